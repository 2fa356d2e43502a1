"""Serve a run's target with its draft: start an engine's server, wait until it is ready, and send it a prompt."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from attrs import frozen

from dsl.errors import ConfigError, ServerError
from dsl.files import new_file, write_json
from executor.launchers.redacted_log import RedactedLog
from executor.model_tools.engines import ENGINES, Engine
from executor.model_tools.served import ServedRun, find_served
from executor.records.run_record import Record, find_record, serving
from executor.store.artifact_store import Store
from executor.system.output import indented, print_lines
from executor.system.server import Server, is_reachable_by_others, require_free_port, wait_until_ready
from executor.system.user_cache import compile_cache
from ops.lib.sglang.serve_command import Address, shell_line
from ops.tools.serve.chat import HELLO, ask, prompt_text, tau_text
from ops.tools.serve.measure import Endpoint, LoadSettings, break_even, break_even_text, measure

MAX_TOKENS = 128
LOAD_PROMPTS = 32


@frozen(kw_only=True)
class ServeOptions:
    """The options of `dflow serve`. run, node: None for the latest run, and its only draft.

    block_size: verified tokens of a step, None for the draft's own. engine: a name in `ENGINES`. extra: arguments for
    it. load: measure the server at several concurrencies and stop. url: of a server that runs already, to be measured.
    plain_url: of one that serves the target without the draft, to compare with.
    """

    store: Path
    run: str | None
    node: str | None
    engine: str
    host: str
    port: int
    check: bool
    extra: Sequence[str]
    block_size: int | None = None
    load: LoadSettings | None = None
    url: str | None = None
    plain_url: str | None = None


class EngineServer(Server):
    """A running server of an engine; refusals of the engine are raised as such. algorithm: the draft's, as SGLang names
    it.
    """

    def __init__(
        self,
        engine: Engine,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        pipe: Path | None = None,
        algorithm: str = "speculative decoding",
    ) -> None:
        self.engine, self.algorithm = engine, algorithm
        super().__init__(command, {**compile_cache(), **environment}, log, pipe)

    def died(self) -> ServerError:
        refused = self.engine.refusal(self.log.read_text("utf-8", errors="replace"))
        if refused is None:
            return super().died()
        return ServerError(
            f"{self.engine.name} refuses {self.algorithm} on this machine; run the command on one with a GPU\n"
            f"    {refused}\nlog: {self.log}"
        )


def serve_run(options: ServeOptions) -> None:
    """Start a server for a run's draft, send it one prompt, and serve until interrupted.

    With `check` it stops once the server has answered, with `load` once it has been measured. Raises ConfigError for an
    argument that dflow sets itself, StoreError where the run has nothing to serve, DataError without a suitable engine,
    and ServerError where the server fails or does not use the draft.
    """
    engine = ENGINES[options.engine]
    engine.refuse_own(options.extra)
    store = Store.open(options.store, write=True)
    record = find_record(store.records, options.run)
    with serving(store.path, record.folder):
        run = find_served(store, record, options.node, 1 if options.load is None else LOAD_PROMPTS)
        if options.url is not None:
            measure_load(engine, options.url.rstrip("/").removesuffix("/v1"), run, record, options)
            return
        if options.block_size is not None:
            if refusal := engine.block_size_refusal(run):
                raise ConfigError(f"--block-size: {refusal}; leave it out")
            run = run.in_blocks(options.block_size)
        elif run.best_blocks:
            print_lines(best_blocks_text(engine, run))
        _serve(engine, run, record, options)


def best_blocks_text(engine: Engine, run: ServedRun) -> str:
    """The best block of each batch size as a line, and how to serve in one that is shorter than the draft's."""
    best = ", ".join(f"{block} for batches of {size}" for size, block in run.best_blocks.items())
    line = f"best block by batch, as the evaluation measured it: {best}"
    if all(block == run.draft.block_size for block in run.best_blocks.values()):
        return line
    refusal = engine.block_size_refusal(run)
    return f"{line}; {refusal}, and serves in blocks of {run.draft.block_size}" if refusal else f"{line} (--block-size)"


def _serve(engine: Engine, run: ServedRun, record: Record, options: ServeOptions) -> None:
    address = Address(host=options.host, port=options.port)
    for warning in (*run.warnings, *engine.warnings(run)):
        print_lines(f"warning: {warning}", error=True)
    command = engine.command(run, address, options.extra)
    print_lines(shell_line(command, engine.environment(run)))
    if notice := engine.notice(run):
        print_lines(notice)
    command = [*engine.program(run), *command[1:]]
    require_free_port(options.host, options.port)
    key = os.environ.get(engine.key_variable, "")
    if is_reachable_by_others(options.host) and not key:
        variable = engine.key_variable
        print_lines(f"warning: {options.host}: whoever reaches it can use it; {variable} sets a key", error=True)
    log = record.folder / f"serve-{address.port}.log"
    with _started(engine, command, run, log, key, options.extra) as server:
        wait_until_ready(server, address.url)
        print_lines(f"ready: {address.url}/v1 (log: {log})")
        try_prompt(engine, address.url, run, key)
        if options.load is not None:
            measure_load(engine, address.url, run, record, options)
        elif not options.check:
            try:
                print_lines("Ctrl-C stops it")
                server.wait()
            except KeyboardInterrupt:
                print_lines("stopping")


def measure_load(engine: Engine, url: str, run: ServedRun, record: Record, options: ServeOptions) -> None:
    """Measure a server at several concurrencies, print the figures, and write them to a file of the run's record.

    Raises ServerError if the server answers none of the run's prompts.
    """
    assert options.load is not None
    key = os.environ.get(engine.key_variable, "")
    plain = None if options.plain_url is None else options.plain_url.rstrip("/").removesuffix("/v1")
    prompts = run.prompts or (HELLO,)
    levels = measure(
        Endpoint(url=url, dialect=engine.dialect, key=key),
        prompts,
        options.load,
        None if plain is None else Endpoint(url=plain, dialect=engine.dialect, key=key),
        print_lines,
    )
    found = {
        "engine": engine.name,
        "url": url,
        "plain_url": plain,
        "target": str(run.target),
        "draft": run.draft.path,
        "block_size": run.draft.block_size if options.url is None else None,
        "prompts": [prompt.id for prompt in prompts],
        "max_tokens": options.load.max_tokens,
        "stream": options.load.stream,
        "tau_of_the_evaluation": run.tau,
        "levels": levels,
    }
    if plain is not None and (even := break_even(levels, run.draft.block_size)) is not None:
        found |= even
        print_lines(break_even_text(even))
    file = record.folder / f"load-{urlsplit(url).port or 80}.json"
    write_json(file, found)
    print_lines(f"figures: {file}")


@contextmanager
def _started(
    engine: Engine, command: Sequence[str], run: ServedRun, log: Path, key: str, extra: Sequence[str]
) -> Iterator[Server]:
    """Open a context with a running server. Its key is neither in its arguments nor in its log."""
    environment = engine.environment(run)
    if not key:
        with EngineServer(engine, command, environment, log, algorithm=run.draft.algorithm) as server:
            yield server
        return
    with tempfile.TemporaryDirectory(prefix="dflow-serve-") as private:
        new_file(log).close()
        redacted = RedactedLog(Path(private, "output"), log, [key])
        try:
            command = [*command, *engine.key_arguments(key, extra, Path(private))]
            with EngineServer(engine, command, environment, log, redacted.pipe, run.draft.algorithm) as server:
                yield server
        finally:
            redacted.close()


def try_prompt(engine: Engine, url: str, run: ServedRun, key: str = "") -> None:
    """Send one prompt, and show answer and accepted length. Raises ServerError where the draft was not used."""
    prompt = run.prompts[0] if run.prompts else HELLO
    answer = ask(url, prompt.messages, MAX_TOKENS, key, engine.dialect)
    print_lines(f"prompt: {indented(prompt_text(prompt))}\nanswer: {indented(answer.text)}")
    if answer.tau is None:
        if answer.tokens > 1:
            raise ServerError(
                f"{url}: {answer.tokens} tokens without a verification step; the server does not use the draft"
            )
        print_lines("the answer is one token long, which needs no verification step")
        return
    print_lines(tau_text(answer, engine.dialect))
    if run.tau is not None:
        print_lines(f"tau of the evaluation, over all its prompts: {run.tau:.3g}")
    if answer.tau == 1.0:
        print_lines("warning: no proposal of the draft was accepted for this prompt", error=True)
