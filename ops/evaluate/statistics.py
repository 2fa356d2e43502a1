"""tau and its interval from decoded prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from ops.dflash.decode import Decoded


@frozen
class Tau:
    """Mean tokens per verification step, with a 95 % bootstrap interval over the prompts."""

    tau: float
    low: float
    high: float
    unclipped: float
    prompts: int
    steps: int
    generated: int


def acceptance_length(decoded: Sequence[Decoded], resamplings: int, seed: int) -> Tau:
    """tau = generated tokens / verification steps, over all prompts.

    Generated tokens leave out the first one, which the prefill yields, include EOS and stop at it; `unclipped` counts
    what was accepted behind EOS as well. The interval resamples prompts, not steps, because the steps of one answer
    depend on each other. All nan where no step was made.
    """
    generated = np.array([answer.generated for answer in decoded], dtype=np.float64)
    steps = np.array([answer.steps for answer in decoded], dtype=np.float64)
    if steps.sum() == 0:
        return Tau(np.nan, np.nan, np.nan, np.nan, len(decoded), 0, 0)
    draws = np.random.default_rng(seed).integers(0, len(decoded), size=(resamplings, len(decoded)))
    drawn_steps = steps[draws].sum(1)
    ratios = generated[draws].sum(1)[drawn_steps > 0] / drawn_steps[drawn_steps > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Tau(
        tau=float(generated.sum() / steps.sum()),
        low=float(low),
        high=float(high),
        unclipped=float(sum(answer.generated_unclipped for answer in decoded) / steps.sum()),
        prompts=len(decoded),
        steps=int(steps.sum()),
        generated=int(generated.sum()),
    )


def acceptance_by_slot(decoded: Sequence[Decoded], block_size: int) -> list[float]:
    """Share of verification steps in which slot k of the block was accepted, for k = 1 .. block_size - 1.

    As in `unclipped`, what was accepted behind EOS counts.
    """
    accepted = np.array([count for answer in decoded for count in answer.accepted])
    if not len(accepted):
        return [float("nan")] * (block_size - 1)
    return [float((accepted >= slot).mean()) for slot in range(1, block_size)]
