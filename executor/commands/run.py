"""`dflow run`: run what is stale in a pipeline."""

from __future__ import annotations

import argparse

from dsl.read_toml import read_graph
from executor.begin import new_run
from executor.commands.arguments import add_file, add_overrides, add_store
from executor.outcome import run_and_tell
from executor.store import Store, store_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    graph = read_graph(options.file, options.set)
    store = Store.open(store_path(options.store, options.file), write=True)
    return run_and_tell(new_run(store, graph))
