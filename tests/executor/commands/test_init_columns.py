"""Columns of a user's own data, which `dflow init` proposes with its reasons, or asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tomli
from format_cases import png, write_csv
from init_cases import checkpoint, nodes
from pyarrow import parquet

from executor.cli import main

Rows = list[dict[str, Any]]
CAPTIONS = [{"picture": f"{place}.png", "caption_en": f"A cat, number {place}.", "width": place} for place in range(40)]
TURNS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]


def write(folder: Path, name: str, rows: Rows) -> Path:
    for row in rows:
        for value in row.values():
            if isinstance(value, str) and value.endswith(".png"):
                (folder / value).write_bytes(png())
    if name.endswith(".csv"):
        return write_csv(folder, rows, name)
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def ingest_of(project: Path) -> dict[str, Any]:
    """The table of ingest in the file that init wrote without a target."""
    made: dict[str, Any] = tomli.loads((project / "pipeline.toml").read_text())["node"]["ingest"]
    return made


@pytest.mark.parametrize("name", ["data.csv", "data.jsonl", "data.parquet"])
def test_columns_are_proposed_with_their_reasons(project: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    write(project, name, CAPTIONS)
    assert 0 == main(["init", name, "--target", checkpoint(project / "target", sees=True)])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        'columns: no column has a name that ingest reads; answer = "caption_en": a text, named like an answer, image = '
        '"picture": images' in said
    )
    assert "40 samples" in said and "40 with images" in said
    made = nodes(project / "pipeline.toml")["ingest"]
    assert {"answer": "caption_en", "image": "picture"} == made["columns"]
    assert "What is in the image?" == made["question"]
    assert "a text, named like an answer" in (project / "pipeline.toml").read_text()


def test_an_answer_of_texts_is_never_taken_for_that_of_an_image(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"Nr.": place, "Frage (Kunde)": f"Was ist {place}?", "Antwort/Text": f"Es ist {place}."} for place in range(40)
    ]
    write(project, "faq.csv", rows)
    assert 0 == main(["init", "faq.csv"])
    assert {"question": "Frage (Kunde)", "answer": "Antwort/Text"} == ingest_of(project)["columns"]
    write(project, "more.csv", [{**row, "Notiz": "Sehr gut."} for row in rows])
    capsys.readouterr()
    assert 1 == main(["init", "more.csv", "--force"])
    assert "more.csv: which columns are question and answer?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"Query": "1 + 1?", "gold answer": "two"}, {"question": "Query", "answer": "gold answer"}),
        ({"userMessage": "Hello?", "modelText": "Hi!"}, {"question": "userMessage", "answer": "modelText"}),
        ({"question": "Why?", "reasonGiven": "So."}, {"question": "question", "answer": "reasonGiven"}),
        ({"query": "Why?", "n": 5}, {"prompt": "query"}),
        (
            {"Query": "1 + 1?", "Thought": "Add.", "gold answer": "two"},
            {"question": "Query", "answer": "gold answer", "reasoning": "Thought"},
        ),
        (
            {"photo": "a.png", "beschreibung": "Eine Katze.", "thinking": "Hm."},
            {"answer": "beschreibung", "reasoning": "thinking", "image": "photo"},
        ),
        ({"query": "Why?", "thought": "So."}, {"question": "query", "answer": "thought"}),
        ({"chat": TURNS, "source": "web"}, {"messages": "chat"}),
        ({"chat": json.dumps(TURNS), "source": "web"}, {"messages": "chat"}),
        ({"photo": "a.png", "beschreibung": "Eine Katze."}, {"answer": "beschreibung", "image": "photo"}),
    ],
    ids=str,
)
def test_names_and_values_tell_what_columns_are(project: Path, row: dict[str, Any], columns: dict[str, str]) -> None:
    write(project, "data.jsonl", [row] * 5)
    assert 0 == main(["init", "data.jsonl"])
    assert columns == ingest_of(project)["columns"]


def test_reasoning_beside_answers_that_are_read_is_proposed_if_its_name_leaves_no_doubt(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": "1 + 1?", "answer": "two"}
    write(project, "data.jsonl", [{**row, "thought": "Add."}] * 5)
    assert 0 == main(["init", "data.jsonl"])
    assert {"reasoning": "thought"} == ingest_of(project)["columns"]
    said = " ".join(capsys.readouterr().out.split())
    assert (
        'columns: ingest reads these rows without this column; reasoning = "thought": a text, named like reas' in said
    )
    assert "reasoning: 5 of 5 learnt answers have some" in said
    for others in ({"rationale": "Add."}, {"reasoning": "Add."}, {"thought": "Add.", "thinking": "Yes."}, {"cot": 5}):
        write(project, "data.jsonl", [{**row, **others}] * 5)
        assert 0 == main(["init", "data.jsonl", "--force"])
        assert "columns" not in ingest_of(project)


def test_metadata_of_an_image_folder_with_captions_of_another_name(project: Path) -> None:
    (project / "photos").mkdir()
    rows = [{"file_name": f"{place}.png", "additional_feature": f"Number {place}."} for place in range(5)]
    write(project / "photos", "metadata.csv", rows)
    assert 0 == main(["init", "photos"])
    made = ingest_of(project)
    assert {"answer": "additional_feature", "image": "file_name"} == made["columns"]


def test_what_cannot_be_told_is_asked_for_and_answered_by_an_option(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, "data.csv", [{"left": "Why?", "right": "So.", "count": 3}] * 5)
    assert 1 == main(["init", "data.csv"])
    said = capsys.readouterr().err
    assert "data.csv: which columns are question and answer? It has left (text), right (text), count (other" in said
    assert "dflow init DATA --column question=NAME --column answer=NAME" in said
    assert 0 == main(["init", "data.csv", "--column", "question=left", "--column", "answer=right"])
    assert {"question": "left", "answer": "right"} == ingest_of(project)["columns"]
    assert 'columns = { question = "left", answer = "right" }' in (project / "pipeline.toml").read_text()
    assert 1 == main(["init", "data.csv", "--force", "--column", "answr=right"])
    assert "--column answr=right: write KEY=NAME, where KEY is one of messages, prompt," in capsys.readouterr().err


def test_files_that_need_different_columns_are_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "a.csv", CAPTIONS)
    write(project, "b.csv", [{"query": "Why?", "reply": "So."}])
    assert 1 == main(["init", "a.csv", "b.csv"])
    assert "a.csv and b.csv need different columns: rename those of one" in capsys.readouterr().err


def test_rows_with_a_mistake_in_their_turns_are_no_other_columns(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "data.jsonl").write_text('{"messages": [{"role": 5}], "note": "text"}\n')
    assert 1 == main(["init", "data.jsonl"])
    assert 'data.jsonl:1: messages[0]: no string "role"' in capsys.readouterr().err


def test_a_batch_and_its_output_need_no_columns(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = {"messages": [{"role": "user", "content": "Hello?"}]}
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hi!"}, "finish_reason": "stop"}]}
    write(project, "in.jsonl", [{"custom_id": f"r-{n}", "method": "POST", "body": ask} for n in range(5)])
    output = [{"custom_id": f"r-{n}", "response": {"status_code": 200, "body": answer}} for n in range(5)]
    write(project, "out.jsonl", output)
    assert 0 == main(["init", "in.jsonl", "out.jsonl"])
    assert "columns" not in ingest_of(project)
    assert "tokens of an answer: median" in capsys.readouterr().out
    assert 1 == main(["init", "out.jsonl", "--force"])
    assert "out.jsonl: a line of a batch's output, which has no prompt" in capsys.readouterr().err


@pytest.mark.parametrize("form", [lambda value: value, json.dumps])
def test_keys_of_a_log_that_is_not_read_are_named_with_those_that_are(
    project: Path, capsys: pytest.CaptureFixture[str], form: Callable[[Any], Any]
) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    said = {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}
    (project / "log.jsonl").write_text(json.dumps({"req": form(asked), "resp": form(said), "ms": 3}) + "\n")
    assert 1 == main(["init", "log.jsonl"])
    told = capsys.readouterr().err
    assert 'log.jsonl: "req", "resp" are of a server\'s log: rename the keys to "request" and "response"' in told
    assert "docs/data.md#traffic-of-a-server" in told
