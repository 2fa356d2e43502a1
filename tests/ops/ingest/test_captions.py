"""Captions of a folder of images, as `datasets` has them: they are the answers, or it is said why they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from fake_stage import FakeStage
from format_cases import png
from format_reading import read
from pyarrow import parquet

from dsl.errors import DataError
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.lib.data.files import read_jsonl

ROWS = [{"file_name": "a.png", "text": "A cat, asleep."}, {"file_name": "deeper/b.png", "text": "Two dogs."}]


def photos(folder: Path) -> Path:
    (folder / "photos" / "deeper").mkdir(parents=True)
    for name in ("a.png", "deeper/b.png"):
        (folder / "photos" / name).write_bytes(png())
    return folder / "photos"


def write(file: Path, rows: list[dict[str, str]]) -> None:
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
        file.write_text("\n".join(lines))
    else:
        file.write_text("\n".join(map(json.dumps, rows)))


def said(row: dict) -> tuple[str, str, int]:
    question, answer = ("".join(part.get("text", "") for part in turn["content"]) for turn in row["conversations"])
    return question, answer, len(row["images"])


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "metadata.parquet"])
@pytest.mark.parametrize("column", ["text", "caption"])
def test_captions_are_the_answers_to_the_question_about_the_image(tmp_path, name, column):
    folder = photos(tmp_path)
    write(folder / name, [{"file_name": row["file_name"], column: row["text"], "width": "4"} for row in ROWS])
    _, rows, summary = read(folder, tmp_path / "out", question="What do you see?")
    assert [("What do you see?", "A cat, asleep.", 1), ("What do you see?", "Two dogs.", 1)] == [*map(said, rows)]
    assert {} == summary["dropped"]


def test_a_row_may_have_any_form_beside_its_file_name(tmp_path):
    folder = photos(tmp_path)
    write(folder / "metadata.csv", [{"file_name": "a.png", "question": "Which animal?", "answer": "A cat."}])
    _, rows, _ = read(folder, tmp_path / "out")
    assert [("Which animal?", "A cat.", 1)] == [*map(said, rows)]


def test_each_split_has_its_captions(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "photos" / split).mkdir(parents=True)
        (tmp_path / "photos" / split / "a.png").write_bytes(png())
        write(tmp_path / "photos" / split / "metadata.csv", [{"file_name": "a.png", "text": f"Of {split}."}])
    _, rows, _ = read(tmp_path / "photos", tmp_path / "out", val_fraction=0.0)
    assert [("test", "Of test."), ("train", "Of train.")] == [(row["split"], said(row)[1]) for row in rows]


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_captions_in_a_column_of_another_name_are_a_mistake_not_lost(tmp_path, name):
    folder = photos(tmp_path)
    write(folder / name, [{"file_name": "a.png", "description": "A cat."}])
    with pytest.raises(DataError, match=rf'{name}:1: no "text" or "caption" beside "file_name": name the column'):
        read(folder, tmp_path / "out")
    _, rows, _ = read(folder, tmp_path / "images", format="image-folder")
    assert ["deeper/b.png"] == [row["id"] for row in rows]


def test_captions_that_the_format_leaves_out_are_named(tmp_path, capsys):
    folder = photos(tmp_path)
    write(folder / "metadata.csv", ROWS)
    stage = FakeStage(tmp_path / "out")
    ingest(Ingest(source=str(folder), format="image-folder", seed=0), stage)
    assert ["deeper/b.png"] == [row["id"] for row in read_jsonl(stage.out_dir / "samples.jsonl")]
    assert f'warning: {folder}/metadata.csv: its captions are not read with format = "image' in capsys.readouterr().out


def test_other_tables_beside_images_are_no_captions(tmp_path):
    folder = photos(tmp_path)
    (folder / "classes.csv").write_text("file_name,text\na.png,A cat.\n")
    _, rows, _ = read(folder, tmp_path / "out")
    assert [("What is in the image?", "deeper", 1)] == [*map(said, rows)]


def test_images_that_no_caption_names_are_counted_in_a_warning(tmp_path, capsys):
    folder = photos(tmp_path)
    write(folder / "metadata.csv", ROWS)
    stage = FakeStage(tmp_path / "out")
    ingest(Ingest(source=str(folder)), stage)
    assert "not used" not in capsys.readouterr().out
    (folder / "deeper" / "c.JPG").write_bytes(png())
    (folder / ".thumbs.png").write_bytes(png())
    ingest(Ingest(source=str(folder)), FakeStage(tmp_path / "again"))
    expected = f"{folder}: 1 of 3 images are not used, since no row of the captions names them, such as deeper/c.JPG"
    assert expected in capsys.readouterr().out
