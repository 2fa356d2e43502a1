"""Answers of the target to a batch of prompts, greedy or sampled.

B batch, N new tokens at most, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode_batch import AfterStep, decode_stepwise
from ops.lib.drafts.decoding.sampling import choose
from ops.lib.target.model import Target
from ops.regenerate_answers.sampling import Sampling


def generate(
    target: Target,
    prompts: Sequence[TokenSample],
    draws_BN: Tensor,
    sampling: Sampling,
    after_step: AfterStep | None = None,
) -> list[list[int]]:
    """The tokens of the answer to each prompt, with the EOS if the answer reached it.

    prompts: samples whose input_ids end with the generation prompt. draws_BN: float64 [B, N] in [0, 1), see
    `uniform_draws`; a token depends only on its own row, except for the rounding of a batched forward pass.
    after_step: as in `decode_stepwise`.
    """
    draws_BN = draws_BN.to(target.device)

    def next_tokens(logits_BV: Tensor, rows_B: Tensor, step: int) -> Tensor:
        return choose(
            logits_BV, draws_BN[rows_B, step], sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
        )

    decoded = decode_stepwise(
        target,
        target.inputs(prompts),
        [one.id for one in prompts],
        draws_BN.shape[1],
        next_tokens,
        after_step=after_step,
    )
    return [list(one.tokens) for one in decoded]
