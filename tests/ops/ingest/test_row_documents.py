"""Documents of rows, which answers stand on: read, kept, and counted where they have another form."""

from __future__ import annotations

import json

import pyarrow
import pytest
from format_reading import TURNS, inject, read
from own_samples import run_ingest
from pyarrow import parquet

from ops.artifacts import Samples

DOCUMENTS = [{"title": "Paris", "text": "It is sunny."}, {"text": "It rains.", "id": 2}]
ROW = {"messages": TURNS, "documents": DOCUMENTS}
ROWS = {
    "a list": ROW,
    "JSON": {**ROW, "documents": json.dumps(DOCUMENTS)},
    "the arguments of a chat template": {"messages": TURNS, "chat_template_kwargs": {"documents": DOCUMENTS}},
    "a request's": {
        "request": {"messages": TURNS[:1], "documents": DOCUMENTS},
        "response": {"choices": [{"message": TURNS[1], "finish_reason": "stop"}]},
    },
    "a request's arguments": {
        "request": {"messages": TURNS[:1], "chat_template_kwargs": {"documents": DOCUMENTS}},
        "response": {"choices": [{"message": TURNS[1], "finish_reason": "stop"}]},
    },
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_documents_are_kept_with_their_keys_in_order(tmp_path, capsys, row):
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    stage, [written], _ = read(tmp_path / "data.jsonl", tmp_path)
    assert json.dumps(DOCUMENTS) == json.dumps(written["documents"])
    samples = inject(stage.artifact(Samples), tmp_path / "inject")
    line = (samples.path / "samples.jsonl").read_text("utf-8")
    assert json.dumps(DOCUMENTS) == json.dumps(json.loads(line)["documents"])
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize("given", [[], "[]", "", None, [None], {"a": None}])
def test_no_documents_are_no_key(tmp_path, capsys, given):
    _, [row], _ = run_ingest(tmp_path, [{**ROW, "documents": given}])
    assert "documents" not in row and "documents" not in capsys.readouterr().out


@pytest.mark.parametrize("given", [["It rains."], "It rains.", {"title": "Paris"}, 5, [{"text": "x"}, "y"]])
def test_documents_that_no_template_takes_are_counted(tmp_path, capsys, given):
    _, [row], _ = run_ingest(tmp_path, [{**ROW, "documents": given}])
    assert "documents" not in row
    assert '1 samples have "documents" that are no list of objects, which are left out' in capsys.readouterr().out


def test_documents_that_no_json_holds_drop_their_sample(tmp_path):
    rows = [ROW, {**ROW, "documents": '[{"score": 1e999}]'}, {**ROW, "documents": [{"text": "\ud800"}]}]
    _, written, summary = run_ingest(tmp_path, rows)
    assert ({"documents are not JSON": 1, "invalid text": 1}, 1) == (summary["dropped"], len(written))


def test_nulls_of_a_table_are_removed_from_documents(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "data.parquet")
    _, [row], _ = read(tmp_path / "data.parquet", tmp_path)
    assert DOCUMENTS == row["documents"]


def test_other_documents_are_another_content(tmp_path, capsys):
    other = {**ROW, "documents": DOCUMENTS[:1]}
    run_ingest(tmp_path / "other", [{**ROW, "split": "train"}, {**other, "split": "test"}])
    assert "have the same turns" not in capsys.readouterr().out
    run_ingest(tmp_path / "same", [{**ROW, "split": "train"}, {**ROW, "split": "test"}])
    assert "1 of 1 samples of test have the same turns" in capsys.readouterr().out
