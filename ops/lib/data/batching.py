"""Batches of samples of similar length, padded lengths, and values spread over many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def batches_by_length(lengths: Sequence[int], batch_tokens: int, filled: int | None = None) -> list[list[int]]:
    """Batches of sample indices with similar lengths, whose padded size is at most `batch_tokens` (or one sample).

    filled: a batch with so many tokens only takes further samples of its last length, which need no padding. Padding
    needs a mask, which excludes the fastest attention kernels on a GPU. None fills batches to the end.
    """
    batches: list[list[int]] = []
    last = 0
    for index in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        length, count = lengths[index], len(batches[-1]) if batches else 0
        takes_others = filled is None or last * count < filled
        if batches and length * (count + 1) <= batch_tokens and (takes_others or length == last):
            batches[-1].append(index)
        else:
            batches.append([index])
        last = length
    return batches


def padded_length(length: int, pad_multiple: int) -> int:
    """The length rounded up to a multiple of pad_multiple."""
    return -(-length // pad_multiple) * pad_multiple


def spread(values: Sequence[T], count: int) -> list[T]:
    """`count` of the values at even distances; all of them if there are fewer."""
    count = min(count, len(values))
    return [values[number * len(values) // count] for number in range(count)]


def spread_over_each(groups: Sequence[tuple[str, str]], count: int | None) -> list[int]:
    """Places of at most `count` entries of each category, in order; None: of all.

    groups: (category, topic) of each entry. Every topic of a category has its share of them, and so has every source,
    whose samples follow each other: they are at even distances in the order of topics.
    """
    places: dict[str, list[int]] = {}
    for place, (category, _) in enumerate(groups):
        places.setdefault(category, []).append(place)
    if count is None:
        return list(range(len(groups)))
    chosen = (spread(sorted(each, key=lambda place: groups[place][1]), count) for each in places.values())
    return sorted(place for each in chosen for place in each)
