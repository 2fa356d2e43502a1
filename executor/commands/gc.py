"""`dflow gc`: remove what no kept run uses, or show who uses the disk."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from dsl.convert import unstructure
from dsl.shown import shown_bytes
from executor.commands.arguments import add_json, add_store, add_trust, count, open_store
from executor.maintenance.disk_use import DiskUse, disk_use
from executor.maintenance.gc import KEEP, Item, Survey, collect, survey
from executor.system.output import OK, counted, print_json, print_lines, shown_digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep",
        type=count,
        default=KEEP,
        metavar="N",
        help=f"keep the last N finished runs of each pipeline and all runs after them; default: {KEEP}",
    )
    parser.add_argument(
        "--pulled", action="store_true", help="also artifacts that were pulled and not used by any run yet"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--delete", action="store_true", help="delete; without it, only list what would go")
    how.add_argument("--usage", action="store_true", help="instead show disk use by pipeline, run and node")
    add_json(parser)
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    store = open_store(options, write=options.delete)
    if options.usage:
        use = disk_use(store, options.keep)
        if options.json:
            print_json(unstructure(use))
        else:
            print_lines(_use_text(use))
        return OK
    examine = collect if options.delete else survey
    found = examine(store, keep=options.keep, pulled=not options.pulled)
    if options.json:
        print_json(_to_json(found, options.delete))
    else:
        _print(found, options)
    return OK


def _print(found: Survey, options: argparse.Namespace) -> None:
    for item in found.goes:
        print_lines(f"{'removed' if options.delete else 'goes'}: {_line(item)}")
    for why, items in _by_reason(found).items():
        print_lines(f"stays: {_number(items)}, {shown_bytes(sum(item.size for item in items))}: {why}")
    freed = shown_bytes(found.freed)
    if options.delete:
        print_lines(f"{freed} freed")
    elif found.goes or found.dropped:
        keep = () if options.keep == KEEP else ("--keep", str(options.keep))
        again = " ".join(["dflow gc --delete", *keep, *["--pulled"] * options.pulled])
        print_lines(f"{freed} would be freed; nothing was removed; to delete: {again}")
    else:
        print_lines("nothing to remove")


def _line(item: Item) -> str:
    return f"{item.kind} {shown_digest(item.path.name)}, {shown_bytes(item.size)}: {item.label}"


def _by_reason(found: Survey) -> dict[str, list[Item]]:
    reasons: dict[str, list[Item]] = {}
    for item in found.stays:
        reasons.setdefault(item.why, []).append(item)
    return reasons


def _number(items: list[Item]) -> str:
    kinds = Counter("work folder" if item.kind == "work" else item.kind for item in items)
    return " and ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in kinds.items())


def _to_json(found: Survey, deleted: bool) -> dict[str, Any]:
    def row(item: Item) -> dict[str, Any]:
        return {
            "name": item.path.name, "kind": item.kind, "bytes": item.size, "label": item.label, "why": item.why
        }  # fmt: skip

    return {
        "deleted": deleted,
        "goes": [row(item) for item in found.goes],
        "stays": [row(item) for item in found.stays],
        "runs": {kept.record.run: kept.why for kept in found.kept},
        "index_lines": sum(map(len, found.dropped.values())),
        "freed_bytes": found.freed,
    }


def _use_text(use: DiskUse) -> str:
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
