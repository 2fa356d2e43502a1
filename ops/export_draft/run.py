"""Write a trained draft as a serving directory, and check it against the contract."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from dsl.stage import Stage
from ops.dflash.config import from_serving, to_serving
from ops.export_draft.contract import check_serving
from ops.export_draft.op import ExportDraft
from ops.load_target.model import target_info


def export_draft(config: ExportDraft, stage: Stage) -> None:
    """Write config.json and model.safetensors, and nothing else.

    Raises DataError where the draft was trained for another target, or where what was written breaks the contract.
    """
    draft, target = stage.inputs["draft"], stage.inputs["target"]
    trained_for = json.loads((draft.path / "training.json").read_text("utf-8"))["target"]
    if trained_for != target.digest:
        raise DataError(
            f"{draft.path}: this draft was trained for the target {trained_for[:12]}, but the node's target is "
            f"{target.digest[:12]}; give train_dflash and export_draft the same target"
        )
    shape = from_serving(json.loads((draft.path / "config.json").read_text("utf-8")))
    serving = json.dumps(to_serving(shape, config.dtype), indent=2, sort_keys=True) + "\n"
    (stage.out_dir / "config.json").write_text(serving, encoding="utf-8")
    dtype = getattr(torch, config.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(draft.path / "model.safetensors").items()}
    save_file(weights, stage.out_dir / "model.safetensors", metadata={"format": "pt"})
    check_serving(stage.out_dir, target_info(target))
    stage.log({"export/parameters": float(sum(tensor.numel() for tensor in weights.values()))}, step=0)
    stage.progress(1, 1)
