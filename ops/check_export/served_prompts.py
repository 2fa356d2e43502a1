"""The prompts that SGLang decodes for the gate, its results, and where they differ from those of `evaluate`.

Does not import SGLang. The gate calls `check_live` of live.py, which is imported only where a supported SGLang is
installed. It returns a LiveResult, mistakes of the draft included, and raises LiveUnavailable if SGLang cannot run the
check on this machine: `live = "auto"` then reports that and continues, `live = "required"` fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import Factory, evolve, frozen

from dsl.errors import DataError
from dsl.finding import Finding
from ops.evaluate.lossless import common_length
from ops.evaluate.statistics import Tau, acceptance_length
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import Decoded

SHOWN = 5
RESAMPLINGS = 2000
SLACK = 0.05  # of tau, below the interval: with few prompts it is narrow


class LiveUnavailable(DataError):
    """An error: SGLang is installed, but cannot serve any draft of this kind on this machine."""


@frozen
class Prompt:
    """A prompt of the evaluation. tokens: the target's greedy answer, with its first token and EOS.

    accepted: draft tokens that `evaluate` accepted in each verification step, even after EOS. max_new_tokens: where
    `evaluate` stopped, counted after the first token.
    """

    sample: TokenSample
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    max_new_tokens: int


@frozen
class LiveResult:
    """The result of running SGLang's own code with the draft.

    version: of SGLang. answers: in the order of the prompts; empty if SGLang refused the draft. forward: a case such as
    "3 layers, window 8, context 17" -> largest difference between SGLang's draft class and dflow's. ties: answers or
    steps that differ where two logits are closer than the tie margin, which is no mistake. details: further figures for
    check.json.
    """

    version: str
    answers: tuple[Decoded, ...]
    forward: Mapping[str, float]
    ties: int = 0
    mistakes: tuple[Finding, ...] = ()
    details: Mapping[str, Any] = Factory(dict)


def nan_last(value: float) -> float:
    """A sort key by which NaN is the largest number."""
    return math.inf if math.isnan(value) else value


def largest(values: Iterable[float]) -> float:
    """The largest number, NaN if there is one."""
    return max(values, key=nan_last)


@frozen
class Departure:
    """A prompt that SGLang decoded differently from `evaluate`.

    position: the first token that differs. step: the first verification step with another accepted length. None if none
    does.
    """

    prompt: Prompt
    served: Decoded
    position: int | None
    step: int | None

    def __str__(self) -> str:
        name = f"sample {self.prompt.sample.id}"
        if self.position is not None:
            ours, theirs = _at(self.prompt.tokens, self.position), _at(self.served.tokens, self.position)
            return f"{name}: token {self.position} of the answer is {theirs} in SGLang, and {ours} by the target itself"
        assert self.step is not None
        ours, theirs = _at(self.prompt.accepted, self.step), _at(self.served.accepted, self.step)
        return (
            f"{name}: step {self.step} accepts {theirs} draft tokens in SGLang, {ours} in evaluate; in all "
            f"{len(self.served.accepted)} steps instead of {len(self.prompt.accepted)}"
        )


def departures(prompts: Sequence[Prompt], served: Sequence[Decoded]) -> list[Departure]:
    """The prompts whose answers or accepted lengths differ between SGLang and `evaluate`."""
    found = []
    for prompt, answer in zip(prompts, served, strict=True):
        position = _first_difference(prompt.tokens, answer.tokens)
        step = _first_difference(prompt.accepted, answer.accepted)
        if position is not None or step is not None:
            found.append(Departure(prompt, answer, position, step))
    return found


def departure_mistakes(found: Sequence[Departure], prompts: int, cause: Finding) -> Iterator[Finding]:
    """One mistake for all answers that differ, and one for all accepted lengths that differ.

    found: the departures that are no ties. prompts: the number of prompts. cause: the reason found for one of them.
    """
    answers = [departure for departure in found if departure.position is not None]
    if answers:
        yield evolve(
            cause,
            what=f"{len(answers)} of {prompts} answers are not the target's own:\n{_listed(answers)}\n"
            f"SGLang: verifies every token, so its target or its prompt differs from that of evaluate; {cause.what}",
        )
    lengths = [departure for departure in found if departure.position is None]
    if lengths:
        yield evolve(
            cause,
            what=f"{len(lengths)} of {prompts} prompts are accepted differently than in evaluate:\n{_listed(lengths)}\n"
            f"SGLang: verifies every token, so the answers are still right; {cause.what}",
        )


def tau_of(prompts: Sequence[Prompt]) -> Tau:
    """tau of the gate's prompts in `evaluate`, with its interval."""
    return acceptance_length([Decoded(prompt.tokens, prompt.accepted) for prompt in prompts], RESAMPLINGS, seed=0)


def served_tau(served: Sequence[Decoded]) -> float | None:
    """tau of the answers; tokens accepted after EOS do not count. None without a step."""
    return acceptance_length(served, 1, seed=0).tau


def is_below(served: float | None, measured: Tau) -> bool:
    """Whether a tau is clearly below the interval; False for a single prompt, which has no interval."""
    return served is not None and measured.low is not None and served < measured.low * (1 - SLACK)


def tau_mistake(served: float | None, measured: Tau, cause: Finding) -> Finding:
    return evolve(
        cause,
        what=f"tau is {served:.2f} in SGLang, and {measured.tau:.2f} in evaluate on the same {measured.prompts} "
        f"prompts, with a 95 % interval of {measured.low:.2f} to {measured.high:.2f}\n"
        f"SGLang: verifies every token, so the answers are still right; {cause.what}",
    )


def equal_steps(prompts: Sequence[Prompt], served: Sequence[Decoded]) -> float:
    """The share of verification steps that accept as many draft tokens in SGLang as in `evaluate`."""
    pairs = [(prompt.accepted, answer.accepted) for prompt, answer in zip(prompts, served, strict=True)]
    steps = sum(max(len(ours), len(theirs)) for ours, theirs in pairs)
    equal = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False))
    return equal / steps if steps else 1.0


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    return None if tuple(ours) == tuple(theirs) else common_length(ours, theirs)


def _at(values: Sequence[int], place: int) -> int | str:
    return values[place] if place < len(values) else "none"


def _listed(found: Sequence[Departure]) -> str:
    lines = [f"  {departure}" for departure in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more")
    return "\n".join(lines)
