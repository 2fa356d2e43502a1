"""Held-out accuracy: what counts as right, which samples are asked, what is refused, and a stop on the way."""

from __future__ import annotations

import pytest
import torch
from fake_stage import FakeStage, folder_digest
from family_checkpoints import make_checkpoint
from finetune_cases import answers_of, config, poisoned, relabelled, train
from safetensors.torch import load_file
from transformers import AutoTokenizer

from dsl.errors import DataError, StopRequested
from dsl.finding import Finding
from ops.finetune_vlm.measuring import HeldOut, Metric, measurable
from ops.finetune_vlm.show import report
from ops.lib.data.files import read_json
from ops.lib.data.token_shards import TokenReader

STILL = {"lr": 1e-12, "weight_decay": 0.0, "batch_size": 1, "max_new_tokens": 3}


class StopsOn(FakeStage):
    """Asked to stop as soon as a metric of that name has been logged, or in the n-th measurement of so many answers."""

    def __init__(self, *args, logged="", answers=None, measurement=1):
        super().__init__(*args)
        self.word, self.answers, self.measurement = logged, answers, measurement

    def stop_requested(self):
        asked = self.progressed.count((1, self.answers)) >= self.measurement
        return any(self.word in metrics for metrics, _ in self.logged) or asked


@pytest.fixture(scope="module")
def short(tokens, tmp_path_factory):
    """Labels on the test split that an answer of three tokens can contain."""
    return relabelled(tokens, tmp_path_factory.mktemp("short") / "tokens", "test", lambda _number: "no")


@pytest.fixture(scope="module")
def lively(tmp_path_factory):
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("lively"), vocab_size=600, num_hidden_layers=4)


def test_accuracy_counts_the_answers_that_are_right(tokens, tmp_path):
    checkpoint = make_checkpoint("qwen3_vl", tmp_path / "lively", vocab_size=600, num_hidden_layers=4)
    answers = answers_of(checkpoint, tokens, "test", 3)
    assert all(answer.strip() for answer in answers)
    assert len(set(answers)) > 1
    own = relabelled(tokens, tmp_path / "own", "test", lambda number: answers[number] if number % 2 else "no")
    rest = {"lr": 1e-12, "weight_decay": 0.0, "batch_size": 1, "max_new_tokens": 3}
    stage = train(tmp_path, own, init=str(checkpoint), metric="exact_match", eval_samples=None, eval_every=1, **rest)
    assert [(len(answers) // 2) / len(answers)] == stage.metric("target/accuracy")
    assert [1, 2] == [step for metrics, step in stage.logged if "target/val_accuracy" in metrics]
    assert stage.metric("target/accuracy")[0] == read_json(stage.out_dir / "metrics.json")["accuracy"]
    assert ["training"] == list(stage.figures)


def test_the_accuracy_of_the_checkpoint_before_the_training_stands_beside_that_of_the_result(
    tokens, lively, tmp_path, capsys
):
    answers = answers_of(lively, tokens, "test", 3)
    own = relabelled(tokens, tmp_path / "own", "test", lambda number: answers[number])
    changes = {"metric": "exact_match", "eval_samples": None, "max_new_tokens": 3, "lr": 0.05, "steps": 3}
    stage = train(tmp_path / "trained", own, init=str(lively), **changes)
    assert [1.0] == stage.metric("target/accuracy_before")
    assert 1.0 > stage.metric("target/accuracy")[0]
    metrics = read_json(stage.out_dir / "metrics.json")
    assert (1.0, stage.metric("target/accuracy")[0]) == (metrics["accuracy_before"], metrics["accuracy"])
    said = capsys.readouterr().out
    assert f"info: accuracy on test before fine-tuning: 1.000 of {len(answers)} samples\n" in said
    assert f"info: accuracy on test: {metrics['accuracy']:.3f} of {len(answers)} samples\n" in said
    assert len(answers) == read_json(stage.out_dir / "measurements.json")["test_samples"]
    judged = {section.title: section.body for section in report(stage.out_dir) if isinstance(section.body, Finding)}
    assert ("target", "error") == (judged["accuracy"].code, judged["accuracy"].level)
    assert f"before the training 100.0% of {len(answers)} samples" in judged["accuracy"].what
    assert [] == train(tmp_path / "random", own, **changes).metric("target/accuracy_before")  # from random weights


def test_a_stop_in_the_measurement_before_the_first_step_begins_it_again(short, lively, tmp_path):
    measured = {**STILL, "init": str(lively), "metric": "exact_match", "micro_batch_tokens": 1}
    whole = train(tmp_path / "whole", short, **measured)
    stopped = StopsOn(tmp_path / "cut", {"tokens": short}, logged="never", answers=2)
    with pytest.raises(StopRequested, match="after step 0 of 2"):
        train(stopped, **measured)
    again = train(tmp_path / "cut", short, **measured)
    assert whole.metric("target/accuracy_before") == again.metric("target/accuracy_before") != []
    assert folder_digest(whole.out_dir) == folder_digest(again.out_dir)


@pytest.mark.parametrize(
    ("metric", "label", "answer", "right"),
    [
        (Metric("exact_match"), "a cat", " a cat\n", True),
        (Metric("exact_match"), "a cat", "A cat", False),
        (Metric("exact_match"), "a cat", "a cat.", False),
        (Metric("label_in_answer"), "Cat", "It is a cat.", True),
        (Metric("label_in_answer"), "cat", "They are cats.", False),
        (Metric("label_in_answer"), "sea  horse", "A Sea Horse!", True),
        (Metric("label_in_answer"), "C++", "It is C++, not C.", True),
        (Metric("label_in_answer"), "cat", "Cats, or a cat?", True),
        (Metric("label_in_answer"), "7", "It is 77.", False),
        (Metric("label_in_answer"), "猫", "这是一只猫。", True),
        (Metric("label_in_answer"), "iPhone", "这是iPhone手机", True),
        (Metric("label_in_answer"), "狗", "这是一只猫。", False),
        (Metric("pattern", r"the digit ([0-9])\b"), "This is the digit 7, an odd number.", "It is the digit 7.", True),
        (Metric("pattern", r"the digit ([0-9])\b"), "This is the digit 7, an odd number.", "the digit 77", False),
        (Metric("pattern", r"the digit ([0-9])\b"), "This is the digit 7, an odd number.", "It is 7.", False),
    ],
)
def test_a_metric_says_which_answers_are_right(metric, label, answer, right):
    assert metric.applies(label)
    assert right == metric.right(label, answer)


def test_labels_that_cannot_be_compared_are_left_out():
    metrics = [Metric("none"), Metric("exact_match"), Metric("label_in_answer"), Metric("pattern", "digit ([0-9])")]
    assert [False, True, True, False] == [metric.applies("a text") for metric in metrics]
    assert [False] * 4 == [metric.applies(" ") for metric in metrics]


@pytest.mark.parametrize(("label", "share"), [(lambda number: f"class {number % 2}", 0.5), (str, None)])
def test_the_share_of_the_most_frequent_label_is_counted_where_labels_recur(tokens, tmp_path, label, share):
    own = relabelled(tokens, tmp_path / "own", "test", label)
    held_out = HeldOut.read(
        config(metric="label_in_answer", eval_samples=4, max_new_tokens=200), FakeStage(tmp_path, {"tokens": own})
    )
    chosen = [label(number) for number in held_out.compared["test"]]
    expected = None if share is None else max(map(chosen.count, chosen)) / 4
    assert {"test_samples": 4, "majority_share": expected} == held_out.facts("test")


def test_a_limited_choice_of_samples_is_stable_and_takes_all_classes(tokens, tmp_path):
    by_class = relabelled(tokens, tmp_path / "sorted", "test", lambda number: f"class {number // 4}")
    reader, metric = TokenReader(by_class, "test"), Metric("exact_match")
    every = measurable(reader, metric, None)
    assert list(range(len(reader))) == every
    few = measurable(reader, metric, 6)
    assert 6 == len(few) == len(set(few))
    assert sorted(few) == few
    assert 3 == len({reader.records[index]["label"] for index in few})
    assert set(few) < set(measurable(reader, metric, 8)) < set(every)


def test_a_pattern_that_no_label_matches_is_refused_before_training(tokens, tmp_path):
    stage = FakeStage(tmp_path, {"tokens": tokens})
    label = TokenReader(tokens, "val").records[0]["label"]
    with pytest.raises(DataError, match="matches no label of the splits val and test") as caught:
        train(stage, metric="pattern", pattern="zzz([0-9])", init="nowhere")
    assert label in str(caught.value)


def test_labels_that_need_more_tokens_than_an_answer_may_have_are_told_before_training(tokens, tmp_path, capsys):
    label = "six of all the words in this label"
    own = relabelled(tokens, tmp_path / "own", "test", lambda number: "7" if number else f" {label}\n")
    size = len(AutoTokenizer.from_pretrained(own.path / "processor")(label)["input_ids"])
    keep = {"metric": "label_in_answer", "eval_samples": None}
    HeldOut.read(config(**keep, max_new_tokens=1000), FakeStage(tmp_path, {"tokens": own}))
    assert "" == capsys.readouterr().out
    by_test = poisoned(own, tmp_path / "test", keep=lambda record: record["split"] != "val")
    others = len(TokenReader(by_test, "test"))
    HeldOut.read(config(**keep, max_new_tokens=size - 1), FakeStage(tmp_path, {"tokens": by_test}))
    name = TokenReader(by_test, "test").records[0]["id"]
    assert capsys.readouterr().out.endswith(
        f"warning: accuracy: 1 of {others} labels of val and test need more than max_new_tokens = {size - 1}, so their "
        f"answers never count as right; the longest needs {size} tokens (sample {name}): raise max_new_tokens\n"
    )
    long = relabelled(by_test, tmp_path / "long", "test", lambda _number: label)
    with pytest.raises(DataError, match=f"{others} of {others} labels of val and test need more than max_new_tokens"):
        train(FakeStage(tmp_path, {"tokens": long}), **keep, max_new_tokens=size - 1, init="nowhere")
    by_pattern = {"metric": "pattern", "pattern": "this (label)", "eval_samples": None}
    HeldOut.read(config(**by_pattern, max_new_tokens=size - 1), FakeStage(tmp_path, {"tokens": long}))


def test_a_split_without_a_label_to_compare_is_told(tokens, tmp_path, capsys):
    no_test = poisoned(tokens, tmp_path / "none", keep=lambda record: record["split"] != "test")
    held_out = HeldOut.read(config(metric="exact_match", max_new_tokens=200), FakeStage(tmp_path, {"tokens": no_test}))
    assert {"val": 2, "test": 0} == {split: len(indices) for split, indices in held_out.compared.items()}
    assert "info: no accuracy on test: no label there to compare an answer with\n" == capsys.readouterr().out


def test_a_stop_while_the_result_is_measured_leaves_the_measuring_alone_to_do(short, lively, tmp_path):
    measured = {**STILL, "init": str(lively), "metric": "exact_match", "eval_samples": 3, "checkpoint_every": 50}
    whole = train(tmp_path / "whole", short, **measured)
    stopped = StopsOn(tmp_path / "cut", {"tokens": short}, logged="target/val_accuracy")
    with pytest.raises(StopRequested, match="after step 2 of 2; its progress is saved"):
        train(stopped, **measured)
    assert ["accuracy_before.json", "checkpoint-00000002"] == sorted(path.name for path in stopped.work_dir.iterdir())
    assert [] == stopped.metric("target/accuracy")
    again = train(tmp_path / "cut", short, **measured)
    assert 0 == read_json(again.out_dir / "measurements.json")["steps_in_this_attempt"]
    assert whole.metric("target/loss") == again.metric("target/loss")
    assert [2] * 3 == [step for _, step in again.logged]
    assert whole.metric("target/accuracy") == again.metric("target/accuracy")
    assert folder_digest(whole.out_dir) == folder_digest(again.out_dir)


def test_a_stop_between_two_batches_of_a_measurement_on_the_way_loses_neither_step_nor_measurement(
    short, lively, tmp_path
):
    measured = {**STILL, "init": str(lively), "metric": "exact_match", "eval_every": 1, "log_every": 1}
    measured["micro_batch_tokens"] = 1
    whole = train(tmp_path / "whole", short, **measured)
    stopped = StopsOn(tmp_path / "cut", {"tokens": short}, logged="never", answers=2, measurement=2)
    with pytest.raises(StopRequested, match="after step 1 of 2"):
        train(stopped, **measured)
    assert [] == stopped.metric("target/val_accuracy")
    again = train(tmp_path / "cut", short, **measured)
    assert whole.metric("target/val_accuracy") == again.metric("target/val_accuracy")
    assert whole.metric("target/loss") == again.metric("target/loss")
    assert folder_digest(whole.out_dir) == folder_digest(again.out_dir)


def test_the_accuracy_of_bfloat16_is_that_of_the_weights_that_are_written(tokens, short, lively, tmp_path):
    half = {**STILL, "init": str(lively), "dtype": "bfloat16", "metric": "exact_match", "eval_samples": None}
    first = train(tmp_path / "first", short, **half)
    answers = answers_of(first.out_dir / "model", tokens, "test", 3, torch.bfloat16)
    own = relabelled(tokens, tmp_path / "own", "test", lambda number: answers[number])
    stage = train(tmp_path / "second", own, **half, eval_every=1)
    weights = [load_file(stage.out_dir / "model" / "model.safetensors") for stage in (first, stage)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert any(answer.strip() for answer in answers)
    assert [1.0] == stage.metric("target/accuracy")
    assert not (stage.work_dir / "measured").exists()
