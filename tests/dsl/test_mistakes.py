"""The corpus of mistakes: every line that is reported, with its place; and all of them in one file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli
from corpus import CASES, OPS, Case, as_written, read_case

from dsl.errors import PipelineError
from dsl.finding import Field, File, Finding, Node, Position
from dsl.read_toml import read_graph

HEAD = 'pipeline = { name = "corpus", ops = ["../corpus_ops.py"] }\n\n'
REPORTED_ALONE = ("not TOML", "64 bits", "nested more than")  # such a file is not read any further
PLACE = re.compile(r"(?<=pipeline\.toml:)\d+")
NODES_NAMED = re.compile(r" \((?:Samples|TokenShards|no node produces)\b.*\)$")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOW_CORPUS_KEY", "key")
    monkeypatch.delenv("DFLOW_CORPUS_NOT_SET", raising=False)


def reported(case: Case, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = case.write(corpus)
    monkeypatch.chdir(folder)
    with pytest.raises(PipelineError) as caught:
        read_case(case)
    return as_written(folder, str(caught.value)) + "\n"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_reported_with_its_place_and_what_to_do(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.expected == reported(case, tmp_path, monkeypatch)


def test_the_pages_of_the_corpus_are_read_in_full() -> None:
    assert 112 == len({case.name for case in CASES})
    assert all(case.files and case.expected for case in CASES)


def merged(cases: list[Case]) -> Case:
    """The bodies of all cases in one file, and all that is to be reported of them, at its new lines."""
    text, expected = HEAD, ""
    for case in cases:
        moved = text.count("\n") - HEAD.count("\n")
        expected += PLACE.sub(lambda found, by=moved: str(int(found[0]) + by), case.expected)
        text += case.files["pipeline.toml"].decode().removeprefix(HEAD)
    return Case("merged", {"pipeline.toml": text.encode()}, [], expected)


def holds_only_nodes(case: Case) -> bool:
    """Whether a case is one file that holds nothing but nodes behind the usual head."""
    text = case.files.get("pipeline.toml", b"").decode(errors="replace")
    is_plain = text.startswith(HEAD + "[node.") and "\r" not in text and "\ufffd" not in text
    if len(case.files) > 1 or case.arguments or not is_plain:
        return False
    is_read = not any(alone in case.expected for alone in REPORTED_ALONE)
    return is_read and set(tomli.loads(text)) == {"pipeline", "node"}


def test_the_mistakes_of_all_small_files_are_reported_at_once_where_they_stand_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in CASES if holds_only_nodes(case)]
    assert len(cases) >= 55
    case = merged(cases)
    actual = reported(case, tmp_path, monkeypatch).splitlines()
    expected = [NODES_NAMED.sub("", line) for line in case.expected.splitlines()]
    assert expected == [NODES_NAMED.sub("", line) for line in actual]


def test_a_cycle_of_5000_nodes_is_shown_by_its_two_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(OPS, tmp_path)
    size = 5000
    nodes = [f'[node.n{k}]\nop = "join"\nparts = ["@n{(k - 1) % size}"]\n' for k in range(size)]
    (tmp_path / "p.toml").write_text('pipeline = { name = "p", ops = ["corpus_ops.py"] }\n' + "".join(nodes))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError) as caught:
        read_graph(Path("p.toml"))
    path = [f"n{k} (p.toml:{4 + 3 * k})" for k in (*range(6), *range(size - 6, size))]
    path.insert(6, "... 4,988 more ...")
    message = f"the nodes form a cycle: {' -> '.join([*path, 'n0'])} (remove one of these references)"
    assert f"p.toml:4:1: node.n0.parts: {message}" == str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        None,
        Node("train"),
        File("model.safetensors", "fc.weight"),
        Field("node.train.lr"),
        Field("node.train.lr", Position("p.toml", 3, 4)),
        Field(position=Position("p.toml", 3, 4)),
        Field("train.lr", Position("-s train.lr=x", is_argument=True)),
    ],
    ids=str,
)
def test_a_mistake_is_read_from_json_as_it_was_with_its_key_and_its_place(where: Node | File | Field | None) -> None:
    finding = Finding("expected a number", where, "write 0.1", "warning", "type")
    again = Finding.from_json(json.loads(json.dumps(finding.to_json())))
    assert (finding.path, str(finding.position), str(finding)) == (again.path, str(again.position), str(again))
    assert finding.to_json() == again.to_json()


@pytest.mark.parametrize(
    "wrong",
    [{}, {"what": "it is wrong"}, {"level": "error"}, {"what": "", "level": "error"}, {"what": "x", "level": "bad"},
     {"what": ["x"], "level": "error"}],
    ids=str,
)  # fmt: skip
def test_what_says_nothing_or_has_no_level_is_no_finding(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a finding"):
        Finding.from_json(wrong)
