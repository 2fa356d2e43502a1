"""`dflow evaluate`: tau, speed-up and losslessness of a draft, without a pipeline file."""

from __future__ import annotations

import argparse
from functools import partial

from dsl.compile import compile_pipeline
from dsl.errors import DataError, PipelineError
from dsl.graph import Graph
from executor.commands.arguments import add_overrides, add_store, add_trust, check_store, count, store_of
from executor.planning.session import new_run
from executor.report.first_screen import in_short
from executor.scheduler.run_and_report import run_and_report
from executor.store.artifact_store import Store
from executor.system.output import OK, print_lines
from ops.tools.evaluate.argument_names import advised, by_arguments, source_mistakes
from ops.tools.evaluate.pipeline import check_prompts, evaluation_pipeline, leave_out_gate


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
        help="prompts, or conversations whose last question is asked, in any form that ingest reads; all of them are "
        "asked, whatever their split; default: sixteen questions without images",
    )
    parser.add_argument(
        "--max-prompts",
        type=partial(count, least=1),
        metavar="N",
        help="only the first N prompts with images, and N without; default: all",
    )
    parser.add_argument(
        "--drafts",
        metavar="FOLDER",
        action="append",
        default=[],
        help="the folder of an algorithm of your own that the draft has (docs/drafts.md); may be repeated",
    )
    add_overrides(parser)
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    """Run `dflow evaluate`, and print the verdicts of the report's first screen. Returns the run's exit code."""
    graph = checked_graph(options)
    path = store_of(options)
    check_store(options, path)
    store = Store.open(path, write=True)
    try:
        session = new_run(store, graph, started_by="evaluate")
    except PipelineError as error:
        raise by_arguments(error) from None
    code = run_and_report(session)
    if code == OK:
        for line in in_short(store, session.record, advised):
            print_lines(line)
    return code


def checked_graph(options: argparse.Namespace) -> Graph:
    """The graph of the evaluation. Raises PipelineError with all mistakes in arguments, DataError without prompts."""
    try:
        pipeline = evaluation_pipeline(
            options.draft, options.target, options.prompts, options.max_prompts, options.drafts
        )
    except PipelineError as error:
        raise PipelineError([mistake.at("--drafts") for mistake in error.mistakes]) from None
    unlike = leave_out_gate(pipeline, options.set)
    wrong = source_mistakes(options.draft, options.target)
    try:
        graph = compile_pipeline(pipeline, options.set)
    except PipelineError as error:
        raise by_arguments(error, wrong) from None
    if wrong:
        raise PipelineError(wrong)
    try:
        check_prompts(graph.nodes["ingest"].config)
    except DataError as error:
        raise DataError(f"--prompts: {error}") from None
    if unlike:
        print_lines(
            "note: the gate (node check) is left out, since it compares greedy answers, in whole blocks, with those of "
            f"a server: {', '.join(unlike)}"
        )
    return graph
