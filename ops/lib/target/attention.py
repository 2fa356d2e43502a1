"""The target's attention on a CPU: the query heads of a group read the same keys and values, without copies of them.

transformers' "sdpa" copies keys and values for every query head if there is a mask, since CUDA's fast kernels
accept a mask only with as many key heads as query heads. The CPU's kernel needs no copies, and its results differ by
rounding at most. Training and devices other than the CPU keep transformers' function.

    B batch, Q queries, C keys, H query heads, G key/value heads, D head size
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def grouped_attention(
    module: nn.Module,
    q_BHQD: Tensor,
    k_BGCD: Tensor,
    v_BGCD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [B, Q, H, D], without its weights; takes the arguments of transformers' `sdpa_attention_forward`."""
    if attention_mask is None or q_BHQD.device.type != "cpu" or torch.is_grad_enabled():
        return sdpa_attention_forward(
            module, q_BHQD, k_BGCD, v_BGCD, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    mixed_BHQD = functional.scaled_dot_product_attention(
        q_BHQD, k_BGCD, v_BGCD, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return mixed_BHQD.transpose(1, 2).contiguous(), None
