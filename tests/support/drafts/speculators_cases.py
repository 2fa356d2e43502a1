"""Random drafts of several shapes, written in speculators' format."""

from __future__ import annotations

from pathlib import Path

import torch
from draft_chain import MASK
from draft_forms import IDS, LAYERS, LLAMA3, SIZES, YARN, tensors_of
from safetensors.torch import save_file

from ops.export_draft.run import write_speculators
from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.backbone.speculators import Verifier

WINDOWS = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6}
SHAPES = {
    "plain": {},
    "a block of 16": {"block_size": 16},
    "biases": {"attention_bias": True},
    "yarn": {"rope_scaling": YARN},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "windows": WINDOWS,
}


def written(folder: Path, **changes) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Write a draft of this shape as a serving directory, and in the format of speculators to folder/speculators."""
    shape = {
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": IDS,
        "num_target_layers": LAYERS,
        "rope_theta": 5000.0,
    }
    config = DraftConfig(**SIZES | shape | changes)
    tensors = tensors_of(**{name: value for name, value in changes.items() if name == "attention_bias"})
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", to_serving(config))
    write_speculators(folder, config, "float32", Verifier(None, ("Qwen3ForCausalLM",)))
    return config, tensors
