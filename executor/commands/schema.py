"""`dflow schema`: the JSON schema of pipeline files, for editors."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsl.op_table import all_ops
from dsl.read_toml import op_files_of
from dsl.schema import pipeline_schema
from executor.system.output import OK, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a pipeline file in TOML whose own ops are included",
    )


def main(options: argparse.Namespace) -> int:
    files = () if options.file is None else op_files_of(options.file)
    print_json(pipeline_schema(all_ops(files)), ascii_only=False)
    return OK
