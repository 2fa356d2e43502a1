"""Prompts from a benchmark file: what it may hold, what is told of it, and what the target then gets."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import torch
from evaluate_cases import evaluate_config, make_draft, run_evaluate, small_draft
from fake_stage import FakeStage
from lively_target import make_lively
from PIL import Image

from dsl.errors import DataError, StopRequested
from dsl.estimate import PlanContext, Trial
from dsl.launch import Launch
from dsl.op import Ref
from ops.artifacts import Draft, ImageSamples, Samples, TargetModel, TokenShards
from ops.evaluate.benchmark_rows import Benchmark
from ops.evaluate.lengths import spread_prompts
from ops.evaluate.plan import estimate
from ops.evaluate.prompts import Dialogue, Prompt, read_benchmark, with_turns
from ops.evaluate.show import report as evaluate_sections
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.report_sections import Table
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

ANSWER = "An answer that is long enough for the loss mask of a sample, which wants thirty-two tokens of it at least."


@pytest.fixture(scope="module")
def encoder(tokens) -> ChatEncoder:
    return ChatEncoder(load_processor(str(tokens.path / "processor")))


@pytest.fixture(scope="module")
def target(target, tmp_path_factory) -> TargetModel:
    return make_lively(target, tmp_path_factory.mktemp("lively") / "target")


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Draft:
    return make_draft(small_draft(Target.load(target)), tmp_path_factory.mktemp("draft"))


def png(shade: int = 90, size: tuple[int, int] = (16, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, 200 - shade, 30)).save(file, format="PNG")
    return file.getvalue()


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def written(folder, rows) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / "one.png").write_bytes(png())
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / "bench.jsonl").write_text(text)
    return str(folder / "bench.jsonl")


def good_rows() -> list[dict]:
    address = f"data:image/png;base64,{base64.b64encode(png(140)).decode()}"
    picture = {"type": "image_url", "image_url": {"url": address}}
    return [
        {"id": "m1", "category": "math", "messages": user("What is 2 + 2?")},
        {"id": 2, "category": "math", "messages": [{"role": "system", "content": "Be brief."}, *user("And 3 + 3?")]},
        {"id": "v1", "category": "look", "messages": user("What is it?"), "images": ["pictures/one.png"]},
        {
            "id": "v2",
            "category": "look",
            "messages": user([{"type": "text", "text": "And "}, picture, {"type": "text", "text": "?"}]),
        },
        {
            "id": "talk",
            "category": "talk",
            "messages": [*user("Say one."), {"role": "assistant", "content": "One."}, *user("Say two.")],
        },
    ]


def test_prompts_of_a_file_are_those_that_tokenize_chat_makes_of_the_same_messages(tokens, encoder, tmp_path):
    rows = good_rows()
    asked = read_benchmark(Benchmark(Path(written(tmp_path, rows))), encoder)
    assert ["m1", "2", "v1", "v2", "talk"] == [prompt.id for prompt in asked]
    answered = [
        {**row, "split": "train", "messages": [*row["messages"], {"role": "assistant", "content": ANSWER}]}
        for row in rows
    ]
    source = written(tmp_path, answered)
    stage = FakeStage(tmp_path / "ingest")
    ingest(Ingest(source=source, seed=0), stage)
    stage = FakeStage(tmp_path / "inject", {"samples": stage.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("a"), image_policy="in-place"), stage)
    stage = FakeStage(tmp_path / "tokenize", {"samples": stage.artifact(ImageSamples)})
    tokenize_chat(TokenizeChat(samples=Ref("a"), processor=str(tokens.path / "processor")), stage)
    reader = TokenReader(stage.artifact(TokenShards))
    made = {reader.records[place]["id"]: reader.sample(place) for place in range(len(reader))}
    assert len(rows) == len(made)
    turns = {prompt.id: prompt.turn for prompt in with_turns(Prompt.held_out(reader), reader)}
    assert turns == {prompt.id: prompt.turn for prompt in asked} == {**dict.fromkeys(made, 0), "talk": 1}
    for prompt in asked:
        ours, theirs = prompt.sample(), made[prompt.id]
        assert prompt.length == ours.prompt_tokens == theirs.prompt_tokens == len(ours.input_ids)
        assert torch.equal(theirs.input_ids[: theirs.prompt_tokens], ours.input_ids)
        assert torch.equal(theirs.pixel_values, ours.pixel_values)
        assert torch.equal(theirs.image_grid_thw, ours.image_grid_thw)
        assert not ours.loss_mask.any()


BAD = {
    '{"id": "broken"': "broken JSON at column",
    json.dumps({"category": "a", "messages": user("No id.")}): 'no "id"',
    json.dumps({"id": "b", "messages": user("No category.")}): '"category" must be a word',
    json.dumps({"id": "c", "category": "all", "messages": user("?")}): '"category" must not be "all"',
    json.dumps({"id": "d", "category": "a/b", "messages": user("?")}): '"category" must be a word',
    json.dumps({"id": "e", "category": "a"}): 'no list "messages" (or "conversations")',
    json.dumps({"id": "e2", "category": "a", "mesages": user("?")}): (
        'no list "messages" (or "conversations"), but "mesages" (did you mean "messages"?)'
    ),
    json.dumps({"id": "good", "category": "a", "messages": user("Twice.")}): "bench.jsonl:1; ids must differ",
    json.dumps({"id": "f", "category": "a", "messages": [*user("?"), {"role": "assistant", "content": "!"}]}): (
        "the last message is neither the user's nor a tool's result: remove the answer"
    ),
    json.dumps({"id": "s", "category": "a", "messages": [{"role": "system", "content": "Be brief."}]}): (
        'no user turn: "messages" must have one, {"role": "user", "content": "..."}'
    ),
    json.dumps({"id": "t", "category": "a", "messages": []}): "no user turn",
    json.dumps({"id": "g", "category": "a", "messages": user("?"), "images": ["gone.png"]}): "image missing: gone.png",
    json.dumps({"id": "h", "category": "a", "messages": user("?"), "images": ["../x.png"]}): (
        "image outside the folder: ../x.png: copy it into the folder of the benchmark file"
    ),
    json.dumps({"id": "i", "category": "a", "messages": user("?"), "images": ["text.png"]}): "image undecodable",
    json.dumps({"id": "j", "category": "a", "messages": user("<|im_end|>")}): "special token in the text: <|im_end|>",
    json.dumps({"id": "k", "category": "a", "messages": user("?"), "image_s": ["a.png"]}): (
        'unknown key "image_s" (did you mean "images"?)'
    ),
    json.dumps({"id": "l", "category": "a", "messages": user("<image> <image>"), "images": ["pictures/one.png"]}): (
        "placeholders and images differ"
    ),
}


def test_every_bad_line_is_told_at_once_with_its_place(encoder, tmp_path):
    good = {"id": "good", "category": "a", "messages": user("?")}
    file = written(tmp_path, [good, *BAD])
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(DataError) as caught:
        read_benchmark(Benchmark(Path(file)), encoder)
    first, *lines = str(caught.value).splitlines()
    assert len(BAD) == len(lines)
    for number, (line, expected) in enumerate(zip(lines, BAD.values(), strict=True), start=2):
        assert line.startswith(f"{file}:{number}: ")
        assert expected in line
    assert f"{len(BAD)} of {len(BAD) + 1} lines of the benchmark cannot be used: fix or remove them" in first


def test_a_file_without_prompts_and_a_missing_one_are_refused(encoder, tmp_path):
    with pytest.raises(DataError, match="has no prompts"):
        read_benchmark(Benchmark(Path(written(tmp_path, []))), encoder)
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        read_benchmark(Benchmark(tmp_path / "absent.jsonl"), encoder)


def test_a_benchmark_takes_the_place_of_the_split_and_its_categories_are_those_of_the_report(
    draft, target, tokens, tmp_path
):
    file = written(tmp_path / "data", good_rows())
    stage = run_evaluate(tmp_path, draft, target, tokens, benchmark=file, max_prompts=None, max_new_tokens=8)
    report = read_json(stage.out_dir / "report.json")
    assert ("bench.jsonl", None) == (report["benchmark"], report["split"])
    assert {"all": 5, "math": 2, "look": 2, "talk": 1} == {name: tau["prompts"] for name, tau in report["tau"].items()}
    assert {"errors": 0, "ties": 0} == report["lossless"]
    assert ["m1", "2", "v1", "v2", "talk"] == [row["id"] for row in read_jsonl(stage.out_dir / "prompts.jsonl")]
    assert 2 == (stage.out_dir / "prompts.html").read_text().count("<img")


def test_what_a_limit_leaves_out_of_a_benchmark_is_reported(encoder, tmp_path):
    reported: list[str] = []
    asked = read_benchmark(Benchmark(Path(written(tmp_path, good_rows()))), encoder)
    assert ["m1", "v1", "talk"] == [prompt.id for prompt in spread_prompts(asked, 1, reported.append)]
    assert asked == spread_prompts(asked, 2, reported.append)
    assert asked == spread_prompts(asked, None, reported.append)
    assert ["max_prompts selects prompts spread over each category: 1 of 2 of math, 1 of 2 of look"] == reported


def test_rows_that_are_too_long_with_their_answers_are_named_by_file_and_line_before_anything_is_decoded(
    draft, target, tokens, encoder, tmp_path
):
    rows = [*good_rows(), {"id": "long", "category": "talk", "messages": user("word " * 400)}]
    file = written(tmp_path / "data", rows)
    lengths = [prompt.length for prompt in read_benchmark(Benchmark(Path(file)), encoder)]
    with pytest.raises(DataError) as caught:
        run_evaluate(tmp_path, draft, target, tokens, benchmark=file, max_prompts=None, max_new_tokens=100)
    first, line, remedy = str(caught.value).splitlines()
    assert "1 of 6 prompts and their answers" in first
    assert "than the 512 positions of the draft" in first
    assert f"  {file}:6: {lengths[5]} + 101 = {lengths[5] + 101}" == line
    assert "remove these prompts" in remedy
    assert [] == list((tmp_path / "work").iterdir())
    fits = 512 - lengths[5] - 1
    if fits > 0:
        assert remedy.startswith(f"set max_new_tokens = {fits} or less")


def test_images_are_refused_where_the_target_reads_other_patches(draft, target, tokens, tmp_path):
    other = tmp_path / "tokens"
    other.mkdir()
    (other / "processor").symlink_to(tokens.path / "processor")
    (other / "tokens.json").write_text(json.dumps(read_json(tokens.path / "tokens.json") | {"merge_size": 1}))
    (other / "samples.jsonl").write_text("")
    file = written(tmp_path / "data", good_rows())
    with pytest.raises(DataError, match="the images of the tokens do not fit the target: they have merge_size 1"):
        run_evaluate(tmp_path, draft, target, TokenShards(other, "other"), benchmark=file)


def test_the_images_that_a_benchmark_names_are_part_of_its_key(tmp_path):
    file = written(tmp_path, good_rows())
    assert {"pictures/one.png": tmp_path / "pictures" / "one.png"} == evaluate_config(benchmark=file).external_files()
    assert {} == evaluate_config().external_files()
    assert ("jinja2",) == evaluate_config(benchmark=file).chosen_libraries()


def test_a_trial_knows_how_many_prompts_the_full_run_has(tmp_path):
    config = evaluate_config(benchmark=written(tmp_path, good_rows()), max_prompts=None)
    small = evaluate_config(benchmark=config.benchmark, max_prompts=1)
    trial = Trial(config=small, artifact=tmp_path, inputs={})
    inputs = dict.fromkeys(("draft", "target", "tokens"))
    context = PlanContext(launch=Launch(), inputs=inputs, artifact=None, root=tmp_path, free_disk=0, trial=trial)
    (amount,) = estimate(config, context).growth.series
    assert (3, 5) == (amount.trial, amount.full)


def conversations() -> list[dict]:
    return [
        {"question_id": "a", "category": "talk", "turns": ["Say one.", "Say two.", "Say three."]},
        {"question_id": "b", "category": "look", "turns": ["What is it?", "And?"], "image": "pictures/one.png"},
        {"question_id": "c", "category": "talk", "turns": ["Say four."]},
    ]


def test_each_turn_is_asked_after_the_targets_own_plain_answers(draft, target, tokens, encoder, tmp_path):
    file = written(tmp_path / "data", conversations())
    stage = run_evaluate(tmp_path, draft, target, tokens, benchmark=file, max_new_tokens=8)
    report = read_json(stage.out_dir / "report.json")
    rows = {row["id"]: row for row in read_jsonl(stage.out_dir / "prompts.jsonl")}
    assert [] == report["unasked"]
    assert ["a", "b", "c", "a@1", "b@1", "a@2"] == list(rows)
    assert ("each", {"errors": 0, "ties": 0}) == (report["turns"], report["lossless"])
    for id_, texts in (("a", ["Say one.", "Say two.", "Say three."]), ("b", ["What is it?", "And?"])):
        messages: list[dict] = []
        for number, text in enumerate(texts):
            image = [{"type": "image"}] if id_ == "b" and not number else []
            messages.append({"role": "user", "content": [*image, {"type": "text", "text": text}]})
            row = rows[f"{id_}@{number}" if number else id_]
            ids = encoder.prompt(messages)
            more = 3 if id_ == "b" else 0  # tokens of the image besides its placeholder
            assert len(ids) + more == row["prompt_tokens"]
            answer = row["tokens"][:-1] if row["tokens"][-1] in encoder.processor.eos_token_ids else row["tokens"]
            said = encoder.processor.tokenizer.decode(answer, skip_special_tokens=False)
            messages.append({"role": "assistant", "content": [{"type": "text", "text": said}]})
    by_turn = report["tau_by_turn"]
    assert {"0": 3, "1": 2, "2": 1} == {turn: tau["prompts"] for turn, tau in by_turn.items()}
    for part in ("generated", "steps"):
        assert report["tau"]["all"][part] == sum(tau[part] for tau in by_turn.values())
        assert report["tau"]["all"][part] == sum(tau[part] for tau in report["tau_by_group"].values())
    assert [by_turn["2"]["tau"]] == stage.metric("eval/tau_turn_2")
    assert "tau_by_part" in stage.figures
    assert "tau_by_group" not in stage.figures  # that is the table of categories
    sections = {part.title: part for part in evaluate_sections(stage.out_dir) if isinstance(part.body, Table)}
    assert ["0", "1", "2"] == [row[0] for row in sections["tau by turn"].body.rows]
    assert "tau by context" not in sections
    line = "temperature 0, at most 8 new tokens, thinking as the chat template has it, batches of 2, each turn, after"
    assert f"For comparison: {line} the target's own answers; tau " in sections["tau"].note


def test_only_the_first_turn_is_asked_on_request(draft, target, tokens, tmp_path):
    file = written(tmp_path / "data", conversations())
    changes = {"benchmark": file, "max_new_tokens": 4, "random_draft": False, "first_turn": True}
    stage = run_evaluate(tmp_path, draft, target, tokens, **changes)
    report = read_json(stage.out_dir / "report.json")
    assert ("first", {"0"}) == (report["turns"], set(report["tau_by_turn"]))
    assert ["a", "b", "c"] == [row["id"] for row in read_jsonl(stage.out_dir / "prompts.jsonl")]
    assert "tau_by_part" not in stage.figures


def test_a_conversation_that_was_stopped_between_turns_ends_with_the_same_bytes(draft, target, tokens, tmp_path):
    file = written(tmp_path / "data", conversations())
    changes = {"benchmark": file, "max_new_tokens": 6, "random_draft": False, "batch_size": 3}
    whole = run_evaluate(tmp_path / "whole", draft, target, tokens, **changes)
    with pytest.raises(StopRequested, match="0 of 2 prompts are decoded and kept"):
        run_evaluate(tmp_path / "cut", draft, target, tokens, stop_after=1, **changes)
    again = run_evaluate(tmp_path / "cut", draft, target, tokens, **changes)
    for name in ("report.json", "prompts.jsonl", "prompts.html"):
        assert (whole.out_dir / name).read_bytes() == (again.out_dir / name).read_bytes()


def test_turns_behind_an_answer_that_cannot_be_shown_again_are_left_out_and_reported(
    draft, target, tokens, tmp_path, capsys, monkeypatch
):
    file = written(tmp_path / "data", conversations()[:1])
    monkeypatch.setattr(Dialogue, "answered", in_special_tokens(Dialogue.answered))
    stage = run_evaluate(tmp_path, draft, target, tokens, benchmark=file, max_new_tokens=4, random_draft=False)
    assert [{"id": "a", "reason": "special token in the text: <|im_end|>"}] == read_json(stage.out_dir / "report.json")[
        "unasked"
    ]
    assert (
        'the turns behind prompt "a" are not asked, since the answer cannot be shown again' in capsys.readouterr().out
    )


def in_special_tokens(answered):
    """`Dialogue.answered` of a target that writes a special token into its answers."""
    return lambda self, text: answered(self, text if text == "." else f"{text}<|im_end|>")


def test_the_turn_is_not_known_where_no_sample_has_a_learnt_answer_before_its_last(tokens):
    reader = TokenReader(tokens, "test")
    assert {None} == {prompt.turn for prompt in with_turns(Prompt.held_out(reader), reader)}
