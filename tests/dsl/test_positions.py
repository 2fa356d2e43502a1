"""The scanner of key positions, against tomli."""

import re
import string
from typing import Any

import tomli
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import Position
from dsl.positions import KeyPath, key_positions

DOCUMENT = '''# [not.a.table]
title = "a # b = [c]"   # key = 1
"quoted.key" = 'it "is"'
a.b . "c d" = { x = 1, y = { z = [1, { w = "}" }] } }
text = """
[no.table]
no_key = 1 \\""" still ""text""" # over
lines = [
  "]",  # ]
  [ 1, 2 ],
  { deep = true },
]
when = 1979-05-27 07:32:00Z

[ node . "my node" ]
  op = 'x'
[[array]]
k = 1
[array.sub]
l = 2
[[array]]
k = 3
[[array.inner]]
m = 4
'''


def key_paths(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    """Paths of all keys in what tomli read."""
    if isinstance(value, dict):
        below = [key_paths(member, (*path, key)) for key, member in value.items()]
        return {(*path, key) for key in value}.union(*below)
    if isinstance(value, list):
        return set().union(*[key_paths(member, (*path, index)) for index, member in enumerate(value)])
    return set()


def key_at(text: str, position: Position) -> str:
    """The key that is written at a position."""
    rest = text.replace("\r\n", "\n").split("\n")[position.line - 1][position.column - 1 :]
    found = re.match(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""", rest)
    assert found is not None, rest
    (key,) = tomli.loads(f"{found[0]} = 1")
    return key


def test_a_document_with_every_kind_of_table_has_the_place_of_every_key() -> None:
    positions = key_positions(DOCUMENT, "f.toml")
    assert set(positions) == key_paths(tomli.loads(DOCUMENT))
    assert {path: key_at(DOCUMENT, position) for path, position in positions.items()} == {
        path: path[-1] for path in positions
    }
    assert positions["a", "b", "c d", "y", "z", 1, "w"] == Position("f.toml", 4, 40)
    assert positions["node", "my node", "op"] == Position("f.toml", 16, 3)
    assert positions["array", 1, "inner", 0, "m"] == Position("f.toml", 24, 1)


def test_a_table_that_is_named_first_by_a_deeper_header_stands_there() -> None:
    positions = key_positions("[node.a.launch]\nnproc = 1\n[node.a]\nop = 'x'\n", "f")
    assert positions["node", "a"] == Position("f", 1, 7)
    assert positions["node", "a", "op"] == Position("f", 4, 1)


def test_windows_line_ends_count_as_one_character() -> None:
    text = 'a = """x\r\ny"""\r\nb = 1\r\n'
    assert key_positions(text, "f") == {("a",): Position("f", 1, 1), ("b",): Position("f", 3, 1)}


# Documents drawn at random: nested values written in every style that TOML has.

names = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=3)
odd_names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=3)
blanks = st.sampled_from(["", " ", "\t "])
gaps = st.sampled_from(["", " ", "\n", " # ] } \" ' = x\n", "\n\n"])


def basic(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def written_key(draw: Any) -> tuple[str, str]:
    """A key and how it is written."""
    if draw(st.booleans()):
        name = draw(names)
        return name, draw(st.sampled_from([name, basic(name), f"'{name}'"]))
    name = draw(odd_names)
    return name, basic(name)


def written_value(draw: Any, depth: int) -> str:
    kinds = ["scalar", "string", "block", "literal"] + (["array", "inline"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "string":
        return basic(draw(odd_names))
    if kind == "block":
        return draw(st.sampled_from(['"""a\n[x]\ny = 1"""', '""""q" \\""" b"""""', "'''it's\n# no\n''''", '""""""']))
    if kind == "literal":
        return draw(st.sampled_from(["'a # b'", "'\\'", "''", "'[x]'"]))
    if kind == "array":
        members = [written_value(draw, depth - 1) for _ in range(draw(st.integers(0, 3)))]
        return "[" + ",".join(draw(gaps) + member + draw(gaps) for member in members) + draw(gaps) + "]"
    if kind == "inline":
        return "{ " + ", ".join(written_pairs(draw, depth - 1, most=3)) + " }"
    return draw(st.sampled_from(["1", "-2.5e3", "true", "1979-05-27 07:32:00", "inf", "0xff"]))


def written_pairs(draw: Any, depth: int, most: int) -> list[str]:
    pairs = {}
    for _ in range(draw(st.integers(0, most))):
        parts = [written_key(draw) for _ in range(draw(st.integers(1, 2)))]
        if parts[0][0] not in pairs:
            dotted = (draw(blanks) + "." + draw(blanks)).join(raw for _, raw in parts)
            pairs[parts[0][0]] = f"{dotted}{draw(blanks)}={draw(blanks)}{written_value(draw, depth)}"
    return list(pairs.values())


@st.composite
def documents(draw: Any) -> str:
    lines = [draw(blanks) + pair for pair in written_pairs(draw, 2, most=3)]
    headers = []
    for index in range(draw(st.integers(0, 3))):
        parts = [f"t{index % 2}", *(written_key(draw)[1] for _ in range(draw(st.integers(0, 2))))]
        inside = (draw(blanks) + "." + draw(blanks)).join(parts)
        headers.append(draw(st.sampled_from([f"[{inside}]", f"[[{inside}]]", f"[ {inside} ]  # [c]"])))
        lines += [headers[-1], *written_pairs(draw, 2, most=3)]
    return "".join(line + draw(st.sampled_from(["\n", "\n\n# c = 1\n", " # [x]\n", "\r\n"])) for line in lines)


@given(documents())
def test_every_key_that_tomli_yields_has_the_place_where_it_is_written(text: str) -> None:
    try:
        document = tomli.loads(text)
    except tomli.TOMLDecodeError:
        return  # a table or key twice
    positions = key_positions(text, "f")
    assert set(positions) == key_paths(document)
    assert {path: key_at(text, position) for path, position in positions.items()} == {
        path: path[-1] for path in positions
    }
