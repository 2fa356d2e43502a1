"""Synthetic artifacts for the draft's ops, on disk in the documented layout, and the chain shard, train, export.

The task: tokens walk a cycle of the vocabulary, so the anchor's token decides every slot of its block; features are a
function of the token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fake_stage import FakeStage, folder_digest
from safetensors.torch import save_file

from dsl.op import Ref
from ops.artifacts import BatchPlan, TargetFeatures, TargetModel
from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.target.feature_shards import write_feature_shard
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.op import TrainDflash

HIDDEN, VOCAB, MASK, EOS, PAD = 16, 24, 21, 22, 23
TEXT = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]},
}


def tiny_config(**changes: Any) -> DraftConfig:
    values = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "vocab_size": VOCAB,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 1),
        "num_target_layers": 4,
        "max_position_embeddings": 128,
        "rope_theta": 5000.0,
    }
    return DraftConfig(**values | changes)


def make_target(folder: Path, text: dict[str, Any] | None = None, seed: int = 0) -> TargetModel:
    (folder / "model").mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(
        {name: torch.randn(VOCAB, HIDDEN, generator=generator) for name in names}, folder / "model/model.safetensors"
    )
    write_json(folder / "model" / "config.json", {"model_type": "qwen3", "text_config": text or TEXT})
    info = {
        "model_type": "qwen3",
        "vision": False,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_layers": 4,
        "mask_token_id": MASK,
        "eos_token_ids": [EOS],
        "embed_key": names[0],
        "lm_head_key": names[1],
        "tied": False,
        "trust_remote_code": False,
    }
    write_json(folder / "target.json", info)
    return TargetModel(path=folder, digest=folder_digest(folder))


def make_features(
    folder: Path,
    target: TargetModel,
    *,
    samples: int = 24,
    val: int = 4,
    prompt: int = 4,
    first_length: int = 12,
    **info: Any,
) -> TargetFeatures:
    """Make features of samples of 12 to 23 tokens, or from first_length on; the answer begins at token `prompt`.

    info: further fields of features.json; final_hidden = True adds such states.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, 2 * HIDDEN, generator=generator)
    final = torch.randn(VOCAB, HIDDEN, generator=generator)
    shards = []
    for split, count in (("train", samples), ("val", val)):
        lengths = [first_length + index % 12 for index in range(count)]
        ids = [(torch.arange(length) + 5 * index) % 20 for index, length in enumerate(lengths)]
        masks = [torch.arange(length) >= prompt for length in lengths]
        file = f"{split}-00000.safetensors"
        write_feature_shard(
            folder / file,
            table[torch.cat(ids)] if ids else torch.zeros(0, 2 * HIDDEN),
            torch.cat(ids) if ids else torch.zeros(0),
            torch.cat(masks) if masks else torch.zeros(0),
            torch.tensor([0, *lengths]).cumsum(0),
            final[torch.cat(ids)] if info.get("final_hidden") else None,
        )
        shards.append({"file": file, "split": split, "samples": count, "tokens": sum(lengths)})
    content = {
        "format": 1,
        "target": target.digest,
        "tokens": "t" * 64,
        "target_layer_ids": [0, 1],
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "num_target_layers": 4,
        "positions": "sequential",
        "backend": "hf",
        "final_hidden": False,
        "mask_token_id": MASK,
        "shards": shards,
    }
    write_json(folder / "features.json", content | info)
    return TargetFeatures(path=folder, digest=folder_digest(folder))


def make_plan(folder: Path, features: TargetFeatures, **changes: Any) -> BatchPlan:
    stage = FakeStage(folder, {"features": features})
    values = {"features": Ref("capture"), "tokens_per_step": 96, "epochs": 2, "seed": 0} | changes
    shard_sequence(ShardSequence(**values), stage)
    return stage.artifact(BatchPlan)


def make_inputs(folder: Path, **features: Any) -> dict[str, Any]:
    target = make_target(folder / "target")
    captured = make_features(folder / "features", target, **features)
    return {"features": captured, "target": target, "batches": make_plan(folder / "plan", captured)}


def train_config(**changes: Any) -> TrainDflash:
    values = {
        "features": Ref("capture"),
        "batches": Ref("shard"),
        "target": Ref("target"),
        "block_size": 4,
        "num_layers": 1,
        "num_anchors": 6,
        "seed": 0,
    }
    return TrainDflash(**values | changes)
