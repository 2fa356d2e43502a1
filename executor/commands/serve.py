"""`dflow serve`: serve a run's target with its draft in SGLang, and ask it one prompt."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NoReturn

from executor.commands.arguments import add_address, add_run, add_store
from executor.store.artifact_store import store_path
from executor.system.supervisor import child_environment, module_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.usage = "dflow serve [RUN] [--check] [--node NODE] [--host HOST] [--port PORT] [-- ARGUMENTS OF SGLANG]"
    parser.add_argument("--check", action="store_true", help="stop when the prompt is answered; exit code 1 otherwise")
    parser.add_argument("--node", metavar="NODE", help="the node that exports the draft, where a run exports several")
    add_address(parser, port=30000)
    add_store(parser)


def main(options: argparse.Namespace) -> NoReturn:
    """Becomes executor.model_tools.serve, which needs ops; this command loads them only after it checked whose they
    are.
    """
    names = ("run", "node", "host", "port", "check", "extra")
    store = str(store_path(options.store, None))
    asked = json.dumps({"store": store, **{name: getattr(options, name) for name in names}})
    os.execve(sys.executable, module_command("executor.model_tools.serve", asked), child_environment())
