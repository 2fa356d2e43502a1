"""Targets, prompts and drafts for the decoding of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from fake_stage import FakeStage
from family_checkpoints import FAMILIES, HIDDEN, LAYERS, VOCABULARY, make_checkpoint, picture, token_sample

from ops.artifacts import TargetModel
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target

BLOCK = 5


def family_case(name: str, folder: Path, **text: Any) -> tuple[Target, list[TokenSample]]:
    """A target of a family that does not stop at EOS, and prompts of different lengths, some with images."""
    make_checkpoint(name, folder / "checkpoint", **text)
    stage = FakeStage(folder)
    load_target(LoadTarget(checkpoint=str(folder / "checkpoint")), stage)
    target = without_end(Target.load(stage.artifact(TargetModel)))
    processor = load_processor(str(folder / "checkpoint"))
    questions = ["What is it?", "Describe it, then count what can be seen.", "Of which colour are they all, and why?"]
    samples = [token_sample(processor, question, name=f"text {place}") for place, question in enumerate(questions)]
    if FAMILIES[name].vision:
        pictures = [picture(24, 16), picture(16, 32, seed=1)]
        samples += [
            token_sample(processor, "And these?", images=pictures[:count], name=f"images {count}") for count in (1, 2)
        ]
    return target, samples


def without_end(target: Target) -> Target:
    return ending_at(target, [])


def ending_at(target: Target, tokens: list[int]) -> Target:
    """The target with these EOS tokens instead of its own."""
    return attrs.evolve(target, info={**target.info, "eos_token_ids": tokens})


def draft_for_family(seed: int = 0, **changes: Any) -> DraftModel:
    """A random draft for a target of family_checkpoints."""
    shape = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "vocab_size": VOCABULARY,
        "block_size": BLOCK,
        "mask_token_id": 7,
        "target_layer_ids": (0, 2, 4),
        "num_target_layers": LAYERS,
        "max_position_embeddings": 512,
    }
    draft = random_draft(DraftConfig(**{**shape, **changes}), seed)
    with torch.no_grad():  # so large that every proposal depends on the context
        for weight in draft.parameters():
            if weight.ndim == 2:
                weight.mul_(2 * weight.shape[1] ** -0.5 / 0.02)
    return draft
