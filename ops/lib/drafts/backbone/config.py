"""The draft's shape: `DraftConfig`, and its form in the config.json of the serving contract."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import isfinite
from typing import Any

from attrs import field, frozen

from dsl.errors import ConfigError, DataError
from ops.lib.drafts.algorithms import DFLASH, Algorithm, algorithm_class, part_of, plain
from ops.lib.drafts.layout import Layout
from ops.lib.target.head_settings import HeadSettings

ALGORITHM = "algorithm"
POSITIONS = "sequential"
FORMAT = 1
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {  # rope_type -> the parameters without which it has no frequencies
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
ROPE_SIZES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # above 0
ROPE_NUMBERS = (*ROPE_SIZES, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

SHAPE_FIELDS = (  # decide the shapes of the tensors
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)

NESTS = ("dflash_config", "dflow")  # the tables of a config.json
SIZES = (*SHAPE_FIELDS, "vocab_size", "max_position_embeddings", "rms_norm_eps")  # alike in all formats
LAYER_IDS = "target_layer_ids"
SCALES: Mapping[str, Any] = {  # how the target's embedding and head are used; in a config.json where it is not this
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
IS_CAUSAL = "is_causal"  # of the serving contract, only where a layer slides: `serving_causality`
OF_TARGET = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_layers"}


# Converters with types: of plain `tuple` a type checker cannot tell what the argument may hold.
def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _names(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


class DraftConfigError(ConfigError):
    """Values of a draft's config do not fit; each mistake is "field: what is wrong"."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__(*mistakes, head="draft config")


@frozen(kw_only=True)
class DraftConfig:
    """The configuration of a draft: all that decides its weights and its forward pass.

    hidden_size and vocab_size are the target's, because embedding and head are shared. target_layer_ids name the layers
    whose outputs are the context features, ascending, since engines hand them over in the order of the layers.
    rope_scaling holds {"rope_type", ...} for anything but plain RoPE. positions is always "sequential": absolute 1-D.
    A full layer sees all of the context and all of its block. In a sliding layer a query at position p sees the keys at
    positions j with 0 <= p - j < sliding_window, in the context and in its own block, which is causal there;
    without such a layer sliding_window has no meaning, as in the engines. block_size: tokens that are verified at once,
    the anchor among them. algorithm: what it adds, and its layout. input_embedding_scale: of the rows of the target's
    embedding. output_multiplier, final_logit_softcapping: of the product with the target's head (`HeadSettings`).
    Raises ConfigError that lists every value that does not fit.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...] = field(converter=_numbers)
    num_target_layers: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    layer_types: tuple[str, ...] = field(default=(), converter=_names)
    sliding_window: int | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    positions: str = POSITIONS
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    algorithm: Algorithm = field(factory=plain)

    def __attrs_post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL_ATTENTION,) * self.num_hidden_layers)
        mistakes = [
            *_size_mistakes(self),
            *_layer_mistakes(self),
            *_rope_mistakes(self),
            *_end_mistakes(self),
            *self.algorithm.mistakes(self),
        ]
        if mistakes:
            raise DraftConfigError(*mistakes)

    def layout(self, block_size: int | None = None) -> Layout:
        """The layout of blocks with so many verified tokens: which slot predicts which token. Default: as
        in training.
        """
        return self.algorithm.layout(block_size or self.block_size)

    @property
    def head_settings(self) -> HeadSettings:
        """What the draft's logits are made by, of the product of its states with the target's head."""
        return HeadSettings(self.output_multiplier, self.final_logit_softcapping)

    @property
    def slides(self) -> bool:
        """Whether any layer has a sliding window."""
        return SLIDING_ATTENTION in self.layer_types

    def window(self, layer: int) -> int | None:
        """The number of tokens that a query of this layer sees, including its own; None for a layer without
        a window.
        """
        return self.sliding_window if self.layer_types[layer] == SLIDING_ATTENTION else None

    @property
    def rotary_dim(self) -> int:
        """The number of a head's dimensions that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)


def _size_mistakes(config: DraftConfig) -> list[str]:
    mistakes = [
        f"{name}: must be at least 1, got {getattr(config, name)}"
        for name in (*SHAPE_FIELDS, "vocab_size", "max_position_embeddings")
        if getattr(config, name) < 1
    ]
    if mistakes:
        return mistakes
    if config.num_attention_heads % config.num_key_value_heads:
        mistakes.append(
            f"num_attention_heads: {config.num_attention_heads} is no multiple of "
            f"num_key_value_heads = {config.num_key_value_heads}"
        )
    if config.block_size < 2:
        mistakes.append(f"block_size: must be at least 2, got {config.block_size}; a block of 1 proposes nothing")
    if not 0 <= config.mask_token_id < config.vocab_size:
        mistakes.append(f"mask_token_id: {config.mask_token_id} is no id below vocab_size = {config.vocab_size}")
    return mistakes


def _layer_mistakes(config: DraftConfig) -> list[str]:
    mistakes = []
    ids = config.target_layer_ids
    if not ids:
        mistakes.append("target_layer_ids: names no layer")
    if list(ids) != sorted(set(ids)):
        mistakes.append(f"target_layer_ids: must be distinct and ascending, got {list(ids)}")
    outside = [layer for layer in ids if not 0 <= layer < config.num_target_layers - 1]
    if outside:
        mistakes.append(
            f"target_layer_ids: {outside} outside 0..{config.num_target_layers - 2} "
            f"(the target has {config.num_target_layers} layers, and the last one cannot be captured)"
        )
    if len(config.layer_types) != config.num_hidden_layers:
        mistakes.append(f"layer_types: {len(config.layer_types)} entries for {config.num_hidden_layers} layers")
    unknown = sorted(set(config.layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if unknown:
        mistakes.append(
            f'layer_types: only "{FULL_ATTENTION}" and "{SLIDING_ATTENTION}" are supported, got {", ".join(unknown)}'
        )
    # Engines keep window - 1 and some of them read 0 as "no window", so 1 would be served as full attention.
    if config.slides and (config.sliding_window is None or config.sliding_window < 2):
        mistakes.append(
            f"sliding_window: layers of {SLIDING_ATTENTION} need one of at least 2 tokens, got {config.sliding_window}"
        )
    return mistakes


def _rope_mistakes(config: DraftConfig) -> list[str]:
    mistakes = [*_scaling_mistakes(config.rope_scaling or {})]
    if config.rope_theta <= 0:
        mistakes.append(f"rope_theta: must be positive, got {config.rope_theta}")
    if not 0 < config.partial_rotary_factor <= 1 or config.rotary_dim < 2 or config.rotary_dim % 2:
        mistakes.append(
            f"partial_rotary_factor: {config.partial_rotary_factor} of head_dim = {config.head_dim} must give "
            "an even number of dimensions, at least 2"
        )
    if config.positions != POSITIONS:
        mistakes.append(f'positions: must be "{POSITIONS}", got "{config.positions}"')
    return mistakes


def _end_mistakes(config: DraftConfig) -> Iterator[str]:
    for name, default in SCALES.items():
        value = getattr(config, name)
        if value != default and not (isfinite(value) and value > 0):
            yield f"{name}: must be above 0, got {value}"


def _scaling_mistakes(scaling: Mapping[str, Any]) -> Iterator[str]:
    """Mistakes in rope_scaling: an unsupported kind, missing parameters, and values that are no numbers."""
    rope_type = scaling.get("rope_type", "default")
    if rope_type not in list(ROPE_NEEDS):
        yield f'rope_scaling: rope_type "{rope_type}" is not one of {", ".join(ROPE_NEEDS)}'
        return
    present = {name: value for name, value in scaling.items() if value is not None}
    for name in ROPE_NEEDS[rope_type]:
        if name not in present:
            yield f'rope_scaling: {name} is missing, and rope_type "{rope_type}" needs it'
    for name in ROPE_NUMBERS:
        value = present.get(name, 1)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (name in ROPE_SIZES and not value > 0):
            wanted = "a number above 0" if name in ROPE_SIZES else "a number"
            yield f"rope_scaling: {name} must be {wanted}, got {json.dumps(value)}"
    if not isinstance(present.get("truncate", True), bool):
        yield f"rope_scaling: truncate must be true or false, got {json.dumps(present['truncate'])}"


def unfit_fields(draft: DraftConfig, target: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a draft's config that do not fit the target, each with the reason. target: target.json."""
    wrong = unlike_sizes({name: getattr(draft, name) for name in OF_TARGET}, target)
    last = target["num_layers"] - 2  # the output of the last layer cannot be captured
    outside = [layer for layer in draft.target_layer_ids if layer > last]
    if outside:
        wrong[LAYER_IDS] = f"{list(draft.target_layer_ids)}, and the target has 0..{last} to read"
    return wrong


def unlike_sizes(sizes: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, str]:
    """The given sizes that differ from the target's in its target.json, as name -> both values."""
    return {
        name: f"{sizes[name]}, and the target's is {target[of_target]}"
        for name, of_target in OF_TARGET.items()
        if name in sizes and sizes[name] != target[of_target]
    }


def check_draft_fits(draft: DraftConfig, target: Mapping[str, Any]) -> None:
    """Check that a draft fits the target, by `draft_misfit`. Raises DataError."""
    if misfit := draft_misfit(draft, target):
        raise DataError(misfit)


def draft_misfit(draft: DraftConfig, target: Mapping[str, Any]) -> str:
    """A text that lists the fields which do not fit the target, and what to do; empty for a draft that fits."""
    wrong = unfit_text(unfit_fields(draft, target))
    remedy = "give train_dflash, export_draft and evaluate the same target"
    return f"the draft does not fit the target: {wrong}; {remedy}" if wrong else ""


def unfit_text(wrong: Mapping[str, str]) -> str:
    """The findings of `unfit_fields` in one line."""
    return "; ".join(f"{name} {what}" for name, what in wrong.items())


def to_serving(config: DraftConfig, dtype: str = "float32") -> dict[str, Any]:
    """The serving config.json of a draft; `from_serving` gives the config back."""
    scales = {name: getattr(config, name) for name, default in SCALES.items() if getattr(config, name) != default}
    return config.algorithm.to_serving(_plain_form(config, dtype, scales))


def _plain_form(config: DraftConfig, dtype: str, scales: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json before the algorithm's own fields are in their places. scales: those of SCALES that it has."""
    causality = {IS_CAUSAL: serving_causality(config)} if config.slides else {}
    name = config.algorithm.name
    own = {} if name == DFLASH else {ALGORITHM: name}
    return causality | {
        "architectures": [config.algorithm.architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "dtype": dtype,
        **{name: getattr(config, name) for name in SIZES},
        "rope_theta": config.rope_theta,
        "rope_scaling": dict(config.rope_scaling) if config.rope_scaling else None,
        "partial_rotary_factor": config.partial_rotary_factor,
        "layer_types": list(config.layer_types),
        # Transformers' Qwen3Config forgets sliding_window where this is false.
        "use_sliding_window": config.slides,
        "sliding_window": config.sliding_window,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **scales,
        },
        "dflow": {"format": FORMAT, "positions": config.positions, **own},
    }


def serving_causality(config: DraftConfig) -> bool | None:
    """The value of is_causal for the config.json of a draft with sliding windows.

    Engines and the reference class apply true and false to every layer. By null they use their default: sliding layers
    are causal, full layers are not.
    """
    return None if FULL_ATTENTION in config.layer_types else True


def from_serving(data: Mapping[str, Any]) -> DraftConfig:
    """The DraftConfig that a serving config.json describes.

    Raises DraftConfigError that lists missing fields, or fields of a wrong type, or values that do not fit.
    """
    missing = missing_fields(data)
    if missing:
        raise DraftConfigError(*(f"{name}: is missing" for name in missing))
    names = [attribute.name for attribute in DraftConfig.__attrs_attrs__ if attribute.name != ALGORITHM]
    wrong = [f"{name}: {what}" for name, what in wrong_types(data) if name.rpartition(".")[2] in names]
    if wrong:
        raise DraftConfigError(*wrong)
    algorithm, data = algorithm_of(data).from_serving(data)
    found = {**SCALES, **data, **data["dflash_config"], **data["dflow"]}
    config = DraftConfig(**{name: found[name] for name in names}, algorithm=algorithm)
    if data["use_sliding_window"] is not config.slides:
        needed = str(config.slides).lower()
        raise DraftConfigError(
            f"use_sliding_window: must be {needed} with these layer_types, or engines ignore or refuse the window"
        )
    if data.get(IS_CAUSAL) not in ((None, serving_causality(config)) if config.slides else (None, False)):
        stated = json.dumps(data[IS_CAUSAL])
        raise DraftConfigError(
            f"{IS_CAUSAL}: {stated} does not fit these layer_types: sliding layers are causal, and full ones are not"
        )
    return config


def missing_fields(data: Mapping[str, Any]) -> list[str]:
    """The fields of the serving contract that a config.json lacks, nested ones as "dflash_config.mask_token_id"."""
    missing = []
    for name, value in example(data).items():
        if name not in data:
            missing.append(name)
        elif isinstance(value, dict):
            inner = data[name] if isinstance(data[name], Mapping) else {}
            missing.extend(f"{name}.{key}" for key in value if key not in inner)
    return missing


def wrong_types(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields whose JSON type is wrong, each with a description. An integer is accepted for a float."""
    for name, typical in example(data).items():
        inner = data.get(name)
        if not isinstance(typical, dict):
            if name in data and (wanted := _wanted(name, typical, inner)):
                yield name, f"must be {wanted}, got {json.dumps(inner)}"
        elif isinstance(inner, Mapping):
            for key, value in typical.items():
                if key in inner and (wanted := _wanted(key, value, inner[key])):
                    yield f"{name}.{key}", f"must be {wanted}, got {json.dumps(inner[key])}"


def _wanted(name: str, example: Any, value: Any) -> str:
    """A text on what a field must be, if its value is something else; "" if it is right."""
    kind = OPTIONAL.get(name, type(example))
    if value is None and name in OPTIONAL:
        return ""
    fits = isinstance(value, (int, float) if kind is float else kind)
    if isinstance(example, list):
        fits = fits and all(type(member) is type(example[0]) for member in value)
    if fits and (kind is bool or not isinstance(value, bool)):
        return ""
    if isinstance(example, list):
        return "a list of numbers" if isinstance(example[0], int) else "a list of strings"
    return {dict: "a table", str: "a string", bool: "true or false"}.get(kind, "a number")


OPTIONAL = {"rope_scaling": dict, "sliding_window": int}  # null where there is none


def algorithm_of(data: Mapping[str, Any]) -> type[Algorithm]:
    """The algorithm that a config.json names as dflow writes it; without a name plain DFlash. Raises ConfigError."""
    return algorithm_class(str(table_of(data, "dflow").get(ALGORITHM, DFLASH)))


def contract_part(data: Mapping[str, Any], name: str) -> Any:
    """The object `shapes`, `MISSING` or `WRONG` in the config.py of a config.json's algorithm."""
    return part_of(algorithm_of(data), f"config:{name}")


def optional_part(data: Mapping[str, Any], name: str, default: Any) -> Any:
    """An object in the config.py of a config.json's algorithm that not every algorithm has: `stored_name`,
    `contract_name`, `form_of`, `COMPARED`.
    """
    return getattr(sys.modules[algorithm_of(data).__module__], name, default)


def table_of(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a config.json; empty where there is none."""
    table = data.get(name)
    return table if isinstance(table, Mapping) else {}


def lookup(data: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether a config.json has a field such as "dflash_config.mask_token_id", and the field's value."""
    nest, _, inner = name.rpartition(".")
    table = table_of(data, nest) if nest else data
    return inner in table, table.get(inner)


def full_name(name: str, data: Mapping[str, Any]) -> str:
    """The full name of a DraftConfig field, as nested in a config.json of this algorithm."""
    fields = example(data)
    return next((f"{nest}.{name}" for nest in NESTS if name in fields.get(nest, {})), name)


def example(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every field of the serving contract for the algorithm of a config.json, with a value of its type; of SCALES those
    that it has, or that it says the draft was trained with.
    """
    tables = (data, table_of(data, "dflash_config"), table_of(table_of(data, "dflow"), "trained"))
    return _example(algorithm_of(data), tuple(name for name in SCALES if any(name in table for table in tables)))


@cache
def _example(algorithm: type[Algorithm], ends: tuple[str, ...]) -> Mapping[str, Any]:
    own = algorithm()
    shape = DraftConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        vocab_size=16,
        block_size=4,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=2,
        max_position_embeddings=8,
        algorithm=own,
    )
    # Apart from the shape: an algorithm may refuse them, which is a mistake of the config.json, not of this example.
    return own.to_serving(_plain_form(shape, "float32", dict.fromkeys(ends, 2.0)))
