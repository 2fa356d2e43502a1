"""What one edit in the middle of a chain of ten costs, by what ran: 1, 5 or 0 nodes; and what the plan says before."""

import json
import shutil
from pathlib import Path

import pytest
from toy_ops import Toy

OPS = '''
from pathlib import Path
from attrs import frozen
from dsl.op import Artifact, field, op


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="chain:link")
@frozen(kw_only=True)
class Link:
    """Appends a rounded number."""
    text: Text | None = None
    value: float = field(default=0.0, help="rounded to a whole number")
    output = Text


def link(config, stage):
    write(config, stage, round(config.value))


@op(version=1, run="middle:middle")
@frozen(kw_only=True)
class Middle:
    """The same, by code of its own."""
    text: Text | None = None
    value: float = field(default=0.0, help="rounded to a whole number")
    output = Text


def write(config, stage, number):
    with (Path(__file__).parent / "calls.txt").open("a") as file:
        file.write(type(config).__name__ + "\\n")
    before = (stage.inputs["text"].path / "text.txt").read_text() if config.text is not None else ""
    (stage.out_dir / "text.txt").write_text(f"{before}{number}\\n")
'''
MIDDLE = """
from chain import write


def middle(config, stage):
    write(config, stage, rounded(config.value))


def rounded(value):
    # to the nearest
    return round(value)
"""
CHAIN = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"]


def pipeline(value: float) -> str:
    """Ten nodes in a row, of which n5 is the one with the value."""
    nodes = ['[pipeline]\nname = "chain"\nops = ["chain.py"]\n']
    for place, node in enumerate(CHAIN):
        text = f'text = "@{CHAIN[place - 1]}"\n' if place else ""
        op, number = ("middle", value) if place == 5 else ("link", float(place))
        nodes.append(f'[node.{node}]\nop = "{op}"\nvalue = {number}\n{text}')
    return "\n".join(nodes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Toy(tmp_path_factory.mktemp("chain"), pipeline(1.0))
    (made.folder / "chain.py").write_text(OPS)
    (made.folder / "middle.py").write_text(MIDDLE)
    assert CHAIN == ran(made)
    return made.folder


@pytest.fixture
def chain(finished: Path, tmp_path: Path) -> Toy:
    """A chain that has run."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return Toy(tmp_path, pipeline(1.0))


def ran(toy: Toy) -> list[str]:
    """Run the pipeline: the nodes that were not taken from the store."""
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0, result.stderr
    nodes = [node for node in CHAIN if toy.state()["nodes"][node]["cache"] != "hit"]
    assert len(toy.calls()) == len(nodes)
    return nodes


def planned(toy: Toy) -> dict[str, list[str]]:
    """The nodes by what the plan says of them."""
    result = toy.dflow("plan", str(toy.file), "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, list[str]] = {"hit": [], "miss": [], "maybe": []}
    for row in json.loads(result.stdout)["nodes"]:
        found[row["cache"]].append(row["id"])
    return found


def edit(toy: Toy, old: str, new: str, name: str = "middle.py") -> None:
    text = (toy.folder / name).read_text()
    assert old in text
    (toy.folder / name).write_text(text.replace(old, new))


def test_a_value_changed_without_effect_on_the_output_runs_one_node(chain: Toy) -> None:
    chain.file.write_text(pipeline(1.2))
    assert {"hit": CHAIN[:5], "miss": ["n5"], "maybe": CHAIN[6:]} == planned(chain)
    text = chain.dflow("plan", str(chain.file)).stdout
    assert "may stay cached: runs unless its inputs come out the same" in text.splitlines()
    table = text.partition("\n\n")[0]
    assert [5, 1, 4] == [table.count(f"  {word} ") for word in ("cached", "runs", "may stay cached")]
    assert ["n5"] == ran(chain)
    assert {"hit": CHAIN, "miss": [], "maybe": []} == planned(chain)


def test_a_value_changed_with_effect_runs_what_is_below_and_changed_back_runs_nothing(chain: Toy) -> None:
    chain.file.write_text(pipeline(2.0))
    assert {"hit": CHAIN[:5], "miss": ["n5"], "maybe": CHAIN[6:]} == planned(chain)
    assert CHAIN[5:] == ran(chain)
    chain.file.write_text(pipeline(1.0))
    assert {"hit": CHAIN, "miss": [], "maybe": []} == planned(chain)
    assert [] == ran(chain)


def test_an_edited_module_runs_the_nodes_that_import_it(chain: Toy) -> None:
    edit(chain, "    return round(value)", "    return int(value + 0.5)")
    assert {"hit": CHAIN[:5], "miss": ["n5"], "maybe": CHAIN[6:]} == planned(chain)
    assert ["n5"] == ran(chain)
    edit(chain, "int(value + 0.5)", "int(value + 1.5)")
    assert CHAIN[5:] == ran(chain)


def test_an_edited_comment_or_docstring_runs_nothing(chain: Toy) -> None:
    edit(chain, "    # to the nearest", '    """To the nearest whole number."""\n\n    # half to even')
    edit(chain, "def middle(config, stage):", "def middle(\n    config,\n    stage,  # what it sees of the outside\n):")
    assert {"hit": CHAIN, "miss": [], "maybe": []} == planned(chain)
    assert [] == ran(chain)


def test_what_all_nodes_use_runs_them_all_and_cuts_off_none(chain: Toy) -> None:
    edit(chain, "{before}{number}", "{before}{number} ", "chain.py")
    assert {"hit": [], "miss": CHAIN, "maybe": []} == planned(chain)
    assert CHAIN == ran(chain)


def test_a_node_put_into_the_chain_runs_with_all_below_it(chain: Toy) -> None:
    text = chain.file.read_text().replace('text = "@n4"', 'text = "@new"')
    chain.file.write_text(text + '\n[node.new]\nop = "link"\nvalue = 7.0\ntext = "@n4"\n')
    assert CHAIN[5:] == [node for node in planned(chain)["miss"] if node != "new"] + planned(chain)["maybe"]
    result = chain.dflow("run", str(chain.file))
    assert result.returncode == 0, result.stderr
    assert 6 == len(chain.calls())
