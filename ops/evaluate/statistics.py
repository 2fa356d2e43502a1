"""tau, its intervals and its parts, and the speed-up, from decoded prompts.

N prompts or batches, R resamplings
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from ops.dflash.decode import Decoded

PERCENTILES = (2.5, 97.5)
POSITION_BINS = 16  # at most; the narrowest holds as many tokens


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


@frozen
class TauAtPosition:
    """tau of the steps whose anchor is one of the answer's tokens `first` to `last`, 0 being the prefill's."""

    first: int
    last: int
    tau: float
    low: float
    high: float
    prompts: int
    steps: int
    generated: int


@frozen
class BatchTime:
    """What one batch took: seconds, and tokens of its answers, the first ones included."""

    plain_seconds: float
    plain_tokens: int
    speculative_seconds: float
    speculative_tokens: int


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
    low, high = ratio_interval(generated, steps, resamplings, seed)
    return Tau(
        tau=float(generated.sum() / steps.sum()),
        low=low,
        high=high,
        unclipped=float(sum(answer.generated_unclipped for answer in decoded) / steps.sum()),
        prompts=len(decoded),
        steps=int(steps.sum()),
        generated=int(generated.sum()),
    )


def ratio_interval(
    numerators_N: np.ndarray, denominators_N: np.ndarray, resamplings: int, seed: int
) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of sum(numerators) / sum(denominators), pairs drawn with replacement.

    Draws whose denominators are all 0 are left out.
    """
    draws_RN = np.random.default_rng(seed).integers(0, len(numerators_N), size=(resamplings, len(numerators_N)))
    drawn_R = denominators_N[draws_RN].sum(1)
    ratios = numerators_N[draws_RN].sum(1)[drawn_R > 0] / drawn_R[drawn_R > 0]
    low, high = np.percentile(ratios, PERCENTILES)
    return float(low), float(high)


def steps_of(answer: Decoded) -> list[tuple[int, int]]:
    """(position of the anchor in the answer, tokens that it yielded) of each step; nothing behind the answer's end."""
    steps, anchor = [], 0
    for accepted in answer.accepted:
        steps.append((anchor, min(accepted + 1, answer.generated - anchor)))
        anchor += accepted + 1
    return steps


def tau_by_position(
    decoded: Sequence[Decoded], max_new_tokens: int, resamplings: int, seed: int
) -> list[TauAtPosition]:
    """tau of the steps that began in each part of the answer, parts without a step left out.

    A part is 16 tokens long, or as many times 2 as it takes for at most 16 parts. The intervals resample prompts.
    """
    width = POSITION_BINS
    while width * POSITION_BINS < max_new_tokens:
        width *= 2
    bins = -(-max_new_tokens // width)
    generated_BN = np.zeros((bins, len(decoded)))
    steps_BN = np.zeros((bins, len(decoded)))
    for place, answer in enumerate(decoded):
        for anchor, tokens in steps_of(answer):
            generated_BN[anchor // width, place] += tokens
            steps_BN[anchor // width, place] += 1
    found = []
    for number, (generated_N, steps_N) in enumerate(zip(generated_BN, steps_BN, strict=True)):
        if not steps_N.sum():
            continue
        low, high = ratio_interval(generated_N, steps_N, resamplings, seed)
        found.append(
            TauAtPosition(
                first=number * width,
                last=min((number + 1) * width, max_new_tokens) - 1,
                tau=float(generated_N.sum() / steps_N.sum()),
                low=low,
                high=high,
                prompts=int((steps_N > 0).sum()),
                steps=int(steps_N.sum()),
                generated=int(generated_N.sum()),
            )
        )
    return found


def acceptance_by_slot(decoded: Sequence[Decoded], block_size: int) -> list[float]:
    """Share of verification steps in which slot k of the block was accepted, for k = 1 .. block_size - 1.

    As in `unclipped`, what was accepted behind EOS counts.
    """
    accepted = np.array([count for answer in decoded for count in answer.accepted])
    if not len(accepted):
        return [float("nan")] * (block_size - 1)
    return [float((accepted >= slot).mean()) for slot in range(1, block_size)]


def accepted_lengths(decoded: Sequence[Decoded], block_size: int) -> list[int]:
    """How many steps accepted 0, 1, ... block_size - 1 tokens of the draft."""
    counts = [0] * block_size
    for answer in decoded:
        for count in answer.accepted:
            counts[count] += 1
    return counts


def speedup(batches: Sequence[BatchTime], resamplings: int, seed: int) -> dict[str, float | None]:
    """Plain seconds per token over speculative seconds per token, with an interval that resamples batches.

    A batch was decoded both ways, one right after the other, so a slow moment of the machine hits both. low and high
    are None for a single batch.
    """
    plain_N = np.array([batch.plain_seconds for batch in batches])
    speculative_N = np.array([batch.speculative_seconds for batch in batches])
    # Answers that were sampled differ in length: what was spent is brought to one number of tokens, batch by batch.
    same_N = np.array([batch.speculative_tokens / batch.plain_tokens for batch in batches])
    low, high = ratio_interval(plain_N * same_N, speculative_N, resamplings, seed) if len(batches) > 1 else (None, None)
    return {
        "speedup": float((plain_N * same_N).sum() / speculative_N.sum()),
        "speedup_low": low,
        "speedup_high": high,
    }
