"""Secrets: a reference everywhere, the value only in the stage."""

import base64
import json
import urllib.parse
from functools import partial
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from dsl.compile import compile_pipeline
from dsl.errors import ConfigError, PipelineError
from dsl.graph import graph_to_json
from dsl.op import field, op
from dsl.pipeline import Pipeline
from dsl.secrets import REDACTED, redact, resolved, resolved_text, secret_names, secret_values, without_secrets
from executor.keys.node_key import key_config
from ops.artifacts import Samples


@op(version=1, run="nowhere:ask_server")
@frozen(kw_only=True)
class AskServer:
    """Asks a server."""

    token: str = ""
    headers: dict[str, str] = field(default={})
    tokens: tuple[str, ...] = ()
    count: int = 1
    output = Samples


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("PLAIN", "hf_abc-longer")
    monkeypatch.setenv("PLAINPASSWORD", "pass")
    monkeypatch.setenv("TOKEN", "token")
    monkeypatch.setenv("api_key", "key")
    monkeypatch.setenv("EMPTY_KEY", "")
    monkeypatch.delenv("UNSET_KEY", raising=False)


@pytest.mark.parametrize(
    ("text", "names", "value"),
    [
        ("${secret:PLAIN}", ("PLAIN",), "hf_abc-longer"),
        ("${env:HF_TOKEN}", ("HF_TOKEN",), "hf_abc"),
        ("Bearer ${env:HF_TOKEN}!", ("HF_TOKEN",), "Bearer hf_abc!"),
        ("${secret:PLAIN}${secret:HF_TOKEN}", ("PLAIN", "HF_TOKEN"), "hf_abc-longerhf_abc"),
        ("${env:PLAINPASSWORD}", ("PLAINPASSWORD",), "pass"),
        ("${env:TOKEN}${env:api_key}", ("TOKEN", "api_key"), "tokenkey"),
        ("$${secret:PLAIN}", (), "${secret:PLAIN}"),
        ("${env:PLAIN}", (), "${env:PLAIN}"),
        ("${env:MONKEY}", (), "${env:MONKEY}"),
        ("${other:PLAIN}", (), "${other:PLAIN}"),
        ("{secret:PLAIN} $x ${", (), "{secret:PLAIN} $x ${"),
    ],
)
def test_a_secret_is_found_by_its_kind_or_its_name(text: str, names: tuple[str, ...], value: str) -> None:
    assert secret_names(text) == names
    assert resolved_text(text) == value
    assert resolved(AskServer(token=text)).token == value


def test_secrets_in_lists_and_tables_are_put_in_and_nothing_else_changes() -> None:
    config = AskServer(
        token="plain", headers={"auth": "Bearer ${secret:HF_TOKEN}", "x": "y"}, tokens=("${secret:PLAIN}",), count=3
    )
    assert resolved(config) == AskServer(
        token="plain", headers={"auth": "Bearer hf_abc", "x": "y"}, tokens=("hf_abc-longer",), count=3
    )
    assert secret_values(config) == ("hf_abc-longer", "hf_abc")
    plain = AskServer(token="${x}")
    assert resolved(plain) is plain


VALUES = st.text(min_size=6).filter(lambda value: "***" not in value)


@given(VALUES, st.binary(max_size=5), st.binary(max_size=5))
def test_a_secret_is_hidden_however_it_is_written(value: str, before: bytes, behind: bytes) -> None:
    for write in (repr, ascii, json.dumps, partial(json.dumps, ensure_ascii=False)):
        assert redact(f"x {write(value)[1:-1]} x", (value,)) == f"x {REDACTED} x"
    for quote in (partial(urllib.parse.quote, safe=""), urllib.parse.quote_plus):
        assert redact(f"u={quote(value)}&", (value,)) == f"u={REDACTED}&"
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        assert REDACTED in redact(encode(before + value.encode() + behind).decode(), (value,))


def test_of_a_short_secret_only_what_cannot_be_something_else_is_hidden() -> None:
    assert redact(f"a pin 1234, {base64.b64encode(b'1234').decode()}", ("1234",)) == "a pin ***, MTIzNA=="


def test_an_empty_secret_hides_nothing() -> None:
    assert secret_values(AskServer(token="${secret:EMPTY_KEY}")) == ()


def test_a_value_that_holds_another_is_hidden_first() -> None:
    values = secret_values(AskServer(tokens=("${secret:HF_TOKEN}", "${secret:PLAIN}")))
    assert redact("got hf_abc-longer and hf_abc", values) == f"got {REDACTED} and {REDACTED}"


def test_a_variable_that_is_not_set_is_refused_when_the_pipeline_is_compiled_and_when_it_runs() -> None:
    config = AskServer(token="${secret:UNSET_KEY}", headers={"a": "${env:UNSET_KEY}"})
    with pytest.raises(ConfigError, match="the environment variable UNSET_KEY is not set"):
        resolved(config)
    pipeline = Pipeline("p")
    pipeline.node("ask", config)
    with pytest.raises(PipelineError) as caught:
        compile_pipeline(pipeline)
    assert str(caught.value).split("\n") == [
        "node.ask.token: the environment variable UNSET_KEY is not set (export it before you call dflow)",
        "node.ask.headers: the environment variable UNSET_KEY is not set (export it before you call dflow)",
    ]


def test_the_graph_and_its_record_hold_the_reference_and_the_key_a_constant() -> None:
    pipeline = Pipeline("p")
    pipeline.node("ask", AskServer(token="Bearer ${secret:HF_TOKEN}", tokens=("${env:HF_TOKEN}", "x")))
    graph = compile_pipeline(pipeline)
    assert graph.nodes["ask"].config.token == "Bearer ${secret:HF_TOKEN}"
    text = json.dumps(graph_to_json(graph))
    assert "hf_abc" not in text
    assert json.loads(text)["nodes"][0]["config"]["token"] == "Bearer ${secret:HF_TOKEN}"
    assert key_config(graph.nodes["ask"]) == {
        "token": "Bearer secret",
        "headers": {},
        "tokens": ("secret", "x"),
        "count": 1,
    }


def test_neither_the_value_nor_the_name_of_the_variable_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def keyed(token: str) -> dict[str, object]:
        pipeline = Pipeline("p")
        pipeline.node("ask", AskServer(token=token))
        return key_config(compile_pipeline(pipeline).nodes["ask"])

    before = keyed("${secret:HF_TOKEN}")
    monkeypatch.setenv("HF_TOKEN", "another")
    assert keyed("${secret:HF_TOKEN}") == before
    assert keyed("${secret:PLAIN}") == before
    assert keyed("$${secret:HF_TOKEN}") != before


@given(st.text())
def test_a_text_without_a_reference_is_left_as_it_is(text: str) -> None:
    text = text.replace("${", "")
    assert (secret_names(text), resolved_text(text), without_secrets(text)) == ((), text, text)


def test_a_pipeline_file_may_name_a_secret(tmp_path: Path) -> None:
    pipeline = Pipeline("p", root=tmp_path)
    pipeline.node("ask", AskServer(headers={"auth": "${secret:HF_TOKEN}"}))
    assert compile_pipeline(pipeline).nodes["ask"].config.headers == {"auth": "${secret:HF_TOKEN}"}
