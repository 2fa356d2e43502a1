"""Bootstrap intervals of 95 % from resampled figures, and the names of tau and its interval in MLflow; loads no torch.

R resamplings
"""

from __future__ import annotations

import re
from hashlib import sha256

import numpy as np

ALL = "all"  # all categories together
RESERVED = {"low", "high", "unclipped", "random", "of", "topic"}  # words after "tau_" in the names of other figures
UNSAFE = re.compile(r"[^A-Za-z0-9_. -]")
MOST_TOPICS = 50  # that are reported
LONGEST_NAME = 100  # characters of a topic in the name of a metric
PERCENTILES = (2.5, 97.5)
Z_975 = 1.960


def resampled(count: int, resamplings: int, seed: int) -> np.ndarray:
    """Random indices for bootstrap samples, [R, count], drawn with replacement."""
    return np.random.default_rng(seed).integers(0, count, size=(resamplings, count))


def interval(estimate: float, resampled_R: np.ndarray, count: int) -> tuple[float, float]:
    """A bootstrap interval: the percentiles of the resampled figures, widened since there are few prompts.

    Resampling `count` prompts has too small a spread, by sqrt((count - 1) / count). A spread estimated from few prompts
    also requires Student's t instead of the normal distribution. Source: Hesterberg, What Teachers Should Know About
    the Bootstrap (2015), section 3.4. It is widened here instead of using outer percentiles, which few prompts lack.
    """
    from scipy.special import stdtrit  # slow to import, and rarely needed

    low, high = np.percentile(resampled_R, PERCENTILES)
    wider = float(stdtrit(count - 1, 0.975)) / Z_975 * (count / (count - 1)) ** 0.5
    return float(estimate - wider * (estimate - low)), float(estimate + wider * (high - estimate))


def topic_names(topic: str) -> tuple[str, str, str]:
    """The names in MLflow of a topic's tau and of its interval's ends: "eval/tau_topic/math",
    "eval/tau_topic_low/math", ....

    A topic is any text: one with a character that a name must not have gets the start of its digest, so that no two are
    the same.
    """
    safe = UNSAFE.sub("_", topic)
    if safe != topic or len(topic) > LONGEST_NAME or not topic.strip(". "):
        safe = f"{safe[:LONGEST_NAME]}-{sha256(topic.encode()).hexdigest()[:8]}"
    return f"eval/tau_topic/{safe}", f"eval/tau_topic_low/{safe}", f"eval/tau_topic_high/{safe}"


def tau_names(kind: str, category: str) -> tuple[str, str, str]:
    """The names of tau and its interval: "eval/tau_math", "eval/tau_math_low", "eval/tau_math_high".

    A category with a reserved word could yield another figure's name. It follows a slash, which no category contains:
    "eval/tau_of/low", "eval/tau_of_low/low", "eval/tau_of_high/low".
    """
    if category == ALL:
        return kind, f"{kind}_low", f"{kind}_high"
    if RESERVED.isdisjoint(category.split("_")):
        return f"{kind}_{category}", f"{kind}_{category}_low", f"{kind}_{category}_high"
    return f"{kind}_of/{category}", f"{kind}_of_low/{category}", f"{kind}_of_high/{category}"
