"""The split of a sample: the one that it was given, or else one that depends on the seed and its id alone."""

from __future__ import annotations

import hashlib

from ops.ingest.op import Ingest
from ops.ingest.sample import RawSample


def split_of(config: Ingest, sample: RawSample) -> str:
    """The split given, or else a function of (seed, id) alone."""
    if sample.split is not None:
        return sample.split
    place = hash_of(config.seed or 0, sample.draw_id or sample.id) / 2**64
    test_fraction = config.test_fraction if "test" in sample.draw else 0.0
    if place < test_fraction:
        return "test"
    return "val" if "val" in sample.draw and place < test_fraction + config.val_fraction else "train"


def hash_of(seed: int, sample_id: str) -> int:
    """64 bits that depend on (seed, id) alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{sample_id}".encode()).digest()[:8], "big")
