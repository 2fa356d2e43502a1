"""Ops of a user's own, each of which makes a usual mistake: its draft is used otherwise than it was trained."""

from __future__ import annotations

import shutil
from unittest.mock import patch

from attrs import frozen

from dsl.op import field, op
from dsl.stage import Stage
from ops.artifacts import Draft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.model import DraftModel
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash


@op(version=1, run="mistaken_ops:retouch")
@frozen(kw_only=True)
class Retouch:
    """An op that writes the draft again, as a step that prepares it for a server may."""

    draft: Draft
    layer_shift: int = field(default=0, help="added to every target layer")
    mask_token_id: int | None = field(default=None, help="of the export; that of the training unless given")
    output = Draft


def retouch(config: Retouch, stage: Stage) -> None:
    for name in ("config.json", "model.safetensors", "README.md"):
        shutil.copyfile(stage.inputs["draft"].path / name, stage.out_dir / name)
    serving = read_json(stage.out_dir / "config.json")
    told = serving["dflash_config"]
    told["target_layer_ids"] = [layer + config.layer_shift for layer in told["target_layer_ids"]]
    if config.mask_token_id is not None:
        told["mask_token_id"] = config.mask_token_id
    write_json(stage.out_dir / "config.json", serving)


@op(version=1, run="mistaken_ops:train_late")
@frozen(kw_only=True)
class TrainLate(TrainDflash):
    """A user's training op in which every block is one position later than decoding places it."""


def train_late(config: TrainLate, stage: Stage) -> None:
    forward_blocks = DraftModel.forward_blocks

    def late(model, anchors_NM, mask_M, positions_N, *others, **options):
        return forward_blocks(model, anchors_NM, mask_M, positions_N + 1, *others, **options)

    with patch.object(DraftModel, "forward_blocks", late):
        train_dflash(config, stage)
