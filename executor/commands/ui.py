"""`dflow ui`: serve the MLflow UI on the store."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from dsl.errors import StoreError
from executor.commands.arguments import add_address, add_store, add_trust, check_store, open_store
from executor.records.run_record import newest_records
from executor.system.output import OK, print_lines
from executor.system.server import Server, is_reachable_by_others, require_free_port, wait_until_ready
from executor.tracking.sync_state import TRAINING, VIEW, SentRun

# MLflow's job runner is for its own evaluations: a dozen processes that dflow never uses. Its assistant runs commands
# for whoever reaches the port: in Docker, or not at all.
ENVIRONMENT = {
    "MLFLOW_ENABLE_ASSISTANT_SANDBOX": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
ALLOWED = "MLFLOW_SERVER_ALLOWED_HOSTS"  # the user's own list, for a proxy
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
NEWEST = 100  # runs that are searched
GRACE_S = 2  # for open connections at shutdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser, port=5000)
    add_store(parser)
    add_trust(parser)


def allowed_hosts(host: str) -> str:
    """The host names to accept in requests to MLflow's server at this host.

    MLflow's own default accepts 10.*, and so 10.evil.example: pages of that site could read everything once its name
    leads here (DNS rebinding).
    """
    names = {*LOOPBACK, host}
    if is_reachable_by_others(host):
        import psutil

        names |= {socket.gethostname(), socket.getfqdn()}
        addresses = (each for interface in psutil.net_if_addrs().values() for each in interface)
        names |= {each.address for each in addresses if each.family == socket.AF_INET}
    return ",".join(text for name in sorted(names) for text in (name, f"{name.replace('[', '[[]')}:*"))


def links(records: Path, url: str) -> Iterator[str]:
    """Lines with the addresses in MLflow of the newest run's experiment, and of the newest sweep's comparison."""
    here = (record for record in islice(newest_records(records), NEWEST) if record.state.tracking_uri is None)
    sent = [found for record in here if (found := SentRun.read(record.folder)) and found.parent]
    if sent:
        yield f"runs: {url}/#/experiments/{sent[0].experiment}/runs?{TRAINING}&viewStateShareKey={VIEW}"
    swept = next((found for found in sent if found.combinations), None)
    if swept is not None:
        runs = json.dumps([each.run_id for each in swept.combinations.values()], separators=(",", ":"))
        experiments = json.dumps([swept.experiment])
        asked = (
            f"runs={quote(runs)}&experiments={quote(experiments)}&{TRAINING}"  # MLflow reads `runs` only as the first
        )
        yield f"the last sweep, compared: {url}/#/compare-runs?{asked}"


def main(options: argparse.Namespace) -> int:
    """Run `dflow ui`: serve MLflow until Ctrl-C, with its output in a log of the store."""
    store = open_store(options).path
    check_store(options, store)
    if not (store / "mlflow.db").exists():
        raise StoreError(f"{store} has no mlflow.db: no run was tracked there yet")
    require_free_port(options.host, options.port)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{store / 'mlflow.db'}"]
    command += ["--artifacts-destination", (store / "mlartifacts").as_uri()]
    command += ["--host", options.host, "--port", str(options.port), "--workers", "1"]
    # Else uvicorn imports what lies in the working directory before anything that is installed.
    command += ["--uvicorn-opts", f"--timeout-graceful-shutdown {GRACE_S} --app-dir {os.devnull}"]
    if ALLOWED not in os.environ:
        command += ["--allowed-hosts", allowed_hosts(options.host)]
    if is_reachable_by_others(options.host):
        print_lines(f"warning: {options.host}: whoever reaches it can read, change and delete all runs", error=True)
    url = f"http://{options.host}:{options.port}"
    # A shell starts background jobs with this signal ignored, and Python keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = store / f"mlflow-ui-{options.port}.log"
    print_lines(f"starting MLflow on {store}, and waiting until it answers; log: {log}")
    with Server(command, ENVIRONMENT, log) as server:
        try:
            wait_until_ready(server, url, show=False)
            print_lines(f"MLflow of {store} at {url}; Ctrl-C to stop")
            for line in links(store / "records", url):
                print_lines(line)
            server.wait()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the shutdown
    return OK
