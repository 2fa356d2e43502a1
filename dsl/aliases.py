"""An unknown key: the field that another project's name stands for, else the key that was meant, else all keys.

ops/aliases.py has the table of names. It is imported here once a key is unknown, and not before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dsl.convert import KeyHint
from dsl.errors import MOST_SHOWN, listed
from dsl.imports import named_function
from dsl.launch import LAUNCH, TABLE_NAMES

MOST_OF_KEYS = 1000  # characters of a list of keys
NEAR = 0.87  # of difflib's ratio: "evalevery" for "eval_every", but "eval_batch_size" not for "batch_size"
NEAR_WORD = 0.7  # of single words: "sede" for "seed"


def key_hint(name: str, owner: str, keys: Sequence[str], nodes: Mapping[str, str]) -> KeyHint:
    """A hint for an unknown key: the key that was probably meant, or else a list of the valid keys.

    owner: the op or the table ("op.table" for a table of an op) in which the key was given. keys: the owner's keys;
    those of its tables as "table.key". nodes: id -> op, of all nodes of the pipeline.
    """
    if len(name) <= MOST_SHOWN:
        same = next((key for key in keys if _letters(key) == _letters(name)), None)
        same = same or next((key for key in keys if _letters(key.rpartition(".")[2]) == _letters(name)), None)
        alias = None if same is not None else alias_hint(name, owner, nodes)
        if alias is not None:
            return alias
        near = same or nearest_key(name, keys)
        if near is not None:
            return KeyHint(f'did you mean "{near}"?', near)
    return KeyHint(f"keys: {listed(keys, MOST_OF_KEYS)}")


def alias_hint(name: str, owner: str, nodes: Mapping[str, str]) -> KeyHint | None:
    """A hint for a setting's name that another project uses; None for other names. Arguments: those of `key_hint`."""
    table: Mapping[str, Mapping[str, str] | str] = named_function("ops.aliases:ALIASES")
    places = next((answer for known, answer in table.items() if _letters(known) == _letters(name)), None)
    if places is None:
        return None
    if isinstance(places, str):
        return KeyHint(f"dflow has no such setting: {places}")
    here = next((place for place in places if place.startswith(f"{owner}.")), None)
    ops = set(nodes.values())
    there = (place for place in places if place.partition(".")[0] in {*ops, *TABLE_NAMES, LAUNCH})
    place = here or next(there, next(iter(places)))
    remark = f"; {places[place]}" if places[place] else ""
    if here is not None:
        key = here.removeprefix(f"{owner}.")
        return KeyHint(f'here it is "{key}"{remark}', key)
    of, _, key = place.partition(".")
    return KeyHint(f"it is {_named(of, key, owner, nodes)}{remark}")


def nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """The key that `name` probably misspells or begins; None where the name may mean something else."""
    from difflib import get_close_matches

    name = name.lower().replace("-", "_")
    words = [key for key in keys if "_" not in key]
    near = get_close_matches(name, keys, n=1, cutoff=NEAR)
    near = near or get_close_matches(name, words if "_" not in name else (), n=1, cutoff=NEAR_WORD)
    if near:
        return near[0]
    longer = [key for key in keys if key.startswith(f"{name}_")]
    return longer[0] if len(longer) == 1 else None


def _named(of: str, key: str, owner: str, nodes: Mapping[str, str]) -> str:
    if of == LAUNCH:
        return f'"launch.{key}" of a node' if owner in TABLE_NAMES else f'"launch.{key}"'
    if of in TABLE_NAMES:
        return f'"{key}" of [{of}]'
    having = listed((f"node.{node}.{key}" for node, op in nodes.items() if op == of), MOST_SHOWN)
    return f'"{key}" of {of}{f": {having}" if having else ""}'


def _letters(name: str) -> str:
    """The name in lower case without "_" and "-", so that save_steps, save-steps and saveSteps are equal."""
    return re.sub(r"[_-]", "", name).lower()
