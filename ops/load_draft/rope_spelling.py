"""The rope of a config.json in all its spellings.

Transformers 5 keeps everything in `rope_parameters`; earlier versions in rope_theta, rope_scaling (its kind as "type"
or "rope_type") and partial_rotary_factor; some files have both. Of ropes per kind of layer, all must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, field, frozen

from ops.lib.drafts.backbone.config import ROPE_NUMBERS

# Parameters that transformers' functions read, by what `DraftConfig.rope_scaling` holds.
OF_ROPE = frozenset({"rope_type", *ROPE_NUMBERS, "truncate"})
# Of a target's 3-D positions. The classes of all publishers rotate by 1-D positions, and do not read them.
OF_MROPE = frozenset({"mrope_section", "mrope_interleaved"})
TABLES = ("rope_parameters", "rope_scaling")
FLAT = ("rope_theta", "partial_rotary_factor")
KEYS = (*TABLES, *FLAT)
PLAIN = ("default", "mrope")  # kinds without scaling; "mrope" is an older name of a target's plain rope
ALONE = "original_max_position_embeddings"  # has no effect on a plain rope


@frozen
class Rope:
    """The RoPE that a config.json describes.

    theta: None if the file names none. scaling: as `DraftConfig.rope_scaling`. partial: the share of a head to rotate.
    notes: on what was left out. mistakes: why it cannot be read.
    """

    theta: float | None
    scaling: dict[str, Any] | None
    partial: float = 1.0
    notes: list[str] = field(factory=list)
    mistakes: list[str] = field(factory=list)


def read_rope(config: Mapping[str, Any], partial: float | None = None) -> Rope:
    """The RoPE in the part of a config.json that describes the transformer.

    partial: the user's decision on a partial_rotary_factor below 1, which publishers' classes and engines read
    differently.
    """
    rope = Rope(None, None)
    found: dict[str, dict[str, Any]] = {}  # parameter -> where -> value
    for where, table in _tables(config, rope):
        for name, value in table.items():
            if value is not None:
                found.setdefault("rope_type" if name == "type" else name, {})[f"{where}.{name}"] = value
    for name in FLAT:
        if config.get(name) is not None:
            found.setdefault(name, {})[name] = config[name]
    values = {name: _agreed(places, rope) for name, places in found.items()}
    kind = values.get("rope_type", "default")
    mrope = sorted(values.keys() & OF_MROPE)
    if mrope or kind == "mrope":
        rope.notes.append(
            f"{', '.join(mrope) or 'rope_type mrope'}: of a target's 3-D positions; a draft's positions are 1-D"
        )
    rope.mistakes.extend(_partial_mistakes(values.get("partial_rotary_factor", 1.0), partial, kind in PLAIN))
    unknown = values.keys() - OF_ROPE - OF_MROPE - set(FLAT)
    rope.mistakes.extend(f"rope: {name} = {json.dumps(values[name])} is not supported" for name in sorted(unknown))
    scaling = {name: values[name] for name in sorted(values.keys() & OF_ROPE)}
    if kind in PLAIN:
        without_effect = {"rope_type", ALONE}
        if scaling.get("factor") in (1, 1.0):
            without_effect.add("factor")
        rope.mistakes.extend(
            f"rope: {name} = {json.dumps(scaling[name])}, but no rope_type that reads it"
            for name in sorted(scaling.keys() - without_effect)
        )
        scaling = {}
    return evolve(rope, theta=values.get("rope_theta"), scaling=scaling or None, partial=partial or 1.0)


def _tables(config: Mapping[str, Any], rope: Rope) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables of RoPE parameters, with their names; equal tables for each kind of layer count as one."""
    for name in TABLES:
        table = config.get(name)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            rope.mistakes.append(f"{name}: must be a table, got {json.dumps(table)}")
            continue
        layers = {kind: inner for kind, inner in table.items() if isinstance(inner, Mapping)}
        if not layers:
            yield name, table
        elif len(layers) < len(table) or any(inner != next(iter(layers.values())) for inner in layers.values()):
            rope.mistakes.append(
                f"{name}: {', '.join(sorted(layers))} have different ropes; dflow has one rope for all layers"
            )
        else:
            yield f"{name}.{next(iter(layers))}", next(iter(layers.values()))


def _agreed(places: Mapping[str, Any], rope: Rope) -> Any:
    """The value on which all places agree; a mistake is added if they differ."""
    first = next(iter(places.values()))
    if any(value != first for value in places.values()):
        listed = ", ".join(f"{where} = {json.dumps(value)}" for where, value in places.items())
        rope.mistakes.append(f"rope: {listed}: which of them the draft was trained with is not known; keep one")
    return first


def _partial_mistakes(named: Any, partial: float | None, is_plain: bool) -> Iterator[str]:
    """Mistakes in a partial_rotary_factor.

    named: the file's value. partial: the user's decision. is_plain: whether its RoPE is not scaled.
    """
    shown = json.dumps(named)
    if named != 1 and partial is None:
        class_does = "rotates whole heads whatever it is" if is_plain else "does not run with it and a scaled rope"
        yield (
            f"partial_rotary_factor = {shown}: set partial_rotary_factor of load_draft to 1.0 or to {shown}, as the "
            f"draft was trained: transformers' Qwen3 class {class_does}, and engines rotate this share"
        )
    if partial is not None and partial not in (1, named):
        yield f"partial_rotary_factor: {shown} in the file, so it can be that or 1.0, not {partial:g}"
