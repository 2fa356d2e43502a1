"""`dflow tune`: try values of a training, stop the worse ones early, and write the best one's pipeline file."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from dsl.errors import DflowError, shortened
from executor.commands.arguments import add_ray, add_store, add_trust, open_store
from executor.launchers.cluster_address import use_cluster
from executor.system.output import OK, columns, print_lines
from executor.tune.outcome import COLUMNS, outcome_of
from executor.tune.preflight import announcement, pace_of
from executor.tune.trials import read_trials
from executor.tune.tuning import Tuning
from executor.tune.winner import check_writable, default_path, is_winners, write_winner

PAGES = "tune"  # the folder of a store with the pages
UNSAFE = re.compile(r"[^\w.-]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a pipeline with a table [tune]: *.toml")
    parser.add_argument(
        "-o",
        dest="output",
        type=Path,
        metavar="FILE",
        help="the best trial's pipeline file; default: NAME_best.toml beside NAME.toml",
    )
    add_store(parser)
    add_trust(parser)
    add_ray(parser)


def main(options: argparse.Namespace) -> int:
    use_cluster(options.ray)
    if is_winners(options.file):
        raise DflowError(f"{options.file}: `dflow tune` wrote it for the best trial: tune the file that it extends")
    trials = read_trials(options.file)
    output = options.output or default_path(options.file)
    check_writable(output)
    store = open_store(options, write=True)
    print_lines(announcement(trials, pace_of(store, trials)))
    tuning = Tuning(store, trials, options.file, f"dflow {shlex.join(options.given)}")
    tuning.check()
    if tuning.code != OK:
        return tuning.code
    decision = tuning.run()
    if tuning.code != OK:
        return tuning.code
    rivals = tuning.rivals(decision)
    if tuning.code != OK:
        return tuning.code
    outcome = outcome_of(trials, decision, rivals)
    print_lines(columns(COLUMNS, outcome.rows, right=("steps", "tau", "above the best", "seconds")))
    for sentence in outcome.cost:
        print_lines(sentence)
    print_lines("not tried:")
    for sentence in outcome.not_tried:
        print_lines(f"  {sentence}")
    names = dict.fromkeys((shortened(trials.graph.name), shortened(options.file.stem)))  # several files have one name
    page = store.path / PAGES / f"{UNSAFE.sub('_', '-'.join(names))}.html"
    is_changed = write_winner(output, options.file, trials, decision)
    if is_changed or tuning.has_run or not page.exists():
        from executor.tune.page import write_page  # loads matplotlib

        write_page(page, trials.graph.name, outcome, output.absolute())
    print_lines(f"the page: {page}")
    print_lines(f"the best, {outcome.winner}: {output}; next: dflow run {shlex.quote(str(output))}")
    return OK
