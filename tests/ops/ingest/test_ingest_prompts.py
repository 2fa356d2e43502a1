"""Questions with their answers in columns of their own, and prompts without answers, for regenerate_answers."""

import json

import pytest
from fake_stage import FakeStage
from format_cases import png

from dsl.errors import DataError
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.lib.data.files import read_json, read_jsonl, write_jsonl

ASK, ANSWER = {"role": "user", "text": "What is it?"}, {"role": "assistant", "text": "A cat."}
ROWS = [
    {"id": "prompt", "conversations": [ASK]},
    {"id": "no question", "conversations": [{"role": "system", "text": "Hm."}]},
    {"id": "answered", "conversations": [ASK, ANSWER]},
]


def run(folder, rows=ROWS, **options):
    """Run ingest; returns the kept samples, and the drops by reason."""
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "data.jsonl", rows)
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


USER, GPT = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}
COLUMNS = {"from": ["human", "gpt"], "value": ["What is it?", "A cat."]}
FORMS = {
    "texts": {"prompt": "What is it?", "completion": "A cat."},
    "turns": {"prompt": [USER], "completion": [GPT]},
    "turns-and-text": {"prompt": [USER], "completion": "A cat."},
    "all-turns-in-prompt": {"prompt": [USER, GPT], "completion": None},
    "older-sequence": {"prompt": COLUMNS},
    "alpaca": {"instruction": "What is it?", "input": "", "output": "A cat.", "text": "### Instruction: What is it?"},
    "response": {"prompt": "What is it?", "response": "A cat.", "completion": None},
    "response-turns": {"prompt": [USER], "response": [GPT]},
    "dolly": {"instruction": "What is it?", "context": "", "response": "A cat.", "category": "open_qa"},
    "question": {"question": "What is it?", "answer": "A cat.", "category": "animals"},
    "messages-beside-prompt": {"prompt": "What is it?", "prompt_id": "x", "messages": [USER, GPT]},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_a_question_and_its_answer_may_have_columns_of_their_own(tmp_path, row):
    kept, dropped = run(tmp_path, [row])
    assert {} == dropped
    assert [("user", "What is it?"), ("assistant", "A cat.")] == said(kept[0])


def said(row):
    return [
        (turn["role"], "".join(part.get("text", "[]") for part in turn["content"])) for turn in row["conversations"]
    ]


def test_the_input_follows_the_instruction_on_a_line_of_its_own_and_images_and_system_are_those_of_any_row(tmp_path):
    (tmp_path / "x.png").write_bytes(png())
    row = {"instruction": "Name it.", "input": "Be brief.", "output": "A cat.", "system": "Look.", "image": "x.png"}
    dolly = {
        "instruction": "Name it.",
        "context": "Be brief.",
        "response": "A cat.",
        "system": "Look.",
        "image": "x.png",
    }
    inside = {"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "completion": "A cat."}
    kept, _ = run(tmp_path, [row, dolly, inside])
    turns = [("system", "Look."), ("user", "[]Name it.\nBe brief."), ("assistant", "A cat.")]
    assert [turns, turns, [("user", "[]"), ("assistant", "A cat.")]] == [said(row) for row in kept]
    assert [1, 1, 1] == [len(row["images"]) for row in kept]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?"},
        {"prompt": [USER], "completion": []},
        {"prompt": "Why?", "completion": ""},
        {"instruction": "Why?", "output": None},
        {"instruction": "Why?", "response": ""},
        {"question": "Why?", "answer": ""},
    ],
)
def test_a_question_without_an_answer_is_a_prompt(tmp_path, row):
    kept, dropped = run(tmp_path, [row, FORMS["texts"]], require_answers=False)
    assert (["user"], {}) == ([role for role, _ in said(kept[0])], dropped)
    assert {"no answer": 1} == run(tmp_path, [row, FORMS["texts"]])[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "instruction": "b", "output": "c"}, 'both "prompt" and "instruction": remove the columns of'),
        ({"question": "a", "answer": "b", "prompt": "c"}, 'both "prompt" and "question": remove the columns of'),
        (
            {"prompt": "a", "instruction": "b", "response": "c"},
            'both "prompt" and "instruction": remove the columns of',
        ),
        ({"prompt": "a", "completion": "b", "response": "c"}, 'both "completion" and "response": give one of them'),
        ({"instruction": "a", "output": "b", "response": "c"}, 'both "output" and "response": give one of them'),
        (
            {"instruction": "a", "input": "b", "context": "c", "output": "d"},
            'both "input" and "context": give one of them',
        ),
        ({"prompt": 3}, '"prompt" must be a text or a list of turns, got a number'),
        ({"prompt": "a", "completion": {"text": "b"}}, '"completion" must be a text or a list of turns, got an object'),
        ({"prompt": [{"content": "a"}]}, 'prompt[0]: no string "role" (or "from")'),
        ({"prompt": "a", "completion": ["b"]}, "completion[0]: expected an object, got a string"),
        ({"instruction": "a", "input": 1, "output": "b"}, '"input" must be a text, got a number'),
        ({"question": "a", "answer": ["b", "c"]}, '"answer" must be a text, got a list'),
        ({"question": "a", "choices": ["b", "c"]}, 'no list "messages" (or "conversations"), "prompt", "instruction"'),
        ({"instruction": "a", "outputs": "b"}, 'no list "messages" (or "conversations"), but "outputs" (did you mean'),
        ({"prompt": "a", "completions": "b"}, 'unknown key "completions" (did you mean "completion"?)'),
        ({"prompt": "a", "completion": "b", "respons": "c"}, 'unknown key "respons" (did you mean "response"?)'),
        ({"prompt": "a", "responce": "b"}, 'unknown key "responce" (did you mean "response"?)'),
        ({"instruction": "a", "contxt": "b", "response": "c"}, 'unknown key "contxt" (did you mean "context"?)'),
        ({"promt": "a"}, 'no list "messages" (or "conversations"), but "promt" (did you mean "prompt"?)'),
    ],
    ids=json.dumps,
)
def test_a_row_of_two_forms_or_of_none_is_a_mistake_of_its_line(tmp_path, row, message):
    with pytest.raises(DataError) as error:
        run(tmp_path, [FORMS["texts"], row])
    assert str(error.value).startswith(f"{tmp_path}/data.jsonl:2: {message}")
