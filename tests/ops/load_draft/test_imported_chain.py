"""An imported draft in the nodes behind it: the evaluation of the exported one, the gate, `serve` and `diagnose`."""

from __future__ import annotations

import pytest
import torch
from fake_stage import FakeStage
from gate_cases import check
from safetensors.torch import load_file, save_file
from serve_cases import PIPELINE, make_artifacts, record_run, write_folder

from dsl.op import Ref
from dsl.read_toml import read_graph
from executor.model_tools.served import find_served
from executor.records.run_record import find_record
from ops.artifacts import Draft, Report
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.lib.data.files import read_json, write_json
from ops.load_draft.op import LoadDraft
from ops.load_draft.run import load_draft
from ops.tools.diagnose.chain import Chain, last_drafts_of

IMPORT = """
[node.imported]
op = "load_draft"
source = "{source}"
target = "@target"

[node.judge]
op = "evaluate"
draft = "@imported"
target = "@target"
tokens = "@tokenize"
"""


WARM = """
[node.warm]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
warm_start = "@export"
block_size = 7

[node.exported]
op = "export_draft"
draft = "@warm"
target = "@target"
"""


@pytest.fixture(scope="module")
def imported(gate_inputs, tmp_path_factory):
    """The exported draft of the gate as z-lab publishes one, with its layers in another order, and imported again."""
    folder = tmp_path_factory.mktemp("imported")
    source, exported = folder / "source", gate_inputs["draft"].path
    source.mkdir()
    config = read_json(exported / "config.json")
    ids = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = ids[::-1]
    write_json(source / "config.json", {name: value for name, value in config.items() if name != "dflow"})
    weights = load_file(exported / "model.safetensors")
    weights["fc.weight"] = torch.cat(weights["fc.weight"].chunk(len(ids), dim=1)[::-1], dim=1)
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, source / "model.safetensors")
    stage = FakeStage(folder / "stage", {"target": gate_inputs["target"]})
    load_draft(LoadDraft(target=Ref("target"), source=str(source)), stage)
    return stage.artifact(Draft)


@pytest.fixture(scope="module")
def judged(imported, gate_inputs, tmp_path_factory):
    """The inputs of the gate, of the imported draft."""
    inputs = {"draft": imported, "target": gate_inputs["target"], "tokens": gate_inputs["tokens"]}
    stage = FakeStage(tmp_path_factory.mktemp("eval"), inputs)
    config = Evaluate(
        draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), max_new_tokens=8, max_prompts=2, bootstrap=20, seed=0
    )
    evaluate(config, stage)
    return inputs | {"report": stage.artifact(Report)}


def test_the_evaluation_of_an_import_is_that_of_the_export(judged, gate_inputs):
    ours, theirs = (read_json(each["report"].path / "report.json") for each in (judged, gate_inputs))
    assert ours.pop("inputs") != theirs.pop("inputs")
    assert {"publisher": "z-lab"} == ours.pop("imported")
    assert theirs == ours


def test_the_gate_passes_an_import_and_its_card_gets_the_measured_tau(judged, tmp_path):
    shipped = check(tmp_path, judged, live="off").out_dir
    assert "passed" == read_json(shipped / "check.json")["static"]
    card = (shipped / "draft" / "README.md").read_text()
    assert "Not measured yet." not in card
    assert "| written by | z-lab |" in card


def test_a_run_with_an_import_is_served(tmp_path):
    made = make_artifacts(tmp_path / "made")
    made["imported"] = write_folder(tmp_path / "made" / "imported", {"config.json": {"block_size": 7}})
    (tmp_path / "draft").mkdir()
    store, run = record_run(tmp_path, made, more=IMPORT.format(source=tmp_path / "draft"))
    served = find_served(store, find_record(store.records, run), "imported")
    assert (7, ("no node checks the draft of imported",)) == (
        served.draft.block_size,
        tuple(warning.partition(" (")[0] for warning in served.warnings),
    )


def test_of_a_warm_start_the_draft_that_was_trained_is_served_and_diagnosed(tmp_path):
    made = make_artifacts(tmp_path / "made")
    made["exported"] = write_folder(tmp_path / "made" / "exported", {"config.json": {"block_size": 7}})
    store, run = record_run(tmp_path, made, more=WARM)
    record = find_record(store.records, run)
    assert 7 == find_served(store, record, None).draft.block_size
    assert 4 == find_served(store, record, "export").draft.block_size
    assert ["exported"] == last_drafts_of(record.graph())


def test_a_diagnosis_finds_what_is_around_an_import(tmp_path):
    for name in ("checkpoint", "draft", "judge"):
        (tmp_path / name).mkdir()
    write_json(tmp_path / "judge" / "report.json", {"tau": {"all": {"tau": 2.0}}})
    file = tmp_path / "pipeline.toml"
    text = PIPELINE.format(checkpoint=tmp_path / "checkpoint") + IMPORT.format(source=tmp_path / "draft")
    file.write_text(text)
    graph = read_graph(file, [])
    chain = Chain.of(graph, {name: (tmp_path / name, name) for name in graph.nodes}, "imported")
    assert chain.evaluation is not None
    assert (None, None, "judge", "tokenize") == (
        chain.training,
        chain.learnt,
        chain.evaluation.node,
        chain.judged.digest,
    )
