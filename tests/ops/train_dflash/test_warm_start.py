"""A training that begins with an exported draft, through the op: its first loss is that draft's, its shape must fit."""

import shutil

import pytest
import torch
from attrs import fields
from draft_chain import make_inputs, make_plan, tiny_config, train_config
from fake_stage import FakeStage
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import Draft, DraftCheckpoint
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.data.files import read_json, read_jsonl, write_json
from ops.lib.drafts.algorithms import algorithm_class
from ops.lib.drafts.backbone.config import DraftConfig, from_serving, to_serving
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.backbone.reference import Sample, reference_step
from ops.lib.drafts.losses.slots import draw_anchors
from ops.lib.forecasts import DraftForecast, FeaturesForecast, TargetForecast
from ops.lib.target.embedding_and_head import frozen_ends
from ops.lib.target.feature_shards import FeatureReader
from ops.train_dflash.conflicts import DRAFT_SHAPE, conflicts
from ops.train_dflash.run import train_dflash
from ops.train_dflash.shape import OF_PARENT

SHAPE = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SEED = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def train(folder, inputs, **changes):
    stage = FakeStage(folder, inputs)
    train_dflash(train_config(log_every=1, **SHAPE | changes), stage)
    return stage


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, inputs):
    """dtype -> an export of a draft that has learnt the task."""
    folder = tmp_path_factory.mktemp("drafts")
    plan = make_plan(folder / "plan", inputs["features"], epochs=10, tokens_per_step=160)
    trained = train(folder / "train", inputs | {"batches": plan}, lr=3e-2).artifact(DraftCheckpoint)
    exported = {}
    for dtype in ("float32", "bfloat16"):
        stage = FakeStage(folder / dtype, {"draft": trained, "target": inputs["target"]})
        export_draft(ExportDraft(draft=Ref("train"), target=Ref("target"), dtype=dtype), stage)
        exported[dtype] = stage.artifact(Draft)
    return exported


def loss_of_first_step(draft, inputs):
    """The loss of the exported files by the dense reference, on the samples and anchors of the plan's first step."""
    reader = FeatureReader(inputs["features"], "train")
    step = next(iter(read_jsonl(inputs["batches"].path / "steps.jsonl")))
    samples = []
    for index in step["samples"]:
        input_ids_S, loss_mask_S = reader.labels(index)
        anchors_A = draw_anchors(loss_mask_S, 6, seed=SEED, epoch=step["epoch"], sample=index)
        features_SF = reader.features(index, 0, len(input_ids_S)).double()
        samples.append(Sample(features_SF, input_ids_S, loss_mask_S, anchors_A))
    weights = {name: tensor.double() for name, tensor in load_file(draft.path / "model.safetensors").items()}
    embed_VM, head = frozen_ends(inputs["target"], dtype=torch.float64)
    config = from_serving(read_json(draft.path / "config.json"))
    return float(reference_step(weights, config, embed_VM, head.weight_VM, samples).loss)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_loss_of_a_warm_start_is_the_loss_of_the_exported_draft(tmp_path, inputs, drafts, dtype):
    changes = {"seed": SEED, "max_steps": 2, "num_anchors": 6}
    fresh = train(tmp_path / "fresh", inputs, **changes).metric("train/loss")
    given = inputs | {"warm_start": drafts[dtype]}
    warm = train(tmp_path / "warm", given, warm_start=Ref("draft"), **changes).metric("train/loss")
    assert loss_of_first_step(drafts[dtype], inputs) == pytest.approx(warm[0], rel=1e-4)
    assert warm[0] < fresh[0] / 10


def test_the_result_names_the_draft_that_it_began_with_and_a_resume_goes_on_from_its_checkpoint(
    tmp_path, inputs, drafts
):
    given = inputs | {"warm_start": drafts["float32"]}
    changes = {"warm_start": Ref("draft"), "max_steps": 3, "checkpoint_every": 2}
    stage = train(tmp_path, given, **changes)
    first = load_file(stage.out_dir / "model.safetensors")
    assert drafts["float32"].digest == read_json(stage.out_dir / "training.json")["warm_start"]
    resumed = train(tmp_path, given, **changes)
    assert 1 == read_json(resumed.out_dir / "measurements.json")["steps_in_this_attempt"]
    for name, weight in load_file(resumed.out_dir / "model.safetensors").items():
        assert torch.equal(first[name], weight)


def test_a_warm_start_keeps_what_no_field_decides_from_its_draft(tmp_path, inputs):
    parent = tiny_config(
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        attention_bias=True,
        rope_theta=77.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        partial_rotary_factor=0.5,
        intermediate_size=32,
    )
    (tmp_path / "draft").mkdir()
    write_json(tmp_path / "draft" / "config.json", to_serving(parent))
    save_file(random_draft(parent, seed=1).state_dict(), tmp_path / "draft" / "model.safetensors")
    given = inputs | {"warm_start": Draft(path=tmp_path / "draft", digest="d" * 64)}
    stage = train(tmp_path / "warm", given, warm_start=Ref("draft"), max_steps=1)
    assert parent == from_serving(read_json(stage.out_dir / "config.json"))
    stage = train(tmp_path / "other", given, warm_start=Ref("draft"), max_steps=1, rope_theta=77.0)
    assert parent == from_serving(read_json(stage.out_dir / "config.json"))
    with pytest.raises(DataError, match=r"rope_theta: 77.0 in the draft, 99.0 in this training: set rope_theta"):
        train(tmp_path / "wrong", given, warm_start=Ref("draft"), max_steps=1, rope_theta=99.0)


def planned(inputs, parent, **changes):
    """The conflicts that a plan reports for a warm start with this draft."""
    target = TargetForecast.of(read_json(inputs["target"].path / "model" / "config.json"))
    features = FeaturesForecast(num_layers=2, dtype="float32", tokens=None, target_layer_ids=(0, 1))
    forecast = {"target": target, "features": features, "warm_start": parent}
    found = conflicts(train_config(warm_start=Ref("draft"), **SHAPE | {"intermediate_size": 24} | changes), forecast)
    return found.get("warm_start", "").splitlines()


def test_a_plan_names_what_keeps_a_draft_from_starting_a_training(inputs):
    own = tiny_config()
    assert [] == planned(inputs, DraftForecast(shape=own, knows_layers=True))
    assert [] == planned(inputs, None)
    told = planned(inputs, DraftForecast(shape=own, knows_layers=True), num_kv_heads=1, block_size=5, rope_theta=7.0)
    assert [
        "block_size: 4 in the draft, 5 in this training: set block_size, or start from another",
        "num_key_value_heads: 2 in the draft, 1 in this training: set num_kv_heads, or start from another",
        "rope_theta: 5000.0 in the draft, 7.0 in this training: set rope_theta, or start from another",
    ] == told
    wide = tiny_config(hidden_size=32, target_layer_ids=(0, 2))
    told = planned(inputs, DraftForecast(shape=wide, knows_layers=True))
    assert ["hidden_size: 32 in the draft, 16", "target_layer_ids: [0, 2] in the draft, [0, 1]"] == [
        line.partition(" in this training")[0] for line in told
    ]
    assert ["hidden_size"] == [line.partition(":")[0] for line in planned(inputs, DraftForecast(shape=wide))]
    dspark = tiny_config(algorithm=algorithm_class("dspark")())
    assert ["algorithm"] == [line.partition(":")[0] for line in planned(inputs, DraftForecast(shape=dspark))]
    assert [] == planned(inputs, DraftForecast(shape=own), algorithm="dspark")


def test_every_field_of_a_draft_s_config_is_compared_or_kept_in_a_warm_start():
    """But for those with cases of their own above and below, and the positions, of which there is one kind."""
    own_cases = {"mask_token_id", "target_layer_ids", "algorithm", "rope_theta", "positions"}
    assert {field.name for field in fields(DraftConfig)} == {*DRAFT_SHAPE, *OF_PARENT, *own_cases}


def test_another_mask_token_or_other_layers_are_refused(tmp_path, inputs, drafts):
    folder = tmp_path / "draft"
    shutil.copytree(drafts["float32"].path, folder)
    config = read_json(folder / "config.json")
    mask, layers = config["dflash_config"]["mask_token_id"], config["dflash_config"]["target_layer_ids"]
    write_json(
        folder / "config.json",
        config | {"dflash_config": {**config["dflash_config"], "mask_token_id": mask - 1, "target_layer_ids": [0, 2]}},
    )
    with pytest.raises(DataError) as caught:
        train(tmp_path / "t", inputs | {"warm_start": Draft(path=folder, digest="d" * 64)}, warm_start=Ref("draft"))
    assert str(caught.value).splitlines()[1:] == [
        f"  mask_token_id: {mask - 1} in the draft, {mask} in this training: set mask_token_id of train_dflash, or "
        "start from another",
        f"  target_layer_ids: [0, 2] in the draft, {layers} in this training: capture those of the draft "
        "(target_layer_ids)",
    ]


def test_a_draft_of_another_shape_is_refused_with_what_differs(tmp_path, inputs, drafts):
    given = inputs | {"warm_start": drafts["float32"]}
    with pytest.raises(DataError) as caught:
        train(tmp_path, given, warm_start=Ref("draft"), num_kv_heads=1, block_size=5)
    assert str(caught.value).splitlines() == [
        f"{inputs['features'].path}: ",
        "  block_size: 4 in the draft, 5 in this training: set block_size, or start from another",
        "  num_key_value_heads: 2 in the draft, 1 in this training: set num_kv_heads, or start from another",
    ]


@pytest.mark.parametrize("name", ["lilicorr", "dspark"])
def test_a_plan_refuses_a_draft_whose_logits_have_a_scale_or_a_cap_where_the_algorithm_cannot(tmp_path, inputs, name):
    (tmp_path / "draft").mkdir()
    of_target = {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    write_json(tmp_path / "draft" / "config.json", to_serving(tiny_config(**of_target)))
    parent = DraftForecast.read(tmp_path / "draft", "d" * 64)
    neither = f"which a training of {name} can neither keep nor drop: start from another"
    assert [
        f"output_multiplier: 0.5 in the draft, {neither}",
        f"final_logit_softcapping: 3.0 in the draft, {neither}",
    ] == planned(inputs, parent, algorithm=name)
    for able in ("dflash", "dflash2"):
        assert [] == planned(inputs, parent, algorithm=able)
