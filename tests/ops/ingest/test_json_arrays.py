"""One array of objects in a JSON file, as LLaVA data sets come, read piece by piece."""

import json
from pathlib import Path

import pytest
from fake_stage import FakeStage

from dsl.errors import DataError
from ops.ingest.op import Ingest
from ops.ingest.run import ingest

TURNS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]


def read(source: Path, out: Path) -> list[dict]:
    """The rows that ingest writes."""
    stage = FakeStage(out)
    ingest(Ingest(source=str(source), seed=0), stage)
    return [json.loads(line) for line in (stage.out_dir / "samples.jsonl").read_text("utf-8").split("\n")[:-1]]


def test_an_array_is_read_as_a_stream_with_the_line_of_every_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr("ops.ingest.records.CHUNK", 7)
    rows = [{"id": f"ä{place}", "messages": TURNS} for place in range(5)]
    (tmp_path / "data.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    written = read(tmp_path / "data.json", tmp_path)
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    text = '[\n {"messages": []},\n\n {"messages":\n  5},\n [1],\n {"messages": ]'
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(DataError) as error:
        read(tmp_path / "data.json", tmp_path)
    assert str(error.value).split("\n") == [
        f'{tmp_path}/data.json:4: no list "messages" (or "conversations")',
        f"{tmp_path}/data.json:6: expected an object, got a list",
        f"{tmp_path}/data.json:7: broken JSON in the element that begins here: Expecting value",
    ]


def test_elements_that_share_a_line_have_their_places_as_ids_and_are_drawn_one_by_one(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([{"messages": TURNS}] * 100))
    written = read(tmp_path / "data.json", tmp_path)
    assert [row["id"] for row in written] == [str(place) for place in range(1, 101)]
    assert {"train", "test"} <= {row["split"] for row in written}


def test_elements_with_lines_of_their_own_keep_the_numbers_of_these_as_ids(tmp_path):
    element = json.dumps({"messages": TURNS})
    for text, ids in ((f"[{element},\n{element}]", ["1", "2"]), (f"[\n{element},\n\n{element}\n]", ["2", "4"])):
        (tmp_path / "data.json").write_text(text)
        assert [row["id"] for row in read(tmp_path / "data.json", tmp_path)] == ids


def test_a_mistake_in_an_array_of_one_line_is_named_with_its_element(tmp_path):
    row = {"messages": TURNS}
    (tmp_path / "data.json").write_text(json.dumps([row, row, 5, {"id": "1", **row}])[:-1] + ", {]")
    with pytest.raises(DataError) as error:
        read(tmp_path / "data.json", tmp_path)
    file = tmp_path / "data.json"
    assert str(error.value).split("\n") == [
        f"{file}: element 3: expected an object, got a number",
        f'{file}: element 4: id "1" is already that of {file}: element 1; ids must differ, or set duplicate_ids = '
        '"number"',
        f"{file}: element 5: broken JSON in the element that begins here: Expecting property name enclosed in double "
        "quotes",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"messages": []}', '1: broken JSON: the array has no end ("]")'),
        (b'[{"messages": "\xff"}]', "1: not UTF-8 in the text that begins here"),
    ],
)
def test_an_array_that_is_cut_or_no_text_is_a_mistake(tmp_path, content, message):
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(DataError) as error:
        read(tmp_path / "data.json", tmp_path)
    assert str(error.value) == f"{tmp_path}/data.json:{message}"
