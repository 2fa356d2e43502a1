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
        f"{tmp_path}/data.json:6: expected an object, got list",
        f"{tmp_path}/data.json:7: broken JSON in the element that begins here: Expecting value",
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
