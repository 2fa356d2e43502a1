"""Mistakes in the copies of a node are those of the node: they are told once, by the names that the file gives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

from dsl.errors import Mistake
from dsl.written import WrittenNode


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
        attrs.evolve(mistake, message=as_written(mistake.message), hint=as_written(mistake.hint))
        for mistake in mistakes
    ]
    return list(dict.fromkeys(told))
