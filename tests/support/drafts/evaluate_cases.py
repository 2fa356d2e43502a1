"""A random draft for the lively target, and the evaluation of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fake_stage import FakeStage
from safetensors.torch import save_file

from dsl.op import Ref
from ops.artifacts import Draft, TargetModel, TokenShards
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.target.model import Target

BLOCK = 6


def small_draft(target: Target) -> DraftConfig:
    """The config of a draft with two layers for the target of tests/ops/conftest.py."""
    return DraftConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=64,
        vocab_size=600,
        block_size=BLOCK,
        mask_token_id=target.info["mask_token_id"],
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        max_position_embeddings=512,
    )


def make_draft(config: DraftConfig, folder: Path) -> Draft:
    """Write a random draft as a serving directory."""
    save_file(random_draft(config, seed=3).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_serving(config)))
    return Draft(folder, "digest")


def evaluate_config(**changes: Any) -> Evaluate:
    edges = {"draft": Ref("export"), "target": Ref("target"), "tokens": Ref("tokenize"), "seed": 0}
    own = {"max_prompts": 2, "max_new_tokens": 20, "bootstrap": 50, "batch_size": 2}
    return Evaluate(**{**edges, **own, **changes})


def run_evaluate(
    folder: Path, draft: Draft, target: TargetModel, tokens: TokenShards, stop_after: int | None = None, **changes: Any
) -> FakeStage:
    stage = FakeStage(folder, {"draft": draft, "target": target, "tokens": tokens}, stop_after=stop_after)
    evaluate(evaluate_config(**changes), stage)
    return stage
