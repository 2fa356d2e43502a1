"""Declaration of `tokenize_chat`: messages into token ids, loss mask and pixel rows."""

from __future__ import annotations

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import ImageSamples, TokenShards


@op(
    version=1,
    run="ops.tokenize_chat.run:tokenize_chat",
    key_libraries=("transformers", "tokenizers", "pillow"),
    single_process=True,
)
@frozen(kw_only=True)
class TokenizeChat:
    """Apply the chat template, expand image tokens, and mark the answers in a loss mask."""

    samples: ImageSamples
    processor: str = field(
        default="builtin",
        external=True,
        model_id=True,
        help='"builtin" (a byte-level BPE trained on the samples) or a checkpoint directory or model id',
    )
    vocab_size: int = field(
        default=2048, validator=validators.ge(300), help="size of the built-in tokenizer, special tokens included"
    )
    max_length: int = field(default=3072, validator=validators.ge(8), help="longer samples are dropped, never cut")
    min_loss_tokens: int = field(
        default=32, validator=validators.ge(1), help="samples with fewer answer tokens are dropped"
    )
    min_pixels: int | None = field(
        default=None, validator=validators.optional(validators.ge(1)), help="the processor's own unless given"
    )
    max_pixels: int | None = field(
        default=None, validator=validators.optional(validators.ge(1)), help="the processor's own unless given"
    )
    shard_samples: int = field(default=256, validator=validators.ge(1), help="samples in one shard")
    max_dropped: int | None = field(
        default=None, validator=validators.optional(validators.ge(0)), help="fail when more samples are dropped"
    )
    output = TokenShards
