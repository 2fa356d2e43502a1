"""Whether the draft was trained on the target's own answers, and on all of the data."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from attrs import frozen
from torch import Tensor

from ops.capture_targets.backend import forward_batch
from ops.lib.data.sample_account import MOST_LOST, Loss
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.model import Target
from ops.tools.diagnose.finding import Finding, unmeasured

NAME, KEPT = "own answers", "samples kept"
LEAST_OWN = 0.8
ERRORS = 2.0  # standard errors
ROWS = 1024  # of logits at once


@frozen
class OwnShare:
    """tokens: answer tokens checked; chosen: those that are the target's most likely token given all before them.
    expected: how many would be if the target itself had sampled each at the temperature of the answers.
    """

    tokens: int
    chosen: int
    expected: float

    @property
    def share(self) -> float:
        return self.chosen / self.tokens if self.tokens else 1.0

    @property
    def expected_share(self) -> float:
        return self.expected / self.tokens if self.tokens else 1.0

    @property
    def error(self) -> float:
        """Standard error of `expected`; 0 without sampled tokens."""
        return sqrt(self.expected * max(1 - self.expected_share, 0.0))


def own_finding(
    target: Target, samples: Sequence[TokenSample], regenerated_at: float | None, kept_by: str | None = None
) -> Finding:
    """samples: training samples. regenerated_at, kept_by: as in Chain."""
    own = count_own(target, samples, regenerated_at or 0.0)
    normal, advice = _expectation(own, regenerated_at, kept_by)
    return Finding(
        name=NAME,
        measured=f"{own.share:.0%} of {own.tokens:,} tokens of the training answers are the target's greedy choice",
        normal=normal,
        advice=advice,
        is_cause=own.chosen < LEAST_OWN * own.expected - ERRORS * own.error,
    )


def kept_findings(losses: Sequence[tuple[str, Loss]] | None) -> list[Finding]:
    """One for each loss of a node; losses: as in Chain.

    Answers of other tokens than the target generated lower tau; samples that are missing may, if they are of a kind.
    """
    if losses is None:
        return [unmeasured(KEPT, "the store no longer has the accounts of the samples")]
    normal = f"no node loses more than {MOST_LOST:.0%} of its samples or answers"
    if not losses:
        return [Finding(name=KEPT, measured=f"every node kept at least {1 - MOST_LOST:.0%} of them", normal=normal)]
    return [
        Finding(
            name=KEPT,
            measured=f"{node}: {loss.text}",
            normal=normal,
            advice=loss.remedy,
            is_cause=loss.of == "answers",
            is_note=loss.of == "samples",
        )
        for node, loss in losses
    ]


def _expectation(own: OwnShare, regenerated_at: float | None, kept_by: str | None) -> tuple[str, str]:
    """The normal range, and what to do outside it."""
    if regenerated_at is None:
        advice = "put regenerate_answers between the target and capture, and train on the target's own answers"
        if kept_by is not None:
            advice = (
                f'{kept_by} left the answers of the data set unchanged (answers = "data"): set answers = "target" of '
                "it, and train on the target's own answers"
            )
        return (
            f"at least {LEAST_OWN:.0%}; all but ties after regenerate_answers at temperature 0. Decoding "
            "accepts what the target chooses, not what the data set says",
            advice,
        )
    return (
        f"at least {LEAST_OWN:.0%} of the {own.expected_share:.0%} expected of this target's own answers at "
        f"temperature {regenerated_at:g}, at which they were regenerated",
        "the answers were regenerated, but they differ from this target's answers here: regenerate them with the "
        "served target, then capture and train again",
    )


@torch.inference_mode()
def count_own(target: Target, samples: Sequence[TokenSample], temperature: float = 0.0) -> OwnShare:
    tokens, chosen, expected = 0, 0, 0.0
    for sample in samples:
        _, final_BSM = forward_batch(target, [sample], (0,), final_hidden=True)
        assert final_BSM is not None
        places = sample.loss_mask[1:].nonzero().squeeze(1)
        for rows in places.split(ROWS):
            logits_RV = (final_BSM[0, rows].to(target.device) @ target.head_weight.T).float()
            chosen += int((logits_RV.argmax(-1).cpu() == sample.input_ids[rows + 1]).sum())
            expected += _greedy_draws(logits_RV, temperature)
        tokens += len(places)
    return OwnShare(tokens, chosen, expected)


def _greedy_draws(logits_RV: Tensor, temperature: float) -> float:
    """The expected number of rows whose most likely token is sampled at this temperature."""
    if temperature == 0:
        return float(len(logits_RV))
    return float((logits_RV / temperature).softmax(-1).amax(-1).sum())
