"""How ops write JSON."""

from __future__ import annotations

import json
import math

import pytest

from ops.lib.data.files import json_line, write_json, write_jsonl


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_know_is_written_into_no_file(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "file.json", {"tau": number})
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_line([number])
    assert [] == list(tmp_path.iterdir())


def test_an_op_of_ones_own_keeps_tools_and_documents_as_templates_will_write_them(tmp_path):
    """`write_jsonl` is what docs/ops.md gives to ops that change samples."""
    tool = {"name": "f", "description": "d", "parameters": {"z": 1, "a": 2}}
    rows = [
        {"tools": [tool], "id": "b"},
        {"documents": [{"title": "t", "doc_id": 1}]},
        {"id": "c", "answer": {"z": 1, "a": 2}},
    ]
    write_jsonl(tmp_path / "samples.jsonl", rows)
    texts = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.dumps(row) for row in rows[:2]] + [json.dumps(rows[2], sort_keys=True)] == texts
