"""What an artifact says against later nodes ends the run when it is committed, and not hours later at their turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_ops import Toy

OPS = '''
from attrs import frozen
from dsl.estimate import Estimate
from dsl.op import op
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
