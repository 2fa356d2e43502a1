"""Everything that one GPU should show, in one command of nine minutes.

    benchmarks/gpu.sh --budget 540 --out figures        # the folder gets gpu.json, gpu.md, tests.log and profiles
    benchmarks/gpu.sh --only "step 3072"                # parts whose names begin with this
    benchmarks/gpu.sh --no-tests                        # all but the tests
    benchmarks/gpu.sh --device cpu --tiny               # every line at tiny sizes on a CPU

First the GPU tests, and beside them one step of every side, which fills the compiler's cache on the disk. Then one part
after the other, alone on the GPU, the most important first. Each part is a process with its own time limit; one that
fails or is late is named, and the others continue. gpu.json and gpu.md are rewritten after every part, so that they are
up to date whenever this is interrupted. The exit code is 1 if a part did not complete.

Imports no torch: the process that starts the parts has no context on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import page, reason
from benchmarks.gpu_sizes import ALGORITHMS, CHUNK, TINY_CHUNK, contexts, step_sizes
from benchmarks.harness import ROOT, installed_version
from executor.launchers.host_run import stage_environment
from executor.system.supervisor import ChildGroup

BUDGET_S = 540.0
BESIDE_S = {"cuda": 162.0, "cpu": 400.0}  # of the budget at most: the tests, and what runs beside them
STEPS_BESIDE = {"cuda": 2, "cpu": 1}  # at a time, beside the tests: each takes up to 30 GB of the GPU
TESTS = {"cuda": 8, "cpu": min(8, len(os.sched_getaffinity(0)))}  # processes
TEST_THREADS = 2
PATIENCE = {"cuda": 1, "cpu": 6}  # factors of the parts' limits: a dry run may share its machine
TO_TELL_S, INTERRUPTED = 20.0, 124  # before a limit pytest is interrupted, so that it prints why tests failed
KEPT = 3000  # last characters of a failed part's output
OURS, DENSE, SPECFORGE, SPECULATORS = (
    f"benchmarks.sides.{name}" for name in ("ours", "dense", "specforge_peer", "speculators_peer")
)
PEERS = {"SpecForge": (SPECFORGE, ("dflash", "dspark")), "speculators": (SPECULATORS, ALGORITHMS)}
EVALUATE = {
    True: ["--prompts=3", "--new-tokens=4", "--batches", "3", "--hidden=32", "--rounds=1"],
    False: ["--prompts=12", "--new-tokens=24", "--batches", "4", "12", "--hidden=1024", "--layers=16", "--rounds=1"],
}
OUTCOME = re.compile(r"^\[gw\d+\].*? (PASSED|FAILED|ERROR|SKIPPED) (\S.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: a module that runs in a process of its own.

    limit: seconds. needs: a package, without which it is skipped. writes_file: its figures are written to the file of
    --json, not printed in its last line. log: receives pytest's output, from which the figures are read.
    """

    name: str
    module: str
    options: tuple[str, ...]
    limit: float
    needs: str | None = None
    writes_file: bool = False
    log: Path | None = None


Start = Callable[[Part, float], dict[str, Any]]


def main(argv: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Run the parts of the command line, write their figures, and return the exit code.

    start: runs a part within a number of seconds and returns its entry in the figures; see `in_process`.
    """
    arguments = _arguments(argv)
    figures = Figures(arguments, start or in_process)
    beside, alone = (
        [part for part in parts if part.name.startswith(arguments.only)]
        for parts in parts_of(arguments.device, arguments.tiny, arguments.out)
    )
    if arguments.no_tests:
        beside = [part for part in beside if part.log is None]
    tested = sum(part.log is not None for part in beside)
    with ThreadPoolExecutor(STEPS_BESIDE[arguments.device] + tested) as pool:
        for measured in [pool.submit(figures.measure, part, BESIDE_S[arguments.device]) for part in beside]:
            measured.result()
    for part in alone:
        figures.measure(part)
    return int(any(entry["status"] not in ("done", "skipped") for entry in figures.found["parts"].values()))


class Figures:
    """The figures so far, as gpu.json and gpu.md hold them after every part. Used by several threads."""

    def __init__(self, arguments: argparse.Namespace, start: Start) -> None:
        self.start, self.out = start, arguments.out
        self.patience, self.budget, self.began = PATIENCE[arguments.device], arguments.budget, arguments.began
        self.out.mkdir(parents=True, exist_ok=True)
        self.found = {"commit": commit(), "device": arguments.device, "tiny": arguments.tiny, "parts": {}}
        self.lock = threading.Lock()

    def measure(self, part: Part, until: float = float("inf")) -> None:
        """Run a part and save its figures. until: seconds of the budget after which the part is late in any case."""
        remaining = min(until, self.budget) - (time.time() - self.began)
        entry = run_part(part, min(self.patience * part.limit, remaining), self.start)
        with self.lock:
            self.found["parts"][part.name] = entry
            self.found["seconds"] = time.time() - self.began
            print(f"{part.name}: {entry['status']}, {entry['seconds']:.0f} s {reason(entry)}".rstrip(), flush=True)
            _write(self.out / "gpu.json", json.dumps(self.found, indent=1) + "\n")
            _write(self.out / "gpu.md", page(self.found))


def parts_of(device: str, tiny: bool, out: Path) -> tuple[list[Part], list[Part]]:
    """The parts that run beside each other, and those that run alone, the most important first.

    The sum of all limits exceeds the budget, which ends the last ones.
    """
    where = (f"--device={device}", *(["--tiny"] if tiny else []))
    short, long, longest = contexts(tiny)

    def step(side: str, algorithm: str, module: str, *further: str, context: int = short, limit: float = 60) -> Part:
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in step_sizes(tiny, context).items()]
        dtype = "bfloat16" if device == "cuda" else "float32"
        options = (*sizes, f"--device={device}", f"--dtype={dtype}", f"--algorithm={algorithm}", *further)
        needs = side.lower() if side in PEERS else None
        return Part(f"step {context} {algorithm} {side}", module, options, limit, needs)

    def compilation(side: str, algorithm: str, module: str) -> Part:
        once = step(side, algorithm, module, "--steps=1", "--warm-up=0", limit=120)
        return replace(once, name=f"compile {algorithm} {side}")

    def part(name: str, module: str, *further: str, limit: float, needs: str | None = None) -> Part:
        return Part(name, f"benchmarks.gpu_parts.{module}", (*where, *further), limit, needs)

    sides = [("ours", algorithm, OURS) for algorithm in ALGORITHMS]
    sides += [(side, algorithm, module) for side, (module, known) in PEERS.items() for algorithm in known]
    by_algorithm = sorted(sides, key=lambda side: ALGORITHMS.index(side[1]))
    beside = [tests(device, out / "tests.log"), *(compilation(*side) for side in sides)]
    alone = [
        part("machine", "machine", limit=40),
        *(step(*side) for side in by_algorithm),
        *(
            part(f"profile {algorithm}", "profile", f"--algorithm={algorithm}", f"--out={out}", limit=45)
            for algorithm in ALGORITHMS
        ),
        part("optimizer", "optimizer", limit=45),
        step("ours", "dflash", OURS, context=long),
        step("ours", "dflash", OURS, "--steps=3", "--warm-up=2", context=longest, limit=75),
        step("dense", "dflash", DENSE),
        step("chunked", "dflash", OURS, f"--chunk={TINY_CHUNK if tiny else CHUNK}"),
        part("capture", "capture", limit=60),
        part("attention", "attention", limit=70),
        part("ranks", "ranks", limit=60),
        Part("evaluate", "benchmarks.evaluate", (f"--device={device}", *EVALUATE[tiny]), 60, writes_file=True),
        part("capture by SGLang", "capture", "--sglang", limit=90, needs="sglang"),
    ]
    return beside, alone


def tests(device: str, log: Path) -> Part:
    """The part that runs a device's tests, dealt one by one; names are printed, so that a late run shows what
    passed.
    """
    options = ("-m", "gpu", f"--device={device}", "-vv", "-rfEs", "--durations=12", "-p", "no:cacheprovider")
    options += (f"--numprocesses={TESTS[device]}", "--dist=load", "--timeout=150", f"--rootdir={ROOT}")
    options += (f"--ignore={ROOT / 'tests/sglang'}", str(ROOT / "tests"))  # where this was called is anywhere
    return Part("tests", "pytest", options, BESIDE_S[device], log=log)


def run_part(part: Part, limit: float, start: Start) -> dict[str, Any]:
    """Run a part; returns its status (done, failed, timed out, skipped), seconds, and figures or the reason."""
    if part.needs is not None and installed_version(part.needs) is None:
        return {"status": "skipped", "seconds": 0.0, "why": f"{part.needs} is not installed"}
    if limit <= 0:
        return {"status": "timed out", "seconds": 0.0, "why": "no time was left for it"}
    start_s = time.monotonic()
    entry = start(part, limit)
    return {"status": entry.pop("status"), "seconds": time.monotonic() - start_s, **entry}


def in_process(part: Part, limit: float) -> dict[str, Any]:
    """Run a part as a process that is killed with its children at the limit, in seconds; returns its entry."""
    threads = TEST_THREADS if part.log else int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "figures.json", part.log or Path(folder) / "output"
        command = [sys.executable, "-m", part.module, *part.options, *([f"--json={file}"] if part.writes_file else [])]
        if part.log:
            early = f"{max(limit - TO_TELL_S, 1):.0f}"
            command = ["timeout", "--foreground", "--signal=INT", early, *command]
        with (
            log.open("w+b") as output,
            ChildGroup(command, stage_environment(threads), output=output, grace_s=0) as group,
        ):
            in_time = group.ended_within(limit)
            code = group.close()
            output.seek(0)
            printed = output.read().decode(errors="replace")
        entry: dict[str, Any] = {"status": "done"}
        if not in_time or (part.log and code == INTERRUPTED):
            entry = {"status": "timed out", "why": f"ended after {limit:.0f} s"}
        elif code:
            entry = {"status": "failed", "why": f"exit code {code}", "output": printed[-KEPT:]}
        if part.log:
            return {**entry, "figures": outcomes(printed)}
        if entry["status"] != "done":
            return entry
        figures = figures_of(printed, file if part.writes_file else None)
        if figures is None:
            return {"status": "failed", "why": "it printed no figures", "output": printed[-KEPT:]}
        return {**entry, "figures": figures}


def figures_of(printed: str, file: Path | None) -> Any:
    """A part's figures: the content of its file, or its last line that is a JSON object; None if it printed none."""
    if file is not None:
        return json.loads(file.read_text())
    return json.loads(next((line for line in reversed(printed.splitlines()) if line.startswith("{")), "null"))


def outcomes(printed: str) -> dict[str, Any]:
    """The numbers of passed, skipped and failed tests in pytest's output so far, and the names of the failed ones."""
    found = OUTCOME.findall(printed)
    counts = Counter(outcome for outcome, _ in found)
    failed = sorted({name for outcome, name in found if outcome in ("FAILED", "ERROR")})
    return {"passed": counts["PASSED"], "skipped": counts["SKIPPED"], "failed": failed}


def commit() -> str:
    """The checked-out commit, with "+" if files differ from it; "unknown" outside a checkout."""
    commands = [["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]]
    try:
        head, changes = (
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changes else head


def _write(path: Path, text: str) -> None:
    """Replace a file's content atomically."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that prove the code only")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="seconds for all; default: %(default)g"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="the parts whose names begin with this")
    parser.add_argument("--no-tests", action="store_true", help="without the tests")
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument(
        "--began",
        type=float,
        default=time.time(),
        metavar="S",
        help="the time that the budget counts from; default: now",
    )
    arguments = parser.parse_args(argv)
    arguments.out = arguments.out.absolute()
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
