"""What few prompts can show: Student's t on the target's passes per token of an answer.

For one prompt that is 1 / tau. It lies between 0 and 1, so a few easy prompts do not hide what the rest
show, as they would with tau or its logarithm; for answers of equal length its mean is 1 / tau of all.

Two tests share the error probability. One uses the prompts' own spread, and finds small gains over many
prompts. The other adds PRIOR_PROMPTS pseudo-prompts with a spread of PRIOR_SPREAD, about that of prompts whose
tau lies between 1.3 and 6, and finds large gains over few.

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
    """The target's passes per generated token, [N]; for answers with a step."""
    return np.array([answer.steps / answer.generated for answer in answers], dtype=np.float64)


def is_certainly_above(groups: Sequence[np.ndarray], value: float, least_error: float, chance: float) -> bool:
    """Whether a sum or difference of the groups' means, `value`, is above 0 at this error probability.

    least_error: the smallest value that differs from 0, however similar the prompts are.
    """
    for spread, imagined in ((0.0, 0), (PRIOR_SPREAD, PRIOR_PROMPTS)):
        error, degrees = _error(groups, spread, imagined)
        if value > stdtrit(degrees, 1 - chance / 2) * hypot(error, least_error):
            return True
    return False


def most(group: np.ndarray, least_error: float, chance: float) -> float:
    """Upper bound of the mean at this error probability; least_error as above."""
    error, degrees = _error([group], 0.0, 0)
    return float(group.mean() + stdtrit(degrees, 1 - chance) * hypot(error, least_error))


def _error(groups: Sequence[np.ndarray], spread: float, imagined: int) -> tuple[float, int]:
    """The standard error of a sum or difference of the groups' means, and its degrees of freedom (Welch, rounded down).

    Each group's variance is that of its prompts and of `imagined` pseudo-prompts with this spread.
    """
    freedoms = [len(group) - 1 + imagined for group in groups]
    squares = [float(((group - group.mean()) ** 2).sum()) + imagined * spread**2 for group in groups]
    parts = [square / freedom / len(group) for square, freedom, group in zip(squares, freedoms, groups, strict=True)]
    if not sum(parts):
        return 0.0, min(freedoms)
    degrees = sum(parts) ** 2 / sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    return sqrt(sum(parts)), int(degrees + 1e-9)
