"""Bootstrap intervals of 95 %, from resampled figures; loads no torch.

R resamplings
"""

from __future__ import annotations

import numpy as np

PERCENTILES = (2.5, 97.5)
Z_975 = 1.960


def resampled(count: int, resamplings: int, seed: int) -> np.ndarray:
    """[R, count] places, drawn with replacement."""
    return np.random.default_rng(seed).integers(0, count, size=(resamplings, count))


def interval(estimate: float, resampled_R: np.ndarray, count: int) -> tuple[float, float]:
    """The percentiles of the resampled figures, widened to correct the bias of few prompts.

    Resampling `count` prompts has too small a spread, by sqrt((count - 1) / count), and a spread estimated from few
    prompts requires Student's t instead of the normal distribution: as in Hesterberg, What Teachers Should Know About
    the Bootstrap (2015), section 3.4, but widened instead of using outer percentiles, which few prompts lack.
    """
    from scipy.special import stdtrit  # slow to import, and rarely needed

    low, high = np.percentile(resampled_R, PERCENTILES)
    wider = float(stdtrit(count - 1, 0.975)) / Z_975 * (count / (count - 1)) ** 0.5
    return float(estimate - wider * (estimate - low)), float(estimate + wider * (high - estimate))
