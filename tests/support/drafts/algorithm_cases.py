"""Drafts of the algorithms that change the proposal, for a case of dflash_cases."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
from dflash_cases import BLOCK, LAYERS, NEW_TOKENS, Case, noisy
from overfit import overfit
from safetensors.torch import load_file, save_file

from ops.artifacts import Draft
from ops.lib.data.files import write_json
from ops.lib.drafts.algorithms import Algorithm
from ops.lib.drafts.backbone.config import optional_part, to_serving
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.backbone.model import DraftModel

# By which some tokens change, but not all.
NOISE = {"layers": 0.03, "candidate_selector": 0.3, "markov_head": 1.0, "confidence_head": 1.0, "lilicorr": 0.3}


def grown(plain: Path, folder: Path, algorithm: Algorithm, engine: str | None = None) -> Path:
    """A serving directory of the algorithm on a plain draft's backbone, with heads that change tokens.

    engine: as in export_draft.
    """
    config = attrs.evolve(load_draft(plain).config, algorithm=algorithm)
    model = DraftModel(config)
    model.initialise(0)
    backbone = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in backbone:
                weight.copy_(backbone[name])
            else:
                weight.add_(torch.randn(weight.shape, generator=generator) * NOISE[name.partition(".")[0]])
    folder.mkdir()
    serving = to_serving(config)
    serving["dflow"] |= {} if engine is None else {"engine": engine}
    write_json(folder / "config.json", serving)
    stored_name = optional_part(serving, "stored_name", lambda name, _engine: name)
    weights = {stored_name(name, engine): weight for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def anchor_first_draft(case: Case, folder: Path) -> Draft:
    """A noisy DSpark draft in the layout whose slot 0 predicts, which no backbone of plain DFlash fits."""
    trained = overfit(
        folder,
        case.target,
        case.tokens,
        capture={"target_layer_ids": LAYERS, "final_hidden": True},
        epochs=100,
        block_size=BLOCK,
        num_anchors=NEW_TOKENS + 1,
        algorithm="dspark",
        dspark={"rank": 8},
    )
    return noisy(trained, folder / "noisy", 0.2)


def lilicorr_draft(case: Case, folder: Path, engine: str) -> Draft:
    """A LiLiCorr draft with convolutions, whose lattice and backbone were trained together for a few steps.

    engine: as in export_draft.
    """
    return overfit(
        folder,
        case.target,
        case.tokens,
        capture={"target_layer_ids": LAYERS, "final_hidden": True},
        epochs=40,
        engine=engine,
        block_size=BLOCK,
        num_anchors=NEW_TOKENS + 1,
        algorithm="lilicorr",
        lilicorr={"candidates": 4, "width": 16, "heads": 2, "factors": 12, "conv": True, "group": 8},
    )
