"""Compares the states of two capture backends: how far they differ, and whether rounding explains it.

S tokens of a sample, L captured layers, M hidden size, F = L * M
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor

from ops.lib.data.token_shards import TokenSample

# Of a token's state, relative to its norm. Measured in float32 on tiny targets of every family: correct states are at
# most 1.6e-5 apart, the next layer at least 0.3, positions in one dimension 0.3; deeper targets round more.
FLOAT32_TOLERANCE = 2e-3
# Below float32 two correct backends differ by about as much as each of them from float32.
TIMES_OWN_ROUNDING = 3.0
# If float32 states are not available.
NARROW_TOLERANCE = {"bfloat16": 0.1, "float16": 0.02}
LOG_PROB_TOLERANCE = {"float32": 0.02, "bfloat16": 0.5, "float16": 0.1}
KINDS = ("text", "image")


@frozen
class LargestDifference:
    """The largest difference among the tokens of one kind, and where it occurs.

    absolute: of a single number. relative: of a state, relative to the norm of the first backend's state.
    """

    absolute: float
    relative: float
    sample: str
    position: int


@frozen
class Comparison:
    """The comparison of two backends for one layer and kind of token. allowed: the relative distance that rounding
    explains.
    """

    layer: int
    kind: str
    furthest: LargestDifference
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.furthest.relative <= self.allowed  # NaN does not

    def row(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {"layer": self.layer, "kind": self.kind, "allowed": self.allowed, **asdict(self.furthest)} | {
            "agrees": self.agrees
        }


def compare_states(
    samples: Sequence[TokenSample],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    layer_ids: Sequence[int],
    image_token_id: int | None,
    dtype: str,
    float32: Sequence[Tensor] | None = None,
) -> list[Comparison]:
    """Compare two backends' states layer by layer, separately for image tokens and others.

    ours, theirs, float32: [S, F] of each sample. float32: the first backend's states in float32, which show the
    rounding of a narrower dtype.
    """
    compared = []
    for place, layer in enumerate(layer_ids):
        for kind in KINDS:
            furthest = _furthest(samples, ours, theirs, place, len(layer_ids), kind, image_token_id)
            if furthest is None:
                continue
            if dtype == "float32":
                allowed = FLOAT32_TOLERANCE
            elif float32 is None:
                allowed = NARROW_TOLERANCE[dtype]
            else:
                own = _furthest(samples, float32, ours, place, len(layer_ids), kind, image_token_id)
                least = 4 * torch.finfo(getattr(torch, dtype)).eps
                allowed = max(TIMES_OWN_ROUNDING * own.relative, least) if own else least
            compared.append(Comparison(layer, kind, furthest, allowed))
    return compared


def _furthest(
    samples: Sequence[TokenSample],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    place: int,
    layers: int,
    kind: str,
    image_token_id: int | None,
) -> LargestDifference | None:
    """The largest differences of a layer among tokens of one kind; None without such tokens."""
    found = None
    absolute = 0.0
    for sample, ours_SF, theirs_SF in zip(samples, ours, theirs, strict=True):
        is_image_S = sample.input_ids == image_token_id if image_token_id is not None else torch.zeros(len(ours_SF))
        chosen = is_image_S.bool() if kind == "image" else ~is_image_S.bool()
        if not chosen.any():
            continue
        ours_SM, theirs_SM = ours_SF.float().chunk(layers, dim=1)[place], theirs_SF.float().chunk(layers, dim=1)[place]
        difference_SM = (ours_SM - theirs_SM).nan_to_num(torch.inf)
        relative_S = difference_SM.norm(dim=1) / ours_SM.norm(dim=1).clamp(min=1e-12)
        relative_S = relative_S.masked_fill(~chosen, -1.0)
        position = int(relative_S.argmax())
        absolute = max(absolute, float(difference_SM[chosen].abs().max()))
        if found is None or float(relative_S[position]) > found.relative:
            found = LargestDifference(absolute, float(relative_S[position]), sample.id, position)
    return found and LargestDifference(absolute, found.relative, found.sample, found.position)
