"""The config.json of anybody's draft directory as a `DraftConfig`, and what it leaves open. Loads no torch.

Every key is read, known to have no effect, or refused by name: a draft is never read as something else in silence.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

from dsl.errors import ConfigError
from dsl.finding import Finding
from ops.capture_targets.layers import spread_layers
from ops.lib.drafts.backbone.config import (
    FULL_ATTENTION,
    SCALES,
    SIZES,
    SLIDING_ATTENTION,
    DraftConfig,
    DraftConfigError,
    from_serving,
    table_of,
    unfit_fields,
    unlike_sizes,
)
from ops.lib.drafts.backbone.contract import config_mistakes, mistake
from ops.lib.drafts.backbone.speculators import NON_CAUSAL
from ops.lib.drafts.dflash.config import ARCHITECTURE
from ops.lib.target.head_settings import embedding_scale, sglang_embedding_scale
from ops.load_draft.algorithm_fields import AlgorithmFields, algorithm_fields, named_algorithm
from ops.load_draft.publishers import (
    DFLASH2,
    DFLOW,
    LAYERS,
    NEST,
    OF_DFLOW,
    OF_ENGINES,
    SPECULATORS,
    WINDOW,
    Publisher,
    Reading,
    publisher_of,
)
from ops.load_draft.rope_spelling import KEYS as ROPE_KEYS
from ops.load_draft.rope_spelling import read_rope

SCALE = "input_embedding_scale"
IMPORT_AGAIN = "import the draft again from where it came"


@frozen(kw_only=True)
class ReadDraft:
    """A draft's config, as read from a config.json of any publisher.

    config: the draft's. assumed: field -> value, of fields that the file omits. notes: on values that were read
    otherwise than written. layer_order: for each of config.target_layer_ids, its place among the columns of fc.weight.
    has_bias, confidence_reads_token: which of DSpark's tensors exist, as in `AlgorithmFields`.
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
    """Read a draft's config.json of any publisher. target: the target's target.json, None if not known yet.

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
    reading = Reading(publisher, algorithm, config)
    if of_algorithm or reading.is_malformed:  # nothing else of it can be read
        raise _refusal(publisher, [*of_algorithm, *reading.mistakes])
    held = algorithm_fields(reading)
    shape = _shape(reading, held, target, partial_rotary_factor)
    if reading.mistakes:
        raise _refusal(publisher, [*reading.mistakes, *_other_target(shape, target)])
    try:
        draft = DraftConfig(**shape)
    except DraftConfigError as error:
        raise _refusal(publisher, [*error.mistakes, *_other_target(shape, target)]) from None
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
    """The config of a dflow export, which omits nothing. `record_mistakes` checks its keys."""
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


def with_embedding_scale(draft: ReadDraft, config: Mapping[str, Any], target: Mapping[str, Any]) -> ReadDraft:
    """The draft with the scale of embeddings that a file of others leaves open beside a target that scales its own:
    that with which SGLang serves it. target: the target's complete config.json.
    """
    is_open = SCALE not in table_of(config, NEST) and draft.publisher != DFLOW.name
    if not is_open or embedding_scale(target) == 1:
        return draft
    scale = sglang_embedding_scale(target)
    of_draft = evolve(draft.config, input_embedding_scale=scale)
    return evolve(draft, config=of_draft, assumed={**draft.assumed, SCALE: scale})


def record_mistakes(
    config: Mapping[str, Any], target: Mapping[str, Any] | None = None, pad_token_ids: Collection[int] = ()
) -> list[Finding]:
    """Mistakes for the fields of a dflow export that were changed since it was written; none for other drafts.

    target: the target's target.json, None if not known yet.
    """
    record = table_of(config, OF_DFLOW)
    if not record:
        return []
    mistakes = config_mistakes(config, target, str(record.get("target")), pad_token_ids)
    if "imported" in record and not _is_import(record["imported"]):
        wrong = f"is no record of an import: {json.dumps(record['imported'])}"
        mistakes.append(mistake("config.json", wrong, "does not read it", IMPORT_AGAIN, part="dflow.imported"))
    return mistakes


def _is_import(imported: Any) -> bool:
    return (
        isinstance(imported, Mapping)
        and isinstance(imported.get("assumed"), Mapping)
        and isinstance(imported.get("notes"), list)
        and all(isinstance(note, str) for note in imported["notes"])
        and isinstance(imported.get("trained_for", ""), str)
    )


def _refusal(publisher: Publisher, mistakes: Iterable[str]) -> ConfigError:
    head = f"config.json, read as {publisher.name} writes it, cannot be imported"
    return ConfigError(*dict.fromkeys(mistakes), head=head)


def _target_mistakes(draft: DraftConfig, target: Mapping[str, Any] | None) -> list[str]:
    wrong = {} if target is None else unfit_fields(draft, target)
    return _with_remedy(wrong)


def _other_target(shape: Mapping[str, Any], target: Mapping[str, Any] | None) -> list[str]:
    """Mistakes for sizes that are not the target's, found even if the shape makes no DraftConfig."""
    return [] if target is None else _with_remedy(unlike_sizes(shape, target))


def _with_remedy(wrong: Mapping[str, str]) -> list[str]:
    return [f"{name}: {what}; give the target that this draft was made for" for name, what in wrong.items()]


def _shape(
    reading: Reading, held: AlgorithmFields, target: Mapping[str, Any] | None, partial: float | None
) -> dict[str, Any]:
    """The fields for a DraftConfig; mistakes are added to the reading."""
    shape = {name: reading.get(name) for name in (*SIZES, "mask_token_id", "attention_bias")}
    shape |= {"block_size": held.block_size, "algorithm": held.algorithm}
    shape["rms_norm_eps"] = float(shape["rms_norm_eps"])
    shape |= {name: reading.values[name] or SCALES[name] for name in SCALES if name in reading.values}
    rope = read_rope({name: reading.values[name] for name in ROPE_KEYS if name in reading.values}, partial)
    reading.notes.extend(rope.notes)
    reading.mistakes.extend(rope.mistakes)
    theta = reading.get("rope_theta") if rope.theta is None else rope.theta
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        reading.refuse("rope_theta", theta, "a number")
        theta = 1.0
    shape |= {"rope_theta": float(theta), "rope_scaling": rope.scaling, "partial_rotary_factor": rope.partial}
    shape |= _windows(reading, shape["num_hidden_layers"])
    _refuse_other_sizes(reading, shape)
    return shape | _layers(reading, shape["num_hidden_layers"], target)


def _windows(reading: Reading, layers: int) -> dict[str, Any]:
    """The values of layer_types and sliding_window, found from all keys about windows and causality.

    In dflow, a sliding layer is causal and a full one is not. transformers' Qwen3Config ignores the window without
    use_sliding_window, and derives missing layer_types.
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
        reading.refuse("use_sliding_window", False, "true where layers slide by layer_types, or no window is applied")
    if sliding and window is None:
        reading.assumed["sliding_window"] = window = WINDOW
    _refuse_causality(reading, types)
    return {"layer_types": types, "sliding_window": window if sliding else None}


def _swa_types(reading: Reading, types: list[str]) -> list[str]:
    """The kinds of layers with ModelOpt's use_swa, as vLLM serves it.

    They are those of layer_types if one slides; otherwise all layers slide, and are causal only if the file says so.
    """
    if SLIDING_ATTENTION in types:
        return types
    reading.assumed.pop("layer_types", None)
    if not any(name in reading.values for name in ("causal", "is_causal")):
        reading.refuse("causal", None, "true beside use_swa: sliding layers are causal in dflow")
    return [SLIDING_ATTENTION] * len(types)


def _swa_window(reading: Reading, window: int | None) -> int | None:
    """The sliding window, which ModelOpt calls swa_window_size. A block sees all of itself, so it must fit
    the window.
    """
    size, block = reading.values.get("swa_window_size", window), reading.values.get("block_size")
    if window is not None and size != window:
        reading.refuse("sliding_window", window, f"swa_window_size = {size}")
    if size is None:
        reading.refuse("swa_window_size", None, "a number beside use_swa")
    elif block is not None and size < block:
        reading.refuse("swa_window_size", size, f"at least block_size = {block}")
    return size


def _refuse_causality(reading: Reading, types: list[str]) -> None:
    """Refuse values of keys on causality that dflow's layers do not support."""
    asked = [(name, reading.values.get(name)) for name in ("is_causal", "causal")]
    if reading.publisher is SPECULATORS and SLIDING_ATTENTION in types:
        non_causal = reading.values.get(NON_CAUSAL)
        if non_causal is None:  # its class of DFlash2 has another default than the others
            reading.assumed[NON_CAUSAL] = non_causal = reading.algorithm == DFLASH2
        if non_causal:
            reading.refuse(NON_CAUSAL, non_causal, "false where layers slide: dflow's are causal")
        reading.notes.append(
            "sliding_window: counted from each slot, as vLLM serves it; speculators' training counts the context from "
            "the anchor, so its last slots were trained with up to block_size tokens more"
        )
    for name, causal in asked:
        if causal is True and FULL_ATTENTION in types:
            reading.refuse(name, causal, "false where layers are full: dflow's see their whole block")
        if causal is False and SLIDING_ATTENTION in types:
            reading.refuse(name, causal, "true where layers slide: dflow's are causal")


def _refuse_other_sizes(reading: Reading, shape: Mapping[str, Any]) -> None:
    """Refuse a draft with its own vocabulary or hidden size, other than the target's."""
    if reading.publisher is SPECULATORS:
        reading.get("draft_vocab_size")
    values = reading.assumed | reading.values
    for name, same in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if values.get(name) not in (None, shape[same]):
            reading.refuse(name, values[name], f"{same} = {shape[same]}")


def _layers(reading: Reading, layers: int, target: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields target_layer_ids, ascending, and num_target_layers."""
    name, count = reading.layers_key, reading.values.get("num_target_layers")
    if count is None and target is not None:
        reading.assumed["num_target_layers"] = count = target["num_layers"]
    if name not in reading.values and not reading.publisher.fills_layers:
        reading.mistakes.append(f"{name}: is missing, and {reading.publisher.name}'s class has no default for it")
        return {}
    if name not in reading.values:  # without the target any of this number stand for them until its layers are known
        spread = range(layers) if count is None else spread_layers(count, layers, "num_hidden_layers")
        reading.assumed[LAYERS] = list(spread)
    ids = reading.layer_ids
    count = max(ids, default=0) + 2 if count is None else count
    offset = reading.publisher.layers_from
    written = [layer - offset for layer in ids]
    if {-1, count - 1} & {*ids}:
        outside = "those are the target's embeddings and its last layer, which SGLang cannot capture"
        reading.refuse(name, written, f"layers between {-1 - offset} and {count - 1 - offset}: {outside}")
    for_engines = reading.values.get(OF_ENGINES)
    if for_engines is not None and for_engines != [layer + 1 for layer in ids]:
        reading.refuse(OF_ENGINES, for_engines, f"the layers of {name}, counted from 1")
    if ids != sorted(ids):
        reading.notes.append(f"{name}: put in ascending order, and the columns of fc.weight with them")
    return {LAYERS: sorted(ids), "num_target_layers": count}
