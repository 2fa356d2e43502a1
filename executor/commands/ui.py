"""`dflow ui`: serve the MLflow UI on the store."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from dsl.errors import StoreError
from executor.commands.arguments import add_address, add_store
from executor.lines import print_lines
from executor.port import require_free_port
from executor.store import Store, store_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser, port=5000)
    add_store(parser)


def main(options: argparse.Namespace) -> NoReturn:
    """Becomes the MLflow UI on this store's database."""
    store = Store.open(store_path(options.store, None), write=False).path
    if not (store / "mlflow.db").exists():
        raise StoreError(f"{store} holds no mlflow.db: nothing was tracked there yet")
    require_free_port(options.host, options.port)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{store / 'mlflow.db'}"]
    command += ["--artifacts-destination", (store / "mlartifacts").as_uri()]
    command += ["--host", options.host, "--port", str(options.port), "--workers", "1"]
    print_lines(f"http://{options.host}:{options.port}")
    os.execve(sys.executable, command, {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})
