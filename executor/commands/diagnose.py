"""`dflow diagnose`: measure the usual causes of a low tau on a run's artifacts."""

from __future__ import annotations

import argparse
import json
from functools import partial

from executor.commands.arguments import add_json, add_run, add_store, add_trust, check_store, count, open_store
from executor.model_tools.measure import Result, diagnose, keep
from executor.model_tools.served import DEFAULT_RUN, find_draft_run
from executor.system.output import FAILED, OK, print_lines, shown_duration
from executor.system.progress import Activity
from ops.artifacts import Draft
from ops.tools.diagnose.chain import SPLITS
from ops.tools.diagnose.judgement import CAUSE, LEAST_PROMPTS
from ops.tools.diagnose.text import diagnosis_text

PROMPTS = 16
BUDGET_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, DEFAULT_RUN)
    parser.add_argument("--node", metavar="NODE", help="the node that trains the draft; default: all of them")
    parser.add_argument(
        "--prompts",
        type=partial(count, least=LEAST_PROMPTS),
        default=PROMPTS,
        metavar="N",
        help=f"number of held-out prompts to decode, and of training prompts; default: {PROMPTS}",
    )
    parser.add_argument(
        "--split",
        choices=SPLITS,
        help="the held-out split; default: that of the run's evaluation, or another where that one is empty",
    )
    parser.add_argument(
        "--budget",
        type=partial(count, least=1),
        default=BUDGET_S,
        metavar="SECONDS",
        help=f"of each draft; prompts that do not fit are left out, down to {LEAST_PROMPTS}; default: {BUDGET_S}",
    )
    add_json(parser)
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    """Run `dflow diagnose`. Exit code 1 where a cause was found.

    If a draft cannot be measured, results of earlier drafts are kept and shown.
    """
    store = open_store(options)
    check_store(options, store.path)
    record, note = find_draft_run(store.records, options.run, options.node, (Draft,))
    if note:
        print_lines(note, error=True)
    results: list[Result] = []
    longest = f"{shown_duration(options.budget)} at most for each draft, the loading of its target included (--budget)"
    print_lines(f"takes about {longest}; {LEAST_PROMPTS} prompts are decoded in any case", error=True)
    try:
        with Activity() as activity:
            given = (options.node, options.prompts, activity.status, options.split, options.budget)
            for result in diagnose(store, record, *given):
                results.append(result)
                keep(record, result)
                if not options.json:
                    activity.show(diagnosis_text(result))
    finally:
        if options.json and results:
            print_lines(json.dumps({"run": record.run, "drafts": results}, indent=1, allow_nan=False))
    return FAILED if any(finding["level"] == CAUSE for result in results for finding in result["findings"]) else OK
