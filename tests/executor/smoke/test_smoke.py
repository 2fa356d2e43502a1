"""`dflow run FILE --smoke N`: the small chain in a store of its own, then what the full run will take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toy_ops import Toy

from dsl.files import compact, read_lines
from dsl.op_class import hook
from dsl.read_toml import read_graph
from executor.records.run_record import Record
from executor.smoke.full_run import NodeEstimate, Spread, shown_time, verdicts
from executor.smoke.trial_run import small_graph

OPS = '''
from pathlib import Path
from attrs import frozen
from dsl.errors import DataError
from dsl.op import Artifact, field, op
from dsl.estimate import Amount, Estimate, Growth


@frozen
class Lines(Artifact):
    """lines.txt"""


def count_call(name):
    with (Path(__file__).parent / "calls.txt").open("a") as file:
        file.write(name + "\\n")


def lines_of(artifact):
    return (artifact / "lines.txt").read_text().splitlines()


@op(version=1, run="small:take")
@frozen(kw_only=True)
class Take:
    """Writes lines."""
    count: int = field(help="how many")
    output = Lines

    def smoke(self, samples):
        return {"count": min(self.count, samples)}

    def estimate(self, context):
        if context.trial is None:
            return None
        small = len(lines_of(context.trial.artifact))
        assert small == context.trial.config.count
        growth = Growth(output=self.count / small, notes=("reads all",), fails=self.count == 777)
        return Estimate(growth=growth, forecast=self.count)


def take(config, stage):
    count_call("take")
    (stage.out_dir / "lines.txt").write_text("a line of twenty byte\\n" * config.count)


@op(version=1, run="small:copy")
@frozen(kw_only=True)
class Copy:
    """Copies lines, one after the other; of fewer than `least` it is afraid."""
    lines: Lines
    least: int = field(default=0, help="lines")
    output = Lines

    def estimate(self, context):
        if context.trial is None:
            return None
        small, full = len(lines_of(context.trial.inputs["lines"])), context.inputs["lines"]
        return Estimate(growth=Growth(series=(Amount(small, full),), output=full / small))


def copy(config, stage):
    count_call("copy")
    lines = lines_of(stage.inputs["lines"].path)
    if len(lines) < config.least:
        raise DataError(f"{len(lines)} lines are too few")
    for done in range(len(lines) + 1):
        stage.progress(done, len(lines))
    (stage.out_dir / "lines.txt").write_text("\\n".join(lines))


@op(version=1, run="small:count")
@frozen(kw_only=True)
class Count:
    """Counts lines, and says nothing of what grows."""
    lines: Lines
    output = Lines

    def estimate(self, context):
        return Estimate(memory={"lines": 3 * 10**9}, disk={"checkpoints": 7 * 10**9})


def count(config, stage):
    count_call("count")
    (stage.out_dir / "lines.txt").write_text(str(len(lines_of(stage.inputs["lines"].path))))

'''

PIPELINE = """
[pipeline]
name = "small"
ops = ["small.py"]

[mlflow]
tracking_uri = "http://127.0.0.1:1"

[node.take]
op = "take"
count = 1000

[node.copy]
op = "copy"
lines = "@take"

[node.count]
op = "count"
lines = "@copy"
"""


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    (tmp_path / "small.py").write_text(OPS)
    return Toy(tmp_path, PIPELINE)


def smoke(toy: Toy, *arguments: str, code: int = 0) -> str:
    result = toy.dflow("run", str(toy.file), *arguments)
    assert code == result.returncode, result.stdout + result.stderr
    return result.stdout + result.stderr


def table(printed: str) -> dict[str, list[str]]:
    """The cells of the table of the full run, by node; cells are two blanks apart at least."""
    lines = printed[printed.index("the full run, estimated from") :].splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines if "  " in line]
    return {row[0]: row[1:] for row in rows}


def latest(store: Path) -> Record:
    return Record.load(max((store / "records").iterdir()))


def test_the_chain_runs_on_few_samples_in_a_store_of_its_own(toy: Toy) -> None:
    printed = smoke(toy, "--smoke", "10")
    assert ["take", "copy", "count"] == toy.calls()
    assert [] == [*(toy.store / "objects").iterdir(), *(toy.store / "records").iterdir()]
    record = latest(toy.store / "smoke")
    assert ["10"] == (
        (toy.store / "smoke" / "objects" / str(record.state.nodes["count"].digest) / "lines.txt").read_text().split()
    )
    assert "the full run, estimated from 10 samples" in printed
    told = "values that the trial took instead of those of the full run:\n  take: count = 10 (full run: 1000)\n"
    assert told in printed
    assert ["take", "copy", "count", "together"] == [name for name in table(printed) if name != "node"]
    assert printed.rstrip().endswith("for the full run: the same command without --smoke")


def test_the_artifacts_of_the_full_run_are_foretold_in_proportion(toy: Toy) -> None:
    printed = smoke(toy, "--smoke", "10", "-s", "take.count=1_000_000")
    assert "22 MB" == table(printed)["take"][2]
    assert "22 MB" == table(printed)["copy"][2]
    assert "7.0 GB" == table(printed)["count"][2], "what the op knows of its disk counts where it is more"
    assert "7.0 GB" == table(printed)["together"][1]
    assert "take: reads all" in printed
    assert "count: its op does not declare what grows: all of it is scaled, 1e+05 times" in printed
    assert "memory: at most 3.0 GB (count)" in printed


def test_a_full_run_that_would_fail_as_far_as_the_trial_shows_is_not_called_a_success(toy: Toy) -> None:
    printed = smoke(toy, "--smoke", "10", "-s", "take.count=777", code=1)
    failing = "the smoke run ended, but the full run would fail at take, for the reason above: change that, and repeat"
    assert f"{failing} the smoke run" in printed and "take: reads all" in printed
    assert "succeeded" not in printed and "without --smoke" not in printed
    assert ["take", "copy", "count"] == toy.calls()


def test_own_ops_that_run_as_they_are_are_named_before_they_run(toy: Toy) -> None:
    first = toy.dflow("run", str(toy.file), "--smoke", "4").stdout.splitlines()[0]
    graph = read_graph(toy.file)
    without = [node_id for node_id, node in graph.nodes.items() if hook(node.op, "smoke") is None]
    assert 0 < len(without) < len(graph.nodes)
    told = f"not reduced, since their ops have no smoke(): {', '.join(without)}; only their inputs are smaller"
    assert told == first
    assert "no smoke()" not in toy.dflow("run", str(toy.file), "--smoke", "4").stdout


def test_a_reason_names_the_value_that_was_given_where_the_trial_takes_another(toy: Toy) -> None:
    smoke(toy, "--smoke", "10")
    printed = smoke(toy, "--smoke", "20", "-s", "take.count=900")
    assert "take: started: config changed: take.count from 10 to 20 (given: 900)\n" in printed
    printed = smoke(toy, "--smoke", "20", "-s", "take.count=15")
    assert "take: started: config changed: take.count from 20 to 15\n" in printed


def test_a_second_smoke_run_runs_nothing_and_tells_the_same(toy: Toy) -> None:
    first = table(smoke(toy, "--smoke", "10"))
    toy.calls()
    again = smoke(toy, "--smoke", "10")
    assert [] == toy.calls()
    assert first == table(again)


def test_times_are_told_from_the_run_that_computed_a_node(toy: Toy) -> None:
    """The times are made up: 5 s of start-up, 2 s a line, 5 s at the end: 2,010 s for 1,000 lines."""
    smoke(toy, "--smoke", "10")
    record = latest(toy.store / "smoke")
    state = record.state.nodes["copy"]
    state.started, state.ended, state.seconds = 100.0, 130.0, 30.0
    record.save_node("copy")
    lines = [
        {"time": 105.0 + 2 * done, "node": "copy", "attempt": 1, "kind": "progress", "done": done, "total": 10}
        for done in range(11)
    ]
    others = [line for line in read_lines(record.events_path) if line["kind"] != "progress"]
    record.events_path.write_bytes(b"".join(map(compact, [*others, *lines])))
    assert ["30 s", "about 34 min"] == table(smoke(toy, "--smoke", "10"))["copy"][:2]


def test_what_the_real_store_holds_costs_nothing(toy: Toy) -> None:
    smoke(toy, "-s", "copy.least=5")
    told = table(smoke(toy, "--smoke", "10", "-s", "copy.least=6"))
    assert ["cached"] == told["take"]
    assert "cached" not in told["copy"]


def test_a_node_that_fails_is_shown_and_nothing_is_foretold(toy: Toy) -> None:
    printed = smoke(toy, "--smoke", "10", "-s", "copy.least=50", code=1)
    assert "copy failed: DataError: 10 lines are too few" in printed
    assert "copy.log" in printed
    assert "may need more of them: --smoke 40" in printed
    assert "the full run, estimated" not in printed
    assert ["take", "copy"] == toy.calls()


SPLIT_OPS = """
import json
from attrs import frozen
from dsl.errors import DataError
from dsl.op import field, op
from ops.artifacts import ImageSamples, Report, Samples


def write(stage, **splits):
    (stage.out_dir / "samples.jsonl").write_text("")
    (stage.out_dir / "summary.json").write_text(json.dumps({"splits": splits}))


@op(version=1, run="splits:read")
@frozen(kw_only=True)
class Read:
    \"\"\"Reads samples.\"\"\"
    output = Samples


def read(config, stage):
    write(stage, train=9, val=0, test=4)
    (stage.out_dir / "source.json").write_text(json.dumps({"image": {"train": 80, "test": 20}, "text": {"test": 3}}))


@op(version=1, run="splits:drop")
@frozen(kw_only=True)
class Drop:
    \"\"\"Drops those of test.\"\"\"
    samples: Samples
    kept: int = field(default=0, help="of test")
    output = ImageSamples


def drop(config, stage):
    write(stage, train=9, val=0, test=config.kept)


@op(version=1, run="splits:judge")
@frozen(kw_only=True)
class Judge:
    \"\"\"Needs samples.\"\"\"
    samples: ImageSamples
    output = Report


def judge(config, stage):
    raise DataError("no prompts")
"""

SPLIT_PIPELINE = """
[pipeline]
name = "splits"
ops = ["splits.py"]

[node.read]
op = "read"

[node.drop]
op = "drop"
samples = "@read"

[node.judge]
op = "judge"
samples = "@drop"
"""


def test_a_split_that_few_samples_left_empty_is_named_as_a_possible_cause(tmp_path: Path) -> None:
    (tmp_path / "splits.py").write_text(SPLIT_OPS)
    toy = Toy(tmp_path, SPLIT_PIPELINE)
    printed = smoke(toy, "--smoke", "16", code=1)
    assert (
        'the smoke run on 16 samples failed, perhaps only because they are few: drop left the split "test" empty '
        "(4 reached it, of 23 in the full data); repeat it with more samples: --smoke 64"
    ) in printed
    printed = smoke(toy, "--smoke", "16", "-s", "drop.kept=1", code=1)
    assert "the smoke run on 16 samples failed; fix the cause" in printed
    assert "few:" not in printed


def test_too_few_samples_are_refused_before_anything_runs(toy: Toy) -> None:
    assert "--smoke 2: too few samples (take 3 at least" in smoke(toy, "--smoke", "2", code=2)
    assert not toy.store.exists()


def test_more_samples_than_there_are_take_all_of_them(toy: Toy) -> None:
    told = table(smoke(toy, "--smoke", "5000"))
    assert re.fullmatch(r"2[12],\d{3} bytes", told["take"][2])


def test_a_pipeline_in_python_is_tried_like_one_in_toml(toy: Toy) -> None:
    file = toy.folder / "chain.py"
    file.write_text(
        "from pathlib import Path\n"
        "import small\n"
        "from dsl.pipeline import Pipeline\n\n\n"
        "def pipeline():\n"
        "    p = Pipeline('chain', op_files=(Path('small.py'),))\n"
        "    p.node('copy', small.Copy(lines=p.node('take', small.Take(count=30))))\n"
        "    return p\n"
    )
    result = toy.dflow("run", str(file), "--smoke", "3")
    assert 0 == result.returncode, result.stderr
    assert {"take", "copy"} <= table(result.stdout).keys()


def test_the_small_graph_is_tracked_in_its_own_store(toy: Toy) -> None:
    graph = read_graph(toy.file, [])
    small = small_graph(graph, 10)
    assert ("http://127.0.0.1:1", None) == (graph.tracking_uri, small.tracking_uri)
    assert (1000, 10) == (graph.nodes["take"].config.count, small.nodes["take"].config.count)
    assert graph.nodes["count"] == small.nodes["count"]


def test_what_does_not_fit_is_told_by_node() -> None:
    told = {
        "a": NodeEstimate(cached=False, memory=5 * 10**9, needed=2 * 10**9),
        "b": NodeEstimate(cached=False, needed=30 * 10**9, ranks=2, device="cuda", gpu_memory=10**9),
        "c": NodeEstimate(cached=False, needed=30 * 10**9, ranks=2),
    }
    assert [
        "disk: 2.0 GB, and 1.0 GB are free at store: DOES NOT FIT",
        "memory: at most 60.0 GB (c), and this machine has 25.0 GB: DOES NOT FIT: c",
        "memory of a GPU: at most 30.0 GB (b), and a GPU has 80.0 GB: fits",
    ] == verdicts(told, 2e9, 10**9, Path("store"), 25 * 10**9, lambda: 80 * 10**9)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.0, 0.4, "about 0.2 s"),
        (10.0, 12.0, "about 11 s"),
        (50.0, 300.0, "50 s to 5.0 min"),
        (3600.0, 7200.0, "60 min to 2.0 h"),
        (10 * 3600.0, 20 * 3600.0, "10 to 20 h"),
        (86400.0 * 7, 86400.0 * 8, "about 7.5 days"),
    ],
)
def test_times_are_shown_in_a_unit_of_their_size(low: float, high: float, shown: str) -> None:
    assert shown == shown_time(Spread(low, high))
