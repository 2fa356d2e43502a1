"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dsl.errors import NotTrusted
from executor.store.artifact_store import Store, store_path
from executor.system.output import name_store, print_lines
from executor.system.trust import UNKNOWN_STORE, is_own_store, trust_store


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a pipeline: *.toml, or *.py with pipeline()")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-s",
        dest="set",
        action="append",
        default=[],
        metavar="NODE.FIELD=VALUE",
        help="override a value, including pipeline.seed and mlflow.notes; `none` resets it",
    )


def add_execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-going", action="store_true", help="after a node failed, still run the nodes that do not depend on it"
    )
    parser.add_argument(
        "--verify-inputs",
        action="store_true",
        help="before a node runs, read all of its inputs and compare them with their digests",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options --sweep, --to and --only to a parser."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NODE.FIELD=[A,B]",
        help="copy the node and all nodes downstream of it, once per value; several sweeps multiply",
    )
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="NODE",
        help="only these nodes, or all copies of them, and all nodes upstream of them",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NODE", help="only these nodes; their inputs must exist"
    )


LATEST = "the latest in which something ran"


def add_run(parser: argparse.ArgumentParser, default: str = LATEST) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help=f"a run's id, a part of it, or its tag; default: {default}"
    )


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add the option --ray. The command must call `use_cluster(options.ray)` before it uses the cluster."""
    parser.add_argument(
        "--ray",
        metavar="HOST:PORT",
        help='the head of the Ray cluster for nodes with kind = "ray", or "local": one of dflow\'s own here; '
        "default: DFLOW_RAY_ADDRESS, or `ray` of [machine]",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option --trust, for commands that write, send, or run what a record names."""
    parser.add_argument(
        "--trust", action="store_true", help="use a store that you did not make here, from now on, for all commands"
    )


def check_store(options: argparse.Namespace, path: Path) -> None:
    """Check that the user trusts a store that somebody else made: by --trust, or by an answer at the terminal, which is
    kept.

    Raises NotTrusted where the user refuses or there is no terminal.
    """
    if is_own_store(path):
        return
    if not options.trust:
        what = f"the store {path} is {UNKNOWN_STORE}"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NotTrusted(what)
        print_lines(f"{what}\nIt could run any code as you. Trust it? [y/N]", error=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise NotTrusted(what)
    trust_store(path)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the options --host and --port of a server."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen; default: 127.0.0.1, reachable only from this machine; 0.0.0.0: all networks",
    )
    parser.add_argument("--port", type=int, default=port, metavar="N", help=f"default: {port}")


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="DIR", help="the store; default: DFLOW_STORE, or runs/ in the project")


def store_of(options: argparse.Namespace) -> Path:
    """The store's folder: that of --store, else one found from the pipeline file, if the command has one.

    Commands that are printed from now on name this store where necessary.
    """
    path = store_path(options.store, getattr(options, "file", None))
    name_store(path, store_path(None, None))
    return path


def open_store(options: argparse.Namespace, *, write: bool = False) -> Store:
    """Open the store that a command's options name. write: for commands with `add_trust`; see `check_store`."""
    path = store_of(options)
    if write:
        check_store(options, path)
    return Store.open(path, write=write)


def count(text: str, least: int = 0) -> int:
    """Parse a command's argument as a number of at least `least`."""
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f'expected a whole number, {least} or more, got "{text}"')
    return int(text)
