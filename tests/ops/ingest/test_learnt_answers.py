"""Marks of single answers, by which they are learnt or only context: as other projects write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from format_reading import read
from PIL import Image

from ops.ingest.remedies import REMEDIES
from ops.ingest.sample import LAST
from ops.regenerate_answers.conversations import Conversation

Row = dict[str, Any]
OFF = {
    "OpenAI": {"weight": 0},
    "ms-swift": {"loss": False},
    "axolotl": {"train": False},
    "axolotl's other": {"training": False, "loss": None},
    "LLaMA-Factory": {"loss_weight": 0.0},
}
ON = {
    style: {key: value if value is None else type(value)(1) for key, value in off.items()} for style, off in OFF.items()
}
TOOLS = [{"type": "function", "function": {"name": "w", "description": "Weather.", "parameters": {"type": "object"}}}]
CALL = {"role": "tool_call", "content": '{"name": "w", "arguments": {}}'}
NO, YES = OFF["OpenAI"], ON["OpenAI"]


def user(text: str = "Which?") -> Row:
    return {"role": "user", "content": text}


def say(text: str, **mark: Any) -> Row:
    return {"role": "assistant", "content": text, **mark}


def kept(tmp_path: Path, *messages: Row, **more: Any) -> Row:
    """The only row of samples.jsonl, and its counts."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages, **more}) + "\n")
    [row] = read(tmp_path / "data.jsonl", tmp_path / "ingest", split="train")[1]
    return row


def texts(row: Row) -> list[str]:
    return ["".join(part.get("text", "<image>") for part in turn["content"]) for turn in row["conversations"]]


def dropped(tmp_path: Path, *messages: Row) -> str:
    rows = [{"messages": messages, "tools": TOOLS}, {"messages": [user(), say("Kept.")]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage, _, _ = read(tmp_path / "data.jsonl", tmp_path / "ingest", split="train")
    return (stage.out_dir / "dropped.csv").read_text()


@pytest.mark.parametrize("style", OFF)
def test_an_earlier_answer_that_is_not_learnt_is_context_and_not_answered_again(tmp_path, style):
    row = kept(tmp_path, user(), say("A.", **OFF[style]), user("And?"), say("B.", **ON[style]))
    assert (["Which?", "A.", "And?", "B."], LAST) == (texts(row), row["learnt"])
    assert not OFF[style].keys() & {key for turn in row["conversations"] for key in turn}
    asked = Conversation({**row, "messages": row["conversations"]}, "same_name")
    assert ["Which?", "A.", "And?"] == texts({"conversations": asked.messages})


@pytest.mark.parametrize("style", OFF)
def test_what_follows_the_last_answer_that_is_learnt_is_left_out_and_counted(tmp_path, style, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    turns = (user("<image>Which?"), say("A.", **ON[style]), user("<image>And?"), say("B.", **OFF[style]))
    row = kept(tmp_path, *turns, images=["a.png", "a.png"])
    assert (["<image>Which?", "A."], 1, False) == (texts(row), len(row["images"]), "learnt" in row)
    assert "1 samples have turns behind the last answer that is learnt" in capsys.readouterr().out


def test_marks_that_learn_all_answers_change_nothing(tmp_path):
    marked = kept(tmp_path, user(), say("A.", **YES), user("And?"), say("B."))
    assert marked == kept(tmp_path, user(), say("A."), user("And?"), say("B."))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([user(), say("A.", weight=0.5)], 'another weight of an answer than 0 and 1,"turn 2, ""weight"" is 0.5'),
        ([user(), say("A.", loss="no")], 'another weight of an answer than 0 and 1,"turn 2, ""loss"" is \'no\''),
        ([user(), say("A.", **NO)], "no answer is learnt,"),
        (
            [user(), say("A.", **YES), user(), say("B.", **NO), user(), say("C.")],
            'only some of the earlier answers are learnt,"those of turns 2, 6',
        ),
        ([user(), say("A.", **NO), CALL], "an answer of which only a part is learnt,turn 3"),
    ],
    ids=["half", "a text", "none", "some", "a part"],
)
def test_other_marks_drop_the_row_by_name_with_a_remedy(tmp_path, turns, reason):
    found = dropped(tmp_path, *turns)
    assert f",{reason}" in found
    assert REMEDIES[found.splitlines()[1].split(",")[1]] in found
