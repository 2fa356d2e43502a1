"""What of a table in a config enters the key of a node, and what differs between two."""

from pathlib import Path

import pytest
from ops_with_tables import OPS, written

from dsl.read_toml import read_graph
from executor.keys.differences import ABSENT, Difference, differences
from executor.keys.node_key import KeyParts, Sources, key_config, node_parts

LOW = 'kind = "low"\nlow.rank = 64\n'
HIGH = 'kind = "high"\nhigh.level = 1\n'


def parts(folder: Path, text: str, ops: str = OPS) -> KeyParts:
    return node_parts(read_graph(written(folder, text, ops)), "train", Sources.now(None))


def changed(folder: Path, text: str, old: str, new: str) -> bool:
    """Whether another text in the ops gives the node another key."""
    assert 1 == OPS.count(old)
    return parts(folder, text).key({}) != parts(folder, text, OPS.replace(old, new)).key({})


def test_the_values_of_a_table_are_in_the_key_with_defaults_and_without_neutral_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_abc")
    graph = read_graph(written(tmp_path, LOW + 'low.label = "${secret:MY_TOKEN}"\nlow.chunk = 9\n'))
    low = {"rank": 64, "form": "square", "width": None, "label": "secret", "headers": {}}
    expected = {"kind": "low", "low": low, "high": None, "pace": {"steps": 10}, "rate": 0.5}
    assert expected == key_config(graph.nodes["train"])


def test_equal_tables_give_equal_keys_however_they_are_written(tmp_path: Path) -> None:
    key = parts(tmp_path, LOW).key({})
    same = [
        'kind = "low"\n[node.train.low]\nform = "square"\nrank = 64\n',
        'kind = "low"\nlow = { rank = 64, chunk = 1 }\n[node.train.pace]\nsteps = 10\n',
    ]
    assert [key, key] == [parts(tmp_path, text).key({}) for text in same]
    others = [LOW + 'low.form = "round"\n', 'kind = "low"\n', LOW + "pace.steps = 11\n", LOW + "low.headers.a = 'b'\n"]
    assert len({key, *(parts(tmp_path, text).key({}) for text in others)}) == 1 + len(others)


def test_a_new_field_of_a_table_runs_the_nodes_again_that_have_the_table(tmp_path: Path) -> None:
    """As a new field of an op does."""
    field = "    depth: int = 1\n"
    more = f"{field}    height: int = 1\n"
    assert changed(tmp_path, HIGH, field, more)
    of_op = "    rate: float = 0.5\n"
    assert changed(tmp_path, LOW, of_op, f"{of_op}    more: int = 1\n")


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("self.rank * 2", "self.rank * 3", True),
        ("default=256", "default=128", True),
        ("rank: int = field", "rank: float = field", True),
        ("of the low matrix", "of the matrix", False),
        ("validators.ge(1)", "validators.ge(2)", True),
        ("8 needs a label", "8 takes a label", True),
        ('"""Low ranks."""', '"""Ranks."""', False),
        ("self.level * 2", "self.level * 3", True),
    ],
)
def test_the_code_of_a_table_is_code_of_the_nodes_that_have_it(
    tmp_path: Path, old: str, new: str, counts: bool
) -> None:
    """And so is the rest of its file, but no help."""
    assert counts == changed(tmp_path, LOW, old, new)


def test_differences_name_the_fields_of_tables(tmp_path: Path) -> None:
    low, plain = parts(tmp_path, LOW), parts(tmp_path, "")
    other = parts(tmp_path, LOW.replace("64", "8") + "low.headers.a = 'b'\n")
    assert [
        Difference("config", "low.headers.a", ABSENT, "b"),
        Difference("config", "low.rank", 64, 8),
    ] == differences(low, other)
    found = [each for each in differences(plain, low) if each.kind == "config"]
    names = ["kind", "low.form", "low.headers", "low.label", "low.rank", "low.width"]
    assert names == [each.name for each in found]
    assert "set to 64" == str(found[4])
    back = next(each for each in differences(low, plain) if each.name == "low.rank")
    assert "no longer there, was 64" == str(back)
