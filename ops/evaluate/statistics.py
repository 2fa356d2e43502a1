"""The figures of an evaluation, from decoded prompts: tau, its intervals and parts, the speed-up, and calibration.

A part of tau is a sum over steps, of those that a key puts into it (`tau_by`): the parts of a table add up to all.

N prompts or batches, R resamplings, S slots that a step reached: the accepted ones, and the one that was refused
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from attrs import asdict, frozen

from ops.evaluate.intervals import ALL, LONGEST_CONTEXT, MOST_GROUPS, REST, interval, resampled
from ops.lib.drafts.decoding.decode import Decoded

Name = TypeVar("Name", int, str)

POSITION_BINS = 16  # of an answer, at most, and tokens of the narrowest
BINS = 10  # of the calibration
FEWEST_TOKENS, LEAST_KINDS = 12, 4  # fewer tokens are no repetition; fewer distinct ones are a cycle
LOOP_TOKENS, LOOP_ROUNDS = 64, 4  # of a loop, at least


@frozen
class Tau:
    """Mean tokens per verification step, with a 95 % bootstrap interval over the prompts; see `acceptance_length`."""

    tau: float | None
    low: float | None
    high: float | None
    unclipped: float | None
    prompts: int
    steps: int
    generated: int
    cut_steps: int


@frozen
class TauOfPart:
    """tau of some steps, with a 95 % bootstrap interval over the prompts that have one."""

    tau: float | None
    low: float | None
    high: float | None
    prompts: int
    steps: int
    generated: int


@frozen
class TauAtPosition(TauOfPart):
    """tau of the steps whose anchor is among the answer's tokens `first` to `last`; 0 is the prefill's."""

    first: int
    last: int


@frozen
class BatchTime:
    """The cost of decoding one batch both ways: seconds, and tokens of its answers, first ones included."""

    plain_seconds: float
    plain_tokens: int
    speculative_seconds: float
    speculative_tokens: int


def acceptance_length(decoded: Sequence[Decoded], resamplings: int, seed: int, block_size: float = math.inf) -> Tau:
    """tau = generated tokens / verification steps, over all prompts, with an interval.

    Generated tokens exclude the first one, which the prefill yields, and end with EOS. `unclipped` also counts tokens
    accepted after EOS; `cut_steps` are steps that accepted more than their answer contains.
    The interval resamples prompts, not steps, since the steps of an answer depend on each other. It is None for fewer
    than two prompts with a step; everything is None without a step. block_size: the most tokens of a step, and so the
    upper limit of the interval.
    """
    generated = np.array([answer.generated for answer in decoded], dtype=np.float64)
    steps = np.array([answer.steps for answer in decoded], dtype=np.float64)
    if steps.sum() == 0:
        return Tau(None, None, None, None, len(decoded), 0, 0, 0)
    low, high = tau_interval(generated, steps, resamplings, seed, block_size)
    return Tau(
        tau=float(generated.sum() / steps.sum()),
        low=low,
        high=high,
        unclipped=float(sum(answer.generated_unclipped for answer in decoded) / steps.sum()),
        prompts=len(decoded),
        steps=int(steps.sum()),
        generated=int(generated.sum()),
        cut_steps=sum(answer.generated < answer.generated_unclipped for answer in decoded),
    )


def by_category(answers: Iterable[tuple[str, Decoded]]) -> dict[str, list[Decoded]]:
    """The answers of each category under its name, and all answers under "all"."""
    groups: dict[str, list[Decoded]] = {ALL: []}
    for category, answer in answers:
        groups[ALL].append(answer)
        groups.setdefault(category, []).append(answer)
    return groups


def reported_groups(groups: Sequence[str | None]) -> list[str]:
    """The group of each prompt as it is reported: REST without one, and beyond the MOST_GROUPS with most prompts."""
    sizes = Counter(group for group in groups if group is not None)
    largest = set(sorted(sizes, key=lambda group: (-sizes[group], group))[:MOST_GROUPS])
    return [group if group in largest else REST for group in groups]


def tau_interval(
    generated_N: np.ndarray, steps_N: np.ndarray, resamplings: int, seed: int, block_size: float = math.inf
) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of sum(generated) / sum(steps), from prompts drawn with replacement.

    It is limited to 1 to block_size tokens, the range of a step. Prompts without a step are omitted; None if fewer than
    two remain.
    """
    counts = steps_N > 0
    generated_N, steps_N = generated_N[counts], steps_N[counts]
    if len(generated_N) < 2:
        return None, None
    draws_RN = resampled(len(generated_N), resamplings, seed)
    taus_R = generated_N[draws_RN].sum(1) / steps_N[draws_RN].sum(1)
    low, high = interval(float(generated_N.sum() / steps_N.sum()), taus_R, len(generated_N))
    return max(low, 1.0), min(high, float(block_size))


def steps_of(answer: Decoded) -> list[tuple[int, int]]:
    """The anchor's position in the answer and the number of tokens of each step; nothing after the answer's end."""
    steps, anchor = [], 0
    for accepted in answer.accepted:
        steps.append((anchor, min(accepted + 1, answer.generated - anchor)))
        anchor += accepted + 1
    return steps


def tau_by(
    decoded: Sequence[Decoded],
    key: Callable[[int, int], Name],
    resamplings: int,
    seed: int,
    block_size: float = math.inf,
) -> dict[Name, TauOfPart]:
    """tau of the steps in each part, in order of the parts; what has no step is missing. Intervals resample prompts.

    key: gives the part of a step by the place of its answer in `decoded`, and that of its anchor in the answer.
    """
    sums: dict[Name, np.ndarray] = defaultdict(lambda: np.zeros((2, len(decoded))))
    for place, answer in enumerate(decoded):
        for anchor, tokens in steps_of(answer):
            sums[key(place, anchor)][:, place] += tokens, 1
    found = {}
    for part in sorted(sums):
        generated_N, steps_N = sums[part]
        low, high = tau_interval(generated_N, steps_N, resamplings, seed, block_size)
        found[part] = TauOfPart(
            tau=float(generated_N.sum() / steps_N.sum()),
            low=low,
            high=high,
            prompts=int((steps_N > 0).sum()),
            steps=int(steps_N.sum()),
            generated=int(generated_N.sum()),
        )
    return found


def context_part(tokens: int) -> str:
    """The part of a step by the tokens of prompt and answer before its anchor: "00k" below 1,024, "01k" up to
    2,047, "02k", "04k" ... "64k".
    """
    thousands = tokens >> 10
    return f"{min(1 << thousands.bit_length() - 1, LONGEST_CONTEXT) if thousands else 0:02d}k"


def mean_of_prompts(decoded: Sequence[Decoded], resamplings: int, seed: int, block_size: float = math.inf) -> TauOfPart:
    """The mean of each prompt's tau, as others report it: a prompt of few steps counts as much as one of many.

    Prompts without a step have none and are left out. None for the mean without any, and for the interval of one.
    """
    answers = [answer for answer in decoded if answer.steps]
    taus_N = np.array([answer.generated / answer.steps for answer in answers])
    mean = float(taus_N.mean()) if answers else None
    low, high = tau_interval(taus_N, np.ones(len(answers)), resamplings, seed, block_size)
    steps, generated = sum(answer.steps for answer in answers), sum(answer.generated for answer in answers)
    return TauOfPart(mean, low, high, len(answers), steps, generated)


def tau_by_position(
    decoded: Sequence[Decoded], max_new_tokens: int, resamplings: int, seed: int, block_size: float = math.inf
) -> list[TauAtPosition]:
    """tau of the steps that began in each part of the answer, without parts that have no step.

    A part has 16 tokens, doubled until there are at most 16 parts. The intervals resample prompts.
    """
    width = POSITION_BINS
    while width * POSITION_BINS < max_new_tokens:
        width *= 2
    parts = tau_by(decoded, lambda _, anchor: anchor // width, resamplings, seed, block_size)
    return [
        TauAtPosition(**asdict(part), first=number * width, last=min((number + 1) * width, max_new_tokens) - 1)
        for number, part in parts.items()
    ]


def acceptance_by_slot(decoded: Sequence[Decoded], block_size: int) -> list[float | None]:
    """Share of verification steps in which slot k of the block was accepted, for k = 1 .. block_size - 1.

    None for each without a step. As in `unclipped`, tokens accepted after EOS count.
    """
    accepted = np.array([count for answer in decoded for count in answer.accepted])
    if not len(accepted):
        return [None] * (block_size - 1)
    return [float((accepted >= slot).mean()) for slot in range(1, block_size)]


def accepted_lengths(decoded: Sequence[Decoded], block_size: int) -> list[int]:
    """Counts of the steps that accepted 0, 1, ... block_size - 1 tokens of the draft."""
    counts = [0] * block_size
    for answer in decoded:
        for count in answer.accepted:
            counts[count] += 1
    return counts


def speedup(batches: Sequence[BatchTime], resamplings: int, seed: int) -> dict[str, float | None]:
    """The speed-up: plain seconds per token over speculative ones, with an interval that resamples batches.

    A batch is decoded both ways in direct succession, so a slow moment affects both, and both are resampled together.
    Tokens are summed before dividing: sampled answers differ in length, and a mean of ratios would be above the ratio.
    low and high are None for a single batch.
    """
    seconds_N2 = np.array([(batch.plain_seconds, batch.speculative_seconds) for batch in batches])
    tokens_N2 = np.array([(batch.plain_tokens, batch.speculative_tokens) for batch in batches])

    def ratio(seconds_2: np.ndarray, tokens_2: np.ndarray) -> np.ndarray:
        per_token_2 = seconds_2 / tokens_2
        return per_token_2[..., 0] / per_token_2[..., 1]

    found = float(ratio(seconds_N2.sum(0), tokens_N2.sum(0)))
    low, high = None, None
    if len(batches) > 1:
        draws_RN = resampled(len(batches), resamplings, seed)
        low, high = interval(found, ratio(seconds_N2[draws_RN].sum(1), tokens_N2[draws_RN].sum(1)), len(batches))
        low = max(0.0, low)
    return {"speedup": found, "speedup_low": low, "speedup_high": high}


def is_repetition(tokens: Sequence[int]) -> bool:
    """Whether the second half of an answer has fewer than LEAST_KINDS distinct tokens, or the answer ends in a loop.

    A loop is a sequence of any length at least LOOP_ROUNDS times in a row, over LOOP_TOKENS tokens or half of a shorter
    answer. The EOS of an answer that ended belongs to no loop.
    """
    if len(tokens) < FEWEST_TOKENS:
        return False
    half = len(tokens) // 2
    if len(set(tokens[half:])) < LEAST_KINDS:
        return True
    least = min(LOOP_TOKENS, half)
    return any(
        _ends_with_period(tokens, period, max(least, LOOP_ROUNDS * period))
        for period in range(1, len(tokens) // LOOP_ROUNDS + 1)
    )


def _ends_with_period(tokens: Sequence[int], period: int, count: int) -> bool:
    """Whether each of the last `count` tokens is the one a period before it, as far as that is one of them too."""
    end = len(tokens)
    return all(tokens[place] == tokens[place - period] for place in range(end - 1, end - count + period - 1, -1))


def calibration(decoded: Sequence[Decoded]) -> dict[str, Any] | None:
    """The calibration of a confidence head: reliability in bins of equal width, ECE and Brier score; None without a
    head.

    ece: the mean over slots of |mean confidence - share accepted| of their bin (Naeini, Cooper and Hauskrecht, AAAI
    2015). brier: the mean of (confidence - accepted)^2. Slots after the end of an answer count, as in
    `acceptance_by_slot`.
    """
    said: list[float] = []
    accepted: list[bool] = []
    for answer in decoded:
        for count, confidence in zip(answer.accepted, answer.confidence, strict=bool(answer.confidence)):
            said += confidence
            accepted += [slot < count for slot in range(len(confidence))]
    if not said:
        return None
    said_S, accepted_S = np.array(said), np.array(accepted, dtype=np.float64)
    bin_S = np.minimum((said_S * BINS).astype(int), BINS - 1)
    parts = []
    for number in range(BINS):
        inside_S = bin_S == number
        if inside_S.any():
            parts.append(
                {
                    "low": number / BINS,
                    "high": (number + 1) / BINS,
                    "slots": int(inside_S.sum()),
                    "confidence": float(said_S[inside_S].mean()),
                    "accepted": float(accepted_S[inside_S].mean()),
                }
            )
    return {
        "slots": len(said_S),
        "bins": BINS,
        "ece": sum(part["slots"] * abs(part["confidence"] - part["accepted"]) for part in parts) / len(said_S),
        "brier": float(((said_S - accepted_S) ** 2).mean()),
        "confidence": float(said_S.mean()),
        "accepted": float(accepted_S.mean()),
        "reliability": parts,
    }
