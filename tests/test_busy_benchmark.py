"""benchmarks/busy.py: what it counts, what it asks for, and a dry run whose stage needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.busy import SPIN, STAGES, TINY, busy_processes, goal, rows_of, settings_of, throughput
from dsl.read_toml import read_graph

ROOT = Path(__file__).parent.parent
OP = '''
import time
from attrs import frozen
from dsl.op import Artifact, op


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="counting:target")
@frozen(kw_only=True)
class Target:
    """Counts."""
    steps: int
    seed: int = 0
    output = Text

    def threads(self, folders):
        return 1


def target(config, stage):
    for step in range(config.steps):
        time.sleep(0.25)
        stage.progress(step + 1, config.steps)
    (stage.out_dir / "text.txt").write_text("done")
'''
PIPELINE = (
    '[pipeline]\nname = "p"\nops = ["counting.py"]\n[machine]\ncpus = 4\n[node.target]\nop = "target"\nsteps = 9\n'
)


def progress(*reports: tuple[float, int]) -> list[dict]:
    return [{"kind": "progress", "time": when, "done": done} for when, done in reports]


def test_throughput_is_that_of_the_first_series_behind_what_is_skipped() -> None:
    events = [
        *progress((10.0, 0), (14.0, 1), (15.0, 3)),
        {"kind": "metric"},
        *progress((16.0, 5), (17.0, 0), (27.0, 9)),
    ]
    assert 2.0 == throughput(events, skips=1)
    assert pytest.approx(5 / 6) == throughput(events, skips=0)
    with pytest.raises(RuntimeError, match="too few reports"):
        throughput(progress((10.0, 0)), skips=0)


@pytest.mark.parametrize(
    ("threads", "busy", "cores", "share"),
    [(1, 1, 2, 1.0), (1, 4, 2, 0.4), (2, 1, 2, 2 / 3), (2, 4, 2, 1 / 3), (1, 1, 64, 1.0), (8, 8, 4, 0.5)],
)
def test_the_goal_is_04_of_a_fair_share_of_the_cores(threads: int, busy: int, cores: int, share: float) -> None:
    assert pytest.approx(0.4 * share) == goal(threads, busy, cores)


def test_busy_processes_compute_and_are_gone_afterwards() -> None:
    with busy_processes(2):
        end = time.monotonic() + 60
        own: list[Path] = []
        while len(own) < 2 and time.monotonic() < end:  # until both have begun their program
            own = [path for path in Path("/proc").glob("[0-9]*") if _is_busy(path)]
        while min(_cpu_seconds(path) for path in own) < 0.05 and time.monotonic() < end:
            time.sleep(0.05)
        assert 2 == len(own)
        assert all(_cpu_seconds(path) >= 0.05 for path in own)
    assert not [path for path in own if path.exists()]


def test_every_setting_is_one_of_the_pipeline() -> None:
    for quick in (False, True):
        for name, stage in STAGES.items():
            changed = f"{stage.setting}={stage.first + 1}"
            graph = read_graph(TINY, [*settings_of(list(STAGES), quick=quick), changed])
            assert stage.first + 1 == getattr(graph.nodes[name].config, stage.setting.partition(".")[2])


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_is_held_to_its_goal() -> None:
    def rounds(threads: int, *throughputs: float) -> list[dict]:
        return [{"throughput": value, "threads": threads} for value in throughputs]

    kinds = {
        "quiet": rounds(1, 10.0, 20.0, 40.0),
        "busy 4": rounds(1, 1.0, 4.0, 8.0),
        "before": rounds(2, 10.0, 25.0, 39.0),
    }
    busy, before = rows_of({"eval": kinds}, [4], 2)
    assert (0.2, 0.16, True) == (busy["of_quiet"], pytest.approx(busy["goal"]), busy["holds"])
    assert (1.0, 0.97, True) == (before["of_quiet"], before["goal"], before["holds"])
    (slow,) = rows_of({"eval": {**kinds, "busy 4": rounds(1, 1.5, 3.0, 6.0)}}, [4], 2)[:1]
    assert (0.15, False) == (slow["of_quiet"], slow["holds"])


@pytest.mark.slow
def test_a_dry_run_measures_a_stage_quiet_and_beside_one_process(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(OP)
    pipeline, figures = tmp_path / "p.toml", tmp_path / "figures.json"
    pipeline.write_text(PIPELINE)
    command = [sys.executable, "benchmarks/busy.py", "--quick", "--stages", "target", f"--pipeline={pipeline}"]
    done = subprocess.run(
        [*command, f"--json={figures}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(figures.read_text())
    assert [("target", 1, "1 busy")] == [(row["stage"], row["threads"], row["beside"]) for row in found["rows"]]
    assert {"quiet", "busy 1"} == set(found["rounds"]["target"])
    assert all(0 < outcome["throughput"] <= 4.0 for (outcome,) in found["rounds"]["target"].values())
    assert "| target | 1       | 1 busy |" in done.stdout


def _is_busy(process: Path) -> bool:
    try:
        command = (process / "cmdline").read_text().split("\0")
        parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False
    return SPIN in command and parent == str(os.getpid())


def _cpu_seconds(process: Path) -> float:
    return int((process / "stat").read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")
