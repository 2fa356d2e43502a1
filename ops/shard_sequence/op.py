"""Declaration of `shard_sequence`: the plan of batches."""

from __future__ import annotations

from attrs import frozen, validators

from dsl.op import field, op, seed_field
from ops.artifacts import BatchPlan, TargetFeatures


@op(version=1, run="ops.shard_sequence.run:shard_sequence", single_process=True)
@frozen(kw_only=True)
class ShardSequence:
    """Plan the global steps of training: which samples each takes, in an order that depends on the seed alone."""

    features: TargetFeatures
    tokens_per_step: int = field(
        default=16384, validator=validators.ge(1), help="padded tokens in one global step, over all ranks"
    )
    pad_multiple: int = field(default=8, validator=validators.ge(1), help="sequences are padded to a multiple of this")
    epochs: int = field(default=6, validator=validators.ge(1), help="passes over the train split")
    seed: int | None = seed_field()
    output = BatchPlan
