"""Student's t: how far a mean of few may lie from the truth."""

from __future__ import annotations

from math import cos, pi, sin, sqrt, tan

MANY = 1000
HALVINGS = 60


def student_point(chance: float, degrees: int) -> float:
    """What Student's t of so many degrees of freedom exceeds with this chance, which is below 0.5.

    Of more than MANY degrees as of MANY, where it is that of the normal distribution to about 0.2 %.
    """
    degrees = min(degrees, MANY)
    low, high = 0.0, pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(middle, degrees) > chance else (low, middle)
    return sqrt(degrees) * tan(low)


def _beyond(angle: float, degrees: int) -> float:
    """The chance of a t above sqrt(degrees) * tan(angle).

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    term, total = (cos(angle) if degrees % 2 else 1.0), 0.0
    for power in range(degrees % 2 + 2, degrees + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (power - 1) / power
    within = sin(angle) * total
    return (1 - (2 / pi * (angle + within) if degrees % 2 else within)) / 2
