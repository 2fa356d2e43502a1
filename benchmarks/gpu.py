"""Benchmarks of one GPU in under 8 minutes: each part is a process with its own time limit, the most important first.

    benchmarks/gpu.sh                                   # writes gpu.json and gpu.md in the working directory
    benchmarks/gpu.sh --only "step" --out figures       # parts whose names begin with this; figures.json, figures.md
    benchmarks/gpu.sh --device cpu --tiny               # every line at tiny sizes on a CPU

A part that fails or runs too long is reported as such, and the others continue. Both files are rewritten after every
part, so that they are up to date whenever this is interrupted. The exit code is 1 if a part did not complete.

Imports no torch: the process that starts the parts has no context on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import default_folder, interpreter
from benchmarks.gpu_report import page, reason
from benchmarks.gpu_sizes import CHUNK, TINY_CHUNK, contexts, step_sizes
from benchmarks.harness import ROOT, installed_version
from executor.launchers.stage_environment import stage_environment
from executor.system.supervisor import ChildGroup

DEADLINE_S = 470.0
PATIENCE = {"cuda": 1, "cpu": 10}  # factors of the limits: a dry run may share its machine
KEPT = 3000  # last characters of a failed part's output
EVALUATE = {
    True: ["--prompts=3", "--new-tokens=4", "--batches", "3", "--hidden=32", "--rounds=1"],
    False: ["--prompts=12", "--new-tokens=24", "--batches", "4", "12", "--hidden=1024", "--layers=16", "--rounds=1"],
}


@dataclass(frozen=True)
class Part:
    """A module to run. limit: seconds. writes_file: its figures go into the file of --json, not into its last line.
    needs: a package, without which it is skipped."""

    name: str
    module: str
    options: tuple[str, ...]
    limit: float
    writes_file: bool = False
    needs: str | None = None
    python: Path = Path(sys.executable)


Start = Callable[[Part, float], dict[str, Any]]


def main(argv: Sequence[str] | None = None, start: Start | None = None) -> int:
    """start: runs a part within a number of seconds and returns its entry in the figures; see `in_process`."""
    arguments = _arguments(argv)
    parts = [part for part in parts_of(arguments.device, arguments.tiny) if part.name.startswith(arguments.only)]
    start_s = time.monotonic()
    found: dict[str, Any] = {"commit": commit(), "device": arguments.device, "tiny": arguments.tiny, "parts": {}}
    for part in parts:
        patience = PATIENCE[arguments.device]
        remaining = patience * arguments.deadline - (time.monotonic() - start_s)
        found["parts"][part.name] = entry = run_part(part, min(patience * part.limit, remaining), start or in_process)
        found["seconds"] = time.monotonic() - start_s
        print(f"{part.name}: {entry['status']}, {entry['seconds']:.0f} s {reason(entry)}".rstrip(), flush=True)
        _write(arguments.out.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
        _write(arguments.out.with_suffix(".md"), page(found))
    return int(any(entry["status"] not in ("done", "skipped") for entry in found["parts"].values()))


def parts_of(device: str, tiny: bool) -> list[Part]:
    """All parts, the most important first; the sum of their limits exceeds the deadline, which ends the last ones."""
    where = (f"--device={device}", *(["--tiny"] if tiny else []))
    short, long = contexts(tiny)
    at_short, at_long = (_step_options(context, device, tiny) for context in (short, long))
    chunk, peer = f"--chunk={TINY_CHUNK if tiny else CHUNK}", interpreter(default_folder())
    return [
        Part("machine", "benchmarks.gpu_parts.machine", where, 40),
        Part(f"step {short} ours", "benchmarks.sides.ours", at_short, 90),
        Part(f"step {short} dense", "benchmarks.sides.dense", at_short, 70),
        Part(f"step {long} ours", "benchmarks.sides.ours", at_long, 60),
        Part(f"step {long} dense", "benchmarks.sides.dense", at_long, 60),
        Part("capture", "benchmarks.gpu_parts.capture", where, 70),
        Part("evaluate", "benchmarks.evaluate", (f"--device={device}", *EVALUATE[tiny]), 60, writes_file=True),
        Part("ranks", "benchmarks.gpu_parts.ranks", where, 80),
        Part("attention", "benchmarks.gpu_parts.attention", where, 100),
        Part("capture by SGLang", "benchmarks.gpu_parts.capture", (*where, "--sglang"), 90, needs="sglang"),
        Part(f"step {short} chunked", "benchmarks.sides.ours", (*at_short, chunk), 70),
        Part(
            f"step {short} speculators",
            "benchmarks.sides.speculators_peer",
            at_short,
            120,
            needs=None if peer else "speculators",
            python=peer or Path(sys.executable),
        ),
    ]


def _step_options(context: int, device: str, tiny: bool) -> tuple[str, ...]:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in step_sizes(tiny, context).items()]
    return (*sizes, f"--device={device}", f"--dtype={'bfloat16' if device == 'cuda' else 'float32'}")


def run_part(part: Part, limit: float, start: Start) -> dict[str, Any]:
    """The part's entry: its status (done, failed, timed out, skipped), seconds, and its figures or the reason."""
    if part.needs is not None and installed_version(part.needs) is None:
        return {"status": "skipped", "seconds": 0.0, "why": f"{part.needs} is not installed"}
    if limit <= 0:
        return {"status": "timed out", "seconds": 0.0, "why": "no time was left for it"}
    start_s = time.monotonic()
    entry = start(part, limit)
    return {"status": entry.pop("status"), "seconds": time.monotonic() - start_s, **entry}


def in_process(part: Part, limit: float) -> dict[str, Any]:
    """Run a part as a process, which is killed at the limit with its children."""
    environment = stage_environment(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [str(part.python), "-m", part.module, *part.options]
        command += [f"--json={file}"] if part.writes_file else []
        with (
            (Path(folder) / "output").open("w+b") as output,
            ChildGroup(command, environment, output=output, grace_s=0) as group,
        ):
            if not group.ended_within(limit):
                return {"status": "timed out", "why": f"ended after {limit:.0f} s"}
            code = group.close()
            output.seek(0)
            printed = output.read().decode(errors="replace")
        if code:
            return {"status": "failed", "why": f"exit code {code}", "output": printed[-KEPT:]}
        return {"status": "done", "figures": figures_of(printed, file if part.writes_file else None)}


def figures_of(printed: str, file: Path | None) -> Any:
    """A part's figures: the content of its file, or its last line that is a JSON object."""
    if file is not None:
        return json.loads(file.read_text())
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))


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
    """Replaces the file atomically."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that prove the code only")
    parser.add_argument("--only", default="", metavar="NAME", help="the parts whose names begin with this")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu"), metavar="NAME", help="NAME.json and NAME.md are written"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="S",
        help="seconds for all parts on a GPU, ten times as many on a CPU",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
