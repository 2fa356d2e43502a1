"""A draft in the format of speculators, checked against the serving directory in which it lies.

It holds the same draft, so everything follows from that directory's config.json and the target: any other field, value
or tensor is a mistake, named with what vLLM would do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from dsl.finding import Finding
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.mistakes import REWRITE, mistake
from ops.lib.drafts.backbone.speculators_format import (
    AUX_LAYER_IDS,
    FOLDER,
    LAYER_CONFIG,
    NON_CAUSAL,
    Verifier,
    to_speculators,
    unwritable,
)
from ops.lib.drafts.backbone.stored_tensors import Stored, stored_tensors, tensors_digest

NEEDED = ("config.json", "model.safetensors")
REFUSES = "refuses to start"
OTHER_DRAFT = "silently computes another draft than the one that was trained: fewer tokens are accepted"
UNKNOWN = "may read it: its classes read more fields than the export writes"
EFFECTS = {  # of a field that is missing, or has another value; the longest name that begins a field's
    "speculators_model_type": REFUSES,
    "speculators_config": "refuses to start, or serves another target or block, where it is given this directory alone",
    "speculators_config.verifier": "serves this target where it is given this directory alone",
    "speculators_version": "does not read it",
    "architectures": "does not read it; speculators' class does not load the draft",
    "dtype": "does not read it: the draft gets the dtype of the target",
    "block_size": "does not read it; speculators trains on with blocks of this size",
    "mask_token_id": "refuses to start without it, and silently embeds any other token in all slots",
    "draft_vocab_size": "expects a head and a map of a reduced vocabulary, which are not there",
    AUX_LAYER_IDS: "refuses to start without it, and silently captures other layers than in training",
    "sample_from_anchor": "refuses to start if it is true for DFlash, silently accepts almost nothing in the wrong "
    "layout of DSpark, and assumes false without it; others assume true",
    NON_CAUSAL: "silently makes all layers causal, full ones too, if it is false; without it, none",
    LAYER_CONFIG: OTHER_DRAFT,
}
TENSORS = "silently leaves a missing tensor with arbitrary values, and loads what fits by name and shape"


def speculators_mistakes(
    directory: Path, config: DraftConfig | None, dtype: str, verifier: Verifier, weights: Path | None
) -> list[Finding]:
    """What is wrong with a directory in this format.

    config, dtype: of the serving directory, None where its config.json is wrong. weights: its tensors, None where they
    are wrong.
    """
    names = {path.name for path in directory.iterdir()}
    found = [_mistake(name, "is missing", REFUSES) for name in NEEDED if name not in names]
    found += [_mistake(name, "does not belong here", "may read it", "remove it") for name in sorted(names - {*NEEDED})]
    plain = {name for name in names & {*NEEDED} if _is_plain(directory / name)}
    found += [_mistake(name, "is not a regular file", REFUSES) for name in sorted(names & {*NEEDED} - plain)]
    if "config.json" in plain and config is not None:
        found += _config_mistakes(directory / "config.json", config, dtype, verifier)
    if "model.safetensors" in plain and weights is not None and not weights.samefile(directory / "model.safetensors"):
        found += _tensor_mistakes(directory / "model.safetensors", weights)
    return found


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _config_mistakes(path: Path, config: DraftConfig, dtype: str, verifier: Verifier) -> list[Finding]:
    unfit = list(unwritable(config))
    if unfit:
        return [_mistake("config.json", f"cannot hold this draft: {why}", OTHER_DRAFT, NOT_THIS) for why in unfit]
    try:
        written = read_json(path)
    except (OSError, ValueError) as error:
        return [_mistake("config.json", f"not valid JSON ({error})", REFUSES)]
    if not isinstance(written, dict):
        return [_mistake("config.json", "holds no object", REFUSES)]
    expected, got = _flat(to_speculators(config, dtype, verifier)), _flat(written)
    return list(_differences(expected, got))


NOT_THIS = 'leave "speculators" out of formats of export_draft, and write the export again'


def _differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> Iterator[Finding]:
    for name, value in expected.items():
        if name not in got:
            yield _mistake("config.json", "is missing", _effect(name), part=name)
        elif json.dumps(got[name]) != json.dumps(value):
            wrong = f"must be {json.dumps(value)}, got {json.dumps(got[name])}"
            yield _mistake("config.json", wrong, _effect(name), part=name)
    for name in sorted(got.keys() - expected.keys()):
        yield _mistake("config.json", "is not a field of the export", UNKNOWN, f"remove {name}", name)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted names; a list counts as one value."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _effect(name: str) -> str:
    parts = name.split(".")
    starts = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((EFFECTS[start] for start in starts if start in EFFECTS), OTHER_DRAFT)


def _tensor_mistakes(path: Path, weights: Path) -> list[Finding]:
    try:
        stored, whole = stored_tensors(path), stored_tensors(weights)
    except DataError as error:
        return [_mistake("model.safetensors", str(error), REFUSES)]
    by_name = [
        _mistake("model.safetensors", wrong, TENSORS, part=name) for name, wrong in _other_tensors(stored, whole)
    ]
    if by_name or tensors_digest(path) == tensors_digest(weights):
        return by_name
    return [_mistake("model.safetensors", "the tensors are not those of the export", TENSORS)]


def _other_tensors(stored: Stored, whole: Stored) -> Iterator[tuple[str, str]]:
    for name, (shape, dtype) in sorted(whole.items()):
        if name not in stored:
            yield name, "is missing"
        elif stored[name] != (shape, dtype):
            found_shape, found_dtype = stored[name]
            yield name, f"must be {dtype} {list(shape)}, got {found_dtype} {list(found_shape)}"
    for name in sorted(stored.keys() - whole.keys()):
        yield name, "does not belong here"


def _mistake(file: str, wrong: str, effect: str, remedy: str = REWRITE, part: str = "") -> Finding:
    return mistake(f"{FOLDER}/{file}", wrong, effect, remedy, part=part, engine="vLLM")
