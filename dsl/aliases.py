"""An unknown key: the field that another project's name stands for, else the key that was meant, else all keys.

ops/aliases.py has the table of names. It is imported here once a key is unknown, and not before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from dsl.errors import MOST_SHOWN, listed
from dsl.named_function import named_function
from dsl.tables import LAUNCH, TABLE_NAMES

MOST_OF_KEYS = 1000  # characters of a list of keys
NEAR_WORD = 0.7  # of difflib's ratio: "weigths" for "weights", but not "eval" for "max"
NEAR_NAME = 0.92  # of whole names whose words are joined or cut otherwise: "evalevery" for "eval_every"


@frozen
class Alias:
    """Names that other projects use for one setting, and where dflow has it.

    places: "op.field" (or "op.table.field", "launch.field", "mlflow.field", ...) -> in what the value differs, empty
    where it does not. On a node whose op has none of them the first place counts that the pipeline has a node for.
    none: why there is no such setting, and what there is instead; such an alias has no places.
    """

    names: tuple[str, ...]
    places: Mapping[str, str] = field(factory=dict)
    none: str = ""


@frozen
class KeyHint:
    """What to say of an unknown key; key: the key of the same table that it stands for, empty for none."""

    text: str
    key: str = ""


def key_hint(name: str, owner: str, keys: Sequence[str], nodes: Mapping[str, str]) -> KeyHint:
    """owner: the op, or the table ("op.table" too), in which the key was given, which has `keys`, "table.key" too.
    nodes: node id -> op, of all nodes.
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
    """What to say of a name of another project; None for any other. The arguments are those of `key_hint`."""
    table: Sequence[Alias] = named_function("ops.aliases:ALIASES")
    alias = next((alias for alias in table if _letters(name) in map(_letters, alias.names)), None)
    if alias is None:
        return None
    if not alias.places:
        return KeyHint(f"dflow has no such setting: {alias.none}")
    here = next((place for place in alias.places if place.startswith(f"{owner}.")), None)
    ops = set(nodes.values())
    there = (place for place in alias.places if place.partition(".")[0] in {*ops, *TABLE_NAMES, LAUNCH})
    place = here or next(there, next(iter(alias.places)))
    remark = f"; {alias.places[place]}" if alias.places[place] else ""
    if here is not None:
        key = here.removeprefix(f"{owner}.")
        return KeyHint(f'here it is "{key}"{remark}', key)
    of, _, key = place.partition(".")
    return KeyHint(f"it is {_named(of, key, owner, nodes)}{remark}")


def nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """The key of which a name is probably a misspelling; None where it may have another meaning.

    Each word must be near one of the key. A key with further words is meant if there is only one: "warmup" for
    "warmup_ratio", but "layers" for none of "num_layers" and "sliding_layers".
    """
    from difflib import get_close_matches

    near = get_close_matches(name, keys, n=len(keys) or 1, cutoff=0)
    words = _words(name)
    for key in near:
        if len(_words(key)) == len(words) and all(map(_is_near, words, _words(key))):
            return key
    joined = get_close_matches(_letters(name), [_letters(key) for key in near], n=1, cutoff=NEAR_NAME)
    if joined:
        return next(key for key in near if _letters(key) == joined[0])
    longer = [key for key in near if len(_words(key)) > len(words) and _are_among(words, _words(key))]
    return longer[0] if len(longer) == 1 else None


def _named(of: str, key: str, owner: str, nodes: Mapping[str, str]) -> str:
    if of == LAUNCH:
        return f'"launch.{key}" of a node' if owner in TABLE_NAMES else f'"launch.{key}"'
    if of in TABLE_NAMES:
        return f'"{key}" of [{of}]'
    having = listed((f"node.{node}.{key}" for node, op in nodes.items() if op == of), MOST_SHOWN)
    return f'"{key}" of {of}{f": {having}" if having else ""}'


def _letters(name: str) -> str:
    """save_steps, save-steps and saveSteps are one name."""
    return re.sub(r"[_-]", "", name).lower()


def _words(name: str) -> list[str]:
    return name.lower().replace("-", "_").strip("_").split("_")


def _is_near(word: str, other: str) -> bool:
    from difflib import SequenceMatcher

    return SequenceMatcher(None, word, other).ratio() >= NEAR_WORD


def _are_among(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether all words are near others, in their order."""
    rest: Iterator[str] = iter(others)
    return all(any(_is_near(word, other) for other in rest) for word in words)
