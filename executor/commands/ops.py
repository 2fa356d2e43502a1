"""`dflow ops`: list the ops, or describe one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attrs import NOTHING

from dsl.convert import type_name
from dsl.op import OpSpec
from dsl.op_table import all_ops, load_op
from executor.commands.arguments import add_json
from executor.commands.reference import reference
from executor.system.output import OK, print_json, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--ops", action="append", default=[], metavar="FILE", help="a file with ops of your own")
    parser.add_argument("--markdown", action="store_true", help="write docs/reference.md, the reference of all ops")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    files = [Path(file).absolute() for file in options.ops]
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
                "name": field.name,
                "type": type_name(field.type),
                "required": field.required,
                "default": None if field.default is NOTHING else field.default,
                "neutral": field.neutral,
                "help": field.help,
            }
            for field in spec.fields.values()
        ],
    }


def _op_text(spec: OpSpec) -> str:
    lines = [f"{spec.name} (version {spec.version})", f"  {spec.help}", "", "inputs"]
    for edge in spec.edges.values():
        kind = f"list of {edge.type.__name__}" if edge.many else edge.type.__name__
        lines.append(f"  {edge.name}: {kind}{' (optional)' if edge.optional else ''}")
    lines += ["output", f"  {spec.output.__name__}", "launch", f"  {_launches(spec)}", "config"]
    for field in spec.fields.values():
        default = "required" if field.required else f"default {json.dumps(field.default)}"
        neutral = ", not part of the key" if field.neutral else ""
        lines.append(f"  {field.name}: {type_name(field.type)} ({default}{neutral})")
        lines.append(f"      {field.help}")
    return "\n".join(lines)


def _launches(spec: OpSpec) -> str:
    if spec.single_process:
        return "one process"
    if spec.sequence_parallel:
        return "one process or several ranks, sp_degree of which share each sequence"
    return "one process or several ranks"
