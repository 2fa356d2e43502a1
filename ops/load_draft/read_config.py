"""The config.json of anybody's draft directory as a `DraftConfig`, and what it leaves open. Loads no torch.

Every key is read, known to have no effect, or refused by name: a draft is never read as something else in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field, fields, frozen

from dsl.errors import ConfigError
from ops.capture_targets.layers import spread_layers
from ops.lib.drafts.backbone.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DraftConfig,
    from_serving,
    unfit_fields,
    unlike_sizes,
)
from ops.lib.drafts.backbone.speculators_format import AUX_LAYER_IDS, LAYER_CONFIG, NON_CAUSAL
from ops.lib.drafts.dflash.config import ARCHITECTURE
from ops.load_draft.held_algorithm import (
    ALPHA,
    DFLASH2,
    PARAMETERS,
    SWITCHES,
    TEXTS,
    Held,
    held_algorithm,
    is_read,
    named_algorithm,
)
from ops.load_draft.known_keys import HARMLESS, NEUTRAL
from ops.load_draft.publishers import DFLOW, NEST, SPECULATORS, WINDOW, Publisher, publisher_of
from ops.load_draft.rope_spelling import KEYS as ROPE_KEYS
from ops.load_draft.rope_spelling import read_rope

NUMBERS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "block_size", "num_target_layers"),
    *("mask_token_id", "sliding_window", "max_window_layers", "swa_window_size", "draft_vocab_size"),
    "target_hidden_size",
    *PARAMETERS,
)
FLAGS = (
    *("attention_bias", "use_sliding_window", "is_causal", "causal", "use_swa"),
    NON_CAUSAL,
    *SWITCHES,
)
LAYERS = "target_layer_ids"
OF_ENGINES = "eagle_aux_hidden_state_layer_ids"  # the same layers for vLLM, counted from 1
READ = frozenset(
    {
        *(*NUMBERS, *FLAGS, *TEXTS, *ROPE_KEYS, LAYERS, AUX_LAYER_IDS, OF_ENGINES),
        *("rms_norm_eps", ALPHA, "layer_types", "model_type"),
    }
)
MODEL_TYPES = (None, "qwen3", "speculator_model")
OF_SPECULATORS = {AUX_LAYER_IDS, NON_CAUSAL}
NOT_OF_SPECULATORS = {LAYERS, "causal", "use_swa", "swa_window_size"}


@frozen(kw_only=True)
class ReadDraft:
    """config: the draft's. assumed: field -> value, of those that the file leaves open. notes: what was read otherwise
    than it is written. layer_order: for each of config.target_layer_ids, its place among the columns of fc.weight.
    has_bias, confidence_reads_token: which tensors of DSpark there are, as of `Held`.
    """

    publisher: str
    config: DraftConfig
    assumed: Mapping[str, Any]
    notes: tuple[str, ...]
    layer_order: tuple[int, ...]
    has_bias: bool = True
    confidence_reads_token: bool = True


def read_draft_config(
    config: Mapping[str, Any], target: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None
) -> ReadDraft:
    """Reads a config.json; target: the target's target.json, None if it is not known yet.

    partial_rotary_factor: the user's decision on one below 1 (`read_rope`). Raises ConfigError with all reasons why
    dflow would compute something else than the draft's own class.
    """
    publisher = publisher_of(config)
    if publisher is None:
        raise ConfigError(
            f"config.json: architectures = {json.dumps(config.get('architectures'))}, and no {NEST}: this is not a "
            f"DFlash draft ({ARCHITECTURE})"
        )
    if publisher is DFLOW:
        return _of_dflow(config, target, partial_rotary_factor)
    algorithm, of_algorithm = named_algorithm(publisher, config)
    reading = _Reading(publisher, algorithm, config)
    if of_algorithm or reading.is_malformed:  # nothing else of it can be read
        raise _refusal(publisher, [*of_algorithm, *reading.mistakes])
    held = held_algorithm(reading, algorithm)
    shape = _shape(reading, held, target, partial_rotary_factor)
    if reading.mistakes:
        raise _refusal(publisher, [*reading.mistakes, *_other_target(shape, target)])
    try:
        draft = DraftConfig(**shape)
    except ConfigError as error:
        of_shape = [line.strip() for line in str(error).splitlines()[1:]]
        raise _refusal(publisher, [*of_shape, *_other_target(shape, target)]) from None
    if wrong := _target_mistakes(draft, target):
        raise _refusal(publisher, wrong)
    written = reading.layer_ids
    return ReadDraft(
        publisher=publisher.name,
        config=draft,
        assumed=reading.assumed,
        notes=tuple(reading.notes),
        layer_order=tuple(written.index(layer) for layer in draft.target_layer_ids),
        has_bias=held.has_bias,
        confidence_reads_token=held.confidence_reads_token,
    )


def _of_dflow(config: Mapping[str, Any], target: Mapping[str, Any] | None, partial: float | None) -> ReadDraft:
    """An export of dflow, which leaves nothing open. `serving_contract` checks its keys."""
    draft = from_serving(config)
    mistakes = _target_mistakes(draft, target)
    if partial not in (None, draft.partial_rotary_factor):
        mistakes.append(
            f"partial_rotary_factor: {draft.partial_rotary_factor:g}, as it was trained; leave out that of load_draft"
        )
    if mistakes:
        raise _refusal(DFLOW, mistakes)
    order = tuple(range(len(draft.target_layer_ids)))
    return ReadDraft(publisher=DFLOW.name, config=draft, assumed={}, notes=(), layer_order=order)


def _refusal(publisher: Publisher, mistakes: Iterable[str]) -> ConfigError:
    listed = "\n".join(f"  {mistake}" for mistake in dict.fromkeys(mistakes))
    return ConfigError(f"config.json, read as {publisher.name} writes it, cannot be imported:\n{listed}")


def _target_mistakes(draft: DraftConfig, target: Mapping[str, Any] | None) -> list[str]:
    wrong = {} if target is None else unfit_fields(draft, target)
    return _with_remedy(wrong)


def _other_target(shape: Mapping[str, Any], target: Mapping[str, Any] | None) -> list[str]:
    """The same of a shape that is no draft's."""
    return [] if target is None else _with_remedy(unlike_sizes(shape, target))


def _with_remedy(wrong: Mapping[str, str]) -> list[str]:
    return [f"{name}: {what}; give the target that this draft was made for" for name, what in wrong.items()]


@define
class _Reading:
    """A config.json with its nests flattened, and what comes up while it is read."""

    publisher: Publisher
    algorithm: str
    config: Mapping[str, Any]
    values: dict[str, Any] = field(factory=dict)
    assumed: dict[str, Any] = field(factory=dict)
    notes: list[str] = field(factory=list)
    mistakes: list[str] = field(factory=list)
    is_malformed: bool = False  # a value has another type than its key

    def __attrs_post_init__(self) -> None:
        for prefix, table in self._tables():
            for name, value in table.items():
                self._take(prefix, name, value)
        for name in NUMBERS:
            self._require(name, int, "a whole number")
        for name in FLAGS:
            self._require(name, bool, "true or false")
        for name in ("rms_norm_eps", ALPHA):
            self._require(name, (int, float), "a number")
        for name in TEXTS:
            self._require(name, str, "a text")
        types = self.values.get("layer_types", [])
        if not isinstance(types, list) or not all(isinstance(layer, str) for layer in types):
            self.is_malformed = True
            self.mistakes.append(f"layer_types: must be a list of names, got {json.dumps(types)}")

    def _tables(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The places where a publisher writes, the top level last."""
        names = (LAYER_CONFIG,) if self.publisher is SPECULATORS else (NEST,)
        for name in names:
            table = self.config.get(name)
            if isinstance(table, Mapping):
                yield f"{name}.", table
            elif table is not None:
                self.is_malformed = True
                self.mistakes.append(f"{name}: must be a table, got {json.dumps(table)}")
        passed = {*names, "speculators_model_type", "speculators_config"}
        yield "", {name: value for name, value in self.config.items() if name not in passed}

    def _take(self, prefix: str, name: str, value: Any) -> None:
        """A key that is read, or known to have no effect; another is a mistake. null is as if it were not there."""
        if name in NEUTRAL and not is_read(self.publisher, self.algorithm, name):
            if not NEUTRAL[name].is_neutral(value):
                self.mistakes.append(f"{prefix}{name} = {json.dumps(value)}: {NEUTRAL[name].why}")
        elif name in READ - (NOT_OF_SPECULATORS if self.publisher is SPECULATORS else OF_SPECULATORS):
            if name == "model_type" and value not in MODEL_TYPES:
                self.mistakes.append(f'{prefix}model_type = {json.dumps(value)}: only drafts of "qwen3" are supported')
            elif value is not None and self.values.setdefault(name, value) != value:
                self._report_two(prefix, name, value)
        elif name not in HARMLESS:
            self.mistakes.append(
                f"{prefix}{name} = {json.dumps(value)}: dflow does not know this key, which may change what the draft "
                "computes; if it does not, remove it"
            )

    def _report_two(self, prefix: str, name: str, value: Any) -> None:
        if name != "model_type":
            self.mistakes.append(
                f"{name}: {json.dumps(self.values[name])} in one place of the file and {json.dumps(value)} in another "
                f"({prefix or 'the top level'}); keep one"
            )

    def _require(self, name: str, kind: type | tuple[type, ...], wanted: str) -> None:
        value = self.values.get(name)
        is_wrong_bool = isinstance(value, bool) and kind is not bool
        if value is not None and (not isinstance(value, kind) or is_wrong_bool):
            self.is_malformed = True
            self.mistakes.append(f"{name}: must be {wanted}, got {json.dumps(value)}")

    def get(self, name: str) -> Any:
        """The value, or else the default of the publisher's class, which is assumed. Mistake if it has none."""
        if name in self.values:
            return self.values[name]
        if name not in self.publisher.defaults:
            self.mistakes.append(f"{name}: is missing, and {self.publisher.name}'s class has no default for it")
            return None
        self.assumed[name] = self.publisher.defaults[name]
        return self.assumed[name]

    @property
    def layer_ids(self) -> list[int]:
        """The target layers in the order of the file, whose id 0 is the first layer's output, as in `DraftConfig`."""
        name = AUX_LAYER_IDS if self.publisher is SPECULATORS else LAYERS
        written = self.values.get(name)
        ids = self.assumed.get(LAYERS) if written is None else written
        return [layer + self.publisher.layers_from for layer in ids or ()]


def _shape(reading: _Reading, held: Held, target: Mapping[str, Any] | None, partial: float | None) -> dict[str, Any]:
    """The fields of a DraftConfig; what does not fit is added to the reading's mistakes."""
    named = {attribute.name for attribute in fields(DraftConfig)}
    optional = {"tie_word_embeddings", "num_target_layers", "layer_types", "sliding_window", "positions", LAYERS}
    shape = {name: reading.get(name) for name in NUMBERS if name in named - optional - {"block_size"}}
    shape |= {"block_size": held.block_size, "algorithm": held.algorithm}
    for name in ("rms_norm_eps", "attention_bias"):
        shape[name] = reading.get(name)
    shape["rms_norm_eps"] = float(shape["rms_norm_eps"])
    rope = read_rope(_rope_part(reading), partial)
    reading.notes.extend(rope.notes)
    reading.mistakes.extend(rope.mistakes)
    theta = reading.get("rope_theta") if rope.theta is None else rope.theta
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        reading.mistakes.append(f"rope_theta: must be a number, got {json.dumps(theta)}")
        theta = 1.0
    shape |= {"rope_theta": float(theta), "rope_scaling": rope.scaling, "partial_rotary_factor": rope.partial}
    shape |= _windows(reading, shape["num_hidden_layers"])
    _vocabulary_mistakes(reading, shape)
    return shape | _layers(reading, shape["num_hidden_layers"], target)


def _rope_part(reading: _Reading) -> dict[str, Any]:
    return {name: reading.values[name] for name in ROPE_KEYS if name in reading.values}


def _windows(reading: _Reading, layers: int) -> dict[str, Any]:
    """layer_types and sliding_window, by all keys that decide on windows and causality.

    In dflow, a sliding layer is causal and a full one is not; transformers' Qwen3Config forgets the window without
    use_sliding_window, and derives layer_types that are not given.
    """
    slides = bool(reading.get("use_sliding_window"))
    types, window = reading.values.get("layer_types"), reading.values.get("sliding_window")
    if types is None:
        first = reading.get("max_window_layers") if slides else layers
        types = [SLIDING_ATTENTION if layer >= first else FULL_ATTENTION for layer in range(layers)]
        reading.assumed["layer_types"] = types
    if reading.values.get("use_swa"):
        types, slides, window = _swa_types(reading, types), True, _swa_window(reading, window)
    sliding = SLIDING_ATTENTION in types
    if sliding and not slides:
        reading.mistakes.append(
            "use_sliding_window: is not true, but layers slide by layer_types: transformers then forgets the window, "
            "and engines do not start; set it to true if the draft was trained with its window"
        )
    if sliding and window is None:
        reading.assumed["sliding_window"] = window = WINDOW
    _causal_mistakes(reading, types)
    return {"layer_types": types, "sliding_window": window if sliding else None}


def _swa_types(reading: _Reading, types: list[str]) -> list[str]:
    """The kinds of layers with ModelOpt's use_swa, as vLLM serves it: those of layer_types where one slides, and
    otherwise windows in all layers, which are causal only where the file says so.
    """
    if SLIDING_ATTENTION in types:
        return types
    reading.assumed.pop("layer_types", None)
    if not any(name in reading.values for name in ("causal", "is_causal")):
        reading.mistakes.append(
            "causal: is missing beside use_swa, which is as false where no layer slides by layer_types: sliding layers "
            "would see their whole block, and dflow's are causal"
        )
    return [SLIDING_ATTENTION] * len(types)


def _swa_window(reading: _Reading, window: int | None) -> int | None:
    """ModelOpt's own name of the window; its blocks see all of themselves, so they must fit into it."""
    size, block = reading.values.get("swa_window_size", window), reading.values.get("block_size")
    if window is not None and size != window:
        reading.mistakes.append(f"sliding_window = {window}, but swa_window_size = {size}; keep one")
    if size is None:
        reading.mistakes.append("use_swa: needs swa_window_size or sliding_window")
    elif block is not None and size < block:
        reading.mistakes.append(f"swa_window_size: {size} is less than block_size = {block}, and windows the block too")
    return size


def _causal_mistakes(reading: _Reading, types: list[str]) -> None:
    """What keys on causality ask for that dflow's layers do not do."""
    asked = [(name, reading.values.get(name)) for name in ("is_causal", "causal")]
    if reading.publisher is SPECULATORS and SLIDING_ATTENTION in types:
        non_causal = reading.values.get(NON_CAUSAL)
        if non_causal is None:  # its class of DFlash2 has another default than the others
            reading.assumed[NON_CAUSAL] = non_causal = reading.algorithm == DFLASH2
        asked.append((NON_CAUSAL, False if non_causal else None))
        reading.notes.append(
            "sliding_window: counted from each slot, as vLLM serves it; speculators' training counts the context from "
            "the anchor, so its last slots were trained with up to block_size tokens more"
        )
    for name, causal in asked:
        shown = f"{name} = {json.dumps(reading.values.get(name))}"
        if causal is True and FULL_ATTENTION in types:
            reading.mistakes.append(f"{shown}: full layers would be causal, and dflow's see their whole block")
        if causal is False and SLIDING_ATTENTION in types:
            reading.mistakes.append(f"{shown}: sliding layers would see their whole block, and dflow's are causal")


def _vocabulary_mistakes(reading: _Reading, shape: Mapping[str, Any]) -> None:
    """A vocabulary or a hidden size of its own."""
    if reading.publisher is SPECULATORS:
        reading.get("draft_vocab_size")
    values = reading.assumed | reading.values
    for name, same in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(name) not in (None, shape[same]):
            what = "a reduced vocabulary" if same == "vocab_size" else "a target of another width"
            reading.mistakes.append(
                f"{name} = {values[name]}, {same} = {shape[same]}: {what}, which dflow does not have"
            )


def _layers(reading: _Reading, layers: int, target: Mapping[str, Any] | None) -> dict[str, Any]:
    """target_layer_ids, ascending, and num_target_layers."""
    name = AUX_LAYER_IDS if reading.publisher is SPECULATORS else LAYERS
    written = reading.values.get(name)
    count = reading.values.get("num_target_layers")
    if count is None and target is not None:
        reading.assumed["num_target_layers"] = count = target["num_layers"]
    if written is None and not reading.publisher.fills_layers:
        reading.mistakes.append(f"{name}: is missing, and {reading.publisher.name}'s class has no default for it")
    elif written is not None and not _are_numbers(written):
        reading.mistakes.append(f"{name}: must be a list of numbers, got {json.dumps(written)}")
    elif written is None and count is not None:
        reading.assumed[LAYERS] = list(spread_layers(count, layers, "num_hidden_layers"))
    elif written is None:  # with the target they follow from its layers; until then any of this number stand for them
        reading.assumed[LAYERS] = list(range(layers))
    if not (_are_numbers(written) or LAYERS in reading.assumed):
        return {}
    ids = reading.layer_ids
    count = max(ids, default=0) + 2 if count is None else count
    _layer_mistakes(reading, name, ids, count)
    for_engines = reading.values.get(OF_ENGINES)
    if for_engines is not None and for_engines != [layer + 1 for layer in ids]:
        reading.mistakes.append(f"{OF_ENGINES} = {json.dumps(for_engines)}: other layers than {name}; keep one")
    if ids != sorted(ids):
        reading.notes.append(f"{name}: put in ascending order, and the columns of fc.weight with them")
    return {LAYERS: sorted(ids), "num_target_layers": count}


def _layer_mistakes(reading: _Reading, name: str, ids: list[int], count: int) -> None:
    """Layers that an engine does not capture as the draft was trained on them; others are those of `DraftConfig`."""
    offset = reading.publisher.layers_from
    if -1 in ids:
        reading.mistakes.append(
            f"{name}: {-1 - offset} names the target's embeddings, and SGLang does not start with them: it captures "
            "outputs of layers only"
        )
    if count - 1 in ids:
        reading.mistakes.append(
            f"{name}: {count - 1 - offset} names the target's last layer, and SGLang fails at the first prompt: it "
            "captures what enters a layer, and nothing is behind this one. vLLM captures it before the final norm, "
            "behind which z-lab's class reads it"
        )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(layer) is int for layer in value)
