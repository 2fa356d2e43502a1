"""What a draft's confidence head says of its proposals against what was accepted.

S slots that a step reached: the accepted ones, and the one that was refused
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ops.lib.drafts.decoding.decode import Decoded

BINS = 10


def calibration(decoded: Sequence[Decoded]) -> dict[str, Any] | None:
    """Reliability by bins of equal width, its expected error, and the Brier score; None without a confidence head.

    ece: the mean over the slots of |mean confidence - share accepted| of their bin (Naeini, Cooper and Hauskrecht, AAAI
    2015). brier: of (confidence - accepted)^2. Slots behind the end of an answer count, as in `acceptance_by_slot`.
    """
    said: list[float] = []
    accepted: list[bool] = []
    for answer in decoded:
        for count, confidence in zip(answer.accepted, answer.confidence, strict=bool(answer.confidence)):
            said += confidence
            accepted += [slot < count for slot in range(len(confidence))]
    if not said:
        return None
    said_S, accepted_S = np.array(said), np.array(accepted, dtype=np.float64)
    bin_S = np.minimum((said_S * BINS).astype(int), BINS - 1)
    parts = []
    for number in range(BINS):
        inside_S = bin_S == number
        if inside_S.any():
            parts.append(
                {
                    "low": number / BINS,
                    "high": (number + 1) / BINS,
                    "slots": int(inside_S.sum()),
                    "confidence": float(said_S[inside_S].mean()),
                    "accepted": float(accepted_S[inside_S].mean()),
                }
            )
    return {
        "slots": len(said_S),
        "bins": BINS,
        "ece": sum(part["slots"] * abs(part["confidence"] - part["accepted"]) for part in parts) / len(said_S),
        "brier": float(((said_S - accepted_S) ** 2).mean()),
        "confidence": float(said_S.mean()),
        "accepted": float(accepted_S.mean()),
        "reliability": parts,
    }
