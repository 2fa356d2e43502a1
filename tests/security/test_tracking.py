"""What of a tracking server's address is shown where the server refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from toy_ops import ONE_NODE, Toy

from executor.tracking.mlflow_client import shown_error


class Refusing(BaseHTTPRequestHandler):
    """A request handler that refuses every request, and repeats the request's address in the answer."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        text = f"nothing for {self.path}".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, *_arguments: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize("where", ["http://{}/${{secret:MY_TOKEN}}", "http://{}/mlflow?token=${{secret:MY_TOKEN}}"])
def test_no_error_shows_a_secret_in_the_path_or_query_of_the_tracking_uri(where, server, tmp_path):
    uri = where.format(server)
    toy = Toy(tmp_path, ONE_NODE + f'[mlflow]\ntracking_uri = "{uri}"\n', tracked=True)
    run = toy.dflow("run", str(toy.file), MY_TOKEN="open-sesame")
    sync = toy.dflow("sync", MY_TOKEN="open-sesame")
    assert (run.returncode, sync.returncode) == (0, 1)
    assert "MLflow" in run.stderr + run.stdout and "MLflow" in sync.stderr
    assert "sesame" not in run.stdout + run.stderr + sync.stdout + sync.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()] == []


def test_an_error_shows_no_query_of_an_address():
    error = OSError("https://host/api?key=abc&x=1 failed; see 'http://other/?t=d'")
    assert shown_error(error) == "https://host/api?*** failed; see 'http://other/?***'"


def test_a_received_record_gets_no_secret_unless_its_user_trusts_it(server, tmp_path, monkeypatch):
    """Its server asks for a variable of whoever sends it; here nobody has run a pipeline that says so."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    uri = f"http://{server}/${{secret:MY_TOKEN}}"
    toy = Toy(tmp_path, ONE_NODE + f'[mlflow]\ntracking_uri = "{uri}"\n', tracked=True)
    run = toy.dflow("run", str(toy.file), MY_TOKEN="of theirs", XDG_STATE_HOME=str(theirs))
    assert run.returncode == 0
    [record] = toy.store.glob("records/*")
    monkeypatch.setenv("XDG_STATE_HOME", str(mine))
    asked = len(Refusing.paths)
    for command in (["sync"], ["sync", record.name], ["resume", record.name, "--from", "a"]):
        refused = toy.dflow(*command, MY_TOKEN="open-sesame")
        assert refused.returncode == 2 and f"the store {toy.store} is not one that you made here" in refused.stderr
    assert len(Refusing.paths) == asked
    toy.dflow("sync", record.name, "--trust", MY_TOKEN="open-sesame")
    assert any("open-sesame" in path for path in Refusing.paths[asked:])
