"""A node is not started when what it is known to write does not fit on the disk of the store."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from toy_ops import Toy

from dsl.files import free_bytes

OPS = '''
from attrs import frozen
from dsl.estimate import CHECKPOINTS, Estimate
from dsl.op import Artifact, field, op


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="writing:begin")
@frozen(kw_only=True)
class Begin:
    """Writes a text."""
    length: int = field(default=3, help="letters")
    output = Text

    def estimate(self, context):
        letters = None
        if context.artifact is not None:
            letters = len((context.artifact / "text.txt").read_text())
        return Estimate(forecast=letters)


def begin(config, stage):
    (stage.out_dir / "text.txt").write_text("a" * config.length)


@op(version=1, run="writing:copy", resumable=True)
@frozen(kw_only=True)
class Copy:
    """Copies a text many times."""
    text: Text
    again: int = field(default=0, help="changes the key")
    each: int = field(default=10**15, neutral=True, help="bytes of a letter")
    passing: int = field(default=0, neutral=True, help="bytes of checkpoints")
    state: int = field(default=0, neutral=True, help="bytes that an interrupted copy leaves")
    output = Text

    def estimate(self, context):
        letters = context.inputs["text"]
        disk = {"letters": self.each * (letters or 1), CHECKPOINTS: self.passing}
        return Estimate(
            disk={name: size for name, size in disk.items() if size},
            disk_per="" if letters else "a letter",
            less_disk="smaller letters",
            forecast=1,
        )


def copy(config, stage):
    if config.state:
        with (stage.work_dir / "half").open("wb") as file:
            file.truncate(config.state)
        raise ValueError("interrupted")
    (stage.out_dir / "text.txt").write_text((stage.inputs["text"].path / "text.txt").read_text())
'''
PIPELINE = """
[pipeline]
name = "writing"
ops = ["writing.py"]

[node.a]
op = "begin"

[node.b]
op = "copy"
text = "@a"
"""
ANOTHER = """
[node.c]
op = "copy"
text = "@b"
"""
WHAT_TO_DO = (
    ": free space there (`dflow gc --usage` shows what uses it, `dflow gc` removes what nothing uses), use another "
    "store (--store), or write less: smaller letters"
)
FREE = re.compile(r"and [\d.,]+ \w+(?= are free)")


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    (tmp_path / "writing.py").write_text(OPS)
    return Toy(tmp_path, PIPELINE)


def refused(toy: Toy, *arguments: str) -> list[str]:
    """The lines with which plan and run refuse, which must agree except for the free space; nothing runs."""
    plan = toy.dflow("plan", str(toy.file), "--json", *arguments)
    run = toy.dflow("run", str(toy.file), *arguments)
    missing_here = json.loads(plan.stdout)["missing_here"]
    said = [[FREE.sub("and some", line) for line in lines] for lines in (missing_here, run.stderr.splitlines())]
    assert (2, 2, said[0]) == (plan.returncode, run.returncode, said[1])
    return missing_here


def test_a_run_begins_while_the_amount_is_unknown_and_ends_before_the_node_that_is_known_not_to_fit(toy: Toy) -> None:
    assert 0 == toy.dflow("plan", str(toy.file)).returncode
    run = toy.dflow("run", str(toy.file))
    assert 1 == run.returncode
    assert "DiskFull: needs 3,000.0 TB of disk (letters), and " in run.stderr
    assert WHAT_TO_DO in run.stderr
    states = toy.state()["nodes"]
    assert ("done", "failed", None) == (states["a"]["state"], states["b"]["state"], states["b"]["started"])
    resumed = toy.dflow("resume")
    assert (2, True) == (resumed.returncode, resumed.stderr.startswith("node.b: needs 3,000.0 TB of disk (letters)"))
    assert 0 == toy.dflow("run", str(toy.file), "-s", "b.each=1").returncode


def test_plan_and_run_refuse_what_is_known_not_to_fit_and_say_what_to_do(toy: Toy) -> None:
    assert 0 == toy.dflow("run", str(toy.file), "-s", "b.each=1").returncode
    [line] = refused(toy, "-s", "b.again=1")
    assert line.startswith("node.b: needs 3,000.0 TB of disk (letters), and ")
    assert f" are free at {toy.store}{WHAT_TO_DO}" in line


def test_what_an_interrupted_stage_has_written_is_not_needed_again(toy: Toy) -> None:
    needed, written = 3 * 10**12, 4 * 10**12  # a file without blocks
    assert 1 == toy.dflow("run", str(toy.file), "-s", "b.each=1", "-s", f"b.state={written}").returncode
    assert [written] == [file.stat().st_size for file in toy.store.glob("work/*/state/half")]
    done = toy.dflow("run", str(toy.file), "-s", f"b.each={needed // 3}")
    assert (0, "") == (done.returncode, done.stderr)


def test_nodes_are_counted_together_without_the_checkpoints_of_those_that_are_done(toy: Toy) -> None:
    toy.file.write_text(PIPELINE + ANOTHER)
    assert 0 == toy.dflow("run", str(toy.file), "-s", "b.each=1", "-s", "c.each=1").returncode
    most = free_bytes(toy.folder) * 6 // 10
    again = ("-s", "b.again=1", "-s", "c.again=1", "-s", f"c.each={most}")
    [line] = refused(toy, *again, "-s", f"b.each={most // 3}")
    assert line.startswith("node.c: needs ")
    assert " of that for the nodes before it)" in line
    assert 0 == toy.dflow("plan", str(toy.file), *again, "-s", "b.each=1", "-s", f"b.passing={most}").returncode
