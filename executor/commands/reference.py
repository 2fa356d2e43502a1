"""The reference of pipeline files in Markdown, from the ops' own declarations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from dsl.convert import type_name
from dsl.launch import Launch
from dsl.op import ConfigField, OpSpec, config_fields
from dsl.schema import LAUNCH_HELP, TABLE_HELP
from dsl.tables import CLASSES

FACTORY: Any = type(attrs.Factory(dict))  # a default that is built on each use
HEAD = """\
# Reference of the pipeline file

Written by `dflow ops --markdown` from the ops themselves. How the parts fit together: [pipelines.md](pipelines.md);
ops of your own: [ops.md](ops.md). A field in *italics* is neutral: not part of the key, so changing only it never
reruns a node. A required field has no default. Every node also accepts `launch`."""


def reference(specs: Mapping[str, OpSpec]) -> str:
    """Tables of the file, `launch`, and every op with inputs, output and fields."""
    return "\n".join([HEAD, *_tables(), *_launch(), *(line for spec in specs.values() for line in _op(spec))]) + "\n"


def _tables() -> Iterator[str]:
    for name, help in TABLE_HELP.items():
        yield from [
            "",
            f"## `[{name}]`",
            "",
            f"{_sentence(help)}",
            "",
            "| field | type | default |",
            "| --- | --- | --- |",
        ]
        for field in config_fields(CLASSES[name]).values():
            yield f"| `{field.name}` | {_cell(type_name(field.type))} | {_default(field)} |"


def _launch() -> Iterator[str]:
    yield from ["", "## `launch`", "", "How a stage runs; not part of the key.", ""]
    yield from ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in config_fields(Launch).values():
        yield _row(field, LAUNCH_HELP[field.name])


def _op(spec: OpSpec) -> Iterator[str]:
    yield from ["", f"## `{spec.name}`", "", spec.help, ""]
    for edge in spec.edges.values():
        kind = f"list of {edge.type.__name__}" if edge.many else edge.type.__name__
        yield f"- reads `{edge.name}`: {kind}{', optional' if edge.optional else ''}"
    yield f"- writes {spec.output.__name__}"
    yield f"- runs in {_processes(spec)}{'; a killed stage resumes from its last checkpoint' if spec.resumable else ''}"
    if spec.fields:
        yield from ["", "| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in spec.fields.values():
        yield _row(field, field.help)


def _processes(spec: OpSpec) -> str:
    if spec.single_process:
        return "one process"
    return "one process or in several ranks" + (", with `sp_degree`" if spec.sequence_parallel else "")


def _row(field: ConfigField, help: str) -> str:
    name = f"*`{field.name}`*" if field.neutral else f"`{field.name}`"
    return f"| {name} | {_cell(type_name(field.type))} | {_default(field)} | {_cell(help)} |"


def _default(field: ConfigField) -> str:
    if field.required:
        return "required"
    default = field.default.factory() if isinstance(field.default, FACTORY) else field.default
    return "none" if default is None else f"`{_cell(json.dumps(default, ensure_ascii=False))}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
