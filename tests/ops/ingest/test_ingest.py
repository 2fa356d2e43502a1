"""Own JSONL files: every kind of bad input, the account of what was dropped, splits and packs."""

import hashlib
import json
from pathlib import Path

import pytest
from fake_stage import FakeStage
from hypothesis import given
from hypothesis import strategies as st
from own_samples import ANSWER, ASK, GOOD, run_ingest

from dsl.errors import DataError
from ops.ingest.op import Ingest
from ops.ingest.remedies import ANSWERED_LATER
from ops.ingest.rows import row_mistake
from ops.ingest.run import ingest


def turn_row(turn: dict, num_images: int = 0) -> dict:
    """A turn of one text as samples.jsonl holds it."""
    content = [*[{"type": "image"}] * num_images, {"type": "text", "text": turn["text"]}]
    return {"role": turn["role"], "content": content}


def test_samples_are_written_with_roles_text_split_and_image(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/7.png").write_bytes(b"not checked here")
    rows = [
        {"id": "a", "split": "val", "image": "cats/7.png", "conversations": [ASK, ANSWER]},
        {"split": "train", "conversations": [{"role": "system", "text": " Be brief.\n"}, ASK, ANSWER]},
    ]
    stage, written, summary = run_ingest(tmp_path, rows)
    reference = {
        "sha256": hashlib.sha256(b"not checked here").hexdigest(),
        "pack": "images-00000.bin",
        "offset": 0,
        "size": 16,
    }
    assert written == [
        {
            "id": "a",
            "split": "val",
            "category": "image",
            "conversations": [turn_row(ASK, num_images=1), turn_row(ANSWER)],
            "images": [reference],
        },
        {
            "id": "2",
            "split": "train",
            "category": "text",
            "conversations": [turn_row({"role": "system", "text": " Be brief.\n"}), turn_row(ASK), turn_row(ANSWER)],
            "images": [],
        },
    ]
    assert summary == {"in": 2, "kept": 2, "dropped": {}, "splits": {"train": 1, "val": 1, "test": 0}}
    assert stage.logged == [({"ingest/kept": 2, "ingest/dropped": 0}, 0)]
    assert (stage.out_dir / "images-00000.bin").read_bytes() == b"not checked here"


def test_llava_spelling_is_read_and_its_image_markers_removed(tmp_path):
    (tmp_path / "x.png").write_bytes(b"x")
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    _, written, _ = run_ingest(tmp_path, [{"id": 7, "image": ["x.png"], "conversations": turns}])
    assert written[0]["id"] == "7"
    assert written[0]["conversations"] == [turn_row(ASK, num_images=1), turn_row(ANSWER)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": []}, "no turns"),
        ({"conversations": [ASK, {"role": "robot", "text": "hm"}, ANSWER]}, "unknown role"),
        ({"conversations": [{"role": "user", "text": "  "}, ANSWER]}, "empty text"),
        ({"conversations": [{"role": "user", "text": "\ud800"}, ANSWER]}, "invalid text"),
        ({**GOOD, "label": "\ud800"}, "invalid text"),
        ({"conversations": [ANSWER, ASK, ANSWER]}, "starts with the assistant"),
        ({"conversations": [{"role": "system", "text": "Hm"}, ANSWER]}, "starts with the assistant"),
        ({"conversations": [ASK]}, "no answer"),
        ({**GOOD, "image": "absent.png"}, "image missing"),
        ({**GOOD, "image": "."}, "image missing"),
        ({**GOOD, "image": "a\u0000b"}, "image missing"),
        ({**GOOD, "image": "n" * 5000}, "image missing"),
        ({**GOOD, "image": "loop.png"}, "image missing"),
        ({**GOOD, "image": "../secret.png"}, "image outside the folder"),
        ({**GOOD, "image": "link.png"}, "image outside the folder"),
        ({**GOOD, "image": "/etc/hostname"}, "image outside the folder"),
        ({**GOOD, "image": ["inside.png", "../secret.png"]}, "image outside the folder"),
    ],
)
def test_a_sample_at_fault_is_dropped_with_its_reason(tmp_path, row, reason):
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "inside.png").write_bytes(b"x")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    stage, written, summary = run_ingest(folder, [GOOD, row])
    assert [sample["id"] for sample in written] == ["1"]
    assert summary["dropped"] == {reason: 1}
    assert stage.logged == [({"ingest/kept": 1, "ingest/dropped": 1}, 0)]


STRUCTS = ({"url": None}, {"bytes": None, "path": None}, [None], [{"name": None, "arguments": {"a": None}}], {}, [])


@pytest.mark.parametrize("struct", STRUCTS, ids=str)
def test_an_object_or_list_of_nulls_is_none_wherever_a_table_has_one(tmp_path, struct):
    in_rows = ("video", "videos", "audio", "audios", "tools", "functions", "image", "images")
    in_turns = ("tool_calls", "function_call", "tool_call_id")
    in_parts = ("image_url", "image", "url", "path", "video", "audio")
    parts = [{"type": "text", "text": text, **dict.fromkeys(in_parts, struct)} for text in ("What is it?", "A cat.")]
    untyped = [{**dict.fromkeys(in_parts, struct), "text": "What is it?"}]
    turns = [{"role": role, "content": [part]} for role, part in zip(("user", "assistant"), parts, strict=True)]
    rows = [
        {"id": "plain", **GOOD},
        *({"id": key, **GOOD, key: struct} for key in in_rows),
        *({"id": key, "conversations": [{**turn, key: struct} for turn in (ASK, ANSWER)]} for key in in_turns),
        {"id": "parts", "messages": turns},
        {"id": "untyped", "messages": [{"role": "user", "content": untyped}, ANSWER]},
    ]
    _, written, summary = run_ingest(tmp_path, rows, split="train")
    assert {} == summary["dropped"]
    assert [row["id"] for row in rows] == [row["id"] for row in written]
    plain = [turn_row(ASK), turn_row(ANSWER)]
    assert [(plain, [])] * len(rows) == [(row["conversations"], row["images"]) for row in written]


def test_what_is_there_beside_nulls_still_counts(tmp_path):
    rows = [
        {**GOOD, "tools": [None, {"type": "web_search", "name": None}]},
        {"conversations": [ASK, {**ANSWER, "function_call": {"name": "search", "arguments": None}}]},
        {**GOOD, "video": {"path": "a.mp4", "bytes": None}},
        GOOD,
    ]
    _, written, summary = run_ingest(tmp_path, rows)
    dropped = {"a tool that is no function": 1, "tool calls without tools": 1, "videos are not supported": 1}
    assert dropped == summary["dropped"]
    assert ["4"] == [row["id"] for row in written]


@pytest.mark.parametrize(
    "first", [{"role": None, "from": "system"}, {"role": "developer"}, {"from": "system"}], ids=str
)
def test_a_system_column_beside_a_system_turn_of_any_name_adds_none(tmp_path, first):
    rows = [
        {"system": "Be brief.", "conversations": [{**first, "value": "Be kind."}, ASK, ANSWER]},
        {"system": "Be brief.", "conversations": [ASK, ANSWER]},
    ]
    _, written, _ = run_ingest(tmp_path, rows)
    assert [
        [("system", text), ("user", "What is it?"), ("assistant", "A cat.")] for text in ("Be kind.", "Be brief.")
    ] == [[(turn["role"], turn["content"][0]["text"]) for turn in row["conversations"]] for row in written]


def test_an_image_that_cannot_be_read_is_dropped(tmp_path, monkeypatch):
    (tmp_path / "x.png").write_bytes(b"x")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    _, written, summary = run_ingest(tmp_path, [GOOD, {**GOOD, "image": "x.png"}])
    assert [sample["id"] for sample in written] == ["1"]
    assert summary["dropped"] == {"image unreadable": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"conversations": [', "broken JSON at column 20: Expecting value"),
        ("[1]", "expected an object, got a list"),
        ("null", "expected an object, got null"),
        ("true", "expected an object, got a boolean"),
        ('{"text": "hm"}', 'no list "messages"'),
        ('{"conversations": ["hm"]}', "conversations[0]: expected an object, got a string"),
        ('{"conversations": [{"text": "hm"}]}', 'conversations[0]: no string "role" (or "from")'),
        (
            '{"conversations": [{"role": "user", "text": 1}]}',
            "conversations[0]: expected a text or a list of parts, got a number",
        ),
        ('{"conversations": [{"role": "user"}]}', 'conversations[0]: no "content" (or "text", "value")'),
        (
            '{"messages": [{"role": "user", "content": [3]}]}',
            "messages[0].content[0]: expected an object, got a number",
        ),
        ('{"messages": [{"role": "user", "content": [{"x": 1}]}]}', 'messages[0].content[0]: no string "type"'),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            'messages[0].content[0]: no string "text"',
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "image": 5}]}]}',
            'messages[0].content[0]: its image must be a path, bytes, base64 or {"url": ...}',
        ),
        ('{"conversations": [], "image": "a", "images": ["b"]}', 'both "image" and "images": give one of them'),
        ('{"conversations": [], "system": 1}', '"system" must be a string'),
        ('{"conversations": [], "image": 7}', '"image" must be a path, bytes, base64 or null, or a list of them'),
        ('{"conversations": [], "imgae": "x.png"}', 'unknown key "imgae" (did you mean "image"?)'),
        ('{"conversations": [], "img": ["x.png"]}', 'unknown key "img" (did you mean "image"?)'),
        ('{"conversations": [], "split_name": "test"}', 'unknown key "split_name" (did you mean "split"?)'),
        ('{"conversations": [], "lable": "cat"}', 'unknown key "lable" (did you mean "label"?)'),
        ('{"conversations": [], "imagee": ["cats/7"]}', 'unknown key "imagee" (did you mean "image"?)'),
        ('{"conversations": [], "Image": "cats/7"}', 'unknown key "Image" (did you mean "image"?)'),
        ('{"conversations": [], "split_": "eval"}', 'unknown key "split_" (did you mean "split"?)'),
        ('{"message": [{"role": "user"}]}', 'no list "messages" (or "conversations"), but "message" (did you mean'),
        ('{"conversations": [], "split": "dev"}', "\"split\" must be one of train, val, test, got 'dev'"),
        ('{"conversations": [], "split": ["train"]}', "\"split\" must be one of train, val, test, got ['train']"),
        ('{"conversations": [], "id": 1.5}', '"id" must be a string or an integer, got 1.5'),
        ('{"conversations": [], "id": "\\ud800"}', '"id" contains half a surrogate pair'),
        ("[" * 100_000, "broken JSON: nested too deeply"),
    ],
)
def test_a_malformed_line_is_named_with_file_and_line(tmp_path, line, message):
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path, [GOOD, "", line])
    assert str(error.value).startswith(f"{tmp_path}/data.jsonl:3: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"conversations": "hm', "column 19: Unterminated string"),
        ('{"conversations": "\t"}', "column 20: Invalid control character"),
    ],
)
def test_a_message_of_the_json_reader_is_a_whole_sentence(tmp_path, line, message):
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path, [line])
    assert str(error.value) == f"{tmp_path}/data.jsonl:1: broken JSON at {message}"


def test_other_columns_of_a_data_set_are_no_mistakes(tmp_path):
    columns = {"image_id": 7, "idx": 3, "uid": "u", "image_size": [3, 4], "message": "hm", "split_name": None}
    columns |= {
        "labels": [3, 4],
        "lable": 3,
        "split_": None,
        "imagee": {"height": 3},
        "respons": "hm",
        "contexts": "hm",
    }
    assert run_ingest(tmp_path, [{**GOOD, **columns, "image_path": "somewhere"}])[2]["kept"] == 1


def test_a_column_that_could_be_a_misspelt_key_is_none_where_that_key_is_given(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"x")
    row = {"system": "Look.", "split": "train", **GOOD}
    named = {"image_id": "a.png", "image_path": "a.png", "image_file": "a.png", "systems": "s", "split_name": "test"}
    others = {**named, "conversation": [ASK, ANSWER], "image_url": "https://example.com/a.png"}
    rows = [{**row, "image": "x.png", **others}, {**row, "images": ["x.png"], **others}]
    assert run_ingest(tmp_path / "a", rows)[2]["in"] == 2
    for key in ("image_path", "image_file"):
        with pytest.raises(DataError, match=f'unknown key "{key}" .did you mean "image"'):
            run_ingest(tmp_path / key, [{**row, "image": None, key: "a.png"}])


@given(
    place=st.integers(0, 9), letter=st.sampled_from("ab_"), key=st.sampled_from(["split", "system", "label", "image"])
)
def test_a_key_with_one_slip_is_a_mistake(place, letter, key):
    place %= len(key)
    slips = {
        key[:place] + key[place + 1 :],
        key[:place] + letter + key[place:],
        key[:place] + letter + key[place + 1 :],
    }
    slips |= {key[:place] + key[place : place + 2][::-1] + key[place + 2 :], key.upper()[:1] + key[1:]} - {key}
    for slip in slips - {key, "images"}:
        assert row_mistake({**GOOD, slip: "text"}) == f'unknown key "{slip}" (did you mean "{key}"?)'


def test_text_that_is_not_utf8_is_named_with_file_and_line(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"id": "\xff"}\n')
    with pytest.raises(DataError) as error:
        ingest(Ingest(source=str(tmp_path / "data.jsonl"), seed=0), FakeStage(tmp_path))
    assert str(error.value) == f"{tmp_path}/data.jsonl:2: not UTF-8 at byte 9"


def test_all_mistakes_of_a_file_are_reported_together_up_to_20(tmp_path):
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path, ["{", GOOD, "[]", {**GOOD, "id": "a"}, {**GOOD, "id": "a"}])
    assert str(error.value).split("\n") == [
        f"{tmp_path}/data.jsonl:1: broken JSON at column 2: Expecting property name enclosed in double quotes",
        f"{tmp_path}/data.jsonl:3: expected an object, got a list",
        f'{tmp_path}/data.jsonl:5: id "a" is already that of {tmp_path}/data.jsonl:4; ids must differ, or set '
        'duplicate_ids = "number"',
    ]
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path, ["{"] * 30)
    lines = str(error.value).split("\n")
    assert len(lines) == 21
    assert lines[-1] == "... stopped after 20 mistakes"


def test_a_missing_source_and_an_unknown_builtin_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match="no such file or folder; `source` must name a data file or folder"):
        ingest(Ingest(source=str(tmp_path / "absent.jsonl"), seed=0), FakeStage(tmp_path))
    with pytest.raises(DataError, match='the only built-in sample is "builtin:digits"'):
        ingest(Ingest(source="builtin:digit", seed=0), FakeStage(tmp_path))


def test_more_drops_than_max_dropped_fail_with_the_reasons(tmp_path):
    rows = [GOOD, {"conversations": [ASK]}, {"conversations": []}, {"conversations": [ASK]}]
    assert run_ingest(tmp_path / "enough", rows, max_dropped=3)[2]["kept"] == 1
    with pytest.raises(DataError) as error:
        run_ingest(tmp_path / "less", rows, max_dropped=2)
    assert str(error.value).split("\n") == [
        "more than max_dropped = 2 samples were dropped:",
        '       2  no answer (first: sample "2")',
        '       1  no turns (first: sample "3")',
        "the first of them:",
        f'  sample "2": no answer ({ANSWERED_LATER})',
        '  sample "3": no turns (remove the row, or give it turns)',
        f'  sample "4": no answer ({ANSWERED_LATER})',
        f"all of them: {tmp_path}/less/out/dropped.csv",
    ]


def test_splits_drops_and_empty_splits_are_told_before_later_nodes_spend_their_time(tmp_path, capsys):
    run_ingest(tmp_path, [{**GOOD, "split": "train"}, {"conversations": [ASK]}])
    remedy = 'give samples a "split", or raise val_fraction or test_fraction'
    assert capsys.readouterr().out.splitlines() == [
        "info: kept train 1, val 0, test 0",
        'info: dropped 1  no answer (first: sample "2")',
        f'info: sample "2": no answer ({ANSWERED_LATER})',
        f'info: the split "val" is empty; {remedy}',
        f'info: the split "test" is empty; {remedy}',
        "warning: 50% of the samples (1 of 2) are dropped: 1 no answer; no answer: set require_answers = false, and "
        "let regenerate_answers answer; dropped.csv names each with its reason",
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_by_each_of_its_names(tmp_path, key):
    rows = [
        {"conversations": [ASK, {**ANSWER, key: "Hm."}]},
        {"conversations": [ASK, {**ANSWER, "reasoning_content": None, key: "Hm."}]},
        {"conversations": [ASK, {**ANSWER, "thinking": True}]},
    ]
    _, written, _ = run_ingest(tmp_path, rows)
    assert ["Hm.", "Hm.", None] == [row["conversations"][1].get("reasoning_content") for row in written]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "answer": "This one."},
        {"prompt": "Which?", "response": "This one."},
        {"instruction": "Which?", "output": "This one."},
    ],
    ids=str,
)
def test_a_column_of_reasoning_is_that_of_the_answer_beside_it(tmp_path, capsys, row, key):
    rows = [
        {**row, key: "Hm."},
        {**row, key: "Hm.", [*row][1]: "<think>\nHm.\n</think>\n\nThis one."},
        {**row, key: None},
        {**row, key: "off"},
        {**row, key: ["Hm.", "Ah."]},
    ]
    _, written, _ = run_ingest(tmp_path, rows)
    said = [("user", "Which?"), ("assistant", "This one.")]
    plain = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
    reasoned = [plain[0], {**plain[1], "reasoning_content": "Hm."}]
    assert [reasoned, reasoned, plain, plain, plain] == [sample["conversations"] for sample in written]
    out = capsys.readouterr().out
    assert f'1 samples have "{key}" of their own, which is left out: a server has one setting for all' in out
    assert f'1 samples have "{key}" as a column of no answer, which is left out: write it as a text in the turn' in out


def test_a_column_of_reasoning_that_belongs_to_no_answer_is_counted(tmp_path, capsys):
    rows = [
        {
            "messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}],
            "thinking": "x",
        },
        {"prompt": "Which?", "completion": [{"role": "assistant", "content": "This."}], "thinking": "x"},
        {"messages": [{"role": "user", "content": "Which?"}], "response": "This.", "thinking": "x"},
        {"question": "Which?", "answer": "This.", "reasoning": "x", "thinking": "y"},
        {"question": "Which?", "answer": "This.", "reasoning_content": "x", "reasoning": "x"},
    ]
    _, written, _ = run_ingest(tmp_path, rows)
    assert [None, None, None, "x", "x"] == [row["conversations"][1].get("reasoning_content") for row in written]
    out = capsys.readouterr().out
    assert '4 samples have "thinking" as a column of no answer' in out and '"reasoning" as' not in out


def test_samples_with_reasoning_are_told_since_only_some_templates_show_it(tmp_path, capsys):
    thought = {"conversations": [ASK, {**ANSWER, "reasoning_content": "Hm."}]}
    run_ingest(tmp_path, [GOOD, thought, {**GOOD, "split": "val"}, thought])
    line = "info: 2 samples carry reasoning_content, which only some chat templates show"
    assert line in capsys.readouterr().out.splitlines()


def test_a_source_of_which_nothing_is_left_fails(tmp_path):
    with pytest.raises(DataError, match=r"no sample is left of 1:\n +1  no answer"):
        run_ingest(tmp_path / "a", [{"conversations": [ASK]}])
    with pytest.raises(DataError, match="no sample is left of 0:\n  the source is empty"):
        run_ingest(tmp_path / "b", [])


ROWS = st.sampled_from(
    [GOOD, {"conversations": []}, {"conversations": [ASK]}, {**GOOD, "image": "absent.png"}, {**GOOD, "split": "test"}]
)


@given(rows=st.lists(ROWS, min_size=1, max_size=30), limit=st.none() | st.integers(1, 30))
def test_kept_and_dropped_by_reason_add_up_to_in(tmp_path_factory, rows, limit):
    _, written, summary = run_ingest(tmp_path_factory.mktemp("rows"), [GOOD, *rows], max_samples=limit)
    good = 1 + sum(row["conversations"] == GOOD["conversations"] and "image" not in row for row in rows)
    assert summary["in"] == 1 + len(rows)
    assert summary["kept"] + sum(summary["dropped"].values()) == summary["in"]
    assert summary["kept"] == len(written) == min(good, limit or good)
    assert summary["splits"] == {
        split: sum(row["split"] == split for row in written) for split in ("train", "val", "test")
    }


def test_progress_ends_at_the_number_of_samples(tmp_path):
    stage, _, _ = run_ingest(tmp_path, [GOOD] * 250)
    assert [done for done, _ in stage.progressed] == [100, 200, 250]
    assert [240 <= total <= 260 for _, total in stage.progressed] == [True, True, True]
