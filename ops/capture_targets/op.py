"""Declaration of `capture_targets`: hidden states of the target as training data."""

from __future__ import annotations

from typing import Literal

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import TargetFeatures, TargetModel, TokenShards


def ascending_layers(_instance: object, _attribute: object, layer_ids: tuple[int, ...]) -> None:
    """Refuse no layers, a layer twice, another order than that of the layers, and negative ids."""
    if not layer_ids:
        raise ValueError("'target_layer_ids' must name at least one layer")
    if len(set(layer_ids)) < len(layer_ids):
        raise ValueError(f"'target_layer_ids' must name each layer once: {list(layer_ids)}")
    if list(layer_ids) != sorted(layer_ids):
        raise ValueError(f"'target_layer_ids' must be ascending, as serving engines hand them over: {list(layer_ids)}")
    if min(layer_ids) < 0:
        raise ValueError(f"'target_layer_ids' must be >= 0: {list(layer_ids)}")


@op(
    version=1,
    run="ops.capture_targets.run:capture_targets",
    key_libraries=("torch", "transformers"),
    resumable=True,
    single_process=True,
)
@frozen(kw_only=True)
class CaptureTargets:
    """Hidden states of chosen target layers for every token."""

    tokens: TokenShards
    target: TargetModel
    num_layers: int = field(
        default=5, validator=validators.ge(1), help="layers, spread from the 2nd to the 3rd-last of the target"
    )
    target_layer_ids: tuple[int, ...] | None = field(
        default=None,
        validator=validators.optional(ascending_layers),
        help="the layers by number, instead of num_layers; the last layer is not allowed",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", help="of the forward pass and of the stored features"
    )
    final_hidden: bool = field(
        default=False, help='also keep the states behind the final norm, which loss = "kl" of train_dflash needs'
    )
    splits: tuple[Literal["train", "val", "test"], ...] = field(default=("train", "val"), help="the splits to capture")
    shard_tokens: int = field(
        default=16384, validator=validators.ge(1), help="tokens in one shard of features, the unit of resuming"
    )
    batch_tokens: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        neutral=True,
        help="padded tokens in one forward pass; unless given 8192 on a GPU, and 1024 on a CPU for its caches' sake",
    )
    output = TargetFeatures
