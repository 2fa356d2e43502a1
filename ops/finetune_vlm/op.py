"""Declaration of `finetune_vlm`: train a target on the tokenised samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from attrs import frozen, validators

from dsl.convert import Given, Needs, Only
from dsl.errors import ConfigError
from dsl.op import field, is_builtin, op, seed_field
from ops.artifacts import TargetModel, TokenShards

AT_LEAST_1 = validators.optional(validators.ge(1))
RATE = validators.and_(validators.gt(0), validators.lt(1))


def _pattern(_instance: object, _attribute: object, pattern: str | None) -> None:
    """A validator: the pattern is a regular expression with exactly one group."""
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"'pattern' is not a regular expression: {error}") from error
    if groups != 1:
        raise ValueError(f"'pattern' must have one group, got {groups}: {pattern}")


def _frozen(instance: Any, _attribute: object, parts: tuple[str, ...]) -> None:
    """A validator: a frozen part must have no learning rate of its own."""
    for part in ("vision", "projector"):
        if part in parts and getattr(instance, f"lr_{part}", None) is not None:
            raise ValueError(f"'lr_{part}' is given, but freeze contains \"{part}\": give only one of them")


@op(
    version=2,
    run="ops.finetune_vlm.run:finetune_vlm",
    key_libraries=("torch", "transformers"),
    resumable=True,
    sequence_parallel=True,
    gpu=True,
)
@frozen(kw_only=True)
class FinetuneVlm:
    """Train a vision-language target on the train split, from a tiny built-in config or from a checkpoint."""

    tokens: TokenShards
    init: str = field(
        default="builtin:tiny-qwen3-vl",
        external=True,
        model_id=True,
        pinned_by="revision",
        help='"builtin:tiny-qwen3-vl" (random weights) or a checkpoint directory or model id to start from',
    )
    revision: str | None = field(default=None, help="the commit of a model id, 40 hex digits: a branch may move")
    trust_remote_code: bool = field(default=False, help="run the checkpoint's own code")
    mask_token_id: int | None = field(
        default=None,
        keyed_default=False,
        help="id of the mask token where train_dflash sets none, an id that no text gives. Default: that of the tokens",
    )
    steps: int = field(default=400, validator=validators.ge(1), help="optimizer steps")
    batch_size: int | None = field(
        default=None, validator=AT_LEAST_1, help="samples in a step; default: 32, without batch_tokens"
    )
    batch_tokens: int | None = field(
        default=None,
        validator=[
            AT_LEAST_1,
            Given("batch_size and batch_tokens: give only one of them", left_out={"batch_size": None}),
        ],
        help="instead of batch_size: maximum number of tokens in a step",
    )
    optimizer: Literal["adamw", "muon"] = field(
        default="adamw", help="muon: for all matrices but those of the embeddings, with AdamW for the rest"
    )
    lr: float = field(default=2e-3, validator=RATE, help="peak learning rate")
    lr_vision: float | None = field(
        default=None, validator=validators.optional(RATE), help="learning rate of the vision tower; default: lr"
    )
    lr_projector: float | None = field(
        default=None,
        validator=validators.optional(RATE),
        help="learning rate of the mergers, which project visual features into the language model; default: lr",
    )
    freeze: tuple[Literal["vision", "projector", "text", "embeddings"], ...] = field(
        default=(),
        validator=_frozen,
        help='parts that are not trained; "embeddings": those of the tokens and the head, "text": all other layers of '
        "the language model",
    )
    warmup_ratio: float = field(
        default=0.05, validator=validators.and_(validators.ge(0), validators.lt(1)), help="share of the steps"
    )
    weight_decay: float = field(default=0.01, validator=validators.ge(0), help="on matrices only")
    grad_clip: float = field(default=1.0, validator=validators.gt(0), help="maximum norm of the gradient")
    dtype: Literal["float32", "bfloat16"] = field(
        default="float32",
        help="of the computation and of the written weights; while training, weights and loss are float32",
    )
    micro_batch_tokens: int = field(
        default=16384,
        validator=validators.ge(1),
        neutral=True,
        help="padded tokens in one forward pass; a larger step accumulates the gradients of several",
    )
    gradient_checkpointing: bool = field(
        default=False, neutral=True, help="compute layers twice instead of keeping their activations"
    )
    checkpoint_every: int = field(default=50, validator=validators.ge(1), neutral=True, help="steps")
    keep_checkpoints: int = field(
        default=1, validator=validators.ge(1), neutral=True, help="checkpoints to keep, the newest"
    )
    max_nonfinite: int = field(
        default=3,
        validator=validators.ge(1),
        neutral=True,
        help="consecutive steps with a non-finite loss or gradient after which training fails; fewer are skipped",
    )
    log_every: int = field(default=5, validator=validators.ge(1), neutral=True, help="steps")
    eval_every: int | None = field(
        default=None,
        validator=AT_LEAST_1,
        neutral=True,
        help="steps between measurements of loss and accuracy on the val split; default: only at the end",
    )
    metric: Literal["none", "exact_match", "label_in_answer", "pattern"] = field(
        default="none",
        validator=Needs(
            "pattern", "metric = \"pattern\" needs 'pattern', a regular expression with one group", given=("pattern",)
        ),
        help="when a greedy answer counts as right: it is the label; it contains the label as whole words, ignoring "
        "case (anywhere in scripts without spaces); or both match `pattern` first with the same text",
    )
    pattern: str | None = field(
        default=None,
        validator=[Only("metric", "pattern", "'{name}' is only for metric = \"pattern\""), _pattern],
        schema={"format": "regex"},
        help="of metric = \"pattern\": a regular expression with one group, such as 'the digit ([0-9])'; samples whose "
        "label does not match are left out",
    )
    max_new_tokens: int = field(default=32, validator=validators.ge(1), help="maximum length of the greedy answers")
    eval_samples: int | None = field(
        default=None,
        validator=AT_LEAST_1,
        help="samples of a split whose greedy answer is compared, chosen by hash of their ids; default: all",
    )
    seed: int | None = seed_field()
    output = TargetModel

    @staticmethod
    def mistakes_with_nodes_above(values: Mapping[str, Any], above: Callable[..., Mapping[str, Any]]) -> dict[str, str]:
        """Mistakes against nodes above: a checkpoint cannot be trained on tokens of the built-in tokenizer."""
        init, tokenize = values.get("init"), above("tokens")
        is_foreign = tokenize.get("processor") == "builtin" and tokenize.get("target") is None
        if init is None or is_builtin(init) or not is_foreign:
            return {}
        return {
            "init": 'the tokens are those of processor = "builtin", which no checkpoint knows: give tokenize_chat '
            f'processor = "{init}"'
        }


Part = Literal["vision", "projector", "text", "embeddings"]
SEEING: tuple[Part, ...] = ("vision", "projector")  # without a gradient in a step without an image
READING: tuple[Part, ...] = ("text", "embeddings")


def parts_in(config: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts that a target of this config.json has."""
    return (*SEEING, *READING) if config.get("vision_config") else READING


def check_parts(config: FinetuneVlm, parts: Collection[Part], model_type: str) -> None:
    """Check that the named parts exist in the target, and that something is left to train. Raises ConfigError."""
    fields: list[tuple[str, Part]] = [(f'freeze = "{part}"', part) for part in config.freeze]
    rates: tuple[tuple[str, Part], ...] = (("lr_vision", "vision"), ("lr_projector", "projector"))
    fields += [(name, part) for name, part in rates if getattr(config, name) is not None]
    for name, part in fields:
        if part not in parts:
            raise ConfigError(f"{name}: a {model_type} target has no such part")
    if set(parts) <= {*config.freeze}:
        raise ConfigError(f"freeze = {list(config.freeze)}: no part of the target is left to train")


def search(pattern: str, text: str) -> str | None:
    """The pattern's group at its first match, None without one."""
    found = re.search(pattern, text)
    return found.group(1) if found else None
