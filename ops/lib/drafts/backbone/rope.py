"""Rotary position embedding of the draft: plain, partial, or scaled as transformers scales it.

Legend: P any shape of positions, H heads, D head size, Z rotary size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ops.lib.drafts.backbone.config import DraftConfig


def rope_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """The inverse RoPE frequencies, float32 [Z / 2], and the factor for cos and sin.

    Source of the scaled kinds: transformers, modeling_rope_utils.
    """
    scaling = dict(config.rope_scaling or {})
    if scaling.get("rope_type", "default") == "default":
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        return 1.0 / config.rope_theta**exponents, 1.0
    parameters = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor, **scaling}
    shape = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](shape, torch.device("cpu"))


def rotation(frequencies: Tensor, scale: float, positions_P: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [*P, 1, Z], for absolute integer positions; the angles are computed in float32 at least."""
    precise = torch.promote_types(dtype, torch.float32)
    angles = positions_P[..., None].to(precise) * frequencies.to(precise)
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x_PHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first Z dimensions of every head, pairing dimension i with i + Z / 2; the others stay."""
    size = cos.shape[-1]
    turned, passed = x_PHD[..., :size], x_PHD[..., size:]
    half = size // 2
    crossed = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    turned = turned * cos + crossed * sin
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned
