"""Declaration of `finetune_vlm`: train a target on the tokenised samples."""

from __future__ import annotations

from attrs import frozen, validators

from dsl.op import field, op, seed_field
from ops.artifacts import TargetModel, TokenShards


@op(
    version=1,
    run="ops.finetune_vlm.run:finetune_vlm",
    key_libraries=("torch", "transformers"),
    resumable=True,
    single_process=True,
)
@frozen(kw_only=True)
class FinetuneVlm:
    """Train a vision-language target on the train split, from a tiny built-in config or from a checkpoint."""

    tokens: TokenShards
    init: str = field(
        default="builtin:tiny-qwen3-vl",
        external=True,
        model_id=True,
        help='"builtin:tiny-qwen3-vl" (random weights) or a checkpoint directory or model id to start from',
    )
    steps: int = field(default=400, validator=validators.ge(1), help="optimizer steps")
    batch_size: int = field(default=32, validator=validators.ge(1), help="samples in a step")
    lr: float = field(
        default=2e-3, validator=validators.and_(validators.gt(0), validators.lt(1)), help="peak learning rate of AdamW"
    )
    warmup_ratio: float = field(
        default=0.05, validator=validators.and_(validators.ge(0), validators.lt(1)), help="share of the steps"
    )
    weight_decay: float = field(default=0.01, validator=validators.ge(0), help="of AdamW, on matrices only")
    grad_clip: float = field(default=1.0, validator=validators.gt(0), help="largest norm of the gradient")
    checkpoint_every: int = field(default=50, validator=validators.ge(1), neutral=True, help="steps")
    log_every: int = field(default=5, validator=validators.ge(1), neutral=True, help="steps")
    eval_samples: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        help="test images whose greedy answer is compared; all unless given",
    )
    seed: int | None = seed_field()
    output = TargetModel
