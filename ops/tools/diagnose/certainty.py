"""What few prompts can tell: Student's t on the passes of the target for each token of an answer.

That figure of a prompt is 1 / tau. It lies between 0 and 1, so the few prompts that are easy do not hide what the rest
show, as they would with tau or its logarithm; and of answers that are equally long its mean is 1 / tau of them all.

Two tests share the chance of an error. One takes the spread of the prompts as it is, and finds small gains of many
prompts. The other takes in PRIOR_PROMPTS imagined prompts with a spread of PRIOR_SPREAD, about that of prompts whose
tau lies between 1.3 and 6, and finds large gains of few.

N prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, sqrt

import numpy as np
from scipy.special import stdtrit

from ops.lib.drafts.decoding.decode import Decoded

PRIOR_SPREAD, PRIOR_PROMPTS = 0.15, 4


def passes(answers: Sequence[Decoded]) -> np.ndarray:
    """[N], the passes of the target for each generated token; of answers with a step."""
    return np.array([answer.steps / answer.generated for answer in answers], dtype=np.float64)


def is_certainly_above(groups: Sequence[np.ndarray], value: float, least_error: float, chance: float) -> bool:
    """Whether a sum or difference of the groups' means, which is `value`, lies above 0 but for this chance.

    least_error: what cannot be told from none, however alike the prompts are.
    """
    for spread, imagined in ((0.0, 0), (PRIOR_SPREAD, PRIOR_PROMPTS)):
        error, degrees = _error(groups, spread, imagined)
        if value > stdtrit(degrees, 1 - chance / 2) * hypot(error, least_error):
            return True
    return False


def most(group: np.ndarray, least_error: float, chance: float) -> float:
    """What the true mean lies above with this chance at most; least_error as above."""
    error, degrees = _error([group], 0.0, 0)
    return float(group.mean() + stdtrit(degrees, 1 - chance) * hypot(error, least_error))


def _error(groups: Sequence[np.ndarray], spread: float, imagined: int) -> tuple[float, int]:
    """The standard error of a sum or difference of the groups' means, and its degrees of freedom (Welch, rounded down).

    Each group's variance is that of its prompts and of so many imagined ones with this spread.
    """
    freedoms = [len(group) - 1 + imagined for group in groups]
    squares = [float(((group - group.mean()) ** 2).sum()) + imagined * spread**2 for group in groups]
    parts = [square / freedom / len(group) for square, freedom, group in zip(squares, freedoms, groups, strict=True)]
    if not sum(parts):
        return 0.0, min(freedoms)
    degrees = sum(parts) ** 2 / sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    return sqrt(sum(parts)), int(degrees + 1e-9)
