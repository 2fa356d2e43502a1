"""Mistakes of training a target over ranks, made on purpose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.nn.functional as F
from attrs import field, frozen
from target_parallel_cases import Layout
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from ops.lib.sequence_parallel import target, target_attention
from ops.lib.sequence_parallel.exchange import Ulysses
from ops.lib.sequence_parallel.target import ParallelTarget, answer_tokens
from ops.lib.vision.batch import ModelInputs


def dropped_mask() -> AbstractContextManager[None]:
    """Bug: attention without a mask function of its name, for which transformers silently makes no mask."""
    others = {name: mask for name, mask in ALL_MASK_ATTENTION_FUNCTIONS.items() if name != target_attention.ULYSSES}
    return patch.object(type(ALL_MASK_ATTENTION_FUNCTIONS), "_global_mapping", others)


def window_of_the_slice() -> AbstractContextManager[None]:
    """Bug: whether a sliding window needs a mask is decided by the slice, which is shorter than the window."""
    right = target_attention.ulysses_mask

    def wrong(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
        if sdpa_mask(q_length=q_length, kv_length=q_length, **others) is None:
            return None
        return right(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **others)

    masks = {**dict(ALL_MASK_ATTENTION_FUNCTIONS.items()), target_attention.ULYSSES: wrong}
    return patch.object(type(ALL_MASK_ATTENTION_FUNCTIONS), "_global_mapping", masks)


def reduced_in_place() -> AbstractContextManager[None]:
    """Bug: the ranks' losses are summed before the backward pass, unseen by autograd."""
    answer_loss = ParallelTarget.answer_loss

    def wrong(parallel: ParallelTarget, inputs: ModelInputs | None) -> Tensor:
        loss = answer_loss(parallel, inputs)
        dist.all_reduce(loss.detach())
        return loss

    return patch.object(ParallelTarget, "answer_loss", wrong)


def shifted_after_slicing() -> AbstractContextManager[None]:
    """Bug: labels are shifted within the slice, so that its last position predicts nothing."""

    def wanted_tokens(inputs: ModelInputs, start: int, end: int) -> tuple[Tensor, Tensor]:
        wanted_Bs = F.pad(inputs.loss_mask[:, start:end][:, 1:], (0, 1))
        return wanted_Bs, F.pad(inputs.input_ids[:, start:end][:, 1:], (0, 1))[wanted_Bs]

    return patch.object(target, "wanted_tokens", wanted_tokens)


def ratio_of_the_model() -> AbstractContextManager[None]:
    """Bug: KV heads are repeated for the model's 4 query heads each, although 2 share one after the exchange."""
    attend = target_attention.attend

    def wrong(q_BhSD: Tensor, k_BeSD: Tensor, v_BeSD: Tensor, *others: object) -> Tensor:
        return attend(q_BhSD, k_BeSD.repeat_interleave(4, dim=1), v_BeSD.repeat_interleave(4, dim=1), *others)

    return patch.object(target_attention, "attend", wrong)


def heads_side_by_side() -> AbstractContextManager[None]:
    """Bug: the 2 KV heads are repeated as 0 1 0 1 for 4 ranks, where 0 0 1 1 is right."""
    blocks = Ulysses.blocks

    def wrong(exchange: Ulysses, q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return blocks(exchange, q_NKHD, k_NKGD.repeat(1, 1, 2, 1), v_NKGD.repeat(1, 1, 2, 1))

    return patch.object(Ulysses, "blocks", wrong)


def no_dummy_image() -> AbstractContextManager[None]:
    """Bug: a rank without images does not run the vision tower."""
    return patch.object(ParallelTarget, "_see_nothing", lambda _self, _decoder, args, kwargs: (args, kwargs))


def tokens_of_all(whole: ModelInputs, _own: ModelInputs, _layout: Layout) -> int:
    """Denominator, the right one: answer tokens of all ranks."""
    return answer_tokens(whole)


def tokens_of_the_row(_whole: ModelInputs, own: ModelInputs, layout: Layout) -> int:
    """Denominator, wrong: each row divides by its own answer tokens, and gradients are averaged."""
    return answer_tokens(own) * layout.dp


def tokens_of_all_on_every_rank(whole: ModelInputs, _own: ModelInputs, layout: Layout) -> int:
    """Denominator, wrong: no factor of world_size, as if gradients were summed over the ranks and not averaged."""
    return answer_tokens(whole) * layout.ranks


def tokens_of_all_on_every_row(whole: ModelInputs, _own: ModelInputs, layout: Layout) -> int:
    """Denominator, wrong: a factor of sp_degree instead of world_size."""
    return answer_tokens(whole) * layout.dp


@frozen
class Bug:
    """A mistake and the case in which it is made."""

    make: Callable[[], AbstractContextManager[None]]
    family: str
    kind: str
    layout: Layout = field(default=Layout(2, 2))
    count: Callable[[ModelInputs, ModelInputs, Layout], int] = tokens_of_all


BUGS = {
    "2-D mask dropped under left padding": Bug(dropped_mask, "qwen3_vl", "left"),
    "labels shifted after slicing": Bug(shifted_after_slicing, "qwen3_vl", "mixed"),
    "ratio of the model's heads": Bug(ratio_of_the_model, "qwen2_5_vl", "mixed"),
    "KV heads repeated side by side": Bug(heads_side_by_side, "qwen3_vl", "mixed", Layout(1, 4)),
    "sliding window of the slice": Bug(window_of_the_slice, "qwen3", "text", Layout(1, 4)),
    "loss reduced in place": Bug(reduced_in_place, "qwen3_vl", "mixed", count=tokens_of_all_on_every_rank),
    "factor of sp only": Bug(nullcontext, "qwen3_vl", "mixed", count=tokens_of_all_on_every_row),
    "denominator of the row": Bug(nullcontext, "qwen3_vl", "mixed", count=tokens_of_the_row),
}
