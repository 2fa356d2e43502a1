"""The draft sharded over the ranks by FSDP2: what is gathered and reduced together, and when.

The draft is gathered once per step, and every gradient reduced once or twice, independent of the number of passes:
ranks have different numbers of micro-batches and chunks of anchors, which therefore must not communicate.

On a CPU, in the dtype of the weights, the draft is one unit, gathered once and reduced once: every exchange takes time
from computing. Otherwise it is sharded in parts. What the context needs is gathered first, the rest while
that is computed; a layer's gradients are reduced while those of the layers before it are computed, in the step's last
pass over blocks:

    root           fc, hidden_norm                      reduced behind the last backward pass, that of the context
    attention i    q, k, v, o and the norms of heads    behind the last pass over blocks; k, v and their norm once more
    layer i        MLP and the norms of the layer       in that pass, as soon as all of the layer are done
    norm           the last norm                        likewise
    head i         what an algorithm adds beside them   likewise, whose gradients come from every pass over blocks

What is reduced together must be the same on every rank, whether it comes from one pass or is the sum of several: so
a part's gradients all come from the same passes, and it is reduced when the last of them is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from ops.lib.drafts.backbone.hooks import Drawn
from ops.lib.drafts.backbone.model import ContextKV, DraftModel, Layer

# What a pass over blocks calls of a layer first, and so differentiates last.
PROJECTIONS = tuple(name for name in vars(Layer) if name.startswith("project"))

CONTEXT, BLOCKS = "context", "forward_blocks"  # the methods of DraftModel that FSDP2 must wrap


def shard_model(model: DraftModel, flat: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard the draft over all ranks with FSDP2, after `compile_layers`; gradients are averaged over all ranks.

    dtype: of the computation. If it is narrower than the weights, which keep their dtype, weights are cast before they
    are gathered. Gradients are accumulated over passes, and reduced, in the weights' dtype.
    """
    masters = next(model.parameters()).dtype
    narrow = dtype is not None and dtype.itemsize < masters.itemsize
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if narrow else None, reduce_dtype=masters if narrow else None, cast_forward_inputs=False
    )
    parts = parts_of(model) if narrow or overlaps(flat) else []
    for module in (*parts, model):
        fully_shard(module, mesh=flat, reshard_after_forward=False, mp_policy=policy)
    # context returns transposed views; nothing writes into them, which is what FSDP2 warns of on every rank.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if parts:
        _gather_ahead(model, parts)
    for method in (CONTEXT, BLOCKS):
        register_fsdp_forward_method(model, method)


def overlaps(flat: DeviceMesh) -> bool:
    """Whether the ranks' devices compute while they communicate."""
    return bool(flat.device_type == "cuda")


def parts_of(model: DraftModel) -> list[nn.Module]:
    """The modules that are sharded separately, in the order in which a step gathers them."""
    return [*(layer.self_attn for layer in model.layers), *model.layers, model.norm, *_heads(model)]


def _heads(model: DraftModel) -> list[nn.Module]:
    return [module for module in model.children() if isinstance(module, Drawn)]


def _gather_ahead(model: DraftModel, parts: list[nn.Module]) -> None:
    setattr(model, CONTEXT, _with_attentions(model))
    setattr(model, BLOCKS, _with_heads(model))
    for layer in model.layers:
        for method in PROJECTIONS:
            register_fsdp_forward_method(layer, method)
    model.set_modules_to_forward_prefetch(parts)


def _with_attentions(model: DraftModel) -> Callable[..., tuple[Tensor, ContextKV]]:
    """The function context preceded by gathering the attentions, which it uses without calling them as modules."""
    context = model.context

    @wraps(context)
    def after_gathering(*args: Any, **kwargs: Any) -> tuple[Tensor, ContextKV]:
        for layer in model.layers:
            layer.self_attn.unshard()
        return context(*args, **kwargs)

    return after_gathering


def _with_heads(model: DraftModel) -> Callable[..., Tensor]:
    """The function forward_blocks followed by gathering the heads, which the loss uses without calling them
    as modules.
    """
    forward_blocks = model.forward_blocks

    @wraps(forward_blocks)
    def before_the_loss(*args: Any, **kwargs: Any) -> Tensor:
        hidden = forward_blocks(*args, **kwargs)
        for head in _heads(model):
            head.unshard()
        return hidden

    return before_the_loss
