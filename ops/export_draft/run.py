"""Write a trained draft as a serving directory, and check it against the contract."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from dsl.stage import Stage
from ops.dflash.config import from_serving, to_serving
from ops.export_draft.contract import check_serving
from ops.export_draft.op import ExportDraft
from ops.files import read_json, write_json
from ops.load_target.model import target_info


def export_draft(config: ExportDraft, stage: Stage) -> None:
    """Write config.json and model.safetensors, and nothing else.

    Raises DataError where the draft was trained for another target, or where what was written breaks the contract.
    """
    draft, target = stage.inputs["draft"], stage.inputs["target"]
    trained_for = read_json(draft.path / "training.json")["target"]
    if trained_for != target.digest:
        raise DataError(
            f"{draft.path}: this draft was trained for the target {trained_for[:12]}, but the node's target is "
            f"{target.digest[:12]}; give train_dflash and export_draft the same target"
        )
    shape = from_serving(read_json(draft.path / "config.json"))
    write_json(stage.out_dir / "config.json", to_serving(shape, config.dtype))
    dtype = getattr(torch, config.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(draft.path / "model.safetensors").items()}
    save_file(weights, stage.out_dir / "model.safetensors", metadata={"format": "pt"})
    check_serving(stage.out_dir, target_info(target))
    stage.log({"export/parameters": float(sum(tensor.numel() for tensor in weights.values()))}, step=0)
    stage.progress(1, 1)
