"""The config of the built-in target, torch-free: `dflow plan` reads its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError

BUILTIN = "builtin:tiny-qwen3-vl"
TEXT_HIDDEN = 128
TEXT_LAYERS = 8
VISION_HIDDEN = 128
VISION_DEPTH = 2


def check_builtin(init: str) -> None:
    """Check that a built-in target of this name exists. Raises DataError."""
    if init != BUILTIN:
        raise DataError(f'init = "{init}": the only built-in target is "{BUILTIN}"')


def tiny_config(tokens: Mapping[str, Any], special_ids: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of Qwen3VLConfig for a tiny model. tokens: tokens.json; decides vocabulary, patches and special
    ids.

    Eight text layers are the minimum for five distinct captured layers. Both vision layers feed deepstack, so the
    features of the first text layers differ from `hidden_states`, as in the real family.
    """
    return {
        "text_config": {
            "vocab_size": tokens["vocab_size"],
            "hidden_size": TEXT_HIDDEN,
            "intermediate_size": 3 * TEXT_HIDDEN,
            "num_hidden_layers": TEXT_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "pad_token_id": tokens["pad_token_id"],
            "eos_token_id": tokens["eos_token_ids"][0],
        },
        "vision_config": {
            "depth": VISION_DEPTH,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 2 * VISION_HIDDEN,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": tokens["merge_size"],
            "temporal_patch_size": 2,
            "out_hidden_size": TEXT_HIDDEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": list(range(VISION_DEPTH)),
        },
        "tie_word_embeddings": True,
        **special_ids,
    }
