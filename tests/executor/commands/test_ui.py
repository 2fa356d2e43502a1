"""`dflow ui`: a page of MLflow on a store, and an end without a word."""

import signal
import subprocess
import urllib.request

import pytest
from ports import free_port
from toy_ops import wait_for
from tracked_toy import tracked_toy

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_it_says_where_when_a_page_is_there_and_ctrl_c_ends_it_and_its_children_without_a_word(tmp_path):
    toy = tracked_toy(tmp_path)
    port = free_port()
    process = toy.start("ui", "--port", str(port))
    try:
        log = toy.store / f"mlflow-ui-{port}.log"
        assert (
            process.stdout.readline() == f"starting MLflow on {toy.store}, and waiting until it answers; log: {log}\n"
        ), process.stderr.read()
        said = process.stdout.readline()
        assert said == f"MLflow of {toy.store} at http://127.0.0.1:{port}; Ctrl-C to stop\n", process.stderr.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as page:
            assert "<title>MLflow</title>" in page.read().decode()
        processes = servers_of(toy.store)
        assert len(processes) <= 3, processes
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == 0
        wait_for(lambda: servers_of(toy.store) == [])
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def servers_of(store):
    """The command lines of MLflow's processes for the store, what it starts itself included."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if f"{store}/mlflow.db" in line or ("huey" in line and str(store) in line)]
