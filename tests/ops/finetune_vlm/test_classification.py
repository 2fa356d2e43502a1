"""The image classification pipeline on the digits exported as PNG files: the file that users run, in fewer steps."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path

import pytest
from fake_stage import FakeStage

from dsl.read_toml import read_graph
from ops.ingest.digits import digit_samples
from ops.lib.data.files import read_json, read_jsonl
from pipelines.export_digits import export_digits

PIPELINE = Path(__file__).parents[3] / "pipelines" / "vlm_sft_classification.toml"


def run_pipeline(folder, *overrides):
    """Run every node of the file in this process; the stage of each, by id."""
    stages, outputs = {}, {}
    for node in read_graph(PIPELINE, overrides).nodes.values():
        parents = {edge: node.inputs.get(edge, ()) for edge in node.op.edges}
        inputs = {edge: outputs[ids[0]] if ids else None for edge, ids in parents.items()}
        stages[node.id] = FakeStage(folder / node.id, inputs)
        module, function = node.op.run.split(":")
        getattr(import_module(module), function)(node.config, stages[node.id])
        outputs[node.id] = stages[node.id].artifact(node.op.output)
    return stages


def test_exported_digits_are_the_built_in_ones_by_split_and_class(tmp_path):
    assert {"train": 1455, "val": 45, "test": 297} == export_digits(tmp_path)
    files = {file.stem: file for file in tmp_path.rglob("*.png")}
    assert 1797 == len(files)
    for sample in digit_samples():
        file = files[sample.id]
        assert sample.split == file.parts[-3]
        assert f"the digit {file.parts[-2]}" in sample.turns[-1].content[-1]
        assert hashlib.sha256(sample.images[0]).digest() == hashlib.sha256(file.read_bytes()).digest()


@pytest.mark.slow
def test_the_classification_pipeline_names_nine_of_ten_held_out_images(tmp_path):
    export_digits(tmp_path / "digits")
    stages = run_pipeline(tmp_path, f"ingest.source={tmp_path / 'digits'}", "target.steps=120")
    records = list(read_jsonl(stages["tokenize"].out_dir / "samples.jsonl"))
    assert 297 == sum(record["split"] == "test" for record in records)
    assert set("0123456789") == {record["label"] for record in records}
    accuracy = read_json(stages["target"].out_dir / "metrics.json")["accuracy"]
    assert [accuracy] == stages["target"].metric("target/accuracy")
    assert accuracy > 0.9
