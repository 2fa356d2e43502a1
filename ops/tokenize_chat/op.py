"""Declaration of `tokenize_chat`: messages into token ids, loss mask and pixel rows."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import frozen, validators

from dsl.convert import Given
from dsl.op import field, op
from ops.artifacts import ImageSamples, TargetModel, TokenShards
from ops.lib.data.limited_process import SECONDS
from ops.lib.data.tool_forms import GIVEN, ToolsAs
from ops.lib.vision.processor_files import ordered_pixels


def _fits_a_sample(instance: Any, _attribute: object, least: int) -> None:
    """A validator of min_loss_tokens. Raises ValueError if no answer of that length fits into a sample."""
    if least >= instance.max_length and not instance.prompts_only:
        raise ValueError(
            f"'min_loss_tokens': {least} answer tokens do not fit into a sample of max_length = {instance.max_length}: "
            "lower it, or raise max_length"
        )


def _of_served_contexts(instance: Any, _attribute: object, reasoning: str) -> None:
    """A validator of history_reasoning. Raises ValueError if the contexts have no prompts of their own."""
    if reasoning != "kept" and instance.contexts != "served":
        raise ValueError('\'history_reasoning\' = "dropped" needs contexts = "served"')


@op(
    version=7,
    run="ops.tokenize_chat.run:tokenize_chat",
    key_libraries=("transformers", "tokenizers", "pillow", "jinja2", "numpy"),
    single_process=True,
    shares_shards=True,
)
@frozen(kw_only=True)
class TokenizeChat:
    """Apply the chat template, insert the tokens of images, and mark the answers in a loss mask."""

    samples: ImageSamples
    target: TargetModel | None = attrs.field(
        default=None,
        validator=Given(
            "target and processor are both given: omit one, a target has its own processor",
            left_out={"processor": "builtin"},
        ),
    )
    processor: str = field(
        default="builtin",
        external=True,
        model_id=True,
        pinned_by="revision",
        help='"builtin" (a byte-level BPE trained on the samples) or a checkpoint directory or model id; '
        "omit it with a target, whose own processor is used",
    )
    revision: str | None = field(default=None, help="the commit of a model id, 40 hex digits: a branch may move")
    chat_template: str | None = field(
        default=None,
        external=True,
        validator=Given(
            "target and chat_template are both given: give the template to the target's load_target, or to the "
            "tokenize_chat that its fine-tuning reads",
            left_out={"target": None},
        ),
        help="a file with a chat template (jinja), which takes the place of the processor's; a target brings its own",
    )
    trust_remote_code: bool = field(
        default=False, help="run the code that comes with the tokenizer; a target brings its own permission"
    )
    vocab_size: int = field(
        default=2048, validator=validators.ge(300), help="size of the built-in tokenizer, special tokens included"
    )
    train_on: Literal["assistant", "last"] = field(
        default="assistant", help='"assistant": every answer is in the loss mask; "last": only the last one'
    )
    contexts: Literal["whole", "served"] = field(
        default="whole",
        keyed_default=False,
        help='"served": each answer follows the prompt that a server renders from what is before it, in as many '
        'samples as there are such contexts; "whole": a conversation is rendered once, as one sample',
    )
    history_reasoning: Literal["kept", "dropped"] = field(
        default="kept",
        keyed_default=False,
        validator=_of_served_contexts,
        help='whether prompts have the reasoning of earlier answers, with contexts = "served": "dropped" if clients do '
        "not send it back",
    )
    prompts_only: bool = field(
        default=False,
        help="keep each conversation up to the last turn of the user or a tool, without an answer: prompts for "
        "evaluate, not for a training",
    )
    enable_thinking: bool | None = field(
        default=None,
        help="passed to the chat template; default: that of the template; false for a thinking target and answers "
        "without reasoning",
    )
    tools_as: ToolsAs = field(
        default=GIVEN,
        keyed_default=False,
        help="the form of tools for the chat template: that of the data, or that in which the server of an engine "
        "writes them",
    )
    max_length: int = field(
        default=3072,
        validator=validators.ge(8),
        help='longer samples are dropped, never cut; with contexts = "served" they end behind the last answer that '
        "fits",
    )
    min_loss_tokens: int = field(
        default=32,
        validator=[validators.ge(1), _fits_a_sample],
        help="conversations with fewer answer tokens, in all their samples together, are dropped",
    )
    min_pixels: int | None = field(
        default=None, validator=validators.optional(validators.ge(1)), help="default: the processor's own"
    )
    max_pixels: int | None = field(
        default=None,
        validator=[validators.optional(validators.ge(1)), ordered_pixels],
        help="default: the processor's own",
    )
    image_backend: Literal["pillow", "torchvision"] = field(
        default="pillow",
        help="the library that resizes images, which should be that of the serving engine; torchvision must "
        "be installed",
    )
    shard_samples: int = field(
        default=256, validator=validators.ge(1), help="samples in one shard; fewer if their images are large"
    )
    preview_samples: int = field(
        default=20, validator=validators.ge(0), help="samples of the train split shown in preview.html"
    )
    max_dropped: int | None = field(
        default=None, validator=validators.optional(validators.ge(0)), help="fail when more samples are dropped"
    )
    expected_tokens: int | None = field(
        default=None,
        neutral=True,
        validator=validators.optional(validators.ge(1)),
        help="estimated number of tokens, by which `dflow plan` estimates disk until they are counted",
    )
    render_seconds: float = field(
        default=SECONDS,
        neutral=True,
        validator=validators.gt(0),
        help="CPU time in which the chat template must render a sample; the node fails otherwise",
    )
    workers: int | None = field(
        default=None,
        neutral=True,
        validator=validators.optional(validators.ge(1)),
        help="samples processed at the same time; default: the number of cores. Does not affect the result",
    )
    output = TokenShards

    def chosen_libraries(self) -> tuple[str, ...]:
        """The further libraries whose versions enter the key, besides key_libraries."""
        return ("torchvision",) if self.image_backend == "torchvision" else ()
