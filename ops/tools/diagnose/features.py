"""Whether the draft was trained on the features that the served target produces.

S tokens of a sample, L layers, M hidden size, F = L * M
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

import torch
from attrs import frozen
from torch import Tensor

from dsl.finding import Finding
from ops.artifacts import TargetFeatures, TokenShards
from ops.capture_targets.agreement import FLOAT32_TOLERANCE, NARROW_TOLERANCE
from ops.capture_targets.backend import forward_batch
from ops.lib.data.batching import spread
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.float8 import decoded
from ops.lib.target.float8_errors import MOST_BY_ROUNDING
from ops.lib.target.model import Target
from ops.lib.target.state_distance import other_layer, state_distances
from ops.tools.diagnose.judgement import FEATURES, judged, unmeasured

SPLIT = "train"
SAMPLES = 4
ADVICE = (
    "capture again with this target and train on that; if they still differ, the capture and the engine compute "
    "differently: `dflow doctor --backends` shows where"
)


@frozen
class Layer:
    """The mean distance of a token's stored states from the recomputed ones, relative to their norm.

    distance: to the same layer. others: to other layers, by id. neighbour: the distance of the nearest other layer's
    recomputed states from this layer's; infinite where the target has no other one to capture.
    """

    layer_id: int
    distance: float
    others: dict[int, float]
    neighbour: float


def features_finding(
    target: Target, features: TargetFeatures | None, learnt: TokenShards | None, *, is_online: bool
) -> Finding:
    """A finding on the stored features, from recomputing those of a few training samples."""
    if is_online:
        return unmeasured(FEATURES, 'capture = "online" stores no features to compare')
    if features is None or learnt is None:
        return unmeasured(FEATURES, "the store no longer has the draft's training features")
    stored, tokens = FeatureReader(features, SPLIT), TokenReader(learnt, SPLIT)
    indices = spread(range(min(len(stored), len(tokens))), SAMPLES)
    if not indices:
        return unmeasured(FEATURES, f"the split {SPLIT} has none")
    samples = [tokens.sample(index) for index in indices]
    other = [sample.id for index, sample in zip(indices, samples, strict=True) if not _same_text(stored, index, sample)]
    if other:
        return judged(
            name=FEATURES,
            measured=f"those of {', '.join(other)} were captured from other tokens",
            normal="one row for each token of the training",
            advice=ADVICE,
            is_cause=True,
        )
    layers = compare_layers(target, stored, indices, samples)
    dtypes = (stored.info["dtype"], str(target.embed_weight.dtype).removeprefix("torch."))
    allowed = max(_allowed(dtype) for dtype in dtypes) + (MOST_BY_ROUNDING if "feature_dtype" in stored.info else 0.0)
    return _layers_finding(layers, allowed, stored.info.get("feature_dtype", stored.info["dtype"]))


def _layers_finding(layers: Sequence[Layer], allowed: float, dtype: str) -> Finding:
    worst = max(layers, key=lambda layer: layer.distance)
    wrong = [layer for layer in layers if not layer.distance <= allowed]  # NaN is wrong too
    text = f"recomputed states differ by {worst.distance:.1e} of their size at most (layer {worst.layer_id}, {dtype})"
    for layer in wrong:
        nearest = other_layer(layer.others, allowed)
        if nearest is not None:
            text += f"; what is stored for layer {layer.layer_id} is layer {nearest}'s"
    neighbour = min(layer.neighbour for layer in layers)
    others = f"; a wrong layer makes {neighbour:.2g} or more here" if isfinite(neighbour) else ""
    return judged(
        name=FEATURES,
        measured=text,
        normal=f"at most {allowed:g}, which is rounding{others}",
        advice=ADVICE,
        is_cause=bool(wrong),
    )


def compare_layers(
    target: Target, stored: FeatureReader, indices: Sequence[int], samples: Sequence[TokenSample]
) -> list[Layer]:
    """Compare each stored layer with the recomputed states of itself and its neighbours, over the samples' tokens."""
    ids = stored.info["target_layer_ids"]
    near = sorted({k + step for k in ids for step in (-1, 0, 1) if 0 <= k + step < target.num_layers - 1})
    distances: dict[tuple[int, int], list[Tensor]] = {}
    apart: dict[tuple[int, int], list[Tensor]] = {}
    for index, sample in zip(indices, samples, strict=True):
        recomputed_SF, _ = forward_batch(target, [sample], near)
        by_layer = dict(zip(near, recomputed_SF[0].chunk(len(near), dim=-1), strict=True))
        stored_SF = decoded(stored.features(index, 0, stored.lengths[index]))
        for k, stored_SM in zip(ids, stored_SF.chunk(len(ids), dim=-1), strict=True):
            for other in near:
                if abs(other - k) <= 1:
                    distances.setdefault((k, other), []).append(state_distances(stored_SM, by_layer[other]))
                    apart.setdefault((k, other), []).append(state_distances(by_layer[other], by_layer[k]))
    means = {pair: float(torch.cat(found).mean()) for pair, found in distances.items()}
    gaps = {pair: float(torch.cat(found).mean()) for pair, found in apart.items()}
    return [
        Layer(
            k,
            means[k, k],
            {other: value for (of, other), value in means.items() if of == k and other != k},
            min((value for (of, other), value in gaps.items() if of == k and other != k), default=inf),
        )
        for k in ids
    ]


def _allowed(dtype: str) -> float:
    return FLOAT32_TOLERANCE if dtype == "float32" else NARROW_TOLERANCE[dtype]


def _same_text(stored: FeatureReader, index: int, sample: TokenSample) -> bool:
    return torch.equal(stored.labels(index)[0], sample.input_ids)
