"""Time from the start of a stage until its ranks have met, with this code and that of another checkout.

    python benchmarks/start_ranks.py --other CHECKOUT [--ranks 2] [--rounds 10] [--json FILE]

A round starts one stage with each. MLflow is off: its import would run beside the stage. Seconds are from
the fork of the process that starts the ranks to the end of their first all-reduce over gloo; CPU seconds are those of
that process and of all ranks up to there.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Rounds, in_rounds, parser, run_dflow, save_figures, table

OPS = '''
from attrs import frozen
from dsl.op import Artifact, op

@frozen
class Figures(Artifact):
    """figures.json"""

@op(version=1, run="meeting_run:meet")
@frozen(kw_only=True)
class Meet:
    """The ranks meet, and the first one writes how long it took."""
    output = Figures
'''
RUN = """
import json, os, time
from pathlib import Path
import torch
import torch.distributed as dist
from ops.lib.training.rank_group import joined

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
[mlflow]
tracking = false
[node.meet]
op = "meet"
launch = { kind = "ranks", nproc = RANKS, threads = 1, device = "cpu" }
"""


def started(checkout: Path, folder: Path) -> dict[str, float]:
    """The figures of one start with the code of a checkout. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory() as store:
        run_dflow(checkout, "run", str(folder / "pipeline.toml"), "--store", store, cwd=folder)
        [file] = Path(store).glob("objects/*/figures.json")
        return json.loads(file.read_text())


def main() -> None:
    options = parser(__doc__, rounds=10)
    options.add_argument("--other", type=Path, help="a checkout of dflow to compare with")
    options.add_argument("--ranks", type=int, default=2)
    arguments = options.parse_args()
    checkouts = {"this": ROOT, **({"other": arguments.other} if arguments.other else {})}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "meeting.py").write_text(OPS)
        (folder / "meeting_run.py").write_text(RUN)
        (folder / "pipeline.toml").write_text(PIPELINE.replace("RANKS", str(arguments.ranks)))
        sides = {side: partial(started, checkout.resolve(), folder) for side, checkout in checkouts.items()}
        shown = "{wall:.2f} s, {cpu:.2f} s CPU".format_map
        rounds = Rounds(in_rounds(sides, arguments.rounds, shown))
    rows = [["", "seconds", "CPU seconds"]]
    for side in checkouts:
        rows.append([side, *(f"{rounds.median(side, figure):.2f}" for figure in ("wall", "cpu"))])
    if arguments.other:
        rows.append(["this / other", *(f"{rounds.ratio('this', 'other', figure):.2f}" for figure in ("wall", "cpu"))])
    print(table(rows))
    save_figures(arguments.json, rounds.figures)


if __name__ == "__main__":
    main()
