"""Rows of CSV files, which people write by hand, and spreadsheets and pandas by their own rules."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from format_cases import png, write_csv
from format_reading import TURNS, read

from dsl.errors import DataError
from ops.ingest.op import Ingest
from ops.ingest.records import LONGEST
from ops.lib.data.limited_process import memory_limit

ROWS = [
    {"prompt": 'Say "one",\nthen two.', "completion": "one\n\ntwo", "image": "a/x.png", "split": "test"},
    {"prompt": "Größe?", "completion": "Groß.", "id": "size", "system": "Be brief.", "label": "3"},
    {"prompt": "Why?"},
]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("name", ["data.csv", "data.tsv", "data.csv.gz", "data.tsv.zst"])
def test_the_delimiter_is_the_one_with_which_the_first_line_names_columns(tmp_path, name, delimiter):
    text = f'prompt{delimiter}completion{delimiter}id\n"a, b; c\t"{delimiter}"d{delimiter}e"{delimiter}x\n'.encode()
    packed = {".gz": gzip.compress, ".zst": lambda raw: pyarrow.compress(raw, "zstd", asbytes=True)}
    (tmp_path / name).write_bytes(packed.get(Path(name).suffix, bytes)(text))
    _, [row], _ = read(tmp_path / name, tmp_path / "out")
    said = [turn["content"][0]["text"] for turn in row["conversations"]]
    assert ["x", "a, b; c\t", f"d{delimiter}e"] == [row["id"], *said]


@pytest.mark.parametrize("written", [json.dumps, str], ids=["JSON", "as pandas writes it"])
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_turns_may_be_json_in_a_column(tmp_path, key, written):
    _, expected, _ = read(write_jsonl(tmp_path, [{"messages": TURNS, "id": "1"}]), tmp_path / "json")
    source = write_csv(tmp_path, [{"id": "1", key: written(TURNS)}])
    assert expected == read(source, tmp_path / "csv")[1]


def write_jsonl(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.mark.parametrize("name", ["data.csv", "data.tsv"])
def test_columns_are_the_keys_of_rows_and_an_empty_field_is_none(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {"require_answers": False}
    source = write_csv(tmp_path, [{"": number, **row} for number, row in enumerate(ROWS)], name)
    _, rows, _ = read(source, tmp_path / "csv", **config)
    _, expected, _ = read(tmp_path / "rows.jsonl", tmp_path / "json", **config)
    ids = ["2", "size", "7"]  # the lines where the rows begin
    assert ids == [row["id"] for row in rows]
    assert [{**row, "id": each, "split": ""} for row, each in zip(expected, ids, strict=True)] == [
        {**row, "split": ""} for row in rows
    ]
    assert ("test", "3") == (rows[0]["split"], rows[1]["label"])
    assert ["a/x.png"] == list(Ingest(source=str(source)).external_files())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,completion\na,b\n\nc\n", "4: 1 fields, and the first line names 2 columns; quote texts with"),
        ("prompt,completion\na,b,c\n", "2: 3 fields, and the first line names 2 columns"),
        ('prompt,completion\na,"b\nc"\nd,"e\nf', "4: broken CSV in the row that begins here: unexpected end of data"),
        ('prompt,completion\na,"b" c\n', "2: broken CSV in the row that begins here: ',' expected after"),
        ("prompt,completion\na,b\n\xe9,c\n".encode("latin-1"), "3: not UTF-8 at byte 1 of a line of the row"),
        ("prompt,completion\n,b\n", '2: no list "messages" (or "conversations"), "prompt", '),
        ("prompt,split\na,dev\n", "2: \"split\" must be one of train, val, test, got 'dev'"),
        ("prompt,prompt\na,b\n", '1: two columns are named "prompt"'),
        (
            "prompt|completion\na|b\n",
            '1: no list "messages" (or "conversations"), but "prompt|completion" (did you mean "completion"?); the '
            "first line must name the columns, and it is prompt|completion",
        ),
        ("prompt;completion\na;b\nc\n", "3: 1 fields, and the first line names 2 columns"),
        ("prompt\tcompletion\na\tb\tc\n", "2: 3 fields, and the first line names 2 columns"),
        ('id,messages\n1,"[{"\n', '2: "messages" must be a list of turns, or its JSON: Expecting property name'),
        (
            "What is it?,A cat.\n",
            '1: no list "messages" (or "conversations"), "prompt", "instruction" with "output" (or',
        ),
        ("question,answer,prompt\na,b,c\n", '1: both "prompt" and "question": remove the columns of one form; the'),
        (",".join("abc" * 400), "1: 1200 columns, more than 1000"),
    ],
)
@pytest.mark.parametrize("place", ["data.csv", "."])
def test_a_broken_row_is_named_by_the_line_where_it_begins(tmp_path, place, text, message):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as error:
        read(folder / place, tmp_path)
    assert str(error.value).startswith(f"{folder}/data.csv:{message}")


@pytest.mark.parametrize(
    "begin", ["prompt\na\n", 'prompt\n"a\n', "prompt"], ids=["a field", "a quoted field", "columns"]
)
def test_a_row_of_a_gigabyte_is_refused_without_reading_it(tmp_path, begin):
    path = tmp_path / "data.csv"
    path.write_text(begin)
    with path.open("r+b") as file:
        file.truncate(1 << 30)  # takes no space
    with memory_limit(8 * LONGEST), pytest.raises(DataError, match=r"data\.csv:[123]: .*longer than 64 MiB"):
        read(path, tmp_path)


def test_a_row_of_many_lines_is_not_longer_than_one_of_a_single_line_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr("ops.ingest.records.LONGEST", 2000)
    row = ",".join(['"' + "x\n" * 100 + '"'] * 5)
    (tmp_path / "data.csv").write_text(f"prompt,completion,a,b,c\n{row}\n{row}\n")
    assert 2 == read(tmp_path / "data.csv", tmp_path)[2]["kept"]
    (tmp_path / "data.csv").write_text(f"prompt,completion,a,b,c\n{row}\n{row},{row}\n")
    with pytest.raises(DataError, match=r"data\.csv:503: longer than"):
        read(tmp_path / "data.csv", tmp_path)


def test_in_a_folder_csv_files_count_where_their_columns_are_those_of_rows(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "x.png").write_bytes(png())
    (tmp_path / "photos" / "classes.csv").write_text("class,count\ncat,1\n")
    assert ["cat/x.png"] == [row["id"] for row in read(tmp_path / "photos", tmp_path / "a")[1]]
    write_csv(tmp_path / "photos", [{"question": "What?", "answer": "A cat.", "image": "cat/x.png"}], "test.csv")
    (tmp_path / "photos" / "classes.csv").unlink()
    assert ["2"] == [row["id"] for row in read(tmp_path / "photos", tmp_path / "b")[1]]
    write_csv(tmp_path / "photos", [{"prompt": "What?", "completion": "A dog."}], "train.csv")
    rows = read(tmp_path / "photos", tmp_path / "c")[1]
    assert [("test:2", "test"), ("train:2", "train")] == [(row["id"], row["split"]) for row in rows]
    (tmp_path / "photos" / "more.jsonl").write_text(json.dumps({"messages": TURNS}))
    with pytest.raises(DataError, match="contains JSON files and CSV files; say which"):
        read(tmp_path / "photos", tmp_path / "d")
