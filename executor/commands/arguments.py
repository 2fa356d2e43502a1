"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a pipeline: *.toml, or *.py with pipeline()")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-s",
        dest="set",
        action="append",
        default=[],
        metavar="NODE.FIELD=VALUE",
        help="change a value, also pipeline.seed, mlflow.notes and so on; `none` resets it",
    )


def add_keep_going(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-going", action="store_true", help="where a node failed, run what does not read from it all the same"
    )


def add_sweeps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NODE.FIELD=[A,B]",
        help="copy the node and all below it, one copy for each value; several sweeps multiply",
    )


def add_sort(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sort",
        metavar="METRIC",
        help="sort the table of a sweep by this metric, the largest first; --sort=-METRIC: the least first",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="NODE", help="that node and all above it, nothing else")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NODE", help="these nodes alone; what they read has to be there"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's id or a part of it, or its tag; the latest unless given"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Where a server listens."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen; 127.0.0.1 unless given, which this machine alone reaches; 0.0.0.0: all networks",
    )
    parser.add_argument("--port", type=int, default=port, metavar="N", help=f"{port} unless given")


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="DIR", help="the store; DFLOW_STORE or runs/ in the project unless given")


def count(text: str) -> int:
    """The type of an argument that counts something: 0 or more."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f'expected a whole number, 0 or more, got "{text}"')
    return int(text)
