"""`dflow ops`: list the ops, describe one, or write the reference or the JSON schema of pipeline files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from dsl.convert import type_name, unstructure
from dsl.launch import CLASSES, Launch
from dsl.op import ConfigField, OpSpec, config_fields
from dsl.op_table import all_ops, load_op
from dsl.read_toml import op_files_of
from dsl.schema import LAUNCH_HELP, TABLE_HELP, pipeline_schema
from executor.commands.arguments import add_json
from executor.system.output import OK, print_json, print_lines

FACTORY: Any = type(attrs.Factory(dict))  # a default that is built on each use
HEAD = """\
# Reference of the pipeline file

Written by `dflow ops --markdown` from the ops themselves. How the parts fit together: [pipelines.md](pipelines.md);
ops of your own: [ops.md](ops.md). A field in *italics* is neutral: not part of the key, so changing only it never
reruns a node. A required field has no default. Every node also accepts `launch`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--ops", action="append", default=[], metavar="FILE", help="a file with ops of your own")
    parser.add_argument("--markdown", action="store_true", help="write docs/reference.md, the reference of all ops")
    parser.add_argument(
        "--schema",
        nargs="?",
        const="",
        metavar="FILE",
        help="write the JSON schema of pipeline files, for editors; FILE: a TOML pipeline whose own ops are included",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    files = [Path(file).absolute() for file in options.ops]
    if options.schema is not None:
        own = op_files_of(Path(options.schema)) if options.schema else ()
        print_json(pipeline_schema(all_ops([*files, *own])), ascii_only=False)
        return OK
    specs = [load_op(options.name, files)] if options.name else list(all_ops(files).values())
    if options.markdown:
        print_lines(reference({spec.name: spec for spec in specs}).rstrip("\n"))
    elif options.json:
        print_json({"ops": [_op_row(spec) for spec in specs]})
    elif options.name:
        print_lines(_op_text(specs[0]))
    else:
        width = max(len(spec.name) for spec in specs)
        for spec in specs:
            print_lines(f"{spec.name:{width}}  {spec.help.splitlines()[0] if spec.help else ''}")
    return OK


def _op_row(spec: OpSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "help": spec.help,
        "version": spec.version,
        "run": spec.run,
        "resumable": spec.resumable,
        "single_process": spec.single_process,
        "sequence_parallel": spec.sequence_parallel,
        "inputs": [
            {"name": edge.name, "type": edge.type.__name__, "optional": edge.optional, "many": edge.many}
            for edge in spec.edges.values()
        ],
        "output": spec.output.__name__,
        "fields": [
            {
                "name": name,
                "type": type_name(field.type),
                "required": field.required,
                "default": None if field.required else unstructure(field.default),
                "neutral": field.neutral,
                "help": field.help,
            }
            for name, field in spec.all_fields.items()
        ],
    }


def _op_text(spec: OpSpec) -> str:
    lines = [f"{spec.name} (version {spec.version})", f"  {spec.help}", "", "inputs"]
    for edge in spec.edges.values():
        kind = f"list of {edge.type.__name__}" if edge.many else edge.type.__name__
        lines.append(f"  {edge.name}: {kind}{' (optional)' if edge.optional else ''}")
    lines += ["output", f"  {spec.output.__name__}", "launch", f"  {_launches(spec)}", "config"]
    for name, field in spec.all_fields.items():
        default = "required" if field.required else f"default {json.dumps(unstructure(field.default))}"
        neutral = ", not part of the key" if field.neutral else ""
        lines.append(f"  {name}: {type_name(field.type)} ({default}{neutral})")
        lines.append(f"      {field.help}")
    return "\n".join(lines)


def _launches(spec: OpSpec) -> str:
    if spec.single_process:
        return "one process"
    if spec.sequence_parallel:
        return "one process or several ranks, sp_degree of which share each sequence"
    return "one process or several ranks"


def reference(specs: Mapping[str, OpSpec]) -> str:
    """The reference as Markdown: tables of the file's keys, of `launch`, and of every op's inputs, output
    and fields.
    """
    ops = (line for spec in specs.values() for line in _reference_of(spec))
    return "\n".join([HEAD, *_tables(), *_launch(), *ops]) + "\n"


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
        yield _row(field.name, field, LAUNCH_HELP[field.name])


def _reference_of(spec: OpSpec) -> Iterator[str]:
    yield from ["", f"## `{spec.name}`", "", spec.help, ""]
    for edge in spec.edges.values():
        kind = f"list of {edge.type.__name__}" if edge.many else edge.type.__name__
        yield f"- reads `{edge.name}`: {kind}{', optional' if edge.optional else ''}"
    yield f"- writes {spec.output.__name__}"
    yield f"- runs in {_launches(spec)}{'; a killed stage resumes from its last checkpoint' if spec.resumable else ''}"
    if spec.fields:
        yield from ["", "| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in spec.all_fields.items():
        yield _row(name, field, field.help)


def _row(name: str, field: ConfigField, help: str) -> str:
    shown = f"*`{name}`*" if field.neutral else f"`{name}`"
    return f"| {shown} | {_cell(type_name(field.type))} | {_default(field)} | {_cell(help)} |"


def _default(field: ConfigField) -> str:
    if field.required:
        return "required"
    default = field.default.factory() if isinstance(field.default, FACTORY) else field.default
    return "none" if default is None else f"`{_cell(json.dumps(unstructure(default), ensure_ascii=False))}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
