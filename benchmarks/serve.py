"""A run's target served by SGLang with its draft and without: accepted length and speed-up at several concurrencies.

    python benchmarks/serve.py RUN                                   # a run's id, or "" for the latest
    python benchmarks/serve.py RUN --prompts 64 --max-tokens 512 --concurrency 1 8 32 --rounds 3 --json figures.json
    python benchmarks/serve.py RUN -- --mem-fraction-static 0.8 --tp-size 2          # further arguments for SGLang
    python benchmarks/serve.py RUN --cpu                             # in an environment that lets SGLang run on a CPU

A round starts a server for each side, in alternating order, and sends the same held-out prompts of the run at every
concurrency, greedily, after clearing SGLang's prefix cache. Tokens per second are those of
all answers over the wall-clock seconds of the whole batch, prefill included. The speed-up is the median of the rounds'
ratios. Needs a GPU, and the version of SGLang that dflow is written for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path

from attrs import frozen

from benchmarks.harness import in_rounds, parser, save_figures, table
from dsl.errors import DflowError, ServerError, StoreError
from executor.model_tools.engines import ENGINES
from executor.model_tools.serve import EngineServer
from executor.model_tools.served import ServedRun, find_served
from executor.records.run_record import find_record
from executor.store.artifact_store import Store, store_path
from executor.system.server import require_free_port, wait_until_ready
from ops.lib.data.proxies import open_directly
from ops.lib.sglang.serve_command import Address, DraftOption, launch_command, shell_line
from ops.lib.sglang.version import installed_version, require_sglang
from ops.tools.serve.chat import Answer, ChatPrompt, ask

WARM_UP = 4  # prompts before each concurrency, at most as many: graphs, caches, autotuning
ON_A_CPU = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--mm-attention-backend", "sdpa"),
    *("--sampling-backend", "pytorch", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup"),
]


@frozen
class Batch:
    """The result of sending all prompts at one concurrency: wall-clock seconds, and the answers in the prompts'
    order.
    """

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def compared(ours: Batch, alone: Batch) -> dict[str, float]:
    """The figures of a round at one concurrency, with the draft and without.

    tau counts as evaluate does, without the first token of each answer; spec_accept_length as SGLang does, all tokens
    over verification steps. same_answers: the number of answers with the same text on both sides.
    """
    steps = max(1, sum(answer.steps for answer in ours.answers))
    pairs = zip(ours.answers, alone.answers, strict=True)
    return {
        "with_draft": ours.speed,
        "alone": alone.speed,
        "speed_up": ours.speed / alone.speed,
        "tau": (ours.tokens - len(ours.answers)) / steps,
        "spec_accept_length": ours.tokens / steps,
        "same_answers": sum(one.text == other.text for one, other in pairs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return measure(argv)
    except DflowError as error:
        print(error, file=sys.stderr)
        return 1


def measure(argv: Sequence[str] | None) -> int:
    line = list(sys.argv[1:] if argv is None else argv)
    end = line.index("--") if "--" in line else len(line)
    options = _arguments(line[:end])
    store = Store.open(store_path(options.store, None), write=False)
    run = find_served(store, find_record(store.records, options.run or None), options.node, options.prompts)
    require_sglang("benchmarks/serve.py", run.engine)
    if not run.prompts:
        raise StoreError("the store has no samples of this run to use as prompts")
    for warning in run.warnings:
        print(f"warning: {warning}")
    extra = [*(ON_A_CPU if options.cpu else []), *line[end + 1 :]]
    # Each side in a server of its own, one after the other, because both may not fit on one GPU.
    sides = {
        name: partial(run_side, run, draft, options, extra) for name, draft in (("draft", run.draft), ("alone", None))
    }
    outcomes = in_rounds(sides, options.rounds, _speeds)
    pairs = list(zip(outcomes["draft"], outcomes["alone"], strict=True))
    rounds = {size: [compared(ours[size], alone[size]) for ours, alone in pairs] for size in options.concurrency}
    print(figures_table(rounds, len(run.prompts)))
    print(f"{len(run.prompts)} prompts, at most {options.max_tokens} tokens each, {options.rounds} rounds")
    settings = {
        "prompts": [prompt.id for prompt in run.prompts],
        "max_tokens": options.max_tokens,
        "sglang": installed_version(),
        "target": str(run.target),
        "draft": run.draft.path,
        "dtype": run.served.dtype,
        "arguments": extra,
        "tau_of_the_evaluation": run.tau,
    }
    save_figures(options.json, {**settings, "concurrency": rounds})
    return 0


def run_side(
    run: ServedRun, draft: DraftOption | None, options: argparse.Namespace, extra: Sequence[str]
) -> dict[int, Batch]:
    """Start a server with or without the draft, and send all prompts at each concurrency."""
    address = Address(port=options.port)
    command = launch_command(str(run.target), run.served, draft, address=address, extra=extra)
    print(shell_line(command, run.served.environment), flush=True)
    require_free_port(address.host, address.port)
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineServer(
            ENGINES["sglang"], [sys.executable, *command[1:]], run.served.environment, Path(folder) / "server.log"
        ) as server,
    ):
        wait_until_ready(server, address.url)
        for concurrency in options.concurrency:
            send(address.url, run.prompts[: min(concurrency, WARM_UP)], concurrency, options.max_tokens)
            flush_cache(address.url)
            found[concurrency] = send(address.url, run.prompts, concurrency, options.max_tokens)
    return found


def flush_cache(url: str) -> None:
    """Drop SGLang's cached prefixes of earlier prompts, once it is idle. Raises ServerError."""
    try:
        with open_directly(f"{url}/flush_cache?timeout=30", data=b"", timeout=60):
            pass
    except (OSError, HTTPException) as error:
        raise ServerError(f"{url}/flush_cache: {error}") from error


def _speeds(batches: dict[int, Batch]) -> str:
    return ", ".join(f"{batch.speed:,.0f} tokens/s at concurrency {size}" for size, batch in batches.items())


def send(url: str, prompts: Sequence[ChatPrompt], concurrency: int, max_tokens: int) -> Batch:
    """Send all prompts, `concurrency` requests at a time, and return the answers with the time that they took."""
    with ThreadPoolExecutor(concurrency) as pool:
        started = time.perf_counter()
        answers = tuple(pool.map(lambda prompt: ask(url, prompt.messages, max_tokens), prompts))
        return Batch(time.perf_counter() - started, answers)


def figures_table(rounds: dict[int, list[dict[str, float]]], answers: int) -> str:
    names = ("tokens/s with draft", "tokens/s alone", "speed-up", "tau", "spec_accept_length")
    rows = [("concurrency", *names, "same answers")]
    for concurrency, outcomes in rounds.items():
        medians = {name: statistics.median(outcome[name] for outcome in outcomes) for name in outcomes[0]}
        speeds = [f"{medians[side]:,.0f}" for side in ("with_draft", "alone")]
        others = [f"{medians[name]:.2f}" for name in ("speed_up", "tau", "spec_accept_length")]
        same = min(outcome["same_answers"] for outcome in outcomes)
        rows.append((str(concurrency), *speeds, *others, f"{same} of {answers}"))
    return table(rows)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser(__doc__, rounds=3)
    options.add_argument("run", metavar="RUN", help='the id of a run or a part of it; "" for the latest')
    options.add_argument("--store", metavar="DIR", help="default: DFLOW_STORE, or runs/ in the project")
    options.add_argument("--node", help="the node that exports the draft, if the run exports several")
    options.add_argument("--prompts", type=int, default=64, help="held-out prompts, with images for a vision target")
    options.add_argument("--max-tokens", type=int, default=512, help="of one answer")
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--port", type=int, default=30000)
    options.add_argument("--cpu", action="store_true", help="SGLang's arguments for a CPU, to try the script")
    return options.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
