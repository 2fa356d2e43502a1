"""The tensors of DFlash2, and what SGLang does with a draft that lacks some of it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WITHOUT = "serves the draft as less than it is, in silence: without {what}, fewer tokens are accepted"
CONVOLUTIONS = "refuses to start; without both conv fields it " + WITHOUT.format(what="its convolutions")
MISSING: Mapping[str, str] = {
    "dflash_config.conv_kernel_size": CONVOLUTIONS,
    "dflash_config.conv_group_size": CONVOLUTIONS,
    "dflash_config.selector_rank": "refuses to start",
    "dflash_config.selector_top_k": "refuses to start",
    "dflow.algorithm": "does not read it",
}
WRONG: Mapping[str, str] = {
    "architectures": WITHOUT.format(what="its selector"),
    "conv_kernel_size": "stops at the weights' shapes",
    "conv_group_size": "stops at the weights' shapes",
    "selector_rank": "stops at the weights' shapes",
    "selector_top_k": "silently chooses among more or fewer candidates than the draft was trained for",
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Its tensors beside a config.json, with their shapes; none where the sizes are missing or no numbers."""
    nest, hidden = config["dflash_config"], config["hidden_size"]
    names = ("conv_kernel_size", "conv_group_size", "selector_rank")
    values = [config.get("vocab_size"), *map(nest.get, names)]
    sizes = [value for value in values if type(value) is int and value > 0]
    if len(sizes) < len(values):
        return {}
    vocabulary, taps, group, rank = sizes
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (vocabulary, rank),
        "candidate_selector.successor_codebook": (vocabulary, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }
    for index in range(config["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{conv}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{index}.{conv}.kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
    return shapes
