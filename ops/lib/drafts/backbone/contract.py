"""A draft's config.json against the serving contract and the training that it records. Loads no torch.

The contract is closed: fields that it does not name are refused, because SGLang reads many fields that change what a
draft computes. export_draft writes under `dflow` what the draft was trained with (`training_record`), and every field
that an engine reads is compared with it, so that a value changed later, or by a faulty export, is found without the
training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import isclose
from pathlib import Path
from typing import Any

import attrs

from dsl.errors import ConfigError, DataError
from dsl.finding import File, Finding, blocks
from ops.lib.drafts.backbone.config import (
    ALGORITHM,
    IS_CAUSAL,
    NESTS,
    OF_TARGET,
    SCALES,
    SLIDING_ATTENTION,
    DraftConfig,
    DraftConfigError,
    algorithm_of,
    contract_part,
    example,
    from_serving,
    full_name,
    lookup,
    missing_fields,
    table_of,
    to_serving,
    wrong_types,
)
from ops.lib.target.head_settings import sglang_embedding_scale, vllm_embedding_scale
from ops.lib.target.sizes import rope_limit, ropes_of
from ops.lib.vision.family_config import text_part

SGLANG = "sglang"  # the format of an export that every one has
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # config.json's names -> safetensors'
REWRITE = "write the export again: dflow resume RUN --from export"
RETRAIN = "train the draft again with the desired value, or write the export of this training again"
REIMPORT = "get the draft's files from its publisher again, and import them with the target that they were made for"
OF_MAKER = "of its maker"  # the code of what only another export or training corrects
UNREAD = frozenset({"tie_word_embeddings"})  # a draft has neither part; training again would change nothing
# Under dflow, by export_draft and load_draft.
RECORD = ("target", "trained", "digest", "server_args", "formats", "engine", "imported")
CONSTANT = ("architectures", "model_type", "hidden_act", "dflow.format")  # the same in all drafts of an algorithm

_QWEN3 = "silently uses transformers' default for a Qwen3 model ({})"
_SHAPES = "stops at the weights' shapes"
_NOT_READ = "does not read it"
_NO_ENDS = "does not read it: a draft has neither embedding nor head"
_OWN_SCALE = "does not read it: the module of the target's embedding scales its rows or not, whatever the training did"
_PLAIN_ORDER = (
    "reads it for DFlash2, and silently scores candidates by it; the best token of other drafts stays the best"
)
_ANY_WEIGHTS = "does not read it, and serves whatever weights and fields it finds"
# Field, without its table -> what SGLang 0.5.21 and 0.5.23 do without it, and with a value that breaks the contract: by
# their source and measurements. An algorithm's MISSING and WRONG come before these.
EFFECTS: Mapping[str, tuple[str, str]] = {
    "architectures": (
        "finds no model class and refuses to start",
        "refuses to start (ValueError), or builds another model",
    ),
    "model_type": (
        "cannot read the config and refuses to start",
        "refuses to start, or uses another model's defaults",
    ),
    "hidden_act": (
        _QWEN3.format('"silu"'),
        "refuses to start (ValueError: unsupported activation), or computes another one",
    ),
    "dtype": (
        "uses the server's --dtype; default: float16 for weights in float32",
        "refuses to start, or serves in another precision",
    ),
    "hidden_size": (
        f"{_QWEN3.format('4096')}, and {_SHAPES}",
        "stops at shapes that do not fit, at the latest at the target's embeddings",
    ),
    "num_hidden_layers": (
        f"{_QWEN3.format('32')}: layers without weights stay random",
        "silently leaves layers random, or weights unread",
    ),
    "num_attention_heads": (f"{_QWEN3.format('32')}, and {_SHAPES}", _SHAPES),
    "num_key_value_heads": (f"{_QWEN3.format('32')}, and {_SHAPES}", _SHAPES),
    "head_dim": (f"{_QWEN3.format('128')}, and {_SHAPES} if that differs", _SHAPES),
    "intermediate_size": (f"{_QWEN3.format('22016')}, and {_SHAPES}", _SHAPES),
    "vocab_size": ("does not check it", "does not check it"),
    "max_position_embeddings": (
        f"{_QWEN3.format('32768')}, and refuses to start if the target's context is longer (ValueError)",
        "refuses to start if the target's context is longer (ValueError: context_length is greater than the derived "
        "one)",
    ),
    "rms_norm_eps": (_QWEN3.format("1e-6"), "silently normalises with it"),
    "rope_theta": (
        f"{_QWEN3.format('10000')}: other angles than in training, and fewer tokens are accepted",
        "silently rotates by other angles than in training: fewer tokens are accepted",
    ),
    "rope_scaling": (
        f"{_QWEN3.format('none')}: other angles than in training, if there was a scaling",
        "silently rotates by other angles than in training, or stops if it does not know the scaling",
    ),
    "partial_rotary_factor": (
        f"{_QWEN3.format('1')}: other dimensions are rotated, if it was different",
        "silently rotates other dimensions than in training: fewer tokens are accepted",
    ),
    "layer_types": (
        f"{_QWEN3.format('full attention')}: sliding layers see all of the context",
        "silently masks by it, or refuses an unknown type (ValueError)",
    ),
    "use_sliding_window": (
        f"{_QWEN3.format('false')}, ignores sliding_window, and refuses sliding layers",
        "ignores sliding_window if it is false, and refuses to start if a layer slides",
    ),
    "sliding_window": (
        f"{_QWEN3.format('none')}, and refuses to start if a layer slides",
        "silently masks by it; without one it refuses sliding layers (ValueError)",
    ),
    IS_CAUSAL: (
        "takes the default of its version: causal sliding layers since 0.5.21, bidirectional ones in some before it",
        "silently makes every layer causal, or none of them",
    ),
    "attention_bias": (
        f"{_QWEN3.format('false')}, and leaves biases out",
        "silently leaves biases unread, or random",
    ),
    "tie_word_embeddings": (_NO_ENDS, _NO_ENDS),
    "block_size": (
        "serves blocks of 16, whatever the draft was trained with",
        "silently proposes blocks of this size (below 1: ValueError), for which the draft was not trained",
    ),
    "num_target_layers": (
        "uses the number of the target that it serves, and cannot warn about a different one",
        "logs a warning and continues",
    ),
    "mask_token_id": (
        'uses the id of the tokenizer\'s "<|MASK|>", or adds that token: another embedding than in training',
        "refuses an id outside the target's vocabulary (ValueError), and silently embeds any other",
    ),
    "target_layer_ids": (
        "computes ids by the formula for the number of draft layers, which may differ from those of the training",
        "silently captures other layers than in training",
    ),
    "input_embedding_scale": (_OWN_SCALE, _OWN_SCALE),
    "output_multiplier": (_PLAIN_ORDER, _PLAIN_ORDER),
    "final_logit_softcapping": (_PLAIN_ORDER, _PLAIN_ORDER),
    "format": (_NOT_READ, _NOT_READ),
    "positions": (
        "does not read it: its positions are always 1-D",
        "does not read it: its positions are always 1-D, and a draft trained on others is useless",
    ),
    "target": (
        "does not read it, and serves the draft with any target",
        "silently serves the draft with any target: about 1 token a step is accepted",
    ),
    "engine": (_NOT_READ, "does not read it: whichever version is installed serves the draft"),
    "trained": (
        "does not read it, and serves the draft as the other fields describe it",
        "does not read it, and silently serves the other fields, with which the draft was not trained",
    ),
    "digest": (_ANY_WEIGHTS, _ANY_WEIGHTS),
}
DEFAULT = "silently uses a default"
UNKNOWN = "reads more fields than the contract names, and many silently change what a draft computes"
NESTED = "uses the nested one and ignores the top level"
EOS_MASK = "silently embeds the EOS token in every slot; the draft was trained with another token there"
LAST_LAYER = (
    "captures inputs of the next layer, which does not exist: it silently drops the id, starts, and crashes at the "
    "first prefill"
)
NO_LAYERS = "refuses to start (ValueError: target_layer_ids must be non-empty)"
NO_LAYER = "refuses to start (ValueError: an id out of range)"
LAYER_ORDER = "captures each layer once, in their order, so that fc gets the wrong columns, or too few"

Wrong = Iterator[tuple[str, Finding]]  # a field, and what is wrong with it


def mistake(
    file: str, wrong: str, effect: str, advice: str = REWRITE, *, part: str = "", engine: str = "SGLang", code: str = ""
) -> Finding:
    """A mistake that the gate finds in a draft's files.

    file: "" for the draft as a whole. part: the field or tensor. effect: what the engine does with it.
    """
    return Finding(
        f"{wrong}\n{engine}: {effect}",
        File(file, part) if file else None,
        advice,
        code=OF_MAKER if advice == REWRITE else code,
    )


def refuse(directory: Path, mistakes: Sequence[Finding], more: str = "", *, is_imported: bool = False) -> None:
    """Raise DataError that lists all mistakes, followed by `more`; do nothing if there are none.

    is_imported: the draft was trained elsewhere, so that no node can write it again.
    """
    if mistakes:
        listed = blocks(map(of_import, mistakes) if is_imported else mistakes)
        raise DataError(
            f"{directory}: the draft breaks the serving contract:\n{listed}" + (f"\n  {more}" if more else "")
        )


def of_import(found: Finding) -> Finding:
    """The mistake with advice that does not ask for another export or training."""
    return attrs.evolve(found, advice=REIMPORT) if found.code == OF_MAKER else found


READ_BY_VLLM = ("dflash2",)  # the algorithms of which vLLM 0.33 reads input_embedding_scale


def embedding_warnings(config: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, str]:
    """What engines do with the target's embedding that the training did not, by the engine's name.

    config: the draft's config.json; target: the target's complete one.
    """
    scale = lookup(config, full_name("input_embedding_scale", config))[1] or 1.0
    trained = f"the draft was trained with rows of the target's embedding times {scale:g}"
    of_field = scale if algorithm_of(config).name in READ_BY_VLLM else 1.0
    served = {"SGLang": sglang_embedding_scale(target), "vLLM": vllm_embedding_scale(target) * of_field}
    return {
        engine: f"{trained}, and {engine} would embed its tokens by rows times {factor:g}: fewer are accepted"
        for engine, factor in served.items()
        if not isclose(scale, factor, rel_tol=1e-3)
    }


def range_warnings(target: Mapping[str, Any]) -> dict[str, str]:
    """What engines do beyond the first range of a target's RoPE, by the engine's name; empty without such a range.

    target: its config.json.
    """
    text = text_part(target)
    limit = rope_limit(text)
    if limit is None:
        return {}
    beyond = (
        f"beyond {limit:,} tokens the target's RoPE turns all texts of a batch by other angles, which the draft was "
        "not trained on: {} of the command refuses such requests, and must not be raised"
    )
    found = {"SGLang": beyond.format("--context-length"), "vLLM": beyond.format("--max-model-len")}
    if any("dynamic" in (rope.get("rope_type"), rope.get("type")) for rope in ropes_of(text)):
        found["SGLang"] += (
            ". At any length SGLang turns a dynamic RoPE by other angles than transformers: a draft whose features "
            "transformers captured has fewer tokens accepted"
        )
    return found


def training_record(
    config: DraftConfig,
    target_digest: str,
    tensors_digest: str,
    server_args: Mapping[str, Any] | None = None,
    formats: Sequence[str] = (SGLANG,),
) -> dict[str, Any]:
    """The training record for the "dflow" table of a serving config.json.

    It holds the target's digest, the fields as trained, digests of these fields and of the exported tensors, and
    SGLang's arguments of the capture, if any. Several formats are listed as well.
    """
    serving = to_serving(config)
    trained = {name: lookup(serving, place)[1] for name, place in _trained_fields(serving).items()}
    return {
        "target": target_digest,
        "trained": trained,
        "digest": {"trained": _fields_digest(trained), "tensors": tensors_digest},
        **({"server_args": dict(server_args)} if server_args else {}),
        **({"formats": list(formats)} if tuple(formats) != (SGLANG,) else {}),
    }


def trained_config(config: Mapping[str, Any]) -> DraftConfig | None:
    """The config recorded by `training_record` in a config.json; None if the record is missing or invalid."""
    trained = table_of(config, "dflow").get("trained")
    if not isinstance(trained, Mapping):
        return None
    try:
        written = {name: dict(value) if name in NESTS else value for name, value in example(config).items()}
        for name, place in _trained_fields(config).items():
            nest, _, inner = place.rpartition(".")
            (written[nest] if nest else written)[inner] = trained[name]
        return from_serving(written | {"use_sliding_window": _slides(written)})
    except (ConfigError, KeyError, TypeError):
        return None


def config_mistakes(
    config: Mapping[str, Any],
    target: Mapping[str, Any] | None,
    target_digest: str,
    pad_token_ids: Collection[int] = (),
) -> list[Finding]:
    """The mistakes in a serving config.json: in itself, against the training, and against the target.

    target: the target's target.json, None where only its digest is known. A field that an earlier check reported is not
    reported again.
    """
    found: dict[str, list[Finding]] = {}

    def add(mistakes: Iterable[tuple[str, Finding]]) -> None:
        known = set(found)
        for name, wrong in mistakes:
            if name not in known:
                found.setdefault(name, []).append(wrong)

    add(_form_mistakes(config))
    has_form = not found
    add(_record_mistakes(config, target_digest))
    add(_value_mistakes(config, target))
    if target is not None:
        add(_mask_mistakes(config, target, pad_token_ids))
    if has_form:
        add(_draft_mistakes(config))
    add(_training_mistakes(config))
    return [*chain.from_iterable(found.values()), *_unknown_fields(config)]


def field_mistake(name: str, wrong: str, effect: str, remedy: str = REWRITE, code: str = "") -> Finding:
    return mistake("config.json", wrong, effect, remedy, part=name, code=code)


def _form_mistakes(config: Mapping[str, Any]) -> Wrong:
    """Mistakes for missing fields, and for values of another JSON type than the serving contract's."""
    for name in missing_fields(config):
        yield name, field_mistake(name, "is missing", _without(name, config))
    for name, wrong in wrong_types(config):
        yield name, field_mistake(name, wrong, _with_wrong(name, config))


def _record_mistakes(config: Mapping[str, Any], target_digest: str) -> Wrong:
    """Mistakes for missing parts of the training record, another target, and fields changed together with
    the record.
    """
    record = table_of(config, "dflow")
    for inner, kind in (("target", str), ("trained", Mapping), ("digest", Mapping)):
        name = f"dflow.{inner}"
        if inner not in record:
            yield name, field_mistake(name, "is missing", _without(name, config))
        elif not isinstance(record[inner], kind):
            wrong = f"is not a record of a training: {json.dumps(record[inner])}"
            yield name, field_mistake(name, wrong, _with_wrong(name, config))
        elif inner == "target" and record[inner] != target_digest:
            wrong = f"is {record[inner][:12]}, which the draft was trained for, but this target is {target_digest[:12]}"
            remedy = "give export_draft, evaluate and check_export the target of the training"
            yield name, field_mistake(name, wrong, _with_wrong(name, config), remedy)
    trained, digests = record.get("trained"), record.get("digest")
    if not isinstance(digests, Mapping):
        return
    for inner in ("trained", "tensors"):  # the tensors' own digest is compared by `serving_contract`
        name = f"dflow.digest.{inner}"
        if not isinstance(digests.get(inner), str):
            yield name, field_mistake(name, "is missing", _without("dflow.digest", config))
        elif inner == "trained" and isinstance(trained, Mapping) and _fields_digest(trained) != digests[inner]:
            wrong = f"is not that of the export: {_fields_digest(trained)[:12]}, but {name} is {digests[inner][:12]}"
            yield "dflow.trained", field_mistake("dflow.trained", wrong, _with_wrong("dflow.trained", config))


def _value_mistakes(config: Mapping[str, Any], target: Mapping[str, Any] | None) -> Wrong:
    """Mistakes in fields that allow a single value, by the algorithm or by the target; windows need is_causal."""
    expected = {name: lookup(example(config), name)[1] for name in CONSTANT}
    if target is not None:
        expected |= {name: target[of_target] for name, of_target in OF_TARGET.items()}
    for name, value in expected.items():
        present, got = lookup(config, name)
        if present and got != value:
            wrong = f"must be {json.dumps(value)}, got {json.dumps(got)}"
            yield name, field_mistake(name, wrong, _with_wrong(name, config))
    if _slides(config) and IS_CAUSAL not in config:
        yield IS_CAUSAL, field_mistake(IS_CAUSAL, "is missing", _without(IS_CAUSAL, config))
    dtype = config.get("dtype")
    if isinstance(dtype, str) and dtype not in DTYPES:
        wrong = f"must be one of {', '.join(DTYPES)}, got {json.dumps(dtype)}"
        yield "dtype", field_mistake("dtype", wrong, _with_wrong("dtype", config))
    engine = table_of(config, "dflow").get("engine", "")
    if not isinstance(engine, str):
        wrong = f"must be the name of an engine, got {json.dumps(engine)}"
        yield "dflow.engine", field_mistake("dflow.engine", wrong, _with_wrong("dflow.engine", config))


def _mask_mistakes(config: Mapping[str, Any], target: Mapping[str, Any], pad_token_ids: Collection[int]) -> Wrong:
    name = full_name("mask_token_id", config)
    mask = lookup(config, name)[1]
    for kind, ids in (("an EOS id", target["eos_token_ids"]), ("the pad id", pad_token_ids)):
        if isinstance(mask, int) and mask in ids:
            remedy = "set mask_token_id of train_dflash to an id that no text produces, and train again"
            yield name, field_mistake(name, f"is {kind} of the target", EOS_MASK, remedy, OF_MAKER)


def _draft_mistakes(config: Mapping[str, Any]) -> Wrong:
    """Mistakes that DraftConfig finds in a config.json."""
    try:
        from_serving(config)
    except DraftConfigError as error:
        for each in error.mistakes:
            named, _, wrong = each.partition(": ")
            name = named.partition("(")[2].rstrip(")") or named  # "dflash2.group (conv_group_size)"
            remedy = REWRITE if name in UNREAD else RETRAIN
            place = full_name(name, config)
            effect = _layers_effect(config) if name == "target_layer_ids" else _with_wrong(name, config)
            yield place, mistake("config.json", f"{place}: {wrong}", effect, remedy, code=OF_MAKER)


def _layers_effect(config: Mapping[str, Any]) -> str:
    ids, layers = lookup(config, full_name("target_layer_ids", config))[1], config["num_target_layers"]
    if not ids:
        return NO_LAYERS
    if ids != sorted(set(ids)):
        return LAYER_ORDER
    return LAST_LAYER if all(0 <= layer < layers for layer in ids) else NO_LAYER


def _training_mistakes(config: Mapping[str, Any]) -> Wrong:
    """Mistakes for fields with another value than in the training."""
    trained = table_of(config, "dflow").get("trained")
    if not isinstance(trained, Mapping):
        return
    trained = {**SCALES, **trained}
    for name, place in _trained_fields(config).items():
        present, value = lookup(config, place)
        if name not in trained:
            where = f"dflow.trained.{name}"
            yield where, field_mistake(where, "is missing", _without("dflow.trained", config))
        elif present and value != trained[name]:
            wrong = f"is {json.dumps(value)}, but the draft was trained with {json.dumps(trained[name])}"
            remedy = REWRITE if name in UNREAD else RETRAIN
            yield place, field_mistake(place, wrong, _with_wrong(name, config), remedy, OF_MAKER)


def _unknown_fields(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Warnings for fields that the serving contract does not know, at the top and in both nested tables."""
    fields = example(config)
    places = [("", config, fields)]
    places += [(f"{nest}.", table_of(config, nest), fields[nest]) for nest in NESTS if nest in fields]
    for prefix, table, known in places:
        others = {"dflow.": set(RECORD), "": {IS_CAUSAL} if _slides(config) else set()}.get(prefix, set())
        for name in sorted(table.keys() - known.keys() - others):
            remedy, wrong, effect = f"remove {prefix}{name}", "is not a field of the contract", UNKNOWN
            if prefix == "dflash_config." and name in fields:
                remedy += f", and leave {name} at the top level"
                wrong, effect = f"is also at the top level, as {name}", NESTED
            yield field_mistake(prefix + name, wrong, effect, remedy)


def _without(name: str, config: Mapping[str, Any]) -> str:
    """A text on what SGLang does if a field is missing. name: with the table that holds it."""
    own: Mapping[str, str] = contract_part(config, "MISSING")
    return own.get(name) or EFFECTS.get(_last(name), (DEFAULT, ""))[0]


def _with_wrong(name: str, config: Mapping[str, Any]) -> str:
    """A text on what SGLang does with a wrong value of a field."""
    own: Mapping[str, str] = contract_part(config, "WRONG")
    return own.get(_last(name)) or EFFECTS.get(_last(name), ("", UNKNOWN))[1]


def _trained_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """The trained fields, of DraftConfig and of the algorithm, with their places in config.json."""
    of_backbone = [attribute.name for attribute in attrs.fields(DraftConfig) if attribute.name != ALGORITHM]
    places = {name: full_name(name, config) for name in of_backbone}
    present = set(_names(example(config)))
    places = {name: place for name, place in places.items() if name not in SCALES or place in present}
    own = set(_names(example(config))) - set(_names(example({}))) - set(places.values())
    return places | {name: name for name in sorted(own)}


def _fields_digest(trained: Mapping[str, Any]) -> str:
    """The sha256 of the fields as JSON with sorted names."""
    return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()


def _slides(config: Mapping[str, Any]) -> bool:
    types = config.get("layer_types")
    return isinstance(types, list) and SLIDING_ATTENTION in types


def _names(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, dict) else (name,)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
