"""Answers that repeat the same few tokens."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST_TOKENS, LEAST_KINDS = 12, 4  # an answer of fewer tokens repeats nothing; of fewer kinds of them, it is a cycle


def is_repetition(tokens: Sequence[int]) -> bool:
    """Whether the second half of an answer, by when it may have settled, has fewer than LEAST_KINDS distinct tokens."""
    return len(tokens) >= FEWEST_TOKENS and len(set(tokens[len(tokens) // 2 :])) < LEAST_KINDS
