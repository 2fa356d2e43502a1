"""What each op shows of its artifact, read from real artifacts, without torch; the accounts fit each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve
from fake_stage import FakeStage
from hypothesis import given
from hypothesis import strategies as st

from dsl.finding import Finding
from dsl.op import Ref
from executor.report.artifacts import problem_of
from ops.artifacts import BatchPlan
from ops.capture_targets.show import report as capture_targets_sections
from ops.check_export.show import report as check_export_sections
from ops.export_draft.show import report as export_draft_sections
from ops.ingest.show import report as ingest_sections
from ops.lib.data.files import json_line, read_json, write_json
from ops.lib.data.sample_account import NOT_TAKEN, Tally
from ops.lib.report_sections import DROPPED_SHOWN, Account, Html, Section, shown_value, spread
from ops.load_target.show import report as target_sections
from ops.regenerate_answers.show import LETTERS
from ops.regenerate_answers.show import report as regenerate_answers_sections
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.shard_sequence.show import report as shard_sequence_sections
from ops.tokenize_chat.show import report as tokenize_chat_sections
from ops.train_dflash.show import NOT_REACHED, train_account
from ops.train_dflash.show import report as train_dflash_sections


def body(sections: Sequence[Section], title: str) -> Any:
    return {section.title: section.body for section in sections if not isinstance(section.body, Finding)}[title]


def account(sections: Sequence[Section]) -> Account:
    found: Account = body(sections, "samples")
    assert isinstance(found, Account)
    assert found.came_in == sum(found.kept.values()) + sum(found.dropped.values())
    return found


def tallied(folder: Path, kept: int, dropped: dict[str, int]) -> Path:
    stage = FakeStage(folder)
    tally = Tally(stage, "ingest")
    for _ in range(kept):
        tally.keep("train")
    for reason, count in dropped.items():
        for place in range(count):
            tally.drop(reason, f"sample {place}", "with a detail, in CSV")
    tally.finish(None)
    return stage.out_dir


def test_dropped_samples_are_shown_but_not_those_that_nobody_wanted(tmp_path: Path) -> None:
    folder = tallied(tmp_path, 3, {NOT_TAKEN: 50, "no answer": DROPPED_SHOWN + 5})
    sections = ingest_sections(folder)
    assert Account(
        came_in=78, kept={"train": 3, "val": 0, "test": 0}, dropped={NOT_TAKEN: 50, "no answer": 25}
    ) == account(sections)
    table = body(sections, "dropped samples")
    assert ["id", "reason", "detail"] == table.columns
    assert [["sample 0", "no answer", "with a detail, in CSV"], DROPPED_SHOWN] == [table.rows[0], len(table.rows)]
    assert "the first 20 of 25; all are in dropped.csv" == sections[1].note


def test_conversations_that_became_several_samples_are_counted_beside_these(tmp_path: Path) -> None:
    stage = FakeStage(tmp_path)
    tally = Tally(stage, "tokenize")
    for samples in (3, 1):
        tally.keep("train", samples=samples)
    tally.drop("no answer", "a")
    tally.finish(None)
    kept = {"train": 4, "val": 0, "test": 0}
    own = body(ingest_sections(stage.out_dir), "samples")
    assert Account(came_in=3, kept=kept, dropped={"no answer": 1}, conversations=2) == own
    before = Account(came_in=3, kept={"train": 3})
    assert ["", "3 came in, but 1 kept and 1 dropped make 2"] == [
        problem_of(each, [before]) for each in (own, evolve(own, conversations=1))
    ]


def test_the_tokens_show_their_loss_mask_and_how_long_samples_are(tokens) -> None:
    sections = tokenize_chat_sections(tokens.path)
    rows = [json.loads(line) for line in (tokens.path / "samples.jsonl").read_text().splitlines()]
    assert account(sections).kept == read_json(tokens.path / "summary.json")["splits"]
    assert sum(row["tokens"] for row in rows) == sum(row[2] for row in body(sections, "tokens").rows)
    lengths = dict(body(sections, "tokens of a sample").rows)
    assert (min(row["tokens"] for row in rows), max(row["tokens"] for row in rows)) == (
        lengths["smallest"],
        lengths["largest"],
    )
    assert isinstance(body(sections, "loss mask"), Html)
    assert "learnt in 1 answer" in body(sections, "loss mask").text
    share = sum(row["loss_tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    assert f"{share:.1%} of the tokens are in the loss mask" in [section.note for section in sections]


def test_what_is_captured_and_planned_is_what_was_tokenised(tokens, tmp_path: Path) -> None:
    info = read_json(tokens.path / "tokens.json")
    shards = [shard for shard in info["shards"] if shard["split"] != "test"]
    write_json(
        tmp_path / "features.json", {"format": 1, "target": "ab" * 32, "target_layer_ids": [0], "shards": shards}
    )
    stage = FakeStage(tmp_path / "shard", {"tokens": tokens})
    shard_sequence(ShardSequence(tokens=Ref("tokenize"), tokens_per_step=2048, epochs=2), stage)
    tokenized = account(tokenize_chat_sections(tokens.path)).kept
    captured = account(capture_targets_sections(tmp_path))
    sections = list(shard_sequence_sections(stage.artifact(BatchPlan).path))
    planned = account(sections)
    assert {split: tokenized[split] for split in ("train", "val")} == captured.kept
    assert ("train", "val") == captured.splits
    assert {"train": tokenized["train"]} == planned.kept
    assert dict(body(sections, "padded tokens of a step").rows)["largest"] <= 2048


def test_what_max_steps_left_out_was_not_seen_by_the_training(tmp_path: Path) -> None:
    training = {"samples": 100, "samples_seen": 30, "steps": 7, "samples_without_anchor": 2, "val_metrics": None}
    training |= {"tokens": 900}
    write_json(tmp_path / "training.json", training | {"final_metrics": {"train/loss": 0.5}})
    sections = list(train_dflash_sections(tmp_path))
    assert Account(came_in=100, kept={"train": 30}, dropped={NOT_REACHED: 70}, splits=("train",)) == account(sections)
    assert [("steps", 7), ("tokens", 900)] == body(sections, "training").rows
    assert "2 samples of a step had no anchor, and were not trained on" == sections[1].note
    assert {NOT_REACHED: 0} == train_account({"samples": 100}).dropped
    write_json(tmp_path / "training.json", training | {"final_steps": 3})
    (ended,) = [section for section in train_dflash_sections(tmp_path) if section.title == "measured at the end"]
    assert ended.note.startswith("train/... are means of the last 3 steps")


def test_target_draft_and_gate_show_what_they_are(tmp_path: Path) -> None:
    write_json(tmp_path / "target.json", {"model_type": "qwen3_vl", "vision": True})
    write_json(tmp_path / "metrics.json", {"accuracy": 0.95})
    sections = list(target_sections(tmp_path))
    assert [("model_type", "qwen3_vl"), ("vision", "true")] == body(sections, "target").rows
    assert [("accuracy", 0.95)] == body(sections, "measured").rows
    write_json(
        tmp_path / "config.json", {"block_size": 8, "dflash_config": {"mask_token_id": 7}, "dflow": {"format": 1}}
    )
    (tmp_path / "model.safetensors").write_bytes(bytes(12))
    shown = [("algorithm", "dflash"), ("mask_token_id", 7), ("bytes", 12), ("block_size", 8)]
    assert shown == body(export_draft_sections(tmp_path), "draft").rows
    check = {
        "static": "passed",
        "live": {"status": "skipped", "reason": "no GPU", "remedy": "use one"},
        "tau": {"evaluate": {"all": 3.5, "image": 4.0}, "served": None},
        "warnings": ["pixels differ"],
        "prompts": 8,
        "evaluated": 17,
    }
    write_json(tmp_path / "check.json", check)
    sections = check_export_sections(tmp_path)
    assert ("live: reason", "no GPU") in body(sections, "gate").rows
    assert [("all", 3.5, None), ("image", 4.0, None)] == body(sections, "tau").rows
    note = next(section.note for section in sections if section.title == "tau")
    assert "Of the gate's 8 prompts of the 17 that evaluate asked (live_prompts), so tau is another" in note
    assert [("pixels differ",)] == body(sections, "warnings of the gate").rows


def test_answers_are_shown_beside_what_was_asked_and_cut_where_they_are_long(tmp_path: Path) -> None:
    folder = tallied(tmp_path, 1, {"finish reason length": 2})
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a " * 1000}]},
    ]
    row = {"id": "s1", "split": "train", "messages": messages, "finish_reasons": ["stop"], "answer_tokens": [7]}
    (folder / "samples.jsonl").write_text(json_line(row))
    write_json(folder / "measurements.json", {"requests": 3})
    sections = regenerate_answers_sections(folder)
    assert {"finish reason length": 2} == account(sections).dropped
    assert [("stop", 1)] == body(sections, "finish reasons").rows
    (sample, split, asked, answer) = body(sections, "first answers").rows[0]
    assert ("s1", "train", "What is it?") == (sample, split, asked)
    assert len(answer) <= LETTERS
    assert [("requests", 3)] == body(sections, "measured").rows


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_a_spread_is_made_of_the_values_themselves(values: list[int]) -> None:
    rows = dict(spread(values).rows)
    assert (min(values), max(values)) == (rows["smallest"], rows["largest"])
    assert 2 * sum(value <= rows["median"] for value in values) >= len(values)
    assert 2 * sum(value >= rows["median"] for value in values) >= len(values)
    of = rows["95 % up to"]
    assert 100 * sum(value <= of for value in values) >= 95 * len(values) > 100 * sum(value < of for value in values)


def test_a_digest_is_shown_by_its_beginning_and_a_list_as_it_is_written() -> None:
    assert ["abcdef012345", "[1, 2]", "true", None, 0.5, "text"] == [
        shown_value(value) for value in ("abcdef0123456789" * 4, [1, 2], True, None, 0.5, "text")
    ]
