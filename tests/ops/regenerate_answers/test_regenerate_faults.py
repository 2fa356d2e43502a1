"""Servers that are busy, broken, gone or wrong: what is asked again, what is dropped, and what ends the stage."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from urllib.parse import quote

import pytest
from chat_server import ChatServer, Fault, TinyModel, is_probe, response
from fake_stage import folder_digest
from regenerate_cases import answers_of, run_endpoint, turn

from dsl.errors import DataError, TransientError
from ops.artifacts import ImageSamples
from ops.lib.data.files import read_json, read_jsonl, write_jsonl
from ops.lib.data.image_packs import read_packed

OPTIONS = {"max_new_tokens": 16, "finish_reasons": ("stop", "length"), "min_answer_tokens": 1}


@pytest.fixture(scope="module")
def model(talker):
    return TinyModel(talker)


@pytest.fixture(scope="module")
def undisturbed(parroted, talker, model, tmp_path_factory):
    """The answers of a server without faults; the tiny model knows all answers from then on."""
    with ChatServer(model) as server:
        return run_endpoint(tmp_path_factory.mktemp("undisturbed"), parroted, talker, server, **OPTIONS)


def question(body):
    """The text of the last turn that the server was asked."""
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def first(*faults):
    """The first attempts at every request meet with these."""
    return lambda body, attempt: faults[attempt] if attempt < len(faults) else None


TRANSIENT = {
    "busy": first(Fault(429, "busy", {"Retry-After": "0.01"})),
    "broken twice": first(Fault(500, "oh"), Fault(503, "dear")),
    "conflict": first(Fault(409), Fault(408)),
    "cut": first(Fault()),
    "slow": lambda body, attempt: Fault(hang=True) if question(body) == "Describe the line." and not attempt else None,
}


@pytest.mark.parametrize("fault", TRANSIENT.values(), ids=TRANSIENT)
def test_what_passes_by_changes_no_byte(parroted, talker, model, undisturbed, fault, tmp_path):
    with ChatServer(model, fault=fault) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **OPTIONS, timeout_s=4.0)
    assert folder_digest(undisturbed.out_dir) == folder_digest(stage.out_dir)
    answers = stage.metric("regenerate/answers")[0]
    faulty = Counter(str(body) for body in server.conversations)
    probes = [count for count in faulty.values() if count > 1]
    assert len(faulty) == answers
    assert 0 < sum(probes) - len(probes) <= stage.metric("regenerate/retries")[0]


def test_an_answer_that_the_server_broke_off_is_asked_for_again(parroted, talker, model, undisturbed, tmp_path):
    broken: Counter[str] = Counter()

    def answer(body):
        broken[question(body)] += 1
        return response("Half a", "abort") if broken[question(body)] == 1 else model(body)

    with ChatServer(answer) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **OPTIONS)
    assert folder_digest(undisturbed.out_dir) == folder_digest(stage.out_dir)
    assert stage.metric("regenerate/retries")[0] == len(broken)


def test_a_server_that_says_when_is_not_asked_before(parroted, talker, model, undisturbed, tmp_path):
    with ChatServer(
        model,
        fault=lambda body, attempt: (
            Fault(429, "", {"Retry-After": "1"}) if not is_probe(body) and not attempt else None
        ),
    ) as server:
        run_endpoint(tmp_path, parroted, talker, server, **OPTIONS, splits=("val",), concurrency=1)
    times = [when for when, _ in server.asked]
    assert 4 == len(times)
    assert min(times[1] - times[0], times[3] - times[2]) >= 1.0


def test_a_wrong_model_is_told_with_those_that_are_served(parroted, talker, model, tmp_path):
    with (
        ChatServer(model, model="parrot") as server,
        pytest.raises(DataError, match='serves no model "talker"; it serves "parrot"'),
    ):
        run_endpoint(tmp_path, parroted, talker, server)
    assert [] == server.conversations


NEVER = {
    401: "the API key is missing or wrong; api_key_env",
    403: "the API key may not use this model",
    404: 'usually ends in "/v1"; it serves "talker"',
    400: "check the parameters, including extra_body",
}


@pytest.mark.parametrize("status", NEVER)
def test_a_server_that_will_answer_nothing_ends_the_stage_before_the_samples_are_tried(
    parroted, talker, model, status, tmp_path
):
    with (
        ChatServer(model, fault=lambda body, attempt: Fault(status, "never")) as server,
        pytest.raises(DataError, match=f"rejects requests: {status}: never\n.*{NEVER[status]}"),
    ):
        run_endpoint(tmp_path, parroted, talker, server)
    assert [] == server.conversations


def test_a_key_that_expires_meanwhile_ends_the_stage_at_once(parroted, talker, model, undisturbed, tmp_path):
    with (
        ChatServer(
            model, fault=lambda body, attempt: Fault(401, "expired") if len(server.conversations) > 3 else None
        ) as server,
        pytest.raises(DataError, match="rejects requests: 401: expired"),
    ):
        run_endpoint(tmp_path, parroted, talker, server, **OPTIONS, concurrency=1)
    assert 4 == len(server.conversations)


REFUSALS = {
    "refused by the server": (Fault(400, "the prompt has 9999 tokens"), "400: the prompt has 9999 tokens"),
    "the server fails on it": (Fault(500, "boom"), "3 attempts, the last: 500: boom"),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_one_conversation_that_the_server_cannot_answer_is_dropped_and_counted(
    parroted, talker, model, undisturbed, reason, tmp_path
):
    fault, detail = REFUSALS[reason]
    with ChatServer(model, fault=lambda body, _: fault if question(body) == "Describe the circle." else None) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **OPTIONS, retries=2, concurrency=1)
    assert {reason: 1} == read_json(stage.out_dir / "summary.json")["dropped"]
    assert f'id,reason,detail\ntext-1,{reason},"{detail}"\n'.replace('"', "") == (
        (stage.out_dir / "dropped.csv").read_text().replace('"', "")
    )
    expected = answers_of(undisturbed)
    expected.pop("text-1")
    assert expected == answers_of(stage)


def one_of(field, value):
    """An answer with one field of another form."""
    if field == "usage":
        return {**response("Hello"), "usage": value}
    if field in ("content", "reasoning_content"):
        made = response("Hello")
        made["choices"][0]["message"][field] = value
        return made
    if field in ("completion_tokens", "prompt_tokens"):
        return response("Hello", usage={field: value})
    return response("Hello", **{field: value})


MALFORMED = [
    ("content", [{"type": "text", "text": "Hello"}], "content is not a text"),
    ("content", "Hel\ud800lo", "content is not Unicode text"),
    ("reasoning_content", {"a": 1}, "reasoning_content is not a text"),
    ("usage", [3], "not a chat completion"),
    ("completion_tokens", "3", "completion_tokens is not a number of tokens"),
    ("completion_tokens", -1, "completion_tokens is not a number of tokens"),
    ("prompt_tokens", True, "prompt_tokens is not a number of tokens"),
    ("token_ids", "5 6", "token_ids is not a list of token ids"),
    ("token_ids", [5, -1], "token_ids is not a list of token ids"),
    ("token_ids", [5, 2**40], "token_ids is not a list of token ids"),
    ("response_token_ids", [5.0], "token_ids is not a list of token ids"),
    ("prompt_token_ids", {"0": 1}, "prompt_token_ids is not a list of token ids"),
    ("finish_reason", ["\ud800"], "aborted by the server"),
]


@pytest.mark.parametrize(("field", "value", "said"), MALFORMED)
def test_a_malformed_answer_is_asked_for_again_and_its_sample_dropped_with_the_reason(
    parroted, talker, model, undisturbed, field, value, said, tmp_path
):
    def answer(body):
        return one_of(field, value) if question(body) == "Describe the circle." else model(body)

    with ChatServer(answer) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **OPTIONS, retries=1)
    assert 2 == [question(body) for body in server.conversations].count("Describe the circle.")
    dropped = (stage.out_dir / "dropped.csv").read_text("utf-8")
    assert "text-1,the server fails on it," in dropped
    malformed = "" if said.startswith(("not", "aborted")) else "a malformed answer: "
    assert f"2 attempts, the last: {malformed}{said}" in dropped
    expected = answers_of(undisturbed)
    expected.pop("text-1")
    assert expected == answers_of(stage)


def test_an_answer_of_no_tokens_is_an_empty_one(parroted, talker, model, tmp_path):
    def answer(body):
        return response("", token_ids=[]) if question(body) == "Describe the circle." else model(body)

    with ChatServer(answer) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **OPTIONS)
    assert {"fewer than min_answer_tokens": 1} == read_json(stage.out_dir / "summary.json")["dropped"]


def test_ids_that_are_told_as_none_leave_the_text(parroted, talker, model, undisturbed, tmp_path):
    def answer(body):
        made = model(body)
        made["choices"][0]["token_ids"] = []
        return made

    with ChatServer(answer) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **OPTIONS)
    assert answers_of(undisturbed) == answers_of(stage)


def test_a_message_that_utf_8_cannot_write_ends_nothing(parroted, talker, model, tmp_path):
    fault = Fault(400, "no \ud800")
    with ChatServer(model, fault=lambda body, _: fault if question(body) == "Describe the circle." else None) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **OPTIONS)
    assert "text-1,refused by the server,400: no ?" in (stage.out_dir / "dropped.csv").read_text("utf-8")


@pytest.mark.parametrize("key", ["sk-a1", "sk/a+1"])
def test_an_address_that_a_server_redirects_to_is_told_without_the_key(
    parroted, talker, model, monkeypatch, key, tmp_path
):
    monkeypatch.setenv("SOME_KEY", key)
    away = Fault(307, "", {"Location": f"http://elsewhere/v1?key={quote(key, safe='')}&again={key}"})
    with (
        ChatServer(model, fault=lambda body, _: away) as server,
        pytest.raises(DataError, match=r"redirected to http://elsewhere/v1\?key=<API key>&again=<API key>;") as caught,
    ):
        run_endpoint(tmp_path, parroted, talker, server, api_key_env="SOME_KEY")
    assert key not in str(caught.value)


def test_a_server_that_refuses_all_of_the_first_samples_ends_the_stage(talker, tmp_path):
    rows = [
        {"id": str(n), "split": "train", "category": "text", "messages": [turn("user", f"Say {n}.")], "images": []}
        for n in range(60)
    ]
    folder = tmp_path / "samples"
    folder.mkdir()
    write_jsonl(folder / "samples.jsonl", rows)
    with (
        ChatServer(
            lambda body: response("Hello", "stop"), fault=lambda body, _: None if is_probe(body) else Fault(422, "no")
        ) as server,
        pytest.raises(DataError, match='refused all of the first 20 samples; the last, "19": 422: no'),
    ):
        run_endpoint(tmp_path / "run", ImageSamples(folder, "a"), talker, server, concurrency=1)
    assert 20 == len(server.conversations)


def test_a_server_that_goes_away_ends_the_stage_and_no_answer_is_asked_for_twice(
    parroted, talker, model, undisturbed, tmp_path
):
    options = {**OPTIONS, "concurrency": 2, "retries": 1, "shard_samples": 3}

    def gone(body, attempt):
        if len(server.conversations) > 7:
            return Fault()
        return Fault(400, "not this one") if question(body) == "Describe the square." else None

    with (
        ChatServer(model, fault=gone) as server,
        pytest.raises(
            TransientError, match=r"does not answer: \d attempts, the last: .*\n.*answers so far are kept.*resume"
        ),
    ):
        run_endpoint(tmp_path, parroted, talker, server, **options)
    answered = server.conversations[:7]
    answered = [body for body in answered if question(body) != "Describe the square."]
    assert 6 == len(answered)
    # Another machine, another port: where the server runs is outside the key.
    with ChatServer(model) as server:
        stage = run_endpoint(tmp_path, parroted, talker, server, **options)
    total = stage_answers(undisturbed)
    assert total - 6 == len(server.conversations)
    assert not [body for body in answered if body in server.conversations]
    assert folder_digest(undisturbed.out_dir) == folder_digest(stage.out_dir)


def stage_answers(stage):
    return sum(map(len, answers_of(stage).values()))


def test_an_image_that_the_server_cannot_read_is_no_reason_to_lose_the_others(
    parroted, talker, model, undisturbed, tmp_path
):
    """An image of which only the first half came along: the sample is dropped as tokenize_chat would."""
    folder = tmp_path / "samples"
    shutil.copytree(parroted.path, folder)
    rows = list(read_jsonl(folder / "samples.jsonl"))
    image = rows[0]["images"][0]
    half = read_packed(folder, image)[: image["size"] // 2]
    rows[0]["images"] = [{**image, "size": len(half), "sha256": hashlib.sha256(half).hexdigest()}]
    write_jsonl(folder / "samples.jsonl", rows)
    with ChatServer(model) as server:
        stage = run_endpoint(tmp_path, ImageSamples(folder, "b"), talker, server, **OPTIONS)
    assert {"image undecodable": 1} == read_json(stage.out_dir / "summary.json")["dropped"]
    expected = answers_of(undisturbed)
    expected.pop(rows[0]["id"])
    assert expected == answers_of(stage)
