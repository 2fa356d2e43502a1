"""The serving contract of a draft, checked on the files: what SGLang would not check, or would only notice late.

An engine that lacks a tensor silently serves random weights, so nothing here is a warning. The contract is closed:
fields that it does not name are refused, because SGLang reads many fields that change what a draft computes.

config.json is complete, has the right types, and fits this target and the training: export_draft writes under
`dflow` what the draft was trained with (`training_record`), and every field that an engine reads is compared with it,
so that a value changed later, or by a faulty export, is found without the training. model.safetensors holds
every tensor of the contract, of the right shape, and nothing else. Where `dflow.formats` names speculators' format too,
a folder of it holds the same draft (`speculators_contract`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen
from safetensors import safe_open

from dsl.errors import ConfigError, DataError
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import DFLASH
from ops.lib.drafts.backbone import contract_effects
from ops.lib.drafts.backbone.config import (
    ALGORITHM,
    FORMAT,
    IS_CAUSAL,
    SHAPE_FIELDS,
    SLIDING_ATTENTION,
    DraftConfig,
    algorithm_of,
    example,
    from_serving,
    missing_fields,
    to_serving,
    wrong_types,
)
from ops.lib.drafts.backbone.contract_fields import NESTS, contract_part, expected_shapes, full_name, lookup, table_of
from ops.lib.drafts.backbone.load import import_record
from ops.lib.drafts.backbone.mistakes import REWRITE, Mistake, refuse
from ops.lib.drafts.backbone.speculators_contract import speculators_mistakes
from ops.lib.drafts.backbone.speculators_format import FOLDER, Verifier
from ops.lib.drafts.backbone.stored_tensors import DTYPES, Stored, stored_tensors, tensors_digest
from ops.lib.target.model import read_config, target_info, text_config

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
SGLANG, SPECULATORS = "sglang", FOLDER  # formats of an export
NEEDED = {
    CONFIG: "cannot determine the kind of model and refuses to start",
    WEIGHTS: "finds no weights and refuses to start",
    CARD: "does not need it, but it documents how to serve the draft, and for which target",
}
NOT_PLAIN = "refuses to start, or follows a link that is wrong or broken once the draft is shipped"
OF_THE_STORE = "manifest.json"  # beside the files of every committed artifact; it is not shipped
MASK_EMBEDDING = "mask_embedding.pt"


@frozen
class ServedTarget:
    """What the contract needs of the target. pad_token_ids: those of its config and of the prompts' tokens."""

    info: Mapping[str, Any]
    digest: str
    pad_token_ids: frozenset[int]
    verifier: Verifier

    @classmethod
    def of(cls, target: TargetModel, tokens: TokenShards | None = None) -> ServedTarget:
        pads = {text_config(target).get("pad_token_id")}
        if tokens is not None:
            pads.add(read_json(tokens.path / "tokens.json")["pad_token_id"])
        info = target_info(target)
        return cls(
            info=info,
            digest=target.digest,
            pad_token_ids=frozenset(pad for pad in pads if pad is not None),
            verifier=Verifier.of(info, read_config(target.path / "model")),
        )


def check_serving(directory: Path, target: TargetModel, tokens: TokenShards | None = None) -> None:
    """Check a serving directory against the contract and its target; tokens: of the prompts, for their pad id.

    Reads everything, the tensors' values included. Raises DataError that lists all mistakes, each with what SGLang
    would do about it and with its remedy.
    """
    refuse(directory, serving_mistakes(directory, ServedTarget.of(target, tokens)), is_imported=is_imported(directory))


def is_imported(directory: Path) -> bool:
    """Whether a serving directory says that its draft was trained elsewhere."""
    with suppress(DataError):
        return import_record(directory) is not None
    return False


def serving_mistakes(directory: Path, target: ServedTarget) -> list[Mistake]:
    """What is wrong with a serving directory: its files, config.json, the tensors, and then the folder of speculators'
    format.
    """
    entries = {path.name for path in directory.iterdir()} - {OF_THE_STORE}
    present = entries & NEEDED.keys()
    mistakes = [Mistake(f"{name}: is missing", NEEDED[name], REWRITE) for name in sorted(NEEDED.keys() - entries)]
    mistakes += [_stray(name) for name in sorted(entries - NEEDED.keys() - {SPECULATORS})]
    names = {name for name in present if _is_plain(directory / name)}
    mistakes += [_not_plain(name, directory) for name in sorted(present - names)]
    config: dict[str, Any] = {}
    wrong_config: list[Mistake] = []
    wrong_weights: list[Mistake] = []
    if CARD in names:
        mistakes += _card_mistakes(directory / CARD)
    if CONFIG in names:
        config, wrong_config = _read_config(directory / CONFIG)
        wrong_config = wrong_config or config_mistakes(config, target.info, target.digest, target.pad_token_ids)
    if WEIGHTS in names:
        wrong_weights = _weight_mistakes(directory / WEIGHTS, config)
    mistakes += [*wrong_config, *wrong_weights]
    if SPECULATORS not in formats_of(config):
        return mistakes + ([_stray(SPECULATORS)] if SPECULATORS in entries and config else [])
    folder = directory / SPECULATORS
    if folder.is_symlink() or not folder.is_dir():
        return [*mistakes, Mistake(f"{SPECULATORS}: is missing", "finds no draft in this format", REWRITE, "vLLM")]
    return mistakes + speculators_mistakes(
        folder,
        None if wrong_config else from_serving(config),
        str(config.get("dtype")),
        target.verifier,
        directory / WEIGHTS if WEIGHTS in names and not wrong_weights else None,
    )


def formats_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The formats of an export, by its config.json: the contract's own, and others as folders beside it."""
    named = table_of(config, "dflow").get("formats")
    return tuple(map(str, named)) if isinstance(named, list) else (SGLANG,)


def _is_plain(path: Path) -> bool:
    """Whether it is a regular file: a link may be broken, here or once the draft is shipped."""
    return path.is_file() and not path.is_symlink()


def _not_plain(name: str, directory: Path) -> Mistake:
    kind = "a link" if (directory / name).is_symlink() else "a directory"
    return Mistake(f"{name}: is not a regular file but {kind}", NOT_PLAIN, REWRITE)


def _card_mistakes(path: Path) -> list[Mistake]:
    try:
        path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [Mistake(f"{CARD}: cannot be read as text in UTF-8 ({error})", "does not read it", REWRITE)]
    return []


def _read_config(path: Path) -> tuple[dict[str, Any], list[Mistake]]:
    try:
        config = read_json(path)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        return {}, [Mistake(f"{CONFIG}: not valid JSON ({error})", "refuses to start", REWRITE)]
    if not isinstance(config, dict):
        return {}, [Mistake(f"{CONFIG}: holds no object", "refuses to start", REWRITE)]
    try:
        algorithm_of(config)
    except ConfigError as error:
        return {}, [_config_mistake("dflow", str(error), contract_effects.missing("dflow.format"))]
    return config, []


def _weight_mistakes(path: Path, config: Mapping[str, Any]) -> list[Mistake]:
    try:
        stored = stored_tensors(path)
    except DataError as error:
        return [Mistake(f"{WEIGHTS}: {error}", "refuses to start, or loads the rest of the file", REWRITE)]
    # Mistakes of single tensors are more specific than a different digest.
    return [*tensor_mistakes(config, stored), *value_mistakes(path)] or tensors_digest_mistakes(
        config, tensors_digest(path)
    )


def _stray(name: str) -> Mistake:
    what, remedy = f"{name}: does not belong here", "remove the file"
    if name == MASK_EMBEDDING:
        return Mistake(
            what,
            "overwrites the target's embedding of the mask token with it at the start, but the draft was trained with "
            "the target's own",
            remedy,
        )
    if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json")):
        return Mistake(what, "may load it instead of, or over, the draft's own weights", remedy)
    return Mistake(what, "may read it: files beside config.json decide how a model is loaded", remedy)


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
    config: Mapping[str, Any], target: Mapping[str, Any], target_digest: str, pad_token_ids: Collection[int]
) -> list[Mistake]:
    """What is wrong with a config.json, by itself, beside the target's target.json, and beside the training."""
    absent = missing_fields(config)
    found = _Found()
    found.add((name, _config_mistake(name, "is missing", _missing(name, config))) for name in absent)
    found.add(_type_mistakes(config))
    has_form = not found.by_field
    found.add(_record_mistakes(config, target_digest))
    found.add(_value_mistakes(config, target))
    found.add(_mask_mistakes(config, target, pad_token_ids))
    if _slides(config) and IS_CAUSAL not in config:
        found.add([(IS_CAUSAL, _config_mistake(IS_CAUSAL, "is missing", contract_effects.missing(IS_CAUSAL)))])
    if has_form:
        found.add(_draft_mistakes(config))
    found.add(_training_mistakes(config))
    return [*(mistake for mistakes in found.by_field.values() for mistake in mistakes), *_unknown_fields(config)]


@frozen
class _Found:
    """Mistakes by field; a later check adds nothing to a field that an earlier one already reported."""

    by_field: dict[str, list[Mistake]] = field(factory=dict)

    def add(self, mistakes: Iterable[tuple[str, Mistake]]) -> None:
        known = set(self.by_field)
        for name, mistake in mistakes:
            if name not in known:
                self.by_field.setdefault(name, []).append(mistake)


def _config_mistake(name: str, wrong: str, effect: str, remedy: str = REWRITE) -> Mistake:
    return Mistake(f"config.json: {name} {wrong}", effect, remedy)


def _type_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    """Values of another JSON type than the contract's."""
    for name, wrong in wrong_types(config):
        yield name, _config_mistake(name, wrong, _wrong(_last(name), config))


def _record_mistakes(config: Mapping[str, Any], target_digest: str) -> Iterator[tuple[str, Mistake]]:
    record = table_of(config, "dflow")
    for inner, kind in (("target", str), ("trained", Mapping), ("digest", Mapping)):
        name = f"dflow.{inner}"
        if inner not in record:
            yield name, _config_mistake(name, "is missing", contract_effects.missing(name))
        elif not isinstance(record[inner], kind):
            yield (
                name,
                _config_mistake(
                    name, f"is not a record of a training: {json.dumps(record[inner])}", contract_effects.wrong(inner)
                ),
            )
        elif inner == "target" and record[inner] != target_digest:
            wrong = f"is {record[inner][:12]}, which the draft was trained for, but this target is {target_digest[:12]}"
            remedy = "give export_draft, evaluate and check_export the target of the training"
            yield name, _config_mistake(name, wrong, contract_effects.wrong(inner), remedy)
    yield from _fields_digest_mistakes(record)


def _fields_digest_mistakes(record: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    """Digests that are missing, and fields changed together with their record; `tensors_digest_mistakes` checks the
    tensors.
    """
    trained, digests = record.get("trained"), record.get("digest")
    if not isinstance(digests, Mapping):
        return
    for inner in ("trained", "tensors"):
        name = f"dflow.digest.{inner}"
        if not isinstance(digests.get(inner), str):
            yield name, _config_mistake(name, "is missing", contract_effects.missing("dflow.digest"))
        elif inner == "trained" and isinstance(trained, Mapping) and fields_digest(trained) != digests[inner]:
            found = fields_digest(trained)
            wrong = f"is not that of the export: {found[:12]}, but {name} is {digests[inner][:12]}"
            yield "dflow.trained", _config_mistake("dflow.trained", wrong, contract_effects.wrong("trained"))


def _value_mistakes(config: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    expected = {
        "architectures": [algorithm_of(config).architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "num_target_layers": target["num_layers"],
        "dflow.format": FORMAT,
    }
    for name, value in expected.items():
        present, got = lookup(config, name)
        if present and got != value:
            wrong = f"must be {json.dumps(value)}, got {json.dumps(got)}"
            yield name, _config_mistake(name, wrong, _wrong(_last(name), config))
    dtype = config.get("dtype")
    if isinstance(dtype, str) and dtype not in DTYPES:
        wrong = f"must be one of {', '.join(DTYPES)}, got {json.dumps(dtype)}"
        yield "dtype", _config_mistake("dtype", wrong, contract_effects.wrong("dtype"))
    engine = table_of(config, "dflow").get("engine", "")
    if not isinstance(engine, str):
        wrong = f"must be the name of an engine, got {json.dumps(engine)}"
        yield "dflow.engine", _config_mistake("dflow.engine", wrong, contract_effects.wrong("engine"))


def _mask_mistakes(
    config: Mapping[str, Any], target: Mapping[str, Any], pad_token_ids: Collection[int]
) -> Iterator[tuple[str, Mistake]]:
    name = full_name("mask_token_id", config)
    mask = lookup(config, name)[1]
    for kind, ids in (("an EOS id", target["eos_token_ids"]), ("the pad id", pad_token_ids)):
        if isinstance(mask, int) and mask in ids:
            remedy = "give load_target a mask_token_id that no text produces, and capture and train again"
            yield name, _config_mistake(name, f"is {kind} of the target", contract_effects.EOS_MASK, remedy)


def _draft_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    """What DraftConfig refuses; its lines read "field: what is wrong"."""
    try:
        from_serving(config)
    except ConfigError as error:
        for line in str(error).splitlines()[1:]:
            named, _, wrong = line.strip().partition(": ")
            name = named.partition("(")[2].rstrip(")") or named  # "dflash2.group (conv_group_size)"
            remedy = REWRITE if name in UNREAD else RETRAIN
            place = full_name(name, config)
            yield place, Mistake(f"config.json: {place}: {wrong}", _draft_effect(name, config), remedy)


def _draft_effect(name: str, config: Mapping[str, Any]) -> str:
    if name != "target_layer_ids":
        return _wrong(name, config)
    ids, layers = lookup(config, full_name(name, config))[1], config["num_target_layers"]
    if not ids:
        return contract_effects.NO_LAYERS
    if ids != sorted(set(ids)):
        return contract_effects.LAYER_ORDER
    return contract_effects.LAST_LAYER if all(0 <= layer < layers for layer in ids) else contract_effects.NO_LAYER


def _training_mistakes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mistake]]:
    trained = table_of(config, "dflow").get("trained")
    if not isinstance(trained, Mapping):
        return
    for field_name, place in _trained_fields(config).items():
        present, value = lookup(config, place)
        if field_name not in trained:
            where = f"dflow.trained.{field_name}"
            yield where, _config_mistake(where, "is missing", contract_effects.missing("dflow.trained"))
        elif present and value != trained[field_name]:
            wrong = f"is {json.dumps(value)}, but the draft was trained with {json.dumps(trained[field_name])}"
            remedy = REWRITE if field_name in UNREAD else RETRAIN
            yield place, _config_mistake(place, wrong, _wrong(_last(field_name), config), remedy)


def _unknown_fields(config: Mapping[str, Any]) -> list[Mistake]:
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
                _config_mistake(
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


PREFIX = "model."
RANDOM = "silently leaves a missing tensor with arbitrary values, and accepts about 1 token a step"
IGNORED = "silently ignores an unknown tensor"
PREFIXED = "accepts the prefix; the reference implementation does not, and leaves all these tensors random"
FC_WIDTH = "refuses to start (ValueError: fc.weight does not fit the number of target layers)"
SHAPE = "stops while loading the weights, with an error that may name no tensor"
CAST = "silently casts it to the server's dtype"
NOT_FINITE = "silently proposes the same token for NaN logits, and about 1 token a step is accepted"
REPLACED = (
    "silently loads what fits by name and shape: swapped or different weights propose other tokens, and about 1 token "
    "a step is accepted"
)


def tensor_mistakes(config: Mapping[str, Any], stored: Stored) -> list[Mistake]:
    """What is wrong with the tensors beside a config.json.

    If the config lacks a size, also one of the algorithm, they cannot be compared; the config's own mistakes report it.
    """
    ids = lookup(config, full_name("target_layer_ids", config))[1]
    if not isinstance(ids, list) or not all(type(config.get(name)) is int for name in SHAPE_FIELDS):
        return []
    expected = expected_shapes(config)
    if algorithm_of(config).name != DFLASH and not contract_part(config, "shapes")(config):
        return []
    prefixed = {name for name in stored if name.removeprefix(PREFIX) in expected and name.startswith(PREFIX)}
    known = {name.removeprefix(PREFIX) if name in prefixed else name: entry for name, entry in stored.items()}
    mistakes = {name: _tensor_mistake(name, "is missing", RANDOM) for name in expected if name not in known}
    mistakes |= {name: _tensor_mistake(name, "does not belong here", IGNORED) for name in known if name not in expected}
    dtype = DTYPES.get(config["dtype"]) if isinstance(config.get("dtype"), str) else None
    for name in expected.keys() & known.keys():
        shape, stored_dtype = known[name]
        if shape != expected[name]:
            wrong = f"must be {list(expected[name])}, got {list(shape)}"
            mistakes[name] = _tensor_mistake(name, wrong, FC_WIDTH if name == "fc.weight" else SHAPE)
        elif dtype is not None and stored_dtype != dtype:
            mistakes[name] = _tensor_mistake(name, f"must be of dtype {dtype}, got {stored_dtype}", CAST)
    listed = [mistakes[name] for name in sorted(mistakes)]
    if prefixed:
        some = ", ".join(sorted(prefixed)[:3]) + (", ..." if len(prefixed) > 3 else "")
        wrong = f'{len(prefixed)} names begin with "{PREFIX}" ({some})'
        listed.append(Mistake(f"model.safetensors: {wrong}", PREFIXED, REWRITE))
    return listed


def value_mistakes(path: Path) -> list[Mistake]:
    """The tensors with non-finite values. Reads all tensors, one after the other."""
    mistakes = []
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            count = int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else 0
            if count:
                wrong = f"has {count} non-finite values of {tensor.numel()}"
                mistakes.append(
                    _tensor_mistake(name, wrong, NOT_FINITE, "train again from a checkpoint before they appeared")
                )
    return mistakes


def tensors_digest_mistakes(config: Mapping[str, Any], found: str) -> list[Mistake]:
    """Whether tensors of this digest are those that were exported; not checked if the config has no digest of them."""
    digests = table_of(config, "dflow").get("digest")
    if not isinstance(digests, Mapping) or "tensors" not in digests:
        return []  # the config's own mistakes report it
    written = str(digests["tensors"])
    if found == written:
        return []
    what = f"the tensors are not those of the export: {found[:12]}, but dflow.digest.tensors is {written[:12]}"
    return [Mistake(f"model.safetensors: {what}", REPLACED, REWRITE)]


def _tensor_mistake(name: str, wrong: str, effect: str, remedy: str = REWRITE) -> Mistake:
    return Mistake(f"model.safetensors: {name} {wrong}", effect, remedy)
