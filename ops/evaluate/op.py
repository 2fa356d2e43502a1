"""Declaration of `evaluate`: real speculative decoding."""

from __future__ import annotations

from typing import Literal

from attrs import frozen, validators

from dsl.op import field, op, seed_field
from ops.artifacts import Draft, Report, TargetModel, TokenShards


@op(
    version=1,
    run="ops.evaluate.run:evaluate",
    resources="ops.evaluate.resources:evaluate_resources",
    smoke="ops.evaluate.smoke:evaluate_smoke",
    work="ops.evaluate.smoke:evaluate_work",
    key_libraries=("torch", "transformers", "numpy"),
    single_process=True,
    shows_results=True,
    gpu=True,
)
@frozen(kw_only=True)
class Evaluate:
    """Decode held-out prompts with the draft and the target; measure tau and check that nothing is lost."""

    draft: Draft
    target: TargetModel
    tokens: TokenShards
    split: Literal["val", "test"] = field(default="test", help="where the prompts come from")
    max_prompts: int | None = field(
        default=64, validator=validators.optional(validators.ge(1)), help="prompts of each category; all unless given"
    )
    max_new_tokens: int = field(default=128, validator=validators.ge(1), help="generated tokens per prompt, at most")
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", help="of the forward passes of target and draft"
    )
    random_draft: bool = field(default=True, help="measure a randomly initialised draft beside the exported one")
    tie_margin: float = field(
        default=1e-4,
        validator=validators.ge(0),
        help="a differing token whose two best logits lie closer than this is a tie, not an error",
    )
    bootstrap: int = field(default=2000, validator=validators.ge(1), help="resamplings for the 95 % intervals")
    seed: int | None = seed_field()
    output = Report
