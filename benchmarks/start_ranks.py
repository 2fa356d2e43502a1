"""How long a stage takes until its ranks have met, with this code and with that of another checkout.

    python benchmarks/start_ranks.py --other CHECKOUT [--ranks 2] [--rounds 10] [--json FILE]

A round starts one stage with each, and the next round begins with the other one. Seconds are from the fork of the
process that starts the ranks to the end of their first all-reduce over gloo; CPU seconds are those of that process and
of all ranks up to there. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rounds import ROOT, Setting, table

OPS = '''
from attrs import frozen
from dsl.op import Artifact, op

@frozen
class Figures(Artifact):
    """figures.json"""

@op(version=1, run="meeting_run:meet")
@frozen(kw_only=True)
class Meet:
    """The ranks meet, and the first one says how long it took."""
    output = Figures
'''
RUN = """
import json, os, time
from pathlib import Path
import torch
import torch.distributed as dist
from ops.lib.training.ranks import joined

def meet(config, stage):
    with joined(stage):
        dist.all_reduce(torch.ones(1))
        now, cpu = time.clock_gettime(time.CLOCK_BOOTTIME), torch.tensor(time.process_time(), dtype=torch.float64)
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        user, system, started = (int(fields[place]) / os.sysconf("SC_CLK_TCK") for place in (11, 12, 19))
        dist.all_reduce(cpu)
        if stage.rank == 0:
            figures = {"wall": now - started, "cpu": cpu.item() + user + system}
            (stage.out_dir / "figures.json").write_text(json.dumps(figures))
"""
PIPELINE = """
[pipeline]
name = "meeting"
ops = ["meeting.py"]

[node.meet]
op = "meet"
launch = { kind = "torchrun", nproc = RANKS, threads = 1, device = "cpu" }
"""
# Without MLflow, whose import would run beside the stage.
PROGRAM = """
import sys, executor.cli, executor.scheduler.run_loop

class NoFollower:
    def __init__(self, store, folder, display):
        pass

    def finish(self, give_up, *, stopped=False):
        pass

executor.scheduler.run_loop.Follower = NoFollower
sys.exit(executor.cli.main())
"""


def started(checkout: Path, folder: Path) -> dict[str, float]:
    """The figures of one start with the code of a checkout. Raises RuntimeError where the run fails."""
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-c", PROGRAM, "run", str(folder / "pipeline.toml"), "--store", store]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{checkout}: the run failed:\n{done.stderr[-3000:]}")
        [file] = Path(store).glob("objects/*/figures.json")
        return json.loads(file.read_text())


def measure(checkouts: dict[str, Path], ranks: int, rounds: int) -> Setting:
    setting = Setting(0, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "meeting.py").write_text(OPS)
        (folder / "meeting_run.py").write_text(RUN)
        (folder / "pipeline.toml").write_text(PIPELINE.replace("RANKS", str(ranks)))
        for index in range(rounds):
            for side in list(checkouts)[:: 1 if index % 2 else -1]:
                figures = started(checkouts[side], folder)
                setting.figures.setdefault(side, []).append(figures)
                print(f"  round {index + 1}/{rounds} {side}: {figures['wall']:.2f} s, {figures['cpu']:.2f} s CPU")
    return setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--other", type=Path, help="a checkout of dflow to compare with")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    asked = parser.parse_args()
    checkouts = {"this": ROOT.resolve(), **({"other": asked.other.resolve()} if asked.other else {})}
    setting = measure(checkouts, asked.ranks, asked.rounds)
    rows = [["", "seconds", "CPU seconds"]]
    for side in checkouts:
        rows.append([side, *(f"{setting.median(side, figure):.2f}" for figure in ("wall", "cpu"))])
    if asked.other:
        rows.append(["this / other", *(f"{setting.ratio('this', 'other', figure):.2f}" for figure in ("wall", "cpu"))])
    print(table(rows))
    if asked.json:
        asked.json.write_text(json.dumps(setting.figures, indent=1))


if __name__ == "__main__":
    main()
