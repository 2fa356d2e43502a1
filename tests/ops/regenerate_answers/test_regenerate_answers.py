"""The target's own answers: against transformers' generate, resumed, sampled, filtered, and on through the chain."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from attrs import evolve
from fake_stage import FakeStage, folder_digest
from family_checkpoints import make_checkpoint
from import_graph import PYTHON_PATH
from PIL import Image
from regenerate_cases import (
    COLOURS,
    answers_of,
    config,
    conversations,
    make_target,
    run,
    turn,
)

from dsl.errors import DataError, StopRequested
from dsl.estimate import PlanContext, Trial
from dsl.launch import Launch
from dsl.op import Ref, op_of
from ops.artifacts import ImageSamples, TargetModel, TokenShards
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.lib.data.files import read_json, read_jsonl, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.decoding.sampling import uniform_draws
from ops.lib.forecasts import Counts, SamplesForecast, TargetForecast
from ops.lib.target.model import Target, read_config
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import estimate, smoke
from ops.regenerate_answers.run import regenerate_answers
from ops.regenerate_answers.shards import Journal
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat


@pytest.fixture(scope="module")
def target(talker) -> TargetModel:
    return talker


@pytest.fixture(scope="module")
def samples(parroted) -> ImageSamples:
    return parroted


def test_the_target_answers_as_it_was_taught_and_hears_its_own_earlier_answers(samples, target, tmp_path):
    stage = run(tmp_path, samples, target)
    taught = {
        sample_id: [answer for _, answer in turns] for sample_id, split, _, turns in conversations() if split != "test"
    }
    assert taught == answers_of(stage)
    new = {row["id"]: row for row in read_jsonl(stage.out_dir / "samples.jsonl")}
    for old in read_jsonl(samples.path / "samples.jsonl"):
        row = new[old["id"]]
        if old["split"] == "test":
            assert old == row
            continue
        assert ["stop"] * len(taught[old["id"]]) == row.pop("finish_reasons")
        assert len(taught[old["id"]]) == len(row.pop("answer_tokens"))
        assert {**old, "messages": row["messages"]} == row
        questions = [message for message in row["messages"] if message["role"] == "user"]
        assert [message for message in old["messages"] if message["role"] == "user"] == questions
    assert [0] == stage.metric("regenerate/retokenised_differently")
    assert (stage.out_dir / "images-00000.bin").read_bytes() == (samples.path / "images-00000.bin").read_bytes()
    assert stage.progressed[-1] == (11, 11)


def test_every_answer_is_that_of_transformers_generate_on_the_conversation_so_far(samples, target, tmp_path):
    stage = run(tmp_path, samples, target, max_new_tokens=13, finish_reasons=("stop", "length"))
    loaded, processor = Target.load(target), load_processor(str(target.path / "model"))
    lengths = []
    for row in read_jsonl(stage.out_dir / "samples.jsonl"):
        if row["split"] == "test":
            continue
        answered = [place for place, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for number, place in enumerate(answered):
            tokens = reference_answer(loaded, processor, row, row["messages"][:place], 13)
            stopped = tokens[-1] in processor.eos_token_ids
            text = processor.tokenizer.decode(tokens[:-1] if stopped else tokens)
            assert text == row["messages"][place]["content"][0]["text"]
            assert ("stop" if stopped else "length") == row["finish_reasons"][number]
            assert len(tokens) == row["answer_tokens"][number]
            lengths.append(len(tokens))
    assert min(lengths) < 13 == max(lengths)


def reference_answer(loaded, processor, row, messages, new_tokens):
    """Greedy tokens of transformers' generate for one prompt."""
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    arguments = {}
    if row["images"]:
        picture = processor.pixels(Image.new("RGB", (16, 16), COLOURS[row["id"].split("-")[1]]))
        text = text.replace(processor.image_token, processor.image_token * 4)
        arguments = {name: picture[name] for name in ("pixel_values", "image_grid_thw")}
    prompt = torch.tensor([processor.tokenizer(text)["input_ids"]])
    if row["images"]:
        arguments["mm_token_type_ids"] = (prompt == processor.image_token_id).int()
    loaded.forget_positions()
    generated = loaded.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(processor.eos_token_ids),
        pad_token_id=processor.pad_token_id,
        **arguments,
    )
    return generated[0, prompt.shape[1] :].tolist()


def kept_answers(folder):
    """(id, which) -> tokens of the answers in a work folder."""
    found = {
        (row["id"], turn): answer["tokens"]
        for file in folder.glob("*.jsonl")
        for row in read_jsonl(file)
        for turn, answer in enumerate(row["answers"])
    }
    for file in folder.glob("*.answers"):
        found |= {key: answer.tokens for key, answer in Journal(file).answers.items()}
    return found


@pytest.mark.parametrize("stop_after", [1, 12, 30, -1])
def test_a_stopped_regeneration_loses_no_answer_and_ends_with_the_same_bytes(samples, target, tmp_path, stop_after):
    options = {"temperature": 1.0, "shard_samples": 6, "batch_tokens": 150}
    whole = run(tmp_path / "whole", samples, target, **options)
    last = stop_after == -1
    stop_after = whole.stop_asked - 1 if last else stop_after
    stage = FakeStage(tmp_path / "cut", {"samples": samples, "target": target}, stop_after=stop_after)
    with pytest.raises(StopRequested, match="all answers so far are kept"):
        regenerate_answers(config(**options), stage)
    finished = {file: file.stat().st_mtime_ns for file in stage.work_dir.glob("*.jsonl")}
    assert last == bool(finished)
    kept = kept_answers(stage.work_dir)
    assert (stop_after > 1) == bool(kept)
    again = run(tmp_path / "cut", samples, target, **options)
    assert finished == {file: file.stat().st_mtime_ns for file in finished}
    generated = whole.metric("regenerate/tokens_of_attempt")[-1]
    assert generated - sum(kept.values()) == sum(again.metric("regenerate/tokens_of_attempt")[-1:])
    assert generated == whole.metric("regenerate/tokens")[0]
    assert [] == list(stage.work_dir.glob("*.answers"))
    assert folder_digest(whole.out_dir) == folder_digest(again.out_dir)
    other = run(tmp_path / "other", samples, target, **{**options, "shard_samples": 5})
    assert answers_of(whole) == answers_of(other)


def test_a_limit_of_drops_may_change_without_a_new_answer(samples, target, tmp_path):
    options = {"max_new_tokens": 13, "shard_samples": 3}
    with pytest.raises(DataError, match="more than max_dropped = 0 samples were dropped"):
        run(tmp_path, samples, target, max_dropped=0, **options)
    shutil.rmtree(tmp_path / "out")
    again = run(tmp_path, samples, target, max_dropped=8, **options)
    assert 0 == again.stop_asked
    assert 0 < read_json(again.out_dir / "summary.json")["dropped"]["finish reason length"] < 8
    of_a_server = {"endpoint", "api_key_env", "concurrency", "retries", "backoff_s", "timeout_s"}
    assert {"max_dropped", "batch_tokens", "shard_samples"} | of_a_server == {
        name for name, field in op_of(RegenerateAnswers).fields.items() if field.neutral
    }


def test_a_conversation_that_ends_with_the_user_gets_an_answer(samples, target, tmp_path):
    folder = tmp_path / "samples"
    shutil.copytree(samples.path, folder)
    changed = list(read_jsonl(folder / "samples.jsonl"))
    for row in changed:
        row["messages"].pop()  # so pictures end with a second question, and texts are prompts only
    changed[4]["messages"] = [turn("system", "Be brief.")]
    write_jsonl(folder / "samples.jsonl", changed)
    stage = run(tmp_path / "prompts", ImageSamples(folder, "prompts"), target)
    expected = answers_of(run(tmp_path / "answered", samples, target))
    expected.pop(changed[4]["id"])
    assert expected == answers_of(stage)
    assert {"no turn to answer": 1} == read_json(stage.out_dir / "summary.json")["dropped"]
    tokens = FakeStage(tmp_path / "tokens", {"samples": stage.artifact(ImageSamples), "target": target})
    tokenize_chat(TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=1), tokens)
    assert {"no answer": 1} == read_json(tokens.out_dir / "summary.json")["dropped"]  # of the split test, not asked


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from fake_stage import FakeStage
from dsl.op import Ref
from ops.artifacts import ImageSamples, TargetModel
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import estimate, smoke
from ops.regenerate_answers.run import regenerate_answers

class Killed(FakeStage):
    def stop_requested(self):
        if sum(len(file.read_text().splitlines()) for file in self.work_dir.glob(sys.argv[5])) >= int(sys.argv[6]):
            os.kill(os.getpid(), signal.SIGKILL)
        return False

torch.set_num_threads(1)
samples, target, folder = map(Path, sys.argv[1:4])
stage = Killed(folder, {"samples": ImageSamples(samples, "a"), "target": TargetModel(target, "b")})
config = RegenerateAnswers(samples=Ref("a"), target=Ref("b"), max_new_tokens=40, seed=0, shard_samples=int(sys.argv[4]))
regenerate_answers(config, stage)
"""


def killed(samples, target, folder, shard_samples, files, lines):
    """Run in a process that kills itself once these files of its work folder have so many lines."""
    arguments = (samples.path, target.path, folder, shard_samples, files, lines)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
    )
    assert -signal.SIGKILL == done.returncode


def test_answers_that_ended_before_a_kill_in_the_middle_of_a_batch_are_not_generated_again(samples, target, tmp_path):
    whole = run(tmp_path / "whole", samples, target)
    killed(samples, target, tmp_path / "cut", 256, "*.answers", 3)
    work = tmp_path / "cut" / "work"
    kept = kept_answers(work)
    assert 3 <= len(kept) < 8  # of the eight first turns, which are one batch
    [journal] = work.glob("*.answers")
    with journal.open("a") as file:
        file.write('{"id": "text-1", "turn": 0, "answer": {"text": "half a li')
    again = run(tmp_path / "cut", samples, target)
    assert (len(kept), 11) == again.progressed[0]
    generated = whole.metric("regenerate/tokens_of_attempt")[-1]
    assert generated - sum(kept.values()) == again.metric("regenerate/tokens_of_attempt")[-1]
    assert folder_digest(whole.out_dir) == folder_digest(again.out_dir)


def test_a_killed_regeneration_goes_on_behind_its_finished_shards(samples, target, tmp_path):
    killed(samples, target, tmp_path / "cut", 2, "*.jsonl", 4)
    finished = {file: file.stat().st_mtime_ns for file in (tmp_path / "cut" / "work").glob("*.jsonl")}
    assert ["00000000-00000002.jsonl", "00000002-00000004.jsonl"] == sorted(file.name for file in finished)
    (tmp_path / "cut" / "work" / "00000004-00000006.partial").write_text("half a line")
    (tmp_path / "cut" / "work" / "00000004-00000006.answers").write_text('{"id": "text-1", "turn": 0, "answer": {"te')
    again = run(tmp_path / "cut", samples, target, shard_samples=2)
    assert finished == {file: file.stat().st_mtime_ns for file in finished}
    assert folder_digest(run(tmp_path / "whole", samples, target, shard_samples=2).out_dir) == folder_digest(
        again.out_dir
    )


def test_sampled_answers_depend_on_the_seed_and_the_sample_and_not_on_the_batch(samples, target, tmp_path, monkeypatch):
    options = {"temperature": 1.5, "max_new_tokens": 24, "finish_reasons": ("stop", "length")}
    monkeypatch.setattr("ops.regenerate_answers.shards.EVERY_S", 0.0)
    one = answers_of(run(tmp_path / "one", samples, target, **options))
    alone = run(tmp_path / "single", samples, target, batch_tokens=1, **options)
    single = answers_of(alone)
    other = answers_of(run(tmp_path / "other", samples, target, **{**options, "seed": 1}))
    assert one == single
    assert sorted(alone.progressed) == alone.progressed
    assert set(range(12)) == {done for done, _ in alone.progressed}
    assert one != other
    assert not torch.equal(uniform_draws(0, "a", 0, 8), uniform_draws(0, "a", 1, 8))
    assert not torch.equal(uniform_draws(0, "a", 0, 8), uniform_draws(0, "b", 0, 8))
    assert torch.equal(uniform_draws(0, "a", 0, 8), uniform_draws(0, "a", 0, 9)[:8])


def test_answers_are_filtered_by_finish_reason_and_length_and_every_sample_is_accounted_for(samples, target, tmp_path):
    both = run(tmp_path / "both", samples, target, max_new_tokens=13, finish_reasons=("stop", "length"))
    kept = [row for row in read_jsonl(both.out_dir / "samples.jsonl") if row["split"] != "test"]
    assert 8 == len(kept)
    cut = {row["id"] for row in kept if "length" in row["finish_reasons"]}
    longest = {row["id"]: max(row["answer_tokens"]) for row in kept}
    shortest = {row["id"]: min(row["answer_tokens"]) for row in kept}
    stopped = {row["id"] for row in kept if "stop" in row["finish_reasons"]}
    assert 0 < len(cut) < 8
    for name, changes, reasons in (
        ("stop", {}, {"finish reason length": cut}),
        ("length", {"finish_reasons": ("length",)}, {"finish reason stop": stopped}),
        (
            "bounds",
            {"finish_reasons": ("stop", "length"), "min_answer_tokens": 8, "max_answer_tokens": 12},
            {
                "fewer than min_answer_tokens": {i for i in longest if shortest[i] < 8},
                "more than max_answer_tokens": {i for i in longest if longest[i] > 12 and shortest[i] >= 8},
            },
        ),
    ):
        stage = FakeStage(tmp_path / name, {"samples": samples, "target": target})
        dropped = set().union(*reasons.values())
        regenerate_answers(config(max_new_tokens=13, **changes), stage)
        assert {reason: len(ids) for reason, ids in reasons.items() if ids} == read_json(
            stage.out_dir / "summary.json"
        )["dropped"]
        assert 9 == read_json(stage.out_dir / "summary.json")["kept"] + len(dropped)
        assert set(longest) - dropped == set(answers_of(stage))


@pytest.mark.parametrize(
    ("reasons", "kept", "said"),
    [
        ([["stop"], ["length"], ["stop", "length"]], ("stop",), "2 of 3 answered samples have an answer that was cut"),
        ([["stop"], ["length"]], ("stop", "length"), None),
        ([["stop"]], ("stop",), None),
    ],
)
def test_a_trial_says_how_many_answers_it_keeps_that_the_full_run_drops(tmp_path, reasons, kept, said):
    of_split = {"category": "text", "split": "train"}
    rows = [{**of_split, "finish_reasons": each} for each in reasons]
    write_jsonl(tmp_path / "samples.jsonl", [*rows, {"category": "text", "split": "test"}])
    full = RegenerateAnswers(samples=Ref("a"), target=Ref("b"), max_new_tokens=64, finish_reasons=kept)
    trial = Trial(config=evolve(full, **smoke(full, 3)), artifact=tmp_path, inputs={})
    counted = Counts({("text", "train"): len(rows)}, {("text", "train"): 100})
    inputs = {"samples": SamplesForecast(samples=counted), "target": None}
    context = PlanContext(launch=Launch(), inputs=inputs, artifact=None, root=tmp_path, free_disk=0, trial=trial)
    notes = estimate(full, context).growth.notes
    assert (said is not None) is bool(notes)
    for note in notes:
        assert note.startswith(f"{said} at max_new_tokens = 64: the trial keeps them, and the full run drops them")


def test_a_trial_draws_and_keeps_answers_and_says_which_ones_of_the_full_run_are_dropped(samples, target, tmp_path):
    looping = make_target(tmp_path / "looping", make_checkpoint("qwen3", tmp_path / "checkpoint", lively=False))
    texts = [row for row in read_jsonl(samples.path / "samples.jsonl") if not row["images"]]
    write_jsonl(tmp_path / "samples.jsonl", texts)
    asked = ImageSamples(tmp_path, "texts")
    with pytest.raises(DataError, match=r"no answer of the target is left:\n +5  repetition"):
        run(tmp_path / "full", asked, looping, drop_repetitions=True)
    for name, model, dropped in (("tried", looping, 5), ("taught", target, 0)):
        full = config(drop_repetitions=True)
        stage = FakeStage(tmp_path / name, {"samples": asked, "target": model})
        regenerate_answers(evolve(full, **smoke(full, 3)), stage)
        assert answers_of(stage) and 5 == read_json(stage.out_dir / "judgement.json")["samples"]
        trial = Trial(config=evolve(full, **smoke(full, 3)), artifact=stage.out_dir, inputs={})
        growth = grown(full, trial, 5)
        assert bool(dropped) is growth.fails
        said = [note for note in growth.notes if note.startswith("of 5 samples that were answered as the full run")]
        assert [f"it would drop {dropped} ({dropped} repetition): set sampling" in note for note in said] == [True] * (
            dropped > 0
        )
        trained_by_it = TargetForecast.made(model.path, "model", is_tried=True)
        assert not grown(full, trial, 5, trained_by_it).fails


def grown(full, trial, count, target=None):
    """The growth that a trial on `count` samples tells."""
    counted = Counts({("text", "train"): count}, {("text", "train"): 100})
    inputs = {"samples": SamplesForecast(samples=counted), "target": target}
    folder = trial.artifact
    context = PlanContext(launch=Launch(), inputs=inputs, artifact=None, root=folder, free_disk=0, trial=trial)
    return estimate(full, context).growth


def test_samples_that_cannot_be_asked_are_dropped_and_counted(samples, target, tmp_path):
    folder = tmp_path / "samples"
    shutil.copytree(samples.path, folder)
    changed = list(read_jsonl(folder / "samples.jsonl"))
    changed[0]["messages"][1]["content"].insert(0, {"type": "image"})
    changed[0]["images"] *= 2
    changed[1]["messages"][0]["content"][1]["text"] = "<|im_end|>"
    write_jsonl(folder / "samples.jsonl", changed)
    stage = run(tmp_path, ImageSamples(folder, "changed"), target, max_prompt_tokens=50)
    summary = read_json(stage.out_dir / "summary.json")
    assert 1 == summary["dropped"].pop("image in an answer")
    assert 1 == summary["dropped"].pop("special token in the text")
    too_long = summary["dropped"].pop("prompt longer than max_prompt_tokens")
    assert {} == summary["dropped"]
    assert 9 == summary["in"] == summary["kept"] + too_long + 2
    assert 0 < too_long < 7


def test_an_answer_that_never_ends_leaves_nothing_and_says_so(samples, target, tmp_path):
    with pytest.raises(DataError, match=r"no answer of the target is left:\n +8  finish reason length") as caught:
        run(tmp_path, samples, target, max_new_tokens=3)
    assert str(caught.value).splitlines()[-1] == (
        'raise max_new_tokens, or keep answers that were cut: finish_reasons = ["stop", "length"]; '
        "an untrained target does not end its answers"
    )


def test_answers_with_special_tokens_are_dropped_and_laid_to_the_target(samples, tmp_path, capsys):
    checkpoint = make_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    babbling = make_target(tmp_path / "target", checkpoint)
    stage = run(
        tmp_path / "run", samples, babbling, temperature=8.0, max_new_tokens=60, finish_reasons=("stop", "length")
    )
    summary = read_json(stage.out_dir / "summary.json")
    count = summary["dropped"]["special token in the target's answer"]
    assert count > 0 and "special token in the text" not in summary["dropped"]
    said = capsys.readouterr().out
    assert f", {count} special token in the target's answer" in said or f": {count} special token" in said
    assert 1 == said.count("a target that writes the tokens of turns or images is probably not trained")
    assert "channels" not in said
    special = load_processor(str(checkpoint)).special_tokens
    texts = [text for answers in answers_of(stage).values() for text in answers]
    of_turns = [token for token in special if token.startswith(("<|im_", "<|vision_", "<|image_", "<|video_"))]
    assert len(of_turns) > 4
    assert not [text for text in texts if any(token in text for token in of_turns)]
    assert [0] == stage.metric("regenerate/retokenised_differently")


def test_images_for_a_text_target_are_refused_before_anything_is_generated(samples, tmp_path):
    target = make_target(tmp_path / "target", make_checkpoint("qwen3", tmp_path / "checkpoint"))
    with pytest.raises(DataError, match=r'sample "picture-red" has an image, but the target'):
        run(tmp_path / "run", samples, target)


def test_regenerated_samples_go_on_through_tokenize_and_capture(samples, target, tmp_path):
    """Every token that the target wrote is learnt, and no other: no EOS behind an answer that was cut."""
    stage = run(tmp_path / "regenerate", samples, target, max_new_tokens=13, finish_reasons=("stop", "length"))
    assert [0] == stage.metric("regenerate/retokenised_differently")
    inputs = {"samples": stage.artifact(ImageSamples), "target": target}
    tokenized = FakeStage(tmp_path / "tokens", inputs)
    tokenize_chat(TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=1), tokenized)
    tokens = tokenized.artifact(TokenShards)
    lengths = {
        row["id"]: sum(row["answer_tokens"])
        for row in read_jsonl(stage.out_dir / "samples.jsonl")
        if row["split"] != "test"
    }
    records = TokenReader(tokens).records
    assert lengths == {record["id"]: record["loss_tokens"] for record in records if record["split"] != "test"}
    stage = FakeStage(tmp_path / "capture", {"tokens": tokens, "target": target})
    capture_targets(CaptureTargets(tokens=Ref("a"), target=Ref("b"), target_layer_ids=(0, 1)), stage)
    features = read_json(stage.out_dir / "features.json")
    assert sum(record["tokens"] for record in records if record["split"] != "test") == sum(
        shard["tokens"] for shard in features["shards"]
    )


def test_a_prompt_and_answer_beyond_the_target_s_context_are_refused_before_it_is_loaded(samples, target, tmp_path):
    limit = read_config(target.path / "model")["text_config"]["max_position_embeddings"]
    with pytest.raises(DataError, match=rf"{limit} \+ 1 = {limit + 1} tokens, and the target has {limit} positions"):
        run(tmp_path, samples, target, max_prompt_tokens=limit, max_new_tokens=1)
    assert [] == list((tmp_path / "work").iterdir())
