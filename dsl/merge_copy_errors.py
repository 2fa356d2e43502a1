"""Mistakes in the copies of a node are those of the node: they are told once, by the names that the file gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import attrs

from dsl.errors import Mistake
from dsl.unchecked_node import WrittenNode


def told_once(mistakes: Sequence[Mistake], nodes: Mapping[str, WrittenNode]) -> list[Mistake]:
    """The mistakes with the ids of copies as those of the nodes that they are copies of, each once."""
    templates = {node.id: node.template for node in nodes.values() if node.template}
    if not templates:
        return list(mistakes)
    longest_first = sorted(templates, key=len, reverse=True)
    copied = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])")

    def as_written(text: str) -> str:
        return copied.sub(lambda found: templates[found[0]], text)

    told = [
        attrs.evolve(mistake, message=as_written(mistake.message), hint=_hint(mistake, as_written))
        if mistake.path.startswith("node.") or mistake.position is None or mistake.position.is_argument
        else mistake
        for mistake in mistakes
    ]
    return list(dict.fromkeys(told))


def _hint(mistake: Mistake, as_written: Callable[[str], str]) -> str:
    """For an argument the way out may well be to name a copy."""
    is_argument = mistake.position is not None and mistake.position.is_argument
    return mistake.hint if is_argument else as_written(mistake.hint)
