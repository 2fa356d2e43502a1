"""Declaration of `shard_sequence`: the plan of batches."""

from __future__ import annotations

import attrs
from attrs import frozen, validators

from dsl.convert import Given, Needs
from dsl.op import field, op, seed_field
from ops.artifacts import BatchPlan, TargetFeatures, TokenShards

SPLIT = "train"
ONE_SOURCE = (
    Needs(None, "give features, or tokens where train_dflash captures online: both are missing", given=("tokens",)),
    Given(
        "'features' and tokens are both given: give features, or tokens where train_dflash captures online",
        left_out={"tokens": None},
    ),
)


@op(
    version=1,
    run="ops.shard_sequence.run:shard_sequence",
    single_process=True,
)
@frozen(kw_only=True)
class ShardSequence:
    """Plan the global steps of training: which samples each uses, in an order that depends only on the seed."""

    features: TargetFeatures | None = attrs.field(default=None, validator=list(ONE_SOURCE))
    tokens: TokenShards | None = None
    tokens_per_step: int = field(
        default=16384, validator=validators.ge(1), help="padded tokens in one global step, over all ranks"
    )
    pad_multiple: int = field(default=8, validator=validators.ge(1), help="sequences are padded to a multiple of this")
    epochs: int = field(default=6, validator=validators.ge(1), help="passes over the train split")
    seed: int | None = seed_field()
    output = BatchPlan
