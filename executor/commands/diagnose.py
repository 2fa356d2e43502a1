"""`dflow diagnose`: name the usual causes of a low tau by measuring them on what a run made."""

from __future__ import annotations

import argparse
import json

from executor.commands.arguments import add_json, add_run, add_store
from executor.model_tools.computation import Result
from executor.model_tools.diagnose import diagnose, keep
from executor.records.run_record import find_record
from executor.store.artifact_store import Store, store_path
from executor.system.exits import FAILED, OK
from executor.system.output import print_lines
from executor.system.progress import Doing
from ops.tools.diagnose.chain import SPLITS
from ops.tools.diagnose.text import diagnosis_text

PROMPTS = 16
LEAST_PROMPTS = 4  # of fewer nothing is certain


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
    parser.add_argument(
        "--split",
        choices=SPLITS,
        help="whose prompts are held out; that of the run's evaluation unless given, and another where it holds none",
    )
    add_json(parser)
    add_store(parser)


def _several(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= LEAST_PROMPTS):
        raise argparse.ArgumentTypeError(f'expected a whole number, {LEAST_PROMPTS} or more, got "{text}"')
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where a cause was found. Where a draft cannot be measured, those before it are kept and told."""
    store = Store.open(store_path(options.store, None), write=False)
    record = find_record(store.records, options.run)
    results: list[Result] = []
    try:
        with Doing() as doing:
            for result in diagnose(store, record, options.node, options.prompts, doing.tell, options.split):
                results.append(result)
                keep(record, result)
                if not options.json:
                    doing.say(diagnosis_text(result))
    finally:
        if options.json and results:
            print_lines(json.dumps({"run": record.run, "drafts": results}, indent=1, allow_nan=False))
    return FAILED if any(finding["is_cause"] for result in results for finding in result["findings"]) else OK
