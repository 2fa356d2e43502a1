"""Declaration of `regenerate_answers`: the target answers the prompts of the samples itself."""

from __future__ import annotations

from typing import Literal

from attrs import frozen, validators

from dsl.op import field, op, seed_field
from ops.artifacts import ImageSamples, TargetModel


@op(
    version=1,
    run="ops.regenerate_answers.run:regenerate_answers",
    key_libraries=("torch", "transformers", "tokenizers", "pillow"),
    resumable=True,
    single_process=True,
)
@frozen(kw_only=True)
class RegenerateAnswers:
    """Replace the answers of the samples by the target's own, turn after turn."""

    samples: ImageSamples
    target: TargetModel
    splits: tuple[Literal["train", "val", "test"], ...] = field(
        default=("train", "val"), help="the splits to answer anew; the samples of the others pass unchanged"
    )
    temperature: float = field(default=0.0, validator=validators.ge(0), help="of the sampling; 0: the likeliest token")
    top_p: float = field(
        default=1.0,
        validator=validators.and_(validators.gt(0), validators.le(1)),
        help="sample among the likeliest tokens that together reach this probability",
    )
    max_new_tokens: int = field(default=1024, validator=validators.ge(1), help="tokens of one answer, its EOS included")
    max_prompt_tokens: int = field(
        default=3072, validator=validators.ge(1), help="samples with a longer prompt are dropped, never cut"
    )
    enable_thinking: bool | None = field(
        default=None, help="for chat templates that know it; their own default unless given"
    )
    min_pixels: int | None = field(
        default=None, validator=validators.optional(validators.ge(1)), help="the processor's own unless given"
    )
    max_pixels: int | None = field(
        default=None, validator=validators.optional(validators.ge(1)), help="the processor's own unless given"
    )
    image_backend: Literal["pillow", "torchvision"] = field(
        default="pillow", help="the library that resizes images; torchvision has to be installed"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", help="of the forward pass")
    finish_reasons: tuple[Literal["stop", "length"], ...] = field(
        default=("stop",),
        validator=validators.min_len(1),
        help='keep answers that ended so: "stop" by an EOS token, "length" at max_new_tokens',
    )
    min_answer_tokens: int = field(
        default=2, validator=validators.ge(1), help="samples with a shorter answer are dropped; EOS counts"
    )
    max_answer_tokens: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        help="samples with a longer answer are dropped; EOS counts",
    )
    drop_retokenised: bool = field(
        default=False, help="drop samples with an answer whose text gives other tokens than the target generated"
    )
    batch_tokens: int = field(
        default=16384,
        validator=validators.ge(1),
        neutral=True,
        help="padded tokens of one batch, the new ones included",
    )
    shard_samples: int = field(
        default=256, validator=validators.ge(1), neutral=True, help="samples that are asked their next turn together"
    )
    max_dropped: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(0)),
        neutral=True,
        help="fail when more samples are dropped; outside the key, so that finished shards survive a change of it",
    )
    seed: int | None = seed_field()
    output = ImageSamples

    def chosen_libraries(self) -> tuple[str, ...]:
        """What enters the key beside key_libraries."""
        return ("torchvision",) if self.image_backend == "torchvision" else ()
