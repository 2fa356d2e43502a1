"""Declaration of `capture_targets`: hidden states of the target as training data."""

from __future__ import annotations

from typing import Literal

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import TargetFeatures, TargetModel, TokenShards


@op(
    version=1,
    run="ops.capture_targets.run:capture_targets",
    key_libraries=("torch", "transformers"),
    resumable=True,
)
@frozen(kw_only=True)
class CaptureTargets:
    """Hidden states of chosen target layers for every token."""

    tokens: TokenShards
    target: TargetModel
    num_layers: int = field(
        default=5, validator=validators.ge(1), help="layers, spread from the 2nd to the 3rd-last of the target"
    )
    target_layer_ids: tuple[int, ...] | None = field(default=None, help="the layers by number, instead of num_layers")
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", help="of the forward pass and of the stored features"
    )
    splits: tuple[str, ...] = field(default=("train", "val"), help="the splits to capture")
    batch_tokens: int = field(
        default=8192, validator=validators.ge(1), neutral=True, help="padded tokens in one forward pass"
    )
    output = TargetFeatures
