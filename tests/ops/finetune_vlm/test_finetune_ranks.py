"""Fine-tuning on two ranks gives what one process gives: gloo, data and sequence parallel.

One launch trains all cases (finetune_worker.py), and these tests look at what it wrote.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from family_checkpoints import make_checkpoint
from finetune_cases import MEASURED, RANK_CASES, STEPS, answers_of, poisoned, relabelled, train, write_inputs
from import_graph import PYTHON_PATH, SUPPORT
from run_ranks import run_ranks
from safetensors.torch import load_file

from dsl.errors import StopRequested
from ops.finetune_vlm.batches import Order, micro_batches
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.data.token_shards import TokenReader

HERE = SUPPORT / "training"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint("qwen3_vl", folder, vocab_size=600, num_hidden_layers=4)


@pytest.fixture(scope="module")
def few_images(tokens, checkpoint, tmp_path_factory):
    """Six images among the texts, and labels of which the checkpoint hits every second one."""
    images = [row["id"] for row in read_jsonl(tokens.path / "samples.jsonl") if row["category"] == "image"]
    kept = {*images[:5], images[-1]}
    folder = tmp_path_factory.mktemp("tokens")
    few = poisoned(tokens, folder / "few", keep=lambda row: row["category"] == "text" or row["id"] in kept)
    answers = answers_of(checkpoint, few, "test", MEASURED["max_new_tokens"])
    return relabelled(few, folder / "labelled", "test", lambda number: answers[number] if number % 2 else "no")


@pytest.fixture(scope="module")
def folder(few_images, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    init = str(checkpoint)
    write_inputs(folder, few_images, init)
    for name in ("two rows", "muon", "frozen"):
        stage = train(folder / f"{name}, alone", few_images, init=init, **RANK_CASES[name].changes)
        (folder / f"{name}, alone" / "seen.json").write_text(json.dumps({"logged": stage.logged, "refused": ""}))
    with pytest.raises(StopRequested):
        train(folder / "one process, then two rows", few_images, stop_after=2, init=init, **STEPS)
    variables = os.environ | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    run_ranks(2, [str(HERE / "finetune_worker.py"), "ranks", str(folder)], folder, 400, variables)
    seen = [(folder / name / "seen.json").is_file() for name in RANK_CASES]
    assert all(seen), (folder / "log").read_text(errors="replace")[-6000:]
    return folder


def logged(folder, name, metric):
    """The values that rank 0 logged under a name, in order."""
    rows = json.loads((folder / name / "seen.json").read_text())["logged"]
    return [metrics[metric] for metrics, _ in rows if metric in metrics]


def moved(folder, start):
    """The change of each weight by a training."""
    after = load_file(folder / "out" / "model" / "model.safetensors")
    return {name: after[name] - tensor for name, tensor in start.items()}


def off(expected, got):
    """The norm of the difference of all tensors over the norm of the expected ones."""
    distance = torch.stack([(got[name] - tensor).norm() for name, tensor in expected.items()]).norm()
    return float(distance / torch.stack([tensor.norm() for tensor in expected.values()]).norm())


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("two rows", "two rows, alone"),
        ("shared sequences", "two rows, alone"),
        ("shared sequences recomputed", "two rows, alone"),
        ("muon", "muon, alone"),
        ("frozen", "frozen, alone"),
    ],
)
def test_losses_gradients_and_updates_on_ranks_are_those_of_one_process(name, reference, folder, checkpoint):
    for metric in ("target/loss", "target/grad_norm"):
        assert 4 == len(logged(folder, name, metric))
        assert pytest.approx(logged(folder, reference, metric), rel=1e-4) == logged(folder, name, metric)
    start = load_file(checkpoint / "model.safetensors")
    assert off(moved(folder / reference, start), moved(folder / name, start)) < 0.01


def test_the_problem_has_steps_without_images_and_ranks_without_samples(few_images):
    reader = TokenReader(few_images, "train")
    lengths = [record["tokens"] for record in reader.records]
    order = Order(lengths, 0, STEPS["batch_size"])
    steps = [
        [micro_batches(order.samples(step), lengths, STEPS["micro_batch_tokens"], row, 2) for row in range(2)]
        for step in range(1, STEPS["steps"] + 1)
    ]
    with_image = [
        [any(reader.records[index]["category"] == "image" for batch in row for index in batch) for row in step]
        for step in steps
    ]
    assert any(True in step and False in step for step in with_image)
    assert any(not any(step) for step in with_image)
    assert any([] in row for step in steps for row in step)


@pytest.mark.parametrize("name", ["two rows", "shared sequences"])
def test_what_ranks_measure_is_what_one_process_measures(name, folder):
    for metric, count in {"target/val_loss": 2, "target/val_accuracy": 2, "target/accuracy": 1}.items():
        assert count == len(logged(folder, name, metric))
        assert pytest.approx(logged(folder, "two rows, alone", metric), rel=1e-4) == logged(folder, name, metric)
    assert logged(folder, name, "target/accuracy")[0] > 0


def test_a_training_of_one_process_goes_on_on_two_ranks(folder, checkpoint):
    name = "one process, then two rows"
    assert pytest.approx(logged(folder, "two rows, alone", "target/loss")[2:], rel=1e-4) == logged(
        folder, name, "target/loss"
    )
    start = load_file(checkpoint / "model.safetensors")
    assert off(moved(folder / "two rows, alone", start), moved(folder / name, start)) < 0.01


def test_bfloat16_on_ranks_follows_float32_and_writes_bfloat16(folder):
    assert pytest.approx(logged(folder, "two rows", "target/loss"), rel=0.02) == logged(
        folder, "bfloat16", "target/loss"
    )
    weights = load_file(folder / "bfloat16" / "out" / "model" / "model.safetensors")
    assert {torch.bfloat16} == {tensor.dtype for tensor in weights.values()}


def test_what_ranks_write_has_the_files_and_names_of_one_process(folder):
    def written(name):
        out = folder / name / "out"
        files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
        return files, load_file(out / "model" / "model.safetensors").keys(), read_json(out / "model" / "config.json")

    assert written("two rows, alone") == written("two rows") == written("shared sequences")


def test_a_degree_that_does_not_fit_is_refused_on_every_rank(folder):
    seen = json.loads((folder / "degree that does not fit" / "seen.json").read_text())
    assert "2 ranks are fewer than the mesh of dp 1 x sp 3" in seen["refused"]
