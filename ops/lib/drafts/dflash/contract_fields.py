"""The config.json of a serving directory: complete, of the right types, for this target, and as the draft was trained.

export_draft writes under `dflow` what the draft was trained with (`training_record`). Every field that an engine reads
is compared with it, so that a value changed later, or by a faulty export, is found without the training at hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
from attrs import field, frozen

from dsl.errors import ConfigError
from ops.lib.drafts.dflash import contract_effects
from ops.lib.drafts.dflash.config import (
    ARCHITECTURE,
    EXAMPLE,
    FORMAT,
    DraftConfig,
    from_serving,
    missing_fields,
    to_serving,
    wrong_types,
)
from ops.lib.drafts.dflash.contract_mistake import REWRITE, Mistake

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NESTS = ("dflash_config", "dflow")
RETRAIN = "train the draft again with the value that is wanted, or write the export of this training again"
UNREAD = frozenset({"tie_word_embeddings"})  # a draft has neither part; another training would change nothing
RECORD = ("target", "trained", "digest", "server_args")  # under dflow, written by export_draft alone


def training_record(
    config: DraftConfig, target_digest: str, tensors_digest: str, server_args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What goes under `dflow` beside format and positions: the target's digest, every field as it was trained, digests
    of these fields and of the exported tensors, and what SGLang was given for the capture, if anything.
    """
    serving = to_serving(config)
    trained = {attribute.name: _lookup(serving, _full(attribute.name))[1] for attribute in attrs.fields(DraftConfig)}
    return {
        "target": target_digest,
        "trained": trained,
        "digest": {"trained": fields_digest(trained), "tensors": tensors_digest},
        **({"server_args": dict(server_args)} if server_args else {}),
    }


def fields_digest(trained: Mapping[str, Any]) -> str:
    """sha256 over the fields as JSON with sorted names."""
    return hashlib.sha256(json.dumps(trained, sort_keys=True).encode()).hexdigest()


def config_mistakes(
    config: Mapping[str, Any], target: Mapping[str, Any], target_digest: str, pad_token_ids: Collection[int]
) -> list[Mistake]:
    """What is wrong with a config.json, by itself, beside the target's target.json, and beside the training."""
    absent = missing_fields(config)
    found = _Found()
    found.add((name, _mistake(name, "is missing", contract_effects.missing(name))) for name in absent)
    found.add(_type_mistakes(config))
    has_form = not found.by_field
    found.add(_record_mistakes(config, target_digest))
    found.add(_value_mistakes(config, target))
    found.add(_mask_mistakes(config, target, pad_token_ids))
    if has_form:
        found.add(_draft_mistakes(config))
    found.add(_training_mistakes(config))
    return [*(mistake for mistakes in found.by_field.values() for mistake in mistakes), *_unknown_fields(config)]


@frozen
class _Found:
    """Mistakes by field; what one look found of a field is not told again in other words by a later one."""

    by_field: dict[str, list[Mistake]] = field(factory=dict)

    def add(self, mistakes: Iterable[tuple[str, Mistake]]) -> None:
        known = set(self.by_field)
        for name, mistake in mistakes:
            if name not in known:
                self.by_field.setdefault(name, []).append(mistake)


def _mistake(name: str, wrong: str, sglang: str, remedy: str = REWRITE) -> Mistake:
    return Mistake(f"config.json: {name} {wrong}", sglang, remedy)


def _type_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    """Values of another JSON type than the contract's."""
    for name, wrong in wrong_types(config):
        yield name, _mistake(name, wrong, contract_effects.wrong(_last(name)))


def _record_mistakes(config: Mapping[str, Any], target_digest: str) -> Iterator[tuple[str, Mistake]]:
    record = _nest(config, "dflow")
    for inner, kind in (("target", str), ("trained", Mapping), ("digest", Mapping)):
        name = f"dflow.{inner}"
        if inner not in record:
            yield name, _mistake(name, "is missing", contract_effects.missing(name))
        elif not isinstance(record[inner], kind):
            yield (
                name,
                _mistake(
                    name, f"is no record of a training: {json.dumps(record[inner])}", contract_effects.wrong(inner)
                ),
            )
        elif inner == "target" and record[inner] != target_digest:
            wrong = f"is {record[inner][:12]}, which the draft was trained for, but this target is {target_digest[:12]}"
            remedy = "give export_draft, evaluate and check_export the target of the training"
            yield name, _mistake(name, wrong, contract_effects.wrong(inner), remedy)
    yield from _digest_mistakes(record)


def _digest_mistakes(record: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    """Digests that are missing, and fields changed together with their record; contract_tensors.py looks at the
    tensors'.
    """
    trained, digests = record.get("trained"), record.get("digest")
    if not isinstance(digests, Mapping):
        return
    for inner in ("trained", "tensors"):
        name = f"dflow.digest.{inner}"
        if not isinstance(digests.get(inner), str):
            yield name, _mistake(name, "is missing", contract_effects.missing("dflow.digest"))
        elif inner == "trained" and isinstance(trained, Mapping) and fields_digest(trained) != digests[inner]:
            found = fields_digest(trained)
            wrong = f"is not that of the export: {found[:12]}, but {name} is {digests[inner][:12]}"
            yield "dflow.trained", _mistake("dflow.trained", wrong, contract_effects.wrong("trained"))


def _value_mistakes(config: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    expected = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "num_target_layers": target["num_layers"],
        "dflow.format": FORMAT,
    }
    for name, value in expected.items():
        present, got = _lookup(config, name)
        if present and got != value:
            wrong = f"must be {json.dumps(value)}, got {json.dumps(got)}"
            yield name, _mistake(name, wrong, contract_effects.wrong(_last(name)))
    dtype = config.get("dtype")
    if isinstance(dtype, str) and dtype not in DTYPES:
        wrong = f"must be one of {', '.join(DTYPES)}, got {json.dumps(dtype)}"
        yield "dtype", _mistake("dtype", wrong, contract_effects.wrong("dtype"))


def _mask_mistakes(
    config: Mapping[str, Any], target: Mapping[str, Any], pad_token_ids: Collection[int]
) -> Iterator[tuple[str, Mistake]]:
    name = "dflash_config.mask_token_id"
    mask = _nest(config, "dflash_config").get("mask_token_id")
    for kind, ids in (("an EOS id", target["eos_token_ids"]), ("the pad id", pad_token_ids)):
        if isinstance(mask, int) and mask in ids:
            remedy = "give load_target a mask_token_id that no text produces, and capture and train again"
            yield name, _mistake(name, f"is {kind} of the target", contract_effects.EOS_MASK, remedy)


def _draft_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    """What DraftConfig refuses; its lines read "field: what is wrong"."""
    try:
        from_serving(config)
    except ConfigError as error:
        for line in str(error).splitlines()[1:]:
            name, _, wrong = line.strip().partition(": ")
            remedy = REWRITE if name in UNREAD else RETRAIN
            yield _full(name), Mistake(f"config.json: {_full(name)}: {wrong}", _draft_effect(name, config), remedy)


def _draft_effect(name: str, config: Mapping[str, Any]) -> str:
    if name != "target_layer_ids":
        return contract_effects.wrong(name)
    ids, layers = config["dflash_config"]["target_layer_ids"], config["num_target_layers"]
    if not ids:
        return contract_effects.NO_LAYERS
    if ids != sorted(set(ids)):
        return contract_effects.LAYER_ORDER
    return contract_effects.LAST_LAYER if all(0 <= layer < layers for layer in ids) else contract_effects.NO_LAYER


def _training_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    trained = _nest(config, "dflow").get("trained")
    if not isinstance(trained, Mapping):
        return
    for attribute in attrs.fields(DraftConfig):
        name = _full(attribute.name)
        present, value = _lookup(config, name)
        if attribute.name not in trained:
            where = f"dflow.trained.{attribute.name}"
            yield where, _mistake(where, "is missing", contract_effects.missing("dflow.trained"))
        elif present and value != trained[attribute.name]:
            wrong = f"is {json.dumps(value)}, but the draft was trained with {json.dumps(trained[attribute.name])}"
            remedy = REWRITE if attribute.name in UNREAD else RETRAIN
            yield name, _mistake(name, wrong, contract_effects.wrong(attribute.name), remedy)


def _unknown_fields(config: Mapping[str, Any]) -> list[Mistake]:
    """Fields that the contract does not name, at the top and in both nests."""
    mistakes = []
    places = [("", config, EXAMPLE), *((f"{nest}.", _nest(config, nest), EXAMPLE[nest]) for nest in NESTS)]
    for prefix, table, known in places:
        for name in sorted(table.keys() - known.keys() - (set(RECORD) if prefix == "dflow." else set())):
            nested = prefix == "dflash_config." and name in EXAMPLE
            remedy = f"remove {prefix}{name}" + (f", and leave {name} at the top level" if nested else "")
            wrong = f"stands beside {name} at the top level" if nested else "is no field of the contract"
            mistakes.append(
                _mistake(prefix + name, wrong, contract_effects.NESTED if nested else contract_effects.UNKNOWN, remedy)
            )
    return mistakes


def _nest(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    nest = config.get(name)
    return nest if isinstance(nest, Mapping) else {}


def _lookup(config: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether a field such as "dflash_config.mask_token_id" is there, and its value."""
    nest, _, inner = name.rpartition(".")
    table = _nest(config, nest) if nest else config
    return inner in table, table.get(inner)


def _full(name: str) -> str:
    """A field of DraftConfig as config.json nests it."""
    return next((f"{nest}.{name}" for nest in NESTS if name in EXAMPLE[nest]), name)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
