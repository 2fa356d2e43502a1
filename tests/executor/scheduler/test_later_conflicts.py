"""What an artifact says against later nodes ends the run when it is committed, and not hours later at their turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_ops import Toy

from dsl.errors import ConfigError
from dsl.read_toml import read_graph
from executor.planning.preflight import check_space

OPS = '''
from attrs import frozen
from dsl.errors import ConfigError
from dsl.estimate import Estimate
from dsl.op import field, op
from toy import Text, count_call


@op(version=1, run="measuring:measure")
@frozen(kw_only=True)
class Measure:
    """Measures a text, as load_target does a target: what holds of it is known once its artifact exists."""
    text: Text
    output = Text

    def estimate(self, context):
        found = None if context.artifact is None else (context.artifact / "text.txt").read_text()
        return Estimate(forecast=found)


def measure(config, stage):
    count_call("measure")
    (stage.out_dir / "text.txt").write_text((stage.inputs["text"].path / "text.txt").read_text())


@op(version=1, run="measuring:use")
@frozen(kw_only=True)
class Use:
    """Reads a text after long work, and refuses one measured to be bad."""
    text: Text
    measured: Text
    output = Text

    def conflicts(self, forecast):
        return {"measured": "it is bad\\nleave this node out"} if forecast["measured"] == "bad" else {}


def use(config, stage):
    count_call("use")
    (stage.out_dir / "text.txt").write_text("used")


@op(version=1, run="measuring:use")
@frozen(kw_only=True)
class Estimated:
    """As Use, but its estimate is what refuses the measured text, or has a bug."""
    text: Text
    measured: Text
    has_bug: bool = field(default=False, help="whether it has a bug")
    output = Text

    def estimate(self, context):
        if context.inputs["measured"] == "bad":
            raise KeyError("layers") if self.has_bug else ConfigError("measured: too bad", "measured: and too long")
        return Estimate()
'''
PIPELINE = """
[pipeline]
name = "measuring"
ops = ["toy.py", "measuring.py"]

[node.source]
op = "make"
text = "bad"

[node.measured]
op = "measure"
text = "@source"

[node.long]
op = "upper"
text = "@measured"

[node.first]
op = "use"
text = "@long"
measured = "@measured"

[node.second]
op = "use"
text = "@first"
measured = "@measured"

[node.after]
op = "upper"
text = "@second"
"""
MISTAKES = [
    f"node.{node}.measured: {text}" for node in ("first", "second") for text in ("it is bad", "leave this node")
]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    made = Toy(tmp_path, PIPELINE)
    (tmp_path / "measuring.py").write_text(OPS)
    return made


def states(toy: Toy) -> dict[str, str]:
    return {name: node["state"] for name, node in toy.state()["nodes"].items()}


def test_nothing_long_starts_where_a_later_node_does_not_fit_what_was_just_measured(toy: Toy) -> None:
    ended = toy.dflow("run", str(toy.file))
    assert (1, ["make", "measure"]) == (ended.returncode, toy.calls())
    assert [True] * 4 == [mistake in ended.stderr for mistake in MISTAKES]
    done, refused = dict.fromkeys(("source", "measured"), "done"), dict.fromkeys(("first", "second"), "failed")
    assert done | refused | {"long": "pending", "after": "pending"} == states(toy)
    assert "not run: first failed" == toy.state()["nodes"]["after"]["reason"]
    again = toy.dflow("run", str(toy.file))  # the plan reads the artifact now
    assert (2, []) == (again.returncode, toy.calls())
    assert [True] * 4 == [mistake in again.stderr for mistake in MISTAKES]


def test_nodes_that_fit_still_run_with_keep_going(toy: Toy) -> None:
    assert 1 == toy.dflow("run", str(toy.file), "--keep-going").returncode
    assert ["make", "measure", "upper"] == toy.calls()
    assert {"long": "done", "first": "failed", "second": "failed", "after": "pending"}.items() <= states(toy).items()


def test_a_cached_artifact_that_is_found_in_the_middle_of_a_run_counts_as_well(toy: Toy) -> None:
    assert 0 == toy.dflow("run", str(toy.file), "--to", "measured").returncode
    (toy.folder / "same.txt").write_text("bad")
    assert ["make", "measure"] == toy.calls()
    ended = toy.dflow("run", str(toy.file), "-s", "source.source=same.txt")
    assert (1, ["make"]) == (ended.returncode, toy.calls())
    assert [True] * 4 == [mistake in ended.stderr for mistake in MISTAKES]


def test_what_fits_runs_to_the_end(toy: Toy) -> None:
    assert 0 == toy.dflow("run", str(toy.file), "-s", "source.text=good").returncode
    assert ["make", "measure", "upper", "use", "use", "upper"] == toy.calls()


def test_what_an_op_refuses_in_its_estimate_ends_the_run_as_early(toy: Toy) -> None:
    toy.file.write_text(PIPELINE.replace('[node.second]\nop = "use"', '[node.second]\nop = "estimated"'))
    ended = toy.dflow("run", str(toy.file))
    assert (1, ["make", "measure"]) == (ended.returncode, toy.calls())
    expected = [*MISTAKES[:2], "node.second: measured: too bad", "node.second: measured: and too long"]
    assert [True] * 4 == [mistake in ended.stderr for mistake in expected]
    assert {"long": "pending", "first": "failed", "second": "failed"}.items() <= states(toy).items()


def test_a_bug_in_an_estimate_fails_its_node_with_its_traceback_and_not_the_run(toy: Toy) -> None:
    bug = '[node.first]\nop = "estimated"\nhas_bug = true'
    toy.file.write_text(PIPELINE.replace('[node.first]\nop = "use"', bug))
    ended = toy.dflow("run", str(toy.file), "--keep-going")
    assert (1, ["make", "measure", "upper"]) == (ended.returncode, toy.calls())
    assert {"long": "done", "first": "failed", "second": "failed", "after": "pending"}.items() <= states(toy).items()
    failure = toy.state()["nodes"]["first"]["failure"]
    assert ("KeyError: 'layers'", "code") == (failure["what"], failure["code"])
    (log,) = toy.folder.rglob("first.log")
    assert 'raise KeyError("layers") if self.has_bug' in log.read_text()
    assert "measuring.py" in ended.stderr and MISTAKES[2] in ended.stderr
    planned = toy.dflow("plan", str(toy.file))  # of which nothing is lost by its end
    assert (1, True) == (planned.returncode, planned.stderr.endswith("KeyError: 'layers'\n"))


def test_what_an_estimate_refuses_is_refused_at_the_latest_when_its_node_starts(toy: Toy) -> None:
    toy.file.write_text(PIPELINE.replace('[node.second]\nop = "use"', '[node.second]\nop = "estimated"'))
    graph = read_graph(toy.file)
    made = toy.folder / "made"
    made.mkdir()
    (made / "text.txt").write_text("bad")
    with pytest.raises(ConfigError, match=r"node\.second: measured: too bad\nnode\.second: measured: and too long"):
        check_space(graph, "second", {"measured": made}, toy.folder)
