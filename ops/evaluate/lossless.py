"""Whether speculative decoding gave the target's own answers, token by token; distinguishes ties from bugs.

At temperature 0 both ways choose the target's best logit, so whatever the draft proposes, the answers are the same;
but a pass over a block and a pass over one token round differently, and if the two best logits are closer together
than that rounding, either may win. Such a difference is a *tie*. Rounding changes logits only a little, so at a tie
both passes rank the same tokens first: a difference is a tie only if the token of each way is less than tie_margin
below the best one in the pass of the other way too. A pass that clearly prefers another token, or is undecided
between others (wrong positions, a cache that was not rolled back), is a bug, and so is a chosen token that is not the
best of its own pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from attrs import asdict, frozen

from ops.evaluate.turns import PromptResult
from ops.lib.drafts.decoding.decode import Decoded

SHOWN = 10
MANY_TIES = 0.1  # of the answers: rounding causes a few percent


@frozen(kw_only=True)
class Difference:
    """The first token at which a speculative answer differs from the plain one; later ones cannot be compared.

    draft: "trained" or "random". position: in the answer; 0 is the prefill's token. Token and margin are None if that
    answer had already ended. behind_plain: how far the speculative token's logit lies below the best one of the plain
    pass, None if tie_margin or more. behind_speculative: the same for the plain token in the speculative pass. is_best:
    whether each pass chose its own best token, where several were near.
    """

    id: str
    category: str
    draft: str
    position: int
    plain_token: int | None
    speculative_token: int | None
    plain_margin: float | None
    speculative_margin: float | None
    behind_plain: float | None
    behind_speculative: float | None
    is_best: bool

    @property
    def is_tie(self) -> bool:
        return self.behind_plain is not None and self.behind_speculative is not None and self.is_best


@frozen
class Losses:
    """The result of comparing all answers with the plain ones. answers: their number."""

    answers: int
    ties: tuple[Difference, ...]
    errors: tuple[Difference, ...]

    def verdict(self, result: PromptResult) -> str:
        """The verdict on the trained draft's answer to a prompt: "identical", "tie" or "differs"."""
        for verdict, found in (("differs", self.errors), ("tie", self.ties)):
            if any(difference.id == result.id and difference.draft == "trained" for difference in found):
                return verdict
        return "identical"

    @property
    def has_many_ties(self) -> bool:
        """Whether there are more ties than rounding explains."""
        return len(self.ties) > MANY_TIES * self.answers

    def rows(self) -> list[dict[str, Any]]:
        """The differences as in report.json, errors first."""
        return [
            {**asdict(difference), "verdict": verdict}
            for verdict, found in (("error", self.errors), ("tie", self.ties))
            for difference in found
        ]


def compare(results: Sequence[PromptResult]) -> Losses:
    """Compare every speculative answer with the plain one of its prompt, and tell ties from errors.

    `Decoded.near` must hold all tokens within tie_margin.
    """
    differences = [difference for result in results for difference in _differences(result)]
    return Losses(
        answers=sum(1 + (result.random is not None) for result in results),
        ties=tuple(difference for difference in differences if difference.is_tie),
        errors=tuple(difference for difference in differences if not difference.is_tie),
    )


def rounding(results: Sequence[PromptResult]) -> dict[str, float | int | None]:
    """Statistics on how much margins differ between the two passes, at tokens that both chose after equal tokens.

    They measure rounding. With a tie_margin far above `largest` a bug may count as a tie; with one below `median` a tie
    counts as a bug. None if nothing could be compared.
    """
    moved = []
    for result in results:
        common = common_length(result.plain.tokens, result.speculative.tokens)
        pairs = zip(result.plain.margins[:common], result.speculative.margins[:common], strict=False)
        moved += [abs(plain - speculative) for plain, speculative in pairs]
    if not moved:
        return {"tokens": 0, "median": None, "p99": None, "largest": None}
    median, p99 = np.percentile(moved, [50, 99])
    return {"tokens": len(moved), "median": float(median), "p99": float(p99), "largest": max(moved)}


def lossless_message(
    losses: Losses, tie_margin: float, rounded: dict[str, Any], text: Callable[[int], str], report: str
) -> str:
    """The message about answers that are not lossless. text: gives a token's text. report: the folder with details."""
    shown = [f"  {difference_text(error, text)}" for error in losses.errors[:SHOWN]]
    if len(losses.errors) > SHOWN:
        shown.append(f"  ... and {len(losses.errors) - SHOWN} more")
    measured = ""
    if rounded["tokens"]:
        measured = (
            f" Where both agree, rounding moved the margin by {rounded['median']:.2e} in the median and "
            f"{rounded['largest']:.2e} at most."
        )
    return "\n".join(
        (
            f"speculative decoding changed {len(losses.errors)} of {losses.answers} answers beyond a tie (both tokens "
            f"less than tie_margin = {tie_margin:g} behind the best in both passes), {len(losses.ties)} at a tie:",
            *shown,
            f"No draft can cause this: the target's pass over a block differs from its pass over one token "
            f'(cache, roll-back, positions).{measured} In half precision, repeat it with dtype = "float32": what '
            "remains is a bug.",
            f"tau and all answers: {report}",
        )
    )


def difference_text(error: Difference, text: Callable[[int], str]) -> str:
    """A difference in one line: sample, position, both tokens and both margins. text: gives a token's text."""
    drafted = "" if error.draft == "trained" else f" with the {error.draft} draft"
    return (
        f"sample {error.id} ({error.category}){drafted}: token {error.position} is "
        f"{_named(error.speculative_token, error.speculative_margin, text)}, plain decoding gives "
        f"{_named(error.plain_token, error.plain_margin, text)}{_far(error)}"
    )


def _far(error: Difference) -> str:
    """A remark on the token that lies far from the best one in a pass; "" at a tie, or if an answer had ended."""
    if error.is_tie or error.plain_token is None or error.speculative_token is None:
        return ""
    if not error.is_best:
        return "; one of them is not even the best token of its own pass"
    passes = [
        f"{token} is far from the best one {where}"
        for token, behind, where in (
            (error.speculative_token, error.behind_plain, "plainly"),
            (error.plain_token, error.behind_speculative, "speculatively"),
        )
        if behind is None
    ]
    return f"; {', '.join(passes)}"


def _named(token: int | None, margin: float | None, text: Callable[[int], str]) -> str:
    if token is None:
        return "none, since the answer had ended"
    return f"{token} {text(token)!r} by a margin of {margin:.2e}"


def _differences(result: PromptResult) -> Iterable[Difference]:
    for draft, answer in (("trained", result.speculative), ("random", result.random)):
        if answer is None or answer.tokens == result.plain.tokens:
            continue
        position = common_length(result.plain.tokens, answer.tokens)
        plain_token, plain_margin = _at(result.plain, position)
        speculative_token, speculative_margin = _at(answer, position)
        yield Difference(
            id=result.id,
            category=result.category,
            draft=draft,
            position=position,
            plain_token=plain_token,
            speculative_token=speculative_token,
            plain_margin=plain_margin,
            speculative_margin=speculative_margin,
            behind_plain=_behind(result.plain, position, speculative_token),
            behind_speculative=_behind(answer, position, plain_token),
            is_best=_is_best(result.plain, position) and _is_best(answer, position),
        )


def common_length(plain: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal leading tokens."""
    pairs = enumerate(zip(plain, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(plain), len(other)))


def _at(answer: Decoded, position: int) -> tuple[int | None, float | None]:
    if position < len(answer.tokens):
        return answer.tokens[position], answer.margins[position]
    return None, None


def _behind(answer: Decoded, position: int, token: int | None) -> float | None:
    """The distance of a token's logit from the best one at a place; None if it is not near."""
    return None if token is None else answer.near.get(position, {}).get(token)


def _is_best(answer: Decoded, position: int) -> bool:
    """Whether the token chosen at a place is the best one; true if no other was near, or the answer had ended."""
    return position not in answer.near or answer.near[position].get(answer.tokens[position]) == 0
