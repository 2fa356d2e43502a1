"""Requests to servers, with proxies in the environment: who is asked, and who is named when there is no answer."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ports import free_port

from dsl.errors import ConfigError, DataError, TransientError
from dsl.op import Ref
from executor.cli import main
from ops.lib.data.proxies import is_local, proxy_of
from ops.lib.target.fetch import fetch
from ops.regenerate_answers.client import ChatClient
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import missing_here
from ops.regenerate_answers.sampling import Sampling

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ANSWER = {"choices": [{"message": {"content": "Yes."}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored at the end, whatever a test's command sets
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def http(status, body):
    """A server, or a proxy, that answers everything so; its URL, and the addresses that were asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content = body.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_CONNECT = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def config(endpoint):
    settings = {"backend": "endpoint", "model": "m", "processor": "unused", "retries": 0, "dialect": "openai"}
    return RegenerateAnswers(samples=Ref("samples"), endpoint=endpoint, **settings)


def ask(endpoint, said=print):
    async def asked():
        async with ChatClient.of(config(endpoint), Sampling(), said) as client:
            return await client.complete([], None)

    return asyncio.run(asked())


def test_a_server_of_this_machine_is_asked_without_the_proxy(monkeypatch):
    with http(200, json.dumps(ANSWER)) as (server, asked), http(503, "proxy") as (proxy, through):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1080")
        assert "Yes." == ask(f"{server}/v1").text
        assert "/v1/chat/completions" == asked[-1]
        assert [] == through


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]", "0.0.0.0", "gpu.localhost"])
def test_every_name_of_this_machine_is_spared(monkeypatch, host):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    assert None is proxy_of(f"http://{host}:30000/v1")
    assert is_local(host.strip("[]"))


def test_the_variable_that_names_the_proxy_is_the_one_of_the_scheme_then_that_of_all(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "all.example:1")
    monkeypatch.setenv("https_proxy", "http://user:secret@secure.example:2")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert "all.example:1 (ALL_PROXY)" == str(proxy_of("http://model.example/v1"))
    assert "http://all.example:1" == proxy_of("http://model.example/v1").url
    assert "secure.example:2 (https_proxy)" == str(proxy_of("https://model.example/v1"))
    assert None is proxy_of("https://gpu.inside.example/v1")


def test_a_proxy_that_answers_in_place_of_the_server_is_named(monkeypatch):
    with http(503, "<html>no route</html>") as (proxy, through):
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(TransientError) as caught:
            ask("http://model.example:8000/v1")
        named = f"{proxy.removeprefix('http://')} (http_proxy)"
        assert str(caught.value) == (
            f"no answer of http://model.example:8000/v1 through the proxy {named}: 1 attempts, the last: 503: <html>no "
            "route</html>\nall answers so far are kept; let it reach model.example, or add model.example to the "
            "environment variable no_proxy, and check that the server runs, then resume"
        )
        assert "http://model.example:8000/v1/models" == through[0]


def test_a_proxy_that_forbids_is_named_beside_the_server(monkeypatch):
    with http(403, "denied") as (proxy, _):
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(
            DataError, match=r"or the proxy 127.0.0.1:\d+ \(http_proxy\) rejects requests: 403: denied\n"
        ):
            ask("http://model.example/v1")
        monkeypatch.setenv("https_proxy", proxy)
        with pytest.raises(TransientError, match=r"through the proxy 127.0.0.1:\d+ \(https_proxy\): .*ProxyError: 403"):
            ask("https://model.example/v1")


def test_a_proxy_that_is_not_there_is_named_and_not_the_server(monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    said = []
    with pytest.raises(TransientError, match=r"no answer of http://model.example/v1 through the proxy"):
        ask("http://model.example/v1", said.append)
    (line,) = said
    assert line.startswith("http://model.example/v1 cannot be reached through the proxy 127.0.0.1:")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("socks5://127.0.0.1:1080", "a socks5:// proxy, which needs the library socksio, which is not installed"),
        ("socks4://127.0.0.1:1080", "a socks4:// proxy, which is not supported"),
    ],
)
def test_a_proxy_of_another_kind_is_refused_by_its_variable_at_plan_and_run(monkeypatch, url, why):
    monkeypatch.setenv("ALL_PROXY", url)
    expected = f"the environment variable ALL_PROXY names {why}; set it to an http:// proxy, or unset it"
    assert expected == missing_here(config("http://model.example/v1"))["endpoint"]
    assert "endpoint" not in missing_here(config("http://127.0.0.1:30000/v1"))
    with pytest.raises(ConfigError) as caught:
        ask("http://model.example/v1")
    assert expected == str(caught.value)
    with pytest.raises(DataError) as refused:
        fetch("owner/name", None, ())
    assert f"owner/name cannot be downloaded: {expected}" == str(refused.value)


def test_a_command_has_its_libraries_spare_this_machine_too(monkeypatch, capsys):
    from urllib.request import proxy_bypass

    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example")
    assert 0 == main(["ops"])
    capsys.readouterr()
    spared = ("127.0.0.1", "localhost", "inside.example")
    assert (True, True, True, False) == tuple(bool(proxy_bypass(host)) for host in (*spared, "model.example"))
