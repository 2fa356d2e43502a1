"""Declaration of `train_dflash`: the draft."""

from __future__ import annotations

from attrs import frozen, validators

from dsl.op import field, op, seed_field
from ops.artifacts import BatchPlan, DraftCheckpoint, TargetFeatures, TargetModel, TokenShards

AT_LEAST_1 = validators.optional(validators.ge(1))


@op(
    version=1,
    run="ops.train_dflash.run:train_dflash",
    key_libraries=("torch", "transformers"),
    resumable=True,
)
@frozen(kw_only=True)
class TrainDflash:
    """Train a DFlash draft on captured features with the target's frozen embedding and head."""

    features: TargetFeatures
    batches: BatchPlan
    target: TargetModel
    tokens: TokenShards | None = None
    block_size: int = field(default=16, validator=validators.ge(2), help="tokens proposed and verified at once")
    num_layers: int = field(default=5, validator=validators.ge(1), help="draft layers")
    num_heads: int | None = field(default=None, validator=AT_LEAST_1, help="query heads; the target's unless given")
    num_kv_heads: int | None = field(
        default=None, validator=AT_LEAST_1, help="key/value heads; the target's unless given"
    )
    head_dim: int | None = field(default=None, validator=AT_LEAST_1, help="size of a head; the target's unless given")
    intermediate_size: int | None = field(
        default=None, validator=AT_LEAST_1, help="of the MLP; the target's unless given"
    )
    sliding_layers: tuple[int, ...] = field(
        default=(),
        validator=validators.deep_iterable(validators.ge(0)),
        help="draft layers, counted from 0, with a sliding window: causal, over the last sliding_window tokens",
    )
    sliding_window: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(2)),
        help="tokens that a query of a sliding layer sees, its own included",
    )
    rope_theta: float | None = field(
        default=None, validator=validators.optional(validators.gt(0)), help="the target's unless given"
    )
    num_anchors: int = field(default=512, validator=validators.ge(1), help="anchors drawn per sequence, at most")
    gamma: float | None = field(
        default=None,
        validator=validators.optional(validators.gt(0)),
        help="decay of the slots' weights; 7 / 5 / 4 for block sizes 16 / 10 / 8, else half the block size",
    )
    lr: float = field(
        default=6e-4, validator=validators.and_(validators.gt(0), validators.lt(1)), help="peak learning rate of AdamW"
    )
    weight_decay: float = field(default=0.0, validator=validators.ge(0), help="of AdamW, on matrices only")
    warmup_ratio: float = field(
        default=0.04, validator=validators.and_(validators.ge(0), validators.lt(1)), help="share of the steps"
    )
    grad_clip: float = field(default=1.0, validator=validators.gt(0), help="largest norm of the gradient")
    max_steps: int | None = field(
        default=None, validator=validators.optional(validators.ge(1)), help="stop before the plan of batches ends"
    )
    micro_batch_tokens: int = field(
        default=16384, validator=validators.ge(1), neutral=True, help="padded tokens in one forward pass of the draft"
    )
    checkpoint_every: int = field(default=50, validator=validators.ge(1), neutral=True, help="steps")
    log_every: int = field(default=5, validator=validators.ge(1), neutral=True, help="steps")
    eval_every: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        neutral=True,
        help="steps between measurements of loss and accuracy on the val split; at the end only unless given",
    )
    seed: int | None = seed_field()
    output = DraftCheckpoint
