"""A draft's config.json against the serving contract and the training that it records. Loads no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import field, frozen

from dsl.errors import ConfigError
from dsl.finding import Finding
from ops.lib.drafts.backbone import contract_effects
from ops.lib.drafts.backbone.config import (
    ALGORITHM,
    FORMAT,
    IS_CAUSAL,
    SLIDING_ATTENTION,
    DraftConfig,
    algorithm_of,
    example,
    from_serving,
    missing_fields,
    to_serving,
    wrong_types,
)
from ops.lib.drafts.backbone.contract_fields import DTYPES, NESTS, contract_part, full_name, lookup, table_of
from ops.lib.drafts.backbone.mistakes import OF_MAKER, REWRITE, mistake

SGLANG = "sglang"  # the format of an export that every one has
RETRAIN = "train the draft again with the desired value, or write the export of this training again"
UNREAD = frozenset({"tie_word_embeddings"})  # a draft has neither part; training again would change nothing
# Under dflow, by export_draft and load_draft.
RECORD = ("target", "trained", "digest", "server_args", "formats", "engine", "imported")


def training_record(
    config: DraftConfig,
    target_digest: str,
    tensors_digest: str,
    server_args: Mapping[str, Any] | None = None,
    formats: Sequence[str] = (SGLANG,),
) -> dict[str, Any]:
    """What goes under `dflow` beside format and positions: the target's digest, every field as it was trained, digests
    of these fields and of the exported tensors, SGLang's arguments for the capture, if any, and the formats, if there
    are several.
    """
    serving = to_serving(config)
    trained = {name: lookup(serving, place)[1] for name, place in _trained_fields(serving).items()}
    return {
        "target": target_digest,
        "trained": trained,
        "digest": {"trained": fields_digest(trained), "tensors": tensors_digest},
        **({"server_args": dict(server_args)} if server_args else {}),
        **({"formats": list(formats)} if tuple(formats) != (SGLANG,) else {}),
    }


def trained_config(config: Mapping[str, Any]) -> DraftConfig | None:
    """The config that `training_record` wrote into this config.json; None if the record is missing or invalid."""
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


def fields_digest(trained: Mapping[str, Any]) -> str:
    """sha256 over the fields as JSON with sorted names."""
    return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()


def config_mistakes(
    config: Mapping[str, Any],
    target: Mapping[str, Any] | None,
    target_digest: str,
    pad_token_ids: Collection[int] = (),
) -> list[Finding]:
    """What is wrong with a config.json, by itself, beside the training, and beside the target.

    target: its target.json, None where only its digest is known.
    """
    absent = missing_fields(config)
    found = _Found()
    found.add((name, config_mistake(name, "is missing", _missing(name, config))) for name in absent)
    found.add(_type_mistakes(config))
    has_form = not found.by_field
    found.add(_record_mistakes(config, target_digest))
    found.add(_value_mistakes(config, target))
    if target is not None:
        found.add(_mask_mistakes(config, target, pad_token_ids))
    if _slides(config) and IS_CAUSAL not in config:
        found.add([(IS_CAUSAL, config_mistake(IS_CAUSAL, "is missing", contract_effects.missing(IS_CAUSAL)))])
    if has_form:
        found.add(_draft_mistakes(config))
    found.add(_training_mistakes(config))
    return [*(each for mistakes in found.by_field.values() for each in mistakes), *_unknown_fields(config)]


@frozen
class _Found:
    """Mistakes by field; a later check adds nothing to a field that an earlier one already reported."""

    by_field: dict[str, list[Finding]] = field(factory=dict)

    def add(self, mistakes: Iterable[tuple[str, Finding]]) -> None:
        known = set(self.by_field)
        for name, found in mistakes:
            if name not in known:
                self.by_field.setdefault(name, []).append(found)


def config_mistake(name: str, wrong: str, effect: str, remedy: str = REWRITE, code: str = "") -> Finding:
    return mistake("config.json", wrong, effect, remedy, part=name, code=code)


def _type_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Finding]]:
    """Values of another JSON type than the contract's."""
    for name, wrong in wrong_types(config):
        yield name, config_mistake(name, wrong, _wrong(_last(name), config))


def _record_mistakes(config: Mapping[str, Any], target_digest: str) -> Iterator[tuple[str, Finding]]:
    record = table_of(config, "dflow")
    for inner, kind in (("target", str), ("trained", Mapping), ("digest", Mapping)):
        name = f"dflow.{inner}"
        if inner not in record:
            yield name, config_mistake(name, "is missing", contract_effects.missing(name))
        elif not isinstance(record[inner], kind):
            yield (
                name,
                config_mistake(
                    name, f"is not a record of a training: {json.dumps(record[inner])}", contract_effects.wrong(inner)
                ),
            )
        elif inner == "target" and record[inner] != target_digest:
            wrong = f"is {record[inner][:12]}, which the draft was trained for, but this target is {target_digest[:12]}"
            remedy = "give export_draft, evaluate and check_export the target of the training"
            yield name, config_mistake(name, wrong, contract_effects.wrong(inner), remedy)
    yield from _fields_digest_mistakes(record)


def _fields_digest_mistakes(record: Mapping[str, Any]) -> Iterator[tuple[str, Finding]]:
    """Digests that are missing, and fields changed together with their record; `tensors_digest_mistakes` checks the
    tensors.
    """
    trained, digests = record.get("trained"), record.get("digest")
    if not isinstance(digests, Mapping):
        return
    for inner in ("trained", "tensors"):
        name = f"dflow.digest.{inner}"
        if not isinstance(digests.get(inner), str):
            yield name, config_mistake(name, "is missing", contract_effects.missing("dflow.digest"))
        elif inner == "trained" and isinstance(trained, Mapping) and fields_digest(trained) != digests[inner]:
            found = fields_digest(trained)
            wrong = f"is not that of the export: {found[:12]}, but {name} is {digests[inner][:12]}"
            yield "dflow.trained", config_mistake("dflow.trained", wrong, contract_effects.wrong("trained"))


def _value_mistakes(config: Mapping[str, Any], target: Mapping[str, Any] | None) -> Iterator[tuple[str, Finding]]:
    expected = {
        "architectures": [algorithm_of(config).architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "dflow.format": FORMAT,
    }
    if target is not None:
        sizes = (target["vocab_size"], target["hidden_size"], target["num_layers"])
        expected |= dict(zip(("vocab_size", "hidden_size", "num_target_layers"), sizes, strict=True))
    for name, value in expected.items():
        present, got = lookup(config, name)
        if present and got != value:
            wrong = f"must be {json.dumps(value)}, got {json.dumps(got)}"
            yield name, config_mistake(name, wrong, _wrong(_last(name), config))
    dtype = config.get("dtype")
    if isinstance(dtype, str) and dtype not in DTYPES:
        wrong = f"must be one of {', '.join(DTYPES)}, got {json.dumps(dtype)}"
        yield "dtype", config_mistake("dtype", wrong, contract_effects.wrong("dtype"))
    engine = table_of(config, "dflow").get("engine", "")
    if not isinstance(engine, str):
        wrong = f"must be the name of an engine, got {json.dumps(engine)}"
        yield "dflow.engine", config_mistake("dflow.engine", wrong, contract_effects.wrong("engine"))


def _mask_mistakes(
    config: Mapping[str, Any], target: Mapping[str, Any], pad_token_ids: Collection[int]
) -> Iterator[tuple[str, Finding]]:
    name = full_name("mask_token_id", config)
    mask = lookup(config, name)[1]
    for kind, ids in (("an EOS id", target["eos_token_ids"]), ("the pad id", pad_token_ids)):
        if isinstance(mask, int) and mask in ids:
            remedy = "set mask_token_id of train_dflash to an id that no text produces, and train again"
            yield name, config_mistake(name, f"is {kind} of the target", contract_effects.EOS_MASK, remedy, OF_MAKER)


def _draft_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Finding]]:
    """What DraftConfig refuses; its lines read "field: what is wrong"."""
    try:
        from_serving(config)
    except ConfigError as error:
        for line in str(error).splitlines()[1:]:
            named, _, wrong = line.strip().partition(": ")
            name = named.partition("(")[2].rstrip(")") or named  # "dflash2.group (conv_group_size)"
            remedy = REWRITE if name in UNREAD else RETRAIN
            place = full_name(name, config)
            effect = _draft_effect(name, config)
            yield place, mistake("config.json", f"{place}: {wrong}", effect, remedy, code=OF_MAKER)


def _draft_effect(name: str, config: Mapping[str, Any]) -> str:
    if name != "target_layer_ids":
        return _wrong(name, config)
    ids, layers = lookup(config, full_name(name, config))[1], config["num_target_layers"]
    if not ids:
        return contract_effects.NO_LAYERS
    if ids != sorted(set(ids)):
        return contract_effects.LAYER_ORDER
    return contract_effects.LAST_LAYER if all(0 <= layer < layers for layer in ids) else contract_effects.NO_LAYER


def _training_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Finding]]:
    trained = table_of(config, "dflow").get("trained")
    if not isinstance(trained, Mapping):
        return
    for field_name, place in _trained_fields(config).items():
        present, value = lookup(config, place)
        if field_name not in trained:
            where = f"dflow.trained.{field_name}"
            yield where, config_mistake(where, "is missing", contract_effects.missing("dflow.trained"))
        elif present and value != trained[field_name]:
            wrong = f"is {json.dumps(value)}, but the draft was trained with {json.dumps(trained[field_name])}"
            remedy = REWRITE if field_name in UNREAD else RETRAIN
            yield place, config_mistake(place, wrong, _wrong(_last(field_name), config), remedy, OF_MAKER)


def _unknown_fields(config: Mapping[str, Any]) -> list[Finding]:
    """Fields that the contract does not name, at the top and in both nests."""
    mistakes = []
    fields = example(config)
    places = [("", config, fields)]
    places += [(f"{nest}.", table_of(config, nest), fields[nest]) for nest in NESTS if nest in fields]
    for prefix, table, known in places:
        others = {"dflow.": set(RECORD), "": {IS_CAUSAL} if _slides(config) else set()}.get(prefix, set())
        for name in sorted(table.keys() - known.keys() - others):
            nested = prefix == "dflash_config." and name in fields
            remedy = f"remove {prefix}{name}" + (f", and leave {name} at the top level" if nested else "")
            wrong = f"is also at the top level, as {name}" if nested else "is not a field of the contract"
            mistakes.append(
                config_mistake(
                    prefix + name, wrong, contract_effects.NESTED if nested else contract_effects.UNKNOWN, remedy
                )
            )
    return mistakes


def _slides(config: Mapping[str, Any]) -> bool:
    types = config.get("layer_types")
    return isinstance(types, list) and SLIDING_ATTENTION in types


def _missing(name: str, config: Mapping[str, Any]) -> str:
    """What SGLang does without a field of the backbone, or of the algorithm."""
    own: Mapping[str, str] = contract_part(config, "MISSING")
    return own.get(name) or contract_effects.missing(name)


def _wrong(name: str, config: Mapping[str, Any]) -> str:
    """What SGLang does with a wrong value of one."""
    own: Mapping[str, str] = contract_part(config, "WRONG")
    return own.get(name) or contract_effects.wrong(name)


def _trained_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """What is recorded of a training, and where config.json has it: the fields of DraftConfig and the algorithm's."""
    of_backbone = [attribute.name for attribute in attrs.fields(DraftConfig) if attribute.name != ALGORITHM]
    places = {name: full_name(name, config) for name in of_backbone}
    own = set(_names(example(config))) - set(_names(example({}))) - set(places.values())
    return places | {name: name for name in sorted(own)}


def _names(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, dict) else (name,)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
