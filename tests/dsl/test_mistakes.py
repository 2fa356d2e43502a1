"""The corpus of mistakes: every line that is told, with its place; and all of them in one file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import tomli
from corpus import CASES, CORPUS, as_written, read_case
from hypothesis import given
from toml_documents import documents

from dsl.errors import PipelineError
from dsl.read_toml import read_graph
from dsl.toml import parsed

HEAD = 'pipeline = { name = "corpus", ops = ["../corpus_ops.py"] }\n\n'
TOLD_ALONE = ("not TOML", "64 bits", "nested more than")  # such a file is not read any further
PLACE = re.compile(r"(?<=pipeline\.toml:)\d+|(?<=the first time in line )\d+")
NODES_NAMED = re.compile(r" \((?:Samples|TokenShards|no node gives)\b.*\)$")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOW_CORPUS_KEY", "key")
    monkeypatch.delenv("DFLOW_CORPUS_NOT_SET", raising=False)


def told(case: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(case)
    with pytest.raises(PipelineError) as caught:
        read_case(case)
    return as_written(case, str(caught.value)) + "\n"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_told_with_its_place_and_what_to_do(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (case / "expected.txt").read_text() == told(case, monkeypatch)


def merged(cases: list[Path], folder: Path) -> list[str]:
    """Write the bodies of all cases into one file. Returns all that was to be told of them, at its new lines."""
    text, expected = HEAD, []
    for case in cases:
        body = (case / "pipeline.toml").read_text().removeprefix(HEAD)
        moved = text.count("\n") - HEAD.count("\n")
        for line in (case / "expected.txt").read_text().splitlines():
            expected.append(PLACE.sub(lambda found, by=moved: str(int(found[0]) + by), line))
        text += body
    shutil.copy(CORPUS / "corpus_ops.py", folder.parent)
    (folder / "pipeline.toml").write_text(text)
    return expected


def bodies(*, are_toml: bool) -> list[Path]:
    """The cases of one file that hold nothing but nodes behind the usual head."""
    found = []
    for case in CASES:
        if {file.name for file in case.iterdir() if file.is_file()} != {"pipeline.toml", "expected.txt"}:
            continue
        text = (case / "pipeline.toml").read_bytes().decode(errors="replace")
        expected = (case / "expected.txt").read_text()
        is_plain = text.startswith(HEAD + "[node.") and "\r" not in text and "\ufffd" not in text
        is_read = not any(alone in expected for alone in TOLD_ALONE)
        if is_plain and is_read and are_toml and set(tomli.loads(text)) == {"pipeline", "node"}:
            found.append(case)
        if is_plain and not are_toml and "not TOML" in expected:
            found.append(case)
    return found


def test_the_mistakes_of_all_small_files_are_told_at_once_where_they_stand_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "merged"
    folder.mkdir()
    cases = bodies(are_toml=True)
    assert len(cases) >= 55
    expected = merged(cases, folder)
    actual = told(folder, monkeypatch).splitlines()
    assert [NODES_NAMED.sub("", line) for line in expected] == [NODES_NAMED.sub("", line) for line in actual]


def test_what_is_no_toml_in_many_tables_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "merged"
    folder.mkdir()
    cases = bodies(are_toml=False)
    assert len(cases) >= 15
    assert merged(cases, folder) == told(folder, monkeypatch).splitlines()


@given(documents())
def test_a_broken_table_does_not_make_the_others_suspect(text: str) -> None:
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError:
        return  # a table or key twice
    broken = f"{text}\n[broken_table]\nx = oops\ny = 1\nz = True\n"
    with pytest.raises(PipelineError) as caught:
        parsed(broken, "f")
    last = broken.replace("\r\n", "\n").count("\n")
    assert [
        f'f:{last - 2}:5: not TOML: expected a value, got oops (a text stands in quotes: "oops")',
        f"f:{last}:5: not TOML: expected a value, got True (a bool is written true)",
    ] == str(caught.value).split("\n")


def test_a_cycle_of_5000_nodes_is_shown_by_its_two_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(CORPUS / "corpus_ops.py", tmp_path)
    size = 5000
    nodes = [f'[node.n{k}]\nop = "join"\nparts = ["@n{(k - 1) % size}"]\n' for k in range(size)]
    (tmp_path / "p.toml").write_text('pipeline = { name = "p", ops = ["corpus_ops.py"] }\n' + "".join(nodes))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError) as caught:
        read_graph(Path("p.toml"))
    path = [f"n{k} (p.toml:{4 + 3 * k})" for k in (*range(6), *range(size - 6, size))]
    path.insert(6, "... 4,988 more ...")
    message = f"the nodes form a cycle: {' -> '.join([*path, 'n0'])} (one of them must not read what is made of it)"
    assert f"p.toml:4:1: node.n0.parts: {message}" == str(caught.value)
