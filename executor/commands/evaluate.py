"""`dflow evaluate`: tau, speed-up and losslessness of a draft, without a pipeline file."""

from __future__ import annotations

import argparse
from functools import partial

from dsl.graph import compiled
from dsl.read_toml import checked_pipeline
from executor.commands.arguments import add_overrides, add_store, add_trust, check_store, count, store_of
from executor.planning.session import new_run
from executor.report.in_short import in_short
from executor.scheduler.run_and_report import run_and_report
from executor.store.artifact_store import Store
from executor.system.output import OK, print_lines
from ops.tools.evaluate.pipeline import evaluation_pipeline

PROMPTS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "draft",
        metavar="DRAFT",
        help="a draft's directory, of dflow or of others, or a model id with its commit: owner/name@COMMIT",
    )
    parser.add_argument(
        "--target", required=True, metavar="TARGET", help="its target: a checkpoint directory, or owner/name@COMMIT"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="conversations with answers, in any form that ingest reads; default: sixteen questions without images",
    )
    parser.add_argument(
        "--max-prompts",
        type=partial(count, least=1),
        default=PROMPTS,
        metavar="N",
        help=f"prompts of each category; default: {PROMPTS}",
    )
    add_overrides(parser)
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    """The exit code of the run; it ends with the verdicts of the report's first screen."""
    pipeline = evaluation_pipeline(options.draft, options.target, options.prompts, options.max_prompts)
    graph = compiled(checked_pipeline(pipeline, options.set))
    path = store_of(options)
    check_store(options, path)
    store = Store.open(path, write=True)
    session = new_run(store, graph)
    code = run_and_report(session)
    if code == OK:
        for line in in_short(store, session.record):
            print_lines(line)
    return code
