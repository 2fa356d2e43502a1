"""What `dflow serve` and `dflow ui` start: who can use it, and what it shows of keys and of strangers' texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from serve_cases import SERVER, install_server, make_artifacts, record_run
from sockets import tree
from toy_ops import PROJECT, wait_for
from tracked_toy import tracked_toy

from executor.commands.ui import ENVIRONMENT, allowed_hosts
from ops.lib.sglang.version import VERSIONS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
KEY = "open-sesame-0815"
FORGED = "blue\x1b[2J\ndflow: warning: remove your store"
# As SGLang does: its settings are in its log, and who has not the key gets no answer.
WITH_KEY = (
    SERVER.replace(
        'add_argument("--port", type=int)', 'add_argument("--port", type=int)\nparser.add_argument("--config")'
    )
    .replace(
        'print("arguments"',
        'key = json.load(open(options.config))["api-key"] if options.config else None\n'
        'print(f"server_args={{\'api_key\': {key!r}}}", flush=True)\nprint("arguments"',
    )
    .replace(
        "        drafted =",
        '        if key and self.headers["Authorization"] != f"Bearer {key}":\n'
        "            return self.send_error(401)\n        drafted =",
    )
    .replace('"It is blue."', json.dumps(FORGED))
    .replace("time.time() > ready_at", "os.path.exists(os.environ['READY'])")
)


class Serve:
    """Runs `dflow serve` on a store with one run; a small stand-in takes the place of `sglang`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store, self.run = record_run(folder, make_artifacts(folder / "made", "qwen3"))
        self.site = install_server(folder / "site", VERSIONS[-1])
        (self.site / "sglang" / "launch_server.py").write_text(WITH_KEY)
        self.port = free_port()
        self.ready = folder / "ready"  # the server answers once it is there

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        kept = {name: os.environ[name] for name in ("PATH", "XDG_STATE_HOME")}
        paths = {"PYTHONPATH": f"{self.site}:{PROJECT}", "READY": str(self.ready)}
        environment = {**kept, **paths, **variables}
        own = ["serve", "--store", str(self.store.path), "--port", str(self.port), *arguments]
        command = [sys.executable, "-m", "executor.cli", *own]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=environment, cwd=self.folder, text=True, **pipes)


def test_a_key_is_in_no_argument_and_no_log_and_an_answer_does_not_speak_as_dflow(tmp_path):
    serve = Serve(tmp_path)
    process = serve.start("--check", "--host", "0.0.0.0", SGLANG_API_KEY=KEY)
    log = serve.store.records / serve.run / f"serve-{serve.port}.log"
    wait_for(lambda: "processes" in (log.read_text() if log.exists() else ""))
    arguments = [Path(f"/proc/{pid}/cmdline").read_text() for pid in tree(process.pid)]
    serve.ready.touch()
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert any("--config" in each for each in arguments)
    assert KEY not in "".join([*arguments, out, errors]) and "api_key': '***'" in log.read_text()
    assert [file for file in serve.store.path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()] == []
    answer = [line for line in out.splitlines() if "blue" in line or "remove your store" in line]
    assert answer == ["answer: blue\\x1b[2J", "    dflow: warning: remove your store"]


def test_keys_in_arguments_are_refused_and_a_server_for_others_without_one_is_warned_of(tmp_path):
    serve = Serve(tmp_path)
    process = serve.start("--", f"--api-key={KEY}", "--admin_api_key", KEY)
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert "--api-key: every user of this machine sees arguments; set the variable SGLANG_API_KEY" in errors
    assert KEY not in errors
    serve.ready.touch()
    process = serve.start("--check", "--host", "0.0.0.0")
    assert "warning: 0.0.0.0: whoever reaches it can use it" in process.communicate(timeout=300)[1]


@pytest.fixture(scope="module")
def mlflow_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    toy = tracked_toy(tmp_path_factory.mktemp("ui"))
    (toy.folder / "yaml.py").write_text("open('ran', 'w').close()")
    port = free_port()
    process = toy.start("ui", "--port", str(port))
    try:
        assert "starting" in process.stdout.readline()
        assert f"http://127.0.0.1:{port}" in process.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=300)
    assert not (toy.folder / "ran").exists()  # what lies in the working directory is not imported


def answer_code(url: str, body: bytes | None = None, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


EXPERIMENTS = "/ajax-api/2.0/mlflow/experiments/search?max_results=1"


@pytest.mark.parametrize(
    "name",
    ["evil.example", "10.evil.example", "192.168.evil.example:5000", "172.16.evil", "localhost.evil.example", ""],
)
@pytest.mark.parametrize("path", [EXPERIMENTS, "/", "/get-artifact?path=a&run_id=0", "/graphql"])
def test_a_page_whose_name_leads_here_reads_nothing(mlflow_page, name, path):
    assert answer_code(mlflow_page + path, Host=name) == 403


@pytest.mark.parametrize("name", ["localhost:8080", "127.0.0.1", "localhost"])
def test_ways_to_this_machine_are_open(mlflow_page, name):
    assert answer_code(mlflow_page + EXPERIMENTS, Host=name) == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost.evil.example"])
@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/x-www-form-urlencoded"])
def test_a_page_elsewhere_changes_nothing(mlflow_page, origin, kind):
    body = json.dumps({"name": "theirs"}).encode()
    headers = {"Origin": origin, "Content-Type": kind}
    for api in ("/api/2.0", "/ajax-api/2.0", "//api/2.0", "/%61pi/2.0"):
        assert answer_code(f"{mlflow_page}{api}/mlflow/experiments/create", body, **headers) == 403
    request = urllib.request.Request(mlflow_page + EXPERIMENTS, headers={"Origin": origin})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] is None  # so the browser keeps it from the page


def test_where_others_may_come_in_the_names_of_this_machine_are_enough():
    assert "*" not in allowed_hosts("0.0.0.0").split(",") and "10.*" not in allowed_hosts("0.0.0.0")
    assert {"192.0.2.7", "192.0.2.7:*"} <= set(allowed_hosts("192.0.2.7").split(","))


def test_mlflows_assistant_runs_no_command_on_this_machine(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    base = pytest.importorskip("mlflow.assistant.providers.base")
    assert base.assistant_sandbox_enabled()
