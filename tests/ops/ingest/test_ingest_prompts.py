"""Prompts without answers, for regenerate_answers to answer."""

from fake_stage import FakeStage

from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.lib.data.files import read_json, read_jsonl, write_jsonl

ASK, ANSWER = {"role": "user", "text": "What is it?"}, {"role": "assistant", "text": "A cat."}
ROWS = [
    {"id": "prompt", "conversations": [ASK]},
    {"id": "no question", "conversations": [{"role": "system", "text": "Hm."}]},
    {"id": "answered", "conversations": [ASK, ANSWER]},
]


def run(folder, **options):
    """What is kept, and the drops by reason."""
    folder.mkdir()
    write_jsonl(folder / "data.jsonl", ROWS)
    stage = FakeStage(folder)
    ingest(Ingest(source=str(folder / "data.jsonl"), seed=0, **options), stage)
    return list(read_jsonl(stage.out_dir / "samples.jsonl")), read_json(stage.out_dir / "summary.json")["dropped"]


def test_prompts_without_an_answer_are_kept_on_demand_where_the_user_has_the_last_word(tmp_path):
    kept, dropped = run(tmp_path / "all", require_answers=False)
    assert ["prompt", "answered"] == [row["id"] for row in kept]
    assert [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}] == kept[0]["conversations"]
    assert {"no answer": 1} == dropped
    kept, dropped = run(tmp_path / "answered")
    assert ["answered"] == [row["id"] for row in kept]
    assert {"no answer": 2} == dropped
