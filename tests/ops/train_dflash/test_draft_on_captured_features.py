"""Shard, train and export on features that capture_targets made of a real target."""

from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import BatchPlan, DraftCheckpoint
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.drafts.backbone.load import load_draft
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash


def test_a_draft_of_captured_features_is_trained_and_exported_for_its_target(tokens, target, features, tmp_path):
    stage = FakeStage(tmp_path / "shard", {"features": features})
    shard_sequence(ShardSequence(features=Ref("capture"), tokens_per_step=1024, epochs=1, seed=0), stage)
    inputs = {"features": features, "batches": stage.artifact(BatchPlan), "target": target, "tokens": tokens}
    references = {name: Ref(name) for name in inputs}
    stage = FakeStage(tmp_path / "train", inputs)
    train_dflash(TrainDflash(**references, block_size=8, num_layers=1, num_anchors=8, max_steps=4, seed=0), stage)
    losses = stage.metric("train/loss")
    trained = stage.artifact(DraftCheckpoint)
    stage = FakeStage(tmp_path / "export", {"draft": trained, "target": target})
    export_draft(ExportDraft(draft=Ref("train"), target=Ref("target")), stage)
    draft = load_draft(stage.out_dir)
    assert 0 < losses[-1] < 20
    assert draft.config.target_layer_ids == tuple(sorted(draft.config.target_layer_ids))
    assert draft.config.rope_scaling is None
    assert stage.metric("export/parameters") == [sum(parameter.numel() for parameter in draft.parameters())]
