"""The inputs of `check_export`, made by the ops before it, and the gate's run on them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from fake_stage import FakeStage
from safetensors.torch import save_file

from dsl.op import Ref
from ops.artifacts import (
    BatchPlan,
    Draft,
    DraftCheckpoint,
    Report,
    TargetFeatures,
    TargetModel,
    TokenShards,
)
from ops.check_export.op import CheckExport
from ops.check_export.run import check_export
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.algorithms import Algorithm
from ops.lib.drafts.backbone.config import from_serving, to_serving
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.drafts.lilicorr.config import Lilicorr
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

ALGORITHMS = {
    "dflash2": Dflash2(group=8, rank=6, candidates=4),
    "dspark": Dspark(rank=6),
    "lilicorr": Lilicorr(candidates=4, width=8, layers=1, heads=2, factors=6, taps=2, group=8),
}


def make_gate_inputs(
    folder: Path, tokens: TokenShards, target: TargetModel, features: TargetFeatures
) -> dict[str, Any]:
    """Make the inputs of the gate with the ops before it, from a draft of two layers that is trained for a few steps.

    "trained" is the DraftCheckpoint beside them.
    """

    def stage_of(name, config, run, output, **inputs):
        stage = FakeStage(folder / name, inputs)
        run(config, stage)
        return stage.artifact(output)

    config = ShardSequence(features=Ref("a"), tokens_per_step=2048, epochs=1, seed=0)
    plan = stage_of("shard", config, shard_sequence, BatchPlan, features=features)
    config = TrainDflash(
        features=Ref("a"), batches=Ref("b"), target=Ref("c"), block_size=4, num_layers=2, num_anchors=4, seed=0
    )
    inputs = {"features": features, "batches": plan, "target": target}
    trained = stage_of("train", config, train_dflash, DraftCheckpoint, **inputs)
    config = ExportDraft(draft=Ref("a"), target=Ref("b"))
    draft = stage_of("export", config, export_draft, Draft, draft=trained, target=target)
    config = Evaluate(
        draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), max_new_tokens=8, max_prompts=2, bootstrap=20, seed=0
    )
    inputs = {"draft": draft, "target": target, "tokens": tokens}
    return {**inputs, "report": stage_of("eval", config, evaluate, Report, **inputs), "trained": trained}


def with_algorithm(
    folder: Path, inputs: Mapping[str, Any], algorithm: Algorithm, engine: str | None = None
) -> dict[str, Any]:
    """The gate's inputs with the export of an untrained draft of this algorithm. engine: as in ExportDraft."""
    shape = attrs.evolve(from_serving(read_json(inputs["trained"].path / "config.json")), algorithm=algorithm)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "config.json", to_serving(shape))
    save_file(random_draft(shape, 0).state_dict(), checkpoint / "model.safetensors")
    shutil.copy(inputs["trained"].path / "training.json", checkpoint)
    trained = attrs.evolve(inputs["trained"], path=checkpoint)
    stage = FakeStage(folder / "export", {"draft": trained, "target": inputs["target"]})
    export_draft(ExportDraft(draft=Ref("a"), target=Ref("b"), engine=engine), stage)
    return {**inputs, "trained": trained, "draft": attrs.evolve(inputs["draft"], path=stage.out_dir)}


def check(folder: Path, inputs: dict[str, Any], **changes: Any) -> FakeStage:
    """Run the gate; changes: fields of CheckExport."""
    stage = FakeStage(folder, inputs)
    check_export(CheckExport(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), report=Ref("d"), **changes), stage)
    return stage
