"""Files of rows that are compressed, and objects around all rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from fake_stage import FakeStage
from format_reading import TURNS, read

from dsl.errors import DataError
from ops.ingest import compressed
from ops.ingest.op import Ingest
from ops.ingest.plan import missing_here
from ops.ingest.run import ingest

ROWS = [{"id": "a", "messages": TURNS}, {"messages": TURNS}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=1).encode()


def zstd(raw: bytes) -> bytes:
    """Two frames, as `zstd` appends them."""
    return b"".join(pyarrow.compress(each, "zstd", asbytes=True) for each in (raw[:30], raw[30:]))


PACKED = {"rows.jsonl.gz": gzip.compress(LINES), "rows.jsonl.zst": zstd(LINES), "rows.json.gz": gzip.compress(ARRAY)}
PACKED |= {"rows.gz": gzip.compress(LINES), "rows.zst": zstd(LINES), "rows": zstd(LINES), "rows.jsonl": zstd(LINES)}


@pytest.mark.parametrize("name", PACKED)
def test_compressed_rows_are_those_of_the_plain_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain.jsonl").write_bytes(LINES)
    _, expected, _ = read(tmp_path / "plain.jsonl", tmp_path / "plain")
    (tmp_path / name).write_bytes(PACKED[name])
    assert {} == missing_here(Ingest(source=str(tmp_path / name)))
    _, rows, _ = read(tmp_path / name, tmp_path / "packed")
    assert [row["conversations"] for row in expected] == [row["conversations"] for row in rows]


def test_compressed_files_of_a_folder_have_the_splits_and_ids_of_plain_ones(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl.gz", "test.jsonl.gz"):
        (tmp_path / "data" / name).write_bytes(gzip.compress(LINES.replace(b'"id": "a", ', b"")))
    _, rows, _ = read(tmp_path / "data", tmp_path, val_fraction=0.0)
    found = [(row["id"], row["split"]) for row in rows]
    assert [("test:1", "test"), ("test:2", "test"), ("train:1", "train"), ("train:2", "train")] == found


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_broken_line_has_its_number_and_a_broken_archive_a_remedy(tmp_path: Path, name: str) -> None:
    pack = gzip.compress if name.endswith(".gz") else zstd
    (tmp_path / name).write_bytes(pack(LINES + b'{"messages": 5}\n'))
    with pytest.raises(DataError, match=rf'{name}:3: no list "messages"'):
        read(tmp_path / name, tmp_path)
    long = b"".join(json.dumps({"messages": TURNS, "salt": place * 7919}).encode() + b"\n" for place in range(20_000))
    (tmp_path / name).write_bytes(pack(long)[:-200])
    assert {} == missing_here(Ingest(source=str(tmp_path / name)))  # which reads the first row only
    with pytest.raises(DataError, match=rf"{name}: cannot be unpacked as (gzip|Zstandard) \(.*; fetch it again"):
        read(tmp_path / name, tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(compressed, "UNPACKED", 1 << 20)
    monkeypatch.setattr(compressed, "TIMES", 10)
    pack = gzip.compress if name.endswith(".gz") else zstd
    (tmp_path / name).write_bytes(pack((json.dumps({"messages": TURNS}).encode() + b"\n") * 100_000))
    with pytest.raises(DataError, match=rf"{name}: \d+ bytes unpack to \d+ bytes so far, which is too much"):
        ingest(Ingest(source=str(tmp_path / name), seed=0), FakeStage(tmp_path / "stage"))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "around",
    [
        {"data": ROWS},
        {"version": "1.1", "info": {"data": [5]}, "data": ROWS},
        {"object": "list", "data": ROWS, "first_id": "a", "has_more": False},
    ],
)
def test_the_data_of_an_object_are_the_rows(tmp_path: Path, around: dict, indent: int | None, monkeypatch) -> None:
    monkeypatch.setattr("ops.ingest.records.CHUNK", 7)
    (tmp_path / "rows.json").write_text(json.dumps(around, indent=indent))
    _, rows, _ = read(tmp_path / "rows.json", tmp_path)
    assert [TURNS[0]["content"]] * 2 == [row["conversations"][0]["content"][0]["text"] for row in rows]
    assert {} == missing_here(Ingest(source=str(tmp_path / "rows.json")))


def test_a_mistake_in_the_data_of_an_object_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"v": 1,\n"data": [\n{"messages": []},\n{"messages": 5},\n{"messages": ]}')
    with pytest.raises(DataError) as error:
        read(tmp_path / "rows.json", tmp_path)
    assert str(error.value).split("\n") == [
        f'{tmp_path}/rows.json:4: no list "messages" (or "conversations")',
        f"{tmp_path}/rows.json:5: broken JSON in the element that begins here: Expecting value",
    ]


def test_a_list_named_data_beside_turns_is_another_column_and_several_such_lists_are_a_mistake(tmp_path: Path) -> None:
    row = {"messages": TURNS, "data": [{"a": 1}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert 2 == len(read(tmp_path / "rows.jsonl", tmp_path)[1])
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'data': [{'a': 1}], 'messages': TURNS})}\n" * 2)
    assert 2 == len(read(tmp_path / "rows.jsonl", tmp_path)[1])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"data": ROWS, "messages": TURNS}, indent=1))
    with pytest.raises(DataError, match=r'rows\.jsonl:28: more than the rest of an object behind the list "data"'):
        read(tmp_path / "rows.jsonl", tmp_path)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'data': ROWS})}\n" * 2)
    with pytest.raises(
        DataError, match=r'rows\.jsonl: element 3: more than the rest of an object behind the list "data"'
    ):
        read(tmp_path / "rows.jsonl", tmp_path)
