"""The target's own answers to a batch of prompts, one token a step for all rows.

B batch, T tokens so far, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ops.lib.drafts.decoding.answers import Answers
from ops.lib.drafts.decoding.clock import DecodeClock, lap, start
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.prefill import prefill
from ops.lib.target.model import Target
from ops.lib.vision.batch import ModelInputs

Choose = Callable[[Tensor, Tensor, int], Tensor]


@torch.inference_mode()
def answer(
    target: Target,
    prompts: ModelInputs,
    names: Sequence[str],
    most_tokens: int,
    choose: Choose,
    clock: DecodeClock | None = None,
    within: float = 0.0,
) -> list[Decoded]:
    """What the target answers to each prompt, with at most so many tokens, the EOS included.

    choose(logits_BV, rows_B, step): the token of each row, int64 [B]; rows_B are the rows of `prompts` that are left.
    within: as in `Answers`.
    """
    start(clock)
    begun = prefill(target, prompts)
    cache, logits_BV, mask_BT = begun.cache, begun.logits_BV, begun.mask_BS
    next_position_B = mask_BT.sum(-1) + begun.offset_B
    lap(clock, "prefill")
    answers = Answers.of(names, most_tokens, target.eos_token_ids, within)
    rows_B = torch.arange(len(names), device=logits_BV.device)
    for step in range(most_tokens):
        nearest = answers.nearest(logits_BV[:, None])
        left = answers.add_one(tokens_B := choose(logits_BV, rows_B, step), nearest)
        if not answers.open:
            break
        if left is not None:
            cache.reorder_cache(left)
            rows_B, tokens_B, mask_BT, next_position_B = (
                tensor[left] for tensor in (rows_B, tokens_B, mask_BT, next_position_B)
            )
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows_B), 1)], dim=1)
        lap(clock, "other")
        logits_BV = target.model(
            input_ids=tokens_B[:, None],
            attention_mask=mask_BT,
            position_ids=(next_position_B + step)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        lap(clock, "verify")
    lap(clock, "other")
    return answers.decoded()
