"""Write a trained draft as a serving directory, and check it against the contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from dsl.files import replace_file
from dsl.stage import Stage
from ops.export_draft.card import CardFacts, model_card
from ops.export_draft.conflicts import conflicts
from ops.export_draft.op import ExportDraft
from ops.lib.data.files import link_or_copy, read_json, write_json
from ops.lib.drafts.backbone.config import DraftConfig, optional_part, to_serving
from ops.lib.drafts.backbone.contract import training_record
from ops.lib.drafts.backbone.load import CONFIG, WEIGHTS, tensors_digest
from ops.lib.drafts.backbone.serving_contract import CARD, SPECULATORS, check_serving
from ops.lib.drafts.backbone.speculators import Verifier, to_speculators
from ops.lib.forecasts import DraftForecast, TargetStated, refuse_conflicts
from ops.lib.sglang.serve_command import Served
from ops.lib.target.model import read_config, target_info


def export_draft(config: ExportDraft, stage: Stage) -> None:
    """Write config.json, model.safetensors and README.md, and the same draft in the other formats.

    Raises DataError if the draft was trained for another target, if its files contradict each other, if a format cannot
    express it, or if the written files break the contract.
    """
    draft, target = stage.inputs["draft"], stage.inputs["target"]
    training = read_json(draft.path / "training.json")
    trained = DraftForecast.read(draft.path, draft.digest)
    shape = trained.shape
    refuse_conflicts(
        conflicts(config, {"draft": trained, "target": TargetStated.read(target.path, target.digest)}), draft
    )
    check_training(draft.path, shape, training["captured"])
    dtype = getattr(torch, config.dtype)
    serving = to_serving(shape, config.dtype)
    stored_name = optional_part(serving, "stored_name", lambda name, _engine: name)
    weights = {
        stored_name(name, config.engine): tensor.to(dtype)
        for name, tensor in load_file(draft.path / "model.safetensors").items()
    }
    save_file(weights, stage.out_dir / WEIGHTS, metadata={"format": "pt"})
    digest = tensors_digest(stage.out_dir / WEIGHTS)
    server_args = training["captured"].get("server_args")
    serving["dflow"] |= training_record(shape, target.digest, digest, server_args, config.formats)
    if config.engine is not None:
        serving["dflow"]["engine"] = config.engine
    write_json(stage.out_dir / CONFIG, serving)
    info, target_config = target_info(target), read_config(target.path / "model")
    if SPECULATORS in config.formats:
        write_speculators(stage.out_dir, shape, config.dtype, Verifier.of(info, target_config))
    parameters = sum(tensor.numel() for tensor in weights.values())
    facts = CardFacts(
        draft=shape,
        dtype=config.dtype,
        parameters=parameters,
        target=info,
        target_digest=target.digest,
        served=Served.as_trained(info, target_config, training["captured"], target.path / "model", config.engine),
        formats=config.formats,
        training=training,
        training_digest=draft.digest,
        target_config=target_config,
    )
    replace_file(stage.out_dir / CARD, model_card(facts).encode())
    check_serving(stage.out_dir, target)
    stage.log({"export/parameters": float(parameters)}, step=0)
    stage.progress(1, 1)


def write_speculators(folder: Path, shape: DraftConfig, dtype: str, verifier: Verifier) -> None:
    """Write the draft of a serving directory a second time, in speculators' format; both share the weights' file."""
    (folder / SPECULATORS).mkdir(exist_ok=True)
    write_json(folder / SPECULATORS / CONFIG, to_speculators(shape, dtype, verifier))
    link_or_copy(folder / WEIGHTS, folder / SPECULATORS / WEIGHTS)


def check_training(path: Path, shape: DraftConfig, captured: Mapping[str, Any]) -> None:
    """Check a draft's config.json against its training features (training.json). Raises DataError if they differ."""
    differing = [
        f"{name}: {json.dumps(value)} in config.json, {json.dumps(captured[name])} in training.json"
        for name, value in (
            ("target_layer_ids", list(shape.target_layer_ids)),
            ("num_target_layers", shape.num_target_layers),
            ("mask_token_id", shape.mask_token_id),
            ("hidden_size", shape.hidden_size),
            ("positions", shape.positions),
        )
        if captured[name] != value
    ]
    if differing:
        listed = "\n".join(f"  {line}" for line in differing)
        raise DataError(f"{path}: the draft differs from the trained one; train it again:\n{listed}")
