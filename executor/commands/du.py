"""`dflow du`: show disk use of the store."""

from __future__ import annotations

import argparse
from typing import Any

from executor.commands.arguments import add_json, add_store, open_store
from executor.commands.gc import KEEP
from executor.maintenance.disk_use import disk_use, shown_size
from executor.system.output import OK, print_json, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    use = disk_use(open_store(options), KEEP)
    if options.json:
        print_json(use)
    else:
        print_lines(_text(use))
    return OK


def _text(use: dict[str, Any]) -> str:
    lines = [
        f"{use['store']}: {shown_size(use['total'])}",
        f"artifacts  {shown_size(use['artifacts'])}, {shown_size(use['shared'])} of it in several runs, "
        f"{shown_size(use['unused'])} in none",
        f"work       {shown_size(use['work'])}",
        f"records    {shown_size(use['records'])}, {shown_size(use['logs'])} of it logs",
        f"mlflow     {shown_size(use['mlflow'])}",
        f"smoke      {shown_size(use['smoke'])}, the store of `dflow run --smoke`, which may be deleted",
        f"`dflow gc --delete` would free {shown_size(use['freed_by_gc'])}",
    ]
    for pipeline in use["pipelines"]:
        number = len(pipeline["runs"])
        runs = f"{number} run{'s' if number > 1 else ''}"
        lines += ["", f"{pipeline['pipeline']}: {shown_size(pipeline['bytes'])} in {runs}"]
        for run in pipeline["runs"]:
            tags = f" ({', '.join(run['tags'])})" if run["tags"] else ""
            lines.append(
                f"  {run['run']}{tags}: {shown_size(run['bytes'])}, {shown_size(run['only'])} of it in no other run"
            )
            largest = sorted(run["nodes"], key=lambda node: -int(node["bytes"]))[:3]
            lines += [f"    {node['node']}: {shown_size(node['bytes'])}" for node in largest]
            if len(run["nodes"]) > len(largest):
                lines.append(f"    and {len(run['nodes']) - len(largest)} smaller")
    return "\n".join(lines)
