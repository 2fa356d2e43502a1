"""Serve a run's target with its draft: start SGLang's server, wait until it is ready, and ask it something.

This is what `dflow serve` becomes: python -m executor.serve ASKED, a JSON object with the fields of Asked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from attrs import frozen

from dsl.errors import ConfigError, DflowError
from executor.chat_request import Answer, ServerError, ask, is_healthy
from executor.exits import FAILED, OK
from executor.keys import PROJECT
from executor.launch import LOG_LINES
from executor.lines import print_lines
from executor.port import require_free_port
from executor.record import find_record
from executor.served import ChatPrompt, ServedRun, find_served
from executor.store import Store
from ops.sglang_engine.serve_command import Address, launch_command, shell_line
from ops.sglang_engine.version import SGLANG_VERSION, require_sglang

MAX_TOKENS = 128
POLL_S = 0.5
TELL_EVERY_S = 5.0
HELLO = ChatPrompt(
    "no held-out sample", [{"role": "user", "content": [{"type": "text", "text": "Hello! Who are you?"}]}]
)
OF_THE_RUN = "the run decides it; for another draft name its run, or choose with --node"
OWN = {
    "--port": "give --port before the --",
    "--host": "give --host before the --",
    "--model-path": OF_THE_RUN,  # or --model
    "--speculative-algorithm": OF_THE_RUN,
    "--speculative-draft-model-path": OF_THE_RUN,  # or --speculative-draft-model
}
# What SGLang says where there is no GPU: before it loads a model it picks a device, and then checks the algorithm.
REFUSALS = re.compile(r"^.*(speculative decoding is not supported by|No accelerator \(CUDA).*$", re.MULTILINE)


@frozen(kw_only=True)
class Asked:
    """What the command line says. run, node: None for the latest run and its only draft. extra: SGLang's arguments."""

    store: str
    run: str | None
    node: str | None
    host: str
    port: int
    check: bool
    extra: list[str]


class Server:
    """A server's process, its group and its log. Everything ends with `close`, or with this process.

    command: run as it is, with `environment` added to that of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        life_line, self._held = os.pipe()
        path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "executor.guard", str(life_line), *command],
                env={
                    **os.environ,
                    **environment,
                    "PYTHONPATH": os.pathsep.join(path),
                    "PYTHONSAFEPATH": "1",  # no `ops` in the working directory can shadow the real one
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(life_line,),
                process_group=0,
            )
        os.close(life_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it ends. Raises ServerError then: a server does not end by itself."""
        self._process.wait()
        raise self.died()

    def close(self) -> None:
        """Ask everything in the group to stop, and wait for its end; the guard kills what does not stop."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        self._process.wait()
        with suppress(ProcessLookupError):  # where the guard itself was killed, or the server left children
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        with self.log.open("rb") as file:
            return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=LOG_LINES)]

    def died(self) -> ServerError:
        """What to tell of a server that ended: SGLang's refusal where it is one, else the last lines of its log."""
        refusals = list(REFUSALS.finditer(self.log.read_text("utf-8", errors="replace")))
        if refusals:
            said = refusals[-1].group().strip()
            return ServerError(
                f"SGLang refuses DFLASH on this machine; run the command on one with a GPU\n    {said}\nlog: {self.log}"
            )
        shown = "\n".join(f"    {line}" for line in self.last_lines())
        return ServerError(f"the server ended with exit code {self._process.wait()}\n{shown}\nlog: {self.log}")


def main(asked: str) -> int:
    """Exit code 0 where the prompt was answered with the draft's help, 1 otherwise."""
    # A shell starts what runs in the background with this signal ignored, and Python leaves it at that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        serve_run(Asked(**json.loads(asked)))
    except DflowError as error:
        print_lines(f"dflow: {error}", error=True)
        return FAILED
    except KeyboardInterrupt:
        print_lines("dflow: interrupted; the server was stopped", error=True)
        return FAILED
    return OK


def serve_run(asked: Asked) -> None:
    """Start the server, ask it one prompt, and stay until it is interrupted, or with `check` until it has answered.

    Raises ConfigError for an argument of SGLang's that dflow gives, StoreError where the run has nothing to serve,
    DataError where the pinned SGLang is not installed, and ServerError where the server does not start or does not use
    the draft.
    """
    refuse_own(asked.extra)
    store = Store.open(Path(asked.store), write=True)
    record = find_record(store.records, asked.run)
    address = Address(host=asked.host, port=asked.port)
    run = find_served(store, record, asked.node)
    for warning in run.warnings:
        print_lines(f"warning: {warning}", error=True)
    command = launch_command(str(run.target), run.served, run.draft, address=address, extra=asked.extra)
    command[0] = sys.executable
    print_lines(shell_line(command, run.served.environment))
    if run.served.is_mended:
        print_lines(
            f"SGLang {SGLANG_VERSION} lacks a method that DFLASH needs for {run.served.model_type} targets; "
            "this launcher gives it to them and then runs SGLang's own"
        )
    require_sglang("the command above, which runs wherever that version is installed,")
    require_free_port(asked.host, asked.port)
    log = record.folder / f"serve-{address.port}.log"
    with Server(command, run.served.environment, log) as server:
        wait_until_ready(server, address.url)
        print_lines(f"ready: {address.url}/v1 (log: {log})")
        try_prompt(address.url, run)
        if not asked.check:
            try:
                print_lines("Ctrl-C stops it")
                server.wait()
            except KeyboardInterrupt:
                print_lines("stopping")


def refuse_own(extra: Sequence[str]) -> None:
    """Raises ConfigError for arguments that contradict what dflow waits for and says, as SGLang takes them: with "=",
    with underscores, and shortened.
    """
    wrong = []
    for argument in extra:
        name = argument.partition("=")[0].replace("_", "-")
        own = next((each for each in OWN if name.startswith("--") and len(name) > 2 and each.startswith(name)), None)
        if own is not None:
            wrong.append(f"  {argument}: {OWN[own]}")
    if wrong:
        raise ConfigError("behind -- stand arguments that dflow serve gives itself:\n" + "\n".join(wrong))


def wait_until_ready(server: Server, url: str) -> None:
    """Tell the last line of the log every few seconds. Raises ServerError where the server ends."""
    started = told_at = time.monotonic()
    while not is_healthy(url):
        if not server.is_alive():
            raise server.died()
        now = time.monotonic()
        if now - told_at >= TELL_EVERY_S:
            told_at = now
            last = (server.last_lines() or [""])[-1]
            print_lines(f"{now - started:4.0f} s  {last[:120]}")
        time.sleep(POLL_S)


def try_prompt(url: str, run: ServedRun) -> None:
    """Ask one prompt and show the answer and its accepted length. Raises ServerError where the draft was not used."""
    prompt = run.prompts[0] if run.prompts else HELLO
    answer = ask(url, prompt.messages, MAX_TOKENS)
    print_lines(f"prompt: {prompt_text(prompt)}\nanswer: {answer.text}")
    if answer.tau is None:
        if answer.tokens > 1:
            raise ServerError(
                f"{url}: {answer.tokens} tokens without a verification step; the server does not use the draft"
            )
        print_lines("the answer is one token long, which takes no verification step")
        return
    print_lines(accepted_lengths(answer))
    if run.tau is not None:
        print_lines(f"tau of the evaluation, over all its prompts: {run.tau:.3g}")
    if answer.tau == 1.0:
        print_lines("warning: no proposal of the draft was accepted for this prompt", error=True)


def accepted_lengths(answer: Answer) -> str:
    """tau as dflow counts it, beside SGLang's figure."""
    own = f"tau: {answer.tau:.3g} ({answer.tokens - 1} tokens behind the first in {answer.steps} verification steps)"
    if answer.spec_accept_length is None:
        return f"{own}; the server tells no spec_accept_length"
    return f"{own}; SGLang's spec_accept_length, which counts the first token too: {answer.spec_accept_length:.3g}"


def prompt_text(prompt: ChatPrompt) -> str:
    parts: list[Any] = [part for message in prompt.messages for part in message["content"]]
    images = sum(part["type"] == "image_url" for part in parts)
    text = " ".join(part["text"].strip() for part in parts if part["type"] == "text")
    return f"{text} ({prompt.id}{f', {images} image(s)' if images else ''})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
