"""`dflow du`: show disk use of the store."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsl.convert import unstructure
from dsl.sizes import shown_bytes
from executor.commands.arguments import add_json, add_store, open_store
from executor.maintenance.disk_use import DiskUse, disk_use
from executor.maintenance.gc import KEEP
from executor.system.output import OK, counted, print_json, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    use = disk_use(open_store(options), KEEP)
    if options.json:
        print_json(unstructure(use))
    else:
        print_lines(_text(use))
    return OK


def _text(use: DiskUse) -> str:
    lines = [
        f"{use.store}: {shown_bytes(use.total)}",
        f"artifacts  {shown_bytes(use.artifacts)}, {shown_bytes(use.shared)} of it in several runs, "
        f"{shown_bytes(use.unused)} in none",
        f"work       {shown_bytes(use.work)}",
        f"records    {shown_bytes(use.records)}, {shown_bytes(use.logs)} of it logs",
        f"mlflow     {shown_bytes(use.mlflow)}",
        f"smoke      {shown_bytes(use.smoke)}, the store of `dflow run FILE --smoke N`, which may be deleted",
    ]
    if use.freed_by_gc is not None:
        lines.append(f"`dflow gc --delete` would free {shown_bytes(use.freed_by_gc)}")
    lines += [
        f"{folder}: damaged, not counted; remove it with `dflow rm {Path(folder).name}`" for folder in use.damaged
    ]
    for pipeline in use.pipelines:
        runs = counted(len(pipeline.runs), "run")
        lines += ["", f"{pipeline.pipeline}: {shown_bytes(pipeline.bytes)} in {runs}"]
        for run in pipeline.runs:
            tags = f" ({', '.join(run.tags)})" if run.tags else ""
            lines.append(f"  {run.run}{tags}: {shown_bytes(run.bytes)}, {shown_bytes(run.only)} of it in no other run")
            largest = sorted(run.nodes, key=lambda node: -node.bytes)[:3]
            lines += [f"    {node.node}: {shown_bytes(node.bytes)}" for node in largest]
            if len(run.nodes) > len(largest):
                lines.append(f"    and {len(run.nodes) - len(largest)} smaller")
    return "\n".join(lines)
