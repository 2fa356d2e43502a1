"""Answers of the target to a batch of prompts, greedy or sampled.

B batch, N new tokens at most, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode_batch import AfterStep, decode_stepwise
from ops.lib.drafts.decoding.sampling import choose
from ops.lib.target.model import Target


@frozen
class Sampling:
    """The rule by which tokens are chosen. temperature: 0 is greedy. top_p: only the most likely tokens count."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


def generate(
    target: Target,
    prompts: Sequence[TokenSample],
    draws_BN: Tensor,
    sampling: Sampling,
    after_step: AfterStep | None = None,
) -> list[list[int]]:
    """The tokens of the answer to each prompt, with the EOS if the answer reached it.

    prompts: samples whose input_ids end with the generation prompt. draws_BN: float64 [B, max_new_tokens] in [0, 1),
    see `uniform_draws`; a token depends only on its own row, except for the rounding of a batched forward pass.
    after_step: as in `decode_stepwise`.
    """
    draws_BN = draws_BN.to(target.device)

    def next_tokens(logits_BV: Tensor, rows_B: Tensor, step: int) -> Tensor:
        return choose(logits_BV, draws_BN[rows_B, step], sampling.temperature, sampling.top_p)

    decoded = decode_stepwise(
        target,
        target.inputs(prompts),
        [one.id for one in prompts],
        sampling.max_new_tokens,
        next_tokens,
        after_step=after_step,
    )
    return [list(one.tokens) for one in decoded]
