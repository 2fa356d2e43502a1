"""Columns of other names, as `columns` of the config says which is which: rows, captions and every format of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from fake_stage import FakeStage
from format_cases import png, write_csv
from format_reading import TURNS, read
from pyarrow import parquet

from dsl.errors import ConfigError, DataError
from ops.ingest.op import Columns, Ingest
from ops.ingest.plan import missing_here
from ops.ingest.run import ingest

CAPTIONS = Columns(image="picture", answer="description")
ROWS = [{"picture": "a.png", "description": "A cat.", "note": "x"}, {"picture": "b.png", "description": "Two dogs."}]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def write_table(folder: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_set(folder: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    for row in rows:
        (folder / "saved" / row["picture"]).write_bytes(png())
    return folder / "saved"


Write = Callable[[Path, list[dict[str, Any]]], Path]


def texts(row: dict[str, Any]) -> list[str]:
    return ["".join(part.get("text", "") for part in turn["content"]) for turn in row["conversations"]]


def refused(source: Path, columns: Columns, **config: Any) -> str:
    """The first mistake, which plan and the stage report alike."""
    made = Ingest(source=str(source), columns=columns, seed=0, **config)
    with pytest.raises(DataError) as error:
        ingest(made, FakeStage(source.parent / "stage"))
    first = str(error.value).split("\n")[0]
    assert {"source": first} == missing_here(made)
    return first


@pytest.mark.parametrize("write", [write_rows, write_csv, write_table, write_set])
def test_an_image_and_its_answer_get_the_question_of_the_node(tmp_path: Path, write: Write) -> None:
    for row in ROWS:
        (tmp_path / row["picture"]).write_bytes(png())
    _, rows, summary = read(write(tmp_path, ROWS), tmp_path / "out", columns=CAPTIONS, question="What do you see?")
    assert [["What do you see?", "A cat."], ["What do you see?", "Two dogs."]] == [*map(texts, rows)]
    assert [1, 1] == [len(row["images"]) for row in rows]
    assert {} == summary["dropped"]


@pytest.mark.parametrize("write", [write_rows, write_csv, write_table])
def test_a_column_that_is_not_there_is_named_by_plan_with_those_that_are(tmp_path: Path, write: Write) -> None:
    source = write(tmp_path, ROWS)
    said = refused(source, Columns(image="picture", answer="descripton", question="What is it?"))
    assert said.startswith(f"{source}:") and said.split(": columns: ")[1] == (
        'no column "What is it?" for "question", no column "descripton" for "answer"; the row has picture, '
        'description, note; correct it, or write null where a row has none; one question for all is `question = "..."` '
        "of the node itself"
    )


def test_a_later_row_may_lack_what_is_null_and_not_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"q": "What?", "a": "That.", "img": "a.png"}, {"q": "Why?", "a": "So."}, {"q": "How?"}]
    columns = Columns(question="q", answer="a", image="img")
    assert [1, 0] == [len(row["images"]) for row in read(write_rows(tmp_path, rows[:2]), tmp_path, columns=columns)[1]]
    with pytest.raises(DataError, match=r'rows\.jsonl:3: columns: no column "a" for "answer", no column "img" for "im'):
        read(write_rows(tmp_path, rows), tmp_path, columns=columns)


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (Columns(messages="chat"), {"chat": TURNS}, ["Which?", "This one."]),
        (Columns(messages="chat"), {"chat": json.dumps(TURNS)}, ["Which?", "This one."]),
        (Columns(messages="chosen"), {"chosen": TURNS, "prompt": "x"}, ["Which?", "This one."]),
        (Columns(prompt="a", completion="b"), {"a": "1?", "b": "1", "messages": TURNS}, ["1?", "1"]),
        (Columns(answer="long"), {"question": "1?", "answer": "no", "long": "one"}, ["1?", "one"]),
        (Columns(question="answer", answer="question"), {"question": "1", "answer": "1?"}, ["1?", "1"]),
        (Columns(system="role"), {"prompt": "1?", "completion": "1", "role": "Be brief."}, ["Be brief.", "1?", "1"]),
        (
            Columns(instruction="task", input="text", output="out"),
            {"task": "Add.", "text": "1 1", "out": "2"},
            ["Add.\n1 1", "2"],
        ),
    ],
)
def test_columns_become_the_keys_that_they_are_named_for(tmp_path, columns, row, expected) -> None:
    assert [expected] == [*map(texts, read(write_rows(tmp_path, [row]), tmp_path, columns=columns)[1])]


def test_an_answer_beside_a_prompt_of_its_own_asks_which_is_the_question(tmp_path: Path) -> None:
    said = refused(write_rows(tmp_path, [{"prompt": "1?", "reply": "1"}]), Columns(answer="reply"))
    assert said.endswith('the row has "prompt": name that for one of them, question = "prompt"')


def test_an_answer_without_a_question_needs_an_image_that_it_could_be_about(tmp_path: Path) -> None:
    said = refused(write_rows(tmp_path, [{"Frage": "1?", "Antwort": "1"}]), Columns(answer="Antwort"))
    assert "no column has images that one question for all could be about" in said
    assert said.endswith('question = "..."; the row has Frage, Antwort')


def test_other_keys_come_from_columns_too(tmp_path: Path) -> None:
    rows = [{"q": "1?", "a": "1", "uid": "x7", "fold": "test", "truth": "one", "source": "math"}]
    columns = Columns(question="q", answer="a", id="uid", split="fold", label="truth")
    [row] = read(write_rows(tmp_path, rows), tmp_path, columns=columns, group="source")[1]
    assert ("x7", "test", "one", "math") == (row["id"], row["split"], row["label"], row["topic"])
    [row] = read(write_rows(tmp_path, rows), tmp_path, columns=columns, group="uid")[1]
    assert ("x7", "x7") == (row["id"], row["topic"])


def test_a_column_of_reasoning_is_named_and_wins_over_others(tmp_path: Path) -> None:
    row = {"question": "1?", "answer": "1", "thought": "Hm.", "reasoning_content": "no", "rationale": "Oh."}

    def answer(row: dict[str, Any], **columns: str) -> dict[str, Any]:
        found = read(write_rows(tmp_path, [row]), tmp_path, columns=Columns(**columns))[1][0]["conversations"][1]
        return {key: value for key, value in found.items() if key != "role"}

    one = [{"type": "text", "text": "1"}]
    assert {"content": one, "reasoning_content": "Hm."} == answer(row, reasoning="thought")
    assert {"content": one, "reasoning_content": "Oh."} == answer(row, reasoning="rationale")
    assert {"content": one, "reasoning_content": "no"} == answer(row, question="question", answer="answer")
    assert {"content": [{"type": "text", "text": "no"}]} == answer(row, answer="reasoning_content")
    assert {"content": one} == answer({"question": "1?", "answer": "1", "rationale": "Oh."}, question="question")


def test_files_without_the_columns_are_read_as_they_are_and_columns_that_no_file_has_are_a_mistake(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.jsonl").write_text(json.dumps({"messages": TURNS}))
    said = refused(tmp_path / "data", Columns(question="q", answer="a"))
    assert said.endswith('chat.jsonl: its rows have none of `columns`, "q", "a", and need none: correct or remove it')
    (tmp_path / "data" / "log.jsonl").write_text(json.dumps({"request": {"messages": TURNS[:1]}, "response": "Hi!"}))
    write_rows(tmp_path / "data", [{"q": "1?", "a": "1"}])
    _, rows, _ = read(tmp_path / "data", tmp_path, columns=Columns(question="q", answer="a"))
    assert [["Which?", "This one."], ["Which?", "Hi!"], ["1?", "1"]] == [*map(texts, rows)]


def test_the_key_sees_the_images_of_a_column(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    source = str(write_rows(tmp_path, ROWS))
    assert {"a.png": tmp_path / "a.png", "b.png": None} == Ingest(source=source, columns=CAPTIONS).external_files()
    assert {} == Ingest(source=source).external_files()


def test_images_in_a_column_of_bytes_are_seen_by_plan(tmp_path: Path) -> None:
    rows = [{"picture": png(), "description": "A cat."}]
    source = write_table(tmp_path, rows)
    assert {} == missing_here(Ingest(source=str(source), columns=CAPTIONS))
    assert 1 == len(read(source, tmp_path, columns=CAPTIONS)[1][0]["images"])


def test_columns_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="columns names no column"):
        Ingest(source="x", columns=Columns())
    with pytest.raises(ConfigError, match="the built-in sample has none"):
        Ingest(source="builtin:digits", columns=CAPTIONS)


# Metadata as the documentation of `datasets` shows it (ImageFolder).
METADATA = {
    "metadata.csv": "file_name,additional_feature\n0001.png,A white dog on a lawn.\n0002.png,A hen.\n",
    "metadata.jsonl": '{"file_name": "0001.png", "additional_feature": "A white dog on a lawn."}\n'
    '{"file_name": "0002.png", "additional_feature": "A hen."}\n',
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize(
    "columns", [Columns(answer="additional_feature"), Columns(image="file_name", answer="additional_feature")]
)
def test_metadata_of_an_image_folder_has_its_captions_in_any_column(tmp_path, name, columns) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for image in ("0001.png", "0002.png"):
        (folder / image).write_bytes(png())
    (folder / name).write_text(METADATA[name])
    _, rows, _ = read(folder, tmp_path / "out", columns=columns)
    asked = "What is in the image?"
    assert [[asked, "A white dog on a lawn."], [asked, "A hen."]] == [*map(texts, rows)]
    assert [1, 1] == [len(row["images"]) for row in rows]
    (folder / name).write_text(METADATA[name].replace("additional_feature", "text"))
    assert refused(folder, columns).startswith(
        f'{folder / name}:1: columns: no column "additional_feature" for "answer"'
    )


@pytest.mark.parametrize("key", ["file_names", "image_file_names"])
def test_a_row_of_metadata_may_name_several_images(tmp_path: Path, key: str) -> None:
    (tmp_path / "photos").mkdir()
    for image in ("0001.png", "0002.png"):
        (tmp_path / "photos" / image).write_bytes(png())
    row = {key: ["0001.png", "0002.png"], "text": "Two of them."}
    (tmp_path / "photos" / "metadata.jsonl").write_text(json.dumps(row))
    [found] = read(tmp_path / "photos", tmp_path / "out")[1]
    assert 2 == len(found["images"])


def test_metadata_that_names_other_files_asks_which_is_the_image(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "0001.png").write_bytes(png())
    row = {"left_file_name": "0001.png", "question": "Which?", "answer": "This."}
    (tmp_path / "photos" / "metadata.jsonl").write_text(json.dumps(row))
    way = r'metadata\.jsonl:1: which file is the image\? columns = \{ image = "left_file_name" \} says so'
    with pytest.raises(DataError, match=way):
        read(tmp_path / "photos", tmp_path / "out")
    [found] = read(tmp_path / "photos", tmp_path / "out", columns=Columns(image="left_file_name"))[1]
    assert 1 == len(found["images"])
