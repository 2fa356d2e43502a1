"""The split of a sample, and how a limited number of samples is distributed over the splits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ops.ingest.op import Ingest
from ops.ingest.sample import RawSample


def split_of(config: Ingest, sample: RawSample) -> str:
    """The split of a sample: the config's, else the sample's own, else drawn by (seed, what it is drawn by)."""
    if config.split is not None:
        return config.split
    if sample.split is not None:
        return sample.split
    place = hash_of(config.seed or 0, sample.drawn_by) / 2**64
    test_fraction = config.test_fraction if "test" in sample.draw else 0.0
    if place < test_fraction:
        return "test"
    return "val" if "val" in sample.draw and place < test_fraction + config.val_fraction else "train"


def hash_of(seed: int, sample_id: str) -> int:
    """A hash of 64 bits that depends only on (seed, id)."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{sample_id}".encode()).digest()[:8], "big")


def kept_of(config: Ingest, counts: Mapping[str, int]) -> dict[str, int]:
    """The number of samples to keep of a category, by split."""
    return quotas(counts, config.max_samples, config.min_per_split)


def quotas(counts: Mapping[str, int], limit: int | None, least: int = 1) -> dict[str, int]:
    """Distribute `limit` over groups by their sizes, with the largest remainders rounded up.

    Each group gets at least `least`, or all that it has, if the limit suffices for all groups.
    """
    total = sum(counts.values())
    if limit is None or limit >= total:
        return dict(counts)
    shares = {split: limit * count // total for split, count in counts.items()}
    by_remainder = sorted(counts, key=lambda split: -(limit * counts[split] % total))
    for split in by_remainder[: limit - sum(shares.values())]:
        shares[split] += 1
    least = min(least, limit // len(counts))
    for split, count in counts.items():
        while shares[split] < min(least, count):
            shares[max(shares, key=shares.__getitem__)] -= 1
            shares[split] += 1
    return shares
