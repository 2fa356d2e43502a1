"""`dflow diagnose`: name the usual causes of a low tau by measuring them on what a run made."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable

from dsl.errors import shortened
from executor.commands.arguments import add_json, add_run, add_store
from executor.diagnose import diagnose, keep
from executor.diagnosis_text import diagnosis_text
from executor.exits import FAILED, OK
from executor.lines import print_lines, printable, write_on
from executor.record import find_record
from executor.store import Store, store_path

PROMPTS = 16
LEAST_PROMPTS = 2  # one prompt has no interval
CLEARED = "\r\x1b[K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--node", metavar="NODE", help="the node that makes the draft; all of them unless given")
    parser.add_argument(
        "--prompts",
        type=_several,
        default=PROMPTS,
        metavar="N",
        help=f"held-out prompts to decode, and as many of the training's; {PROMPTS} unless given",
    )
    add_json(parser)
    add_store(parser)


def _several(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= LEAST_PROMPTS):
        raise argparse.ArgumentTypeError(f'expected a whole number, {LEAST_PROMPTS} or more, got "{text}"')
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where a cause was found."""
    store = Store.open(store_path(options.store, None), write=False)
    record = find_record(store.records, options.run)
    tell = _teller()
    results = []
    for result in diagnose(store, record, options.node, options.prompts, tell):
        tell("")
        results.append(result)
        if not options.json:
            print_lines(diagnosis_text(result))
    keep(record, results)
    if options.json:
        print_lines(json.dumps({"run": record.run, "drafts": results}, indent=1, allow_nan=False))
    return FAILED if any(finding["is_cause"] for result in results for finding in result["findings"]) else OK


def _teller() -> Callable[[str], None]:
    """On a terminal shows what is measured now in one line, which the next one replaces; elsewhere nothing."""
    if not sys.stderr.isatty():
        return lambda _text: None
    width = shutil.get_terminal_size().columns - 1
    return lambda text: write_on(sys.stderr, CLEARED + shortened(printable(text), width))
