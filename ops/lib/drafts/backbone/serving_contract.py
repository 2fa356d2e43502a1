"""The files of an export against the serving contract: what SGLang would not check, or would only notice late.

An engine that lacks a tensor silently serves random weights, so nothing here is a warning. config.json is complete, has
the right types, and fits this target and the training (contract.py); model.safetensors holds every tensor of the
contract, of the right shape, and nothing else. Where `dflow.formats` names speculators' format too, a folder of it
holds the same draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen
from safetensors import safe_open

from dsl.artifact_digest import MANIFEST
from dsl.errors import ConfigError, DataError
from dsl.finding import Finding
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import DFLASH
from ops.lib.drafts.backbone.config import (
    SHAPE_FIELDS,
    DraftConfig,
    algorithm_of,
    contract_part,
    from_serving,
    full_name,
    lookup,
    optional_part,
    table_of,
)
from ops.lib.drafts.backbone.contract import (
    DTYPES,
    EFFECTS,
    OF_MAKER,
    SGLANG,
    config_mistakes,
    field_mistake,
    mistake,
    refuse,
)
from ops.lib.drafts.backbone.load import CONFIG, WEIGHTS, Stored, import_record, stored_tensors, tensors_digest
from ops.lib.drafts.backbone.sizes import expected_shapes
from ops.lib.drafts.backbone.speculators import ENGINE, FOLDER, REFUSES, Verifier, speculators_mistakes
from ops.lib.target.model import read_config, target_info, text_config
from ops.lib.target.same_target import is_same_target

CARD = "README.md"
SPECULATORS = FOLDER  # a format of an export beside SGLang's
NEEDED = {
    CONFIG: "cannot determine the kind of model and refuses to start",
    WEIGHTS: "finds no weights and refuses to start",
    CARD: "does not need it, but it documents how to serve the draft, and for which target",
}
NOT_PLAIN = "refuses to start, or follows a link that is wrong or broken once the draft is shipped"

MASK_EMBEDDING = "mask_embedding.pt"
STRAY = "may read it: files beside config.json decide how a model is loaded"
STRAY_WEIGHTS = "may load it instead of, or over, the draft's own weights"
STRAY_MASK = (
    "overwrites the target's embedding of the mask token with it at the start, but the draft was trained with the "
    "target's own"
)


@frozen
class ServedTarget:
    """The facts about the target that the serving contract needs. pad_token_ids: of its config and of the prompts'
    tokens.
    """

    info: Mapping[str, Any]
    digest: str
    folder: Path
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
            folder=target.path,
            pad_token_ids=frozenset(pad for pad in pads if pad is not None),
            verifier=Verifier.of(info, read_config(target.path / "model")),
        )


def check_serving(directory: Path, target: TargetModel, tokens: TokenShards | None = None) -> None:
    """Check a serving directory against the serving contract and its target. tokens: of the prompts, for their pad id.

    Everything is read, even the tensors' values. Raises DataError that lists all mistakes, each with what SGLang would
    do and how to correct it.
    """
    refuse(directory, serving_mistakes(directory, ServedTarget.of(target, tokens)), is_imported=is_imported(directory))


def is_imported(directory: Path) -> bool:
    """Whether a serving directory says that its draft was trained elsewhere."""
    with suppress(DataError):
        return import_record(directory) is not None
    return False


def serving_mistakes(directory: Path, target: ServedTarget) -> list[Finding]:
    """All mistakes in a serving directory: files, config.json, tensors, and the folder in speculators' format."""
    plain, mistakes = _file_mistakes(directory, NEEDED, {MANIFEST, SPECULATORS})  # the store's manifest is not shipped
    config: dict[str, Any] = {}
    wrong_config: list[Finding] = []
    wrong_weights: list[Finding] = []
    if CARD in plain:
        mistakes += _card_mistakes(directory / CARD)
    if CONFIG in plain:
        config, wrong_config = _read_config(directory / CONFIG)
        recorded = str(table_of(config, "dflow").get("target"))
        digest = recorded if is_same_target(recorded, target.digest, target.folder) else target.digest
        wrong_config = wrong_config or config_mistakes(config, target.info, digest, target.pad_token_ids)
    if WEIGHTS in plain:
        wrong_weights = _weight_mistakes(directory / WEIGHTS, config)
    mistakes += [*wrong_config, *wrong_weights]
    folder = directory / SPECULATORS
    if SPECULATORS in formats_of(config):
        shape = None if wrong_config else from_serving(config)
        weights = directory / WEIGHTS if WEIGHTS in plain and not wrong_weights else None
        mistakes += _speculators_mistakes(folder, shape, str(config.get("dtype")), target.verifier, weights)
    elif config and (folder.is_symlink() or folder.exists()):
        mistakes.append(_stray(SPECULATORS, "SGLang"))
    return mistakes


def _speculators_mistakes(
    folder: Path, shape: DraftConfig | None, dtype: str, verifier: Verifier, weights: Path | None
) -> list[Finding]:
    """Mistakes in the folder in speculators' format.

    shape, dtype: of the serving directory, None if its config.json is wrong. weights: its tensors, None if they are
    wrong.
    """
    if folder.is_symlink() or not folder.is_dir():
        return [mistake(SPECULATORS, "is missing", "finds no draft in this format", engine=ENGINE)]
    plain, mistakes = _file_mistakes(folder, dict.fromkeys((CONFIG, WEIGHTS), REFUSES), set(), f"{FOLDER}/", ENGINE)
    if CONFIG in plain and shape is not None:
        written, unreadable = _read_json(folder / CONFIG, f"{FOLDER}/", ENGINE)
        mistakes += unreadable or speculators_mistakes(written, shape, dtype, verifier)
    if WEIGHTS in plain and weights is not None and not weights.samefile(folder / WEIGHTS):
        mistakes += _other_tensors(folder / WEIGHTS, weights)
    return mistakes


def formats_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The formats of an export, from its config.json: the main one, and others that lie in subfolders."""
    named = table_of(config, "dflow").get("formats")
    return tuple(map(str, named)) if isinstance(named, list) else (SGLANG,)


def _file_mistakes(
    directory: Path, needed: Mapping[str, str], passed: set[str], prefix: str = "", engine: str = "SGLang"
) -> tuple[set[str], list[Finding]]:
    """The required files that exist as regular files, and the mistakes among the names in a directory.

    needed: name -> what the engine does without it. passed: names that are checked elsewhere.
    """
    entries = {path.name for path in directory.iterdir()} - passed
    present = entries & needed.keys()
    plain = {name for name in present if _is_plain(directory / name)}
    mistakes = [
        mistake(prefix + name, "is missing", needed[name], engine=engine) for name in sorted(needed.keys() - entries)
    ]
    mistakes += [_stray(name, engine, prefix) for name in sorted(entries - needed.keys())]
    for name in sorted(present - plain):
        kind = "a link" if (directory / name).is_symlink() else "a directory"
        mistakes.append(mistake(prefix + name, f"is not a regular file but {kind}", NOT_PLAIN, engine=engine))
    return plain, mistakes


def _is_plain(path: Path) -> bool:
    """Whether a path is a regular file; a link may be broken, now or after the draft is shipped."""
    return path.is_file() and not path.is_symlink()


def _stray(name: str, engine: str, prefix: str = "") -> Finding:
    effect = STRAY
    if name == MASK_EMBEDDING and not prefix:
        effect = STRAY_MASK
    elif name.endswith((".safetensors", ".bin", ".pt", ".pth", ".index.json")):
        effect = STRAY_WEIGHTS
    return mistake(prefix + name, "does not belong here", effect, "remove the file", engine=engine)


def _card_mistakes(path: Path) -> list[Finding]:
    try:
        path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [mistake(CARD, f"cannot be read as text in UTF-8 ({error})", "does not read it")]
    return []


def _read_config(path: Path) -> tuple[dict[str, Any], list[Finding]]:
    config, unreadable = _read_json(path)
    try:
        algorithm_of(config)
    except ConfigError as error:
        return {}, [field_mistake("dflow", str(error), EFFECTS["format"][0])]
    return config, unreadable


def _read_json(path: Path, prefix: str = "", engine: str = "SGLang") -> tuple[dict[str, Any], list[Finding]]:
    """A config.json and no mistakes; or an empty object, and why it cannot be read."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        return {}, [mistake(prefix + CONFIG, f"not valid JSON ({error})", REFUSES, engine=engine)]
    if not isinstance(config, dict):
        return {}, [mistake(prefix + CONFIG, "holds no object", REFUSES, engine=engine)]
    return config, []


def _weight_mistakes(path: Path, config: Mapping[str, Any]) -> list[Finding]:
    try:
        stored = stored_tensors(path)
    except DataError as error:
        return [mistake(WEIGHTS, str(error), "refuses to start, or loads the rest of the file")]
    # Mistakes of single tensors are more specific than a different digest.
    return [*tensor_mistakes(config, stored), *value_mistakes(path)] or tensors_digest_mistakes(
        config, tensors_digest(path)
    )


PREFIX = "model."
RANDOM = "silently leaves a missing tensor with arbitrary values, and accepts about 1 token a step"
COMPARED = "refuses to start (ValueError): it compares the names of these tensors with those of its own"
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
COPY = "silently leaves a missing tensor with arbitrary values, and loads what fits by name and shape"


def tensor_mistakes(config: Mapping[str, Any], stored: Stored) -> list[Finding]:
    """The mistakes in the tensors that belong to a config.json.

    If the config lacks a size, the tensors cannot be compared; the check of the config reports that.
    """
    ids = lookup(config, full_name("target_layer_ids", config))[1]
    if not isinstance(ids, list) or not all(type(config.get(name)) is int for name in SHAPE_FIELDS):
        return []
    expected = expected_shapes(config)
    if algorithm_of(config).name != DFLASH and not contract_part(config, "shapes")(config):
        return []
    prefixed = {name for name in stored if name.removeprefix(PREFIX) in expected and name.startswith(PREFIX)}
    known = {name.removeprefix(PREFIX) if name in prefixed else name: entry for name, entry in stored.items()}
    compared: tuple[str, ...] = optional_part(config, "COMPARED", ())
    form_of: Callable[[str], str] = optional_part(config, "form_of", lambda _: "")

    def unless_compared(name: str, effect: str) -> str:
        return COMPARED if any(part in name for part in compared) else effect

    mistakes = {
        name: _tensor_mistake(name, "is missing", unless_compared(name, RANDOM)) for name in expected.keys() - known
    }
    for name in known.keys() - expected:
        form = form_of(name)
        wrong = "does not belong here" + (f": only {form} has this name" if form else "")
        mistakes[name] = _tensor_mistake(name, wrong, unless_compared(name, IGNORED))
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
        listed.append(mistake(WEIGHTS, wrong, PREFIXED))
    return listed


def value_mistakes(path: Path) -> list[Finding]:
    """Mistakes for tensors with non-finite values. Reads all tensors, one after another."""
    mistakes = []
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            count = int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else 0
            if count:
                wrong = f"has {count} non-finite values of {tensor.numel()}"
                mistakes.append(
                    mistake(
                        WEIGHTS,
                        wrong,
                        NOT_FINITE,
                        "train again from a checkpoint before they appeared",
                        part=name,
                        code=OF_MAKER,
                    )
                )
    return mistakes


def tensors_digest_mistakes(config: Mapping[str, Any], found: str) -> list[Finding]:
    """A mistake if the tensors' digest differs from the one recorded at the export; empty if the config
    records none.
    """
    digests = table_of(config, "dflow").get("digest")
    if not isinstance(digests, Mapping) or "tensors" not in digests:
        return []  # the config's own mistakes report it
    written = str(digests["tensors"])
    if found == written:
        return []
    what = f"the tensors are not those of the export: {found[:12]}, but dflow.digest.tensors is {written[:12]}"
    return [mistake(WEIGHTS, what, REPLACED)]


def _tensor_mistake(name: str, wrong: str, effect: str) -> Finding:
    return mistake(WEIGHTS, wrong, effect, part=name)


def _other_tensors(path: Path, weights: Path) -> Iterator[Finding]:
    """Mistakes for tensors in the folder in speculators' format that differ from the serving directory's."""

    def wrong(what: str, effect: str = COPY, name: str = "") -> Finding:
        return mistake(f"{FOLDER}/{WEIGHTS}", what, effect, part=name, engine=ENGINE)

    try:
        stored, whole = stored_tensors(path), stored_tensors(weights)
    except DataError as error:
        yield wrong(str(error), REFUSES)
        return
    for name, (shape, dtype) in sorted(whole.items()):
        if name not in stored:
            yield wrong("is missing", name=name)
        elif stored[name] != (shape, dtype):
            found_shape, found_dtype = stored[name]
            yield wrong(f"must be {dtype} {list(shape)}, got {found_dtype} {list(found_shape)}", name=name)
    for name in sorted(stored.keys() - whole.keys()):
        yield wrong("does not belong here", name=name)
    if stored == whole and tensors_digest(path) != tensors_digest(weights):
        yield wrong("the tensors are not those of the export")
