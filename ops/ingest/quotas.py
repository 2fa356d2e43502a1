"""How a limited number of samples is dealt over the splits."""

from __future__ import annotations

from collections.abc import Mapping


def quotas(counts: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """`limit` things dealt over groups in proportion to their sizes, by largest remainder; each gets one if it can."""
    total = sum(counts.values())
    if limit is None or limit >= total:
        return dict(counts)
    shares = {split: limit * count // total for split, count in counts.items()}
    by_remainder = sorted(counts, key=lambda split: -(limit * counts[split] % total))
    for split in by_remainder[: limit - sum(shares.values())]:
        shares[split] += 1
    for split in [split for split, share in shares.items() if not share and limit >= len(counts)]:
        shares[split] = 1
        shares[max(shares, key=shares.__getitem__)] -= 1
    return shares
