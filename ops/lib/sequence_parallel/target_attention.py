"""Ulysses inside a transformers model: ranks hold slices of the sequence, and exchange tokens for heads in attention.

transformers looks up attention and its mask by name; both are registered here as "ulysses". A forward pre-hook cuts
the language model's inputs, so that every layer, norm and MLP computes only this rank's slice, and passes the
exchange to the attention as an argument. Without that argument, and so in every forward pass that was not cut,
"ulysses" is transformers' own "sdpa". (An argument, because gradient checkpointing calls the layers again in the
backward pass, when the state of the forward pass is gone.)

Source: DeepSpeed Ulysses, arXiv 2309.14509.

Legend: P sp_degree, B batch, S tokens of the whole sequence, s = S / P, H query heads, G KV heads, D head size,
E = lcm(G, P), h = H / P, e = E / P.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ops.lib.sequence_parallel.exchange import Ulysses
from ops.lib.vision.families import Family

ULYSSES = "ulysses"


@frozen(eq=False)
class Slice:
    """The part of every sequence that this rank has, tokens [start, end)."""

    exchange: Ulysses
    family: Family
    start: int
    end: int

    def cut(self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Cut the language model's inputs to this rank's slice; a forward pre-hook, after image embeddings are
        inserted.

        The 2-D attention mask stays whole, since the registered mask is made from it. Positions are those of the whole
        sequence.
        """
        B, S = kwargs["attention_mask"].shape
        part = slice(self.start, self.end)
        cut = {name: kwargs[name][:, part] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None}
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(S, device=kwargs["attention_mask"].device).expand(B, S)
        cut["position_ids"] = positions[..., part]
        cut |= self.family.slice_visuals(kwargs, part)
        return args, {**kwargs, **cut, "use_cache": False, ULYSSES: self.exchange}


def ulysses_attention(
    module: nn.Module,
    q_BHsD: Tensor,
    k_BGsD: Tensor,
    v_BGsD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    ulysses: Ulysses | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over the whole sequence for this rank's slice of the queries, [B, s, H, D], computed for its h heads.

    attention_mask: bool [B, 1, S, S], or None for only the causal mask.
    """
    if ulysses is None:
        return sdpa_attention_forward(module, q_BHsD, k_BGsD, v_BGsD, attention_mask, dropout, scaling, **others)
    B, s = q_BHsD.shape[0], q_BHsD.shape[2]
    P = dist.get_world_size(ulysses.group)
    exchanged = ulysses.blocks(q_BHsD.transpose(1, 2), k_BGsD.transpose(1, 2), v_BGsD.transpose(1, 2))
    q_BhSD, k_BeSD, v_BeSD = (x.view(P, B, s, *x.shape[2:]).permute(1, 3, 0, 2, 4).flatten(2, 3) for x in exchanged)
    out_BhSD = attend(q_BhSD, k_BeSD, v_BeSD, attention_mask, dropout, scaling)
    out_NshD = out_BhSD.unflatten(2, (P, s)).permute(2, 0, 3, 1, 4).flatten(0, 1)
    return ulysses.back(out_NshD), None


def attend(
    q_BhSD: Tensor,
    k_BeSD: Tensor,
    v_BeSD: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Causal or masked attention with grouped KV heads, [B, S, h, D] for h query heads and e KV heads.

    h / e differs from the model's own ratio if KV heads are repeated. With a mask the KV heads are repeated first, as
    no fast kernel supports both.
    """
    grouped = q_BhSD.shape[1] != k_BeSD.shape[1]
    if grouped and attention_mask is not None:
        groups = q_BhSD.shape[1] // k_BeSD.shape[1]
        k_BeSD, v_BeSD = (x.repeat_interleave(groups, dim=1) for x in (k_BeSD, v_BeSD))
        grouped = False
    return F.scaled_dot_product_attention(
        q_BhSD,
        k_BeSD,
        v_BeSD,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=grouped,
    )


def ulysses_mask(
    *, q_length: int, kv_length: int, q_offset: int = 0, attention_mask: Tensor | None = None, **others: Any
) -> Tensor | None:
    """The mask of "sdpa" for whole sequences, bool [B, 1, S, S], or None for only the causal mask.

    A cut model sees q_length s, and kv_length S from the 2-D mask, which stays whole. Padding on the right needs no
    mask: no token sees later ones, and the padding's own outputs are not used.
    """
    if q_offset == 0 and kv_length > q_length:
        q_length = kv_length
        if attention_mask is not None and is_right_padded(attention_mask):
            attention_mask = None
    mask_of: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return mask_of(q_length=q_length, kv_length=kv_length, q_offset=q_offset, attention_mask=attention_mask, **others)


def is_right_padded(attention_mask: Tensor) -> bool:
    """Whether no token of a 2-D mask [B, S] comes after padding."""
    tokens_BS = attention_mask.bool()
    return not bool((tokens_BS[:, 1:] & ~tokens_BS[:, :-1]).any())


AttentionInterface.register(ULYSSES, ulysses_attention)
AttentionMaskInterface.register(ULYSSES, ulysses_mask)
