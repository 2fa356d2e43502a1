"""The scanner of key positions, against tomli."""

import re

import tomli
from hypothesis import given
from toml_documents import DOCUMENT, documents, key_paths

from dsl.finding import Position
from dsl.toml import key_positions


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
