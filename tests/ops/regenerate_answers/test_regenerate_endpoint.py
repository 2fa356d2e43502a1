"""Answers of a target behind a real HTTP server: the same as those of the target loaded here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from chat_server import ChatServer, Fault, TinyModel, is_probe
from fake_stage import FakeStage, folder_digest
from import_graph import PYTHON_PATH
from regenerate_cases import answers_of, config, endpoint_config, run, run_endpoint, turn
from toy_ops import wait_for

from dsl.errors import ConfigError, DataError, StopRequested, TransientError
from ops.artifacts import ImageSamples
from ops.lib.data.files import read_json, read_jsonl, write_jsonl
from ops.regenerate_answers.client import request_seed
from ops.regenerate_answers.run import regenerate_answers

ROOT = Path(__file__).parents[3]
TWO_PICTURES = [turn("user", "Which one is it?", image=True), turn("assistant", "?")] * 2


@pytest.fixture(scope="module")
def model(talker):
    return TinyModel(talker)


@pytest.fixture(scope="module")
def samples(parroted, tmp_path_factory) -> ImageSamples:
    """Texts and pictures, several turns, a system prompt, and two pictures in one conversation."""
    folder = tmp_path_factory.mktemp("asked") / "samples"
    shutil.copytree(parroted.path, folder)
    rows = list(read_jsonl(folder / "samples.jsonl"))
    rows[3]["messages"].insert(0, turn("system", "Be brief."))
    pictures = [rows[0]["images"][0], rows[1]["images"][0]]
    rows.append({**rows[0], "id": "two-pictures", "messages": TWO_PICTURES, "images": pictures})
    write_jsonl(folder / "samples.jsonl", rows)
    return ImageSamples(folder, folder_digest(folder))


GREEDY = {"max_new_tokens": 16, "finish_reasons": ("stop", "length"), "min_answer_tokens": 1}


@pytest.fixture(scope="module")
def local(samples, talker, tmp_path_factory):
    """The answers of the target when it is loaded in this process."""
    return run(tmp_path_factory.mktemp("local"), samples, talker, **GREEDY)


@pytest.mark.parametrize("owner", ["somebody", "sglang"])
def test_a_server_gives_the_bytes_of_the_target_itself(samples, talker, model, local, owner, tmp_path):
    with ChatServer(model, owner=owner) as server:
        stage = run_endpoint(tmp_path, samples, talker, server, **GREEDY)
    assert answers_of(local) == answers_of(stage)
    assert (owner == "sglang") == (folder_digest(local.out_dir) == folder_digest(stage.out_dir))  # others tell no ids
    answers = sum(map(len, answers_of(stage).values()))
    assert {1, 2} == {len(texts) for texts in answers_of(stage).values()}
    assert answers == len(server.conversations) > len(answers_of(stage))
    assert {owner == "sglang"} == {"return_token_ids" in body for body in server.conversations}
    for name in ("answers", "tokens", "retokenised_differently"):
        assert local.metric(f"regenerate/{name}") == stage.metric(f"regenerate/{name}")
    assert [0] == stage.metric("regenerate/prompted_differently")
    assert stage.progressed[-1] == (answers, answers)
    measured = read_json(stage.out_dir / "measurements.json")
    assert answers + 2 == measured["requests"]  # and the list of models, and a first question
    assert 0 == measured["retries"] < measured["tokens_per_second"]
    assert {"model": "talker", "owned_by": owner} == measured["server"]


def test_a_processor_is_enough_and_nothing_of_the_target_is_read(samples, talker, model, local, tmp_path):
    processor = tmp_path / "processor"
    shutil.copytree(talker.path / "model", processor, ignore=shutil.ignore_patterns("*.safetensors"))
    with ChatServer(model, owner="sglang") as server:
        stage = FakeStage(tmp_path, {"samples": samples, "target": None})
        regenerate_answers(endpoint_config(server, target=None, processor=str(processor), **GREEDY), stage)
    assert folder_digest(local.out_dir) == folder_digest(stage.out_dir)


def test_what_is_drawn_depends_on_seed_sample_and_turn_and_not_on_the_order_of_answers(
    samples, talker, model, tmp_path
):
    options = {**GREEDY, "temperature": 1.0, "top_p": 0.9, "enable_thinking": None}

    def drawn(name, delay, **changes):
        with ChatServer(model, delay=delay) as server:
            return run_endpoint(tmp_path / name, samples, talker, server, **{**options, **changes}), server

    one, server = drawn("one", lambda _: 0.0, concurrency=1)
    many, _ = drawn("many", lambda body: 0.001 * (body.get("seed", 0) % 100), concurrency=8, shard_samples=2)
    other, _ = drawn("other", lambda _: 0.0, seed=1)
    assert folder_digest(one.out_dir) == folder_digest(many.out_dir)
    assert answers_of(one) != answers_of(other)
    seeds = [body["seed"] for body in server.conversations]
    assert len(seeds) == len(set(seeds))
    assert {
        request_seed(0, (sample, number)) for sample, texts in answers_of(one).items() for number in range(len(texts))
    } == set(seeds)
    assert {(1.0, 0.9)} == {(body["temperature"], body["top_p"]) for body in server.conversations}


def test_so_many_requests_are_in_flight_and_no_more(samples, talker, model, tmp_path):
    def until_three_are_there(body):
        if not is_probe(body):
            wait_for(lambda: server.most >= 3)
        return 0.05  # for a fourth one to come

    with ChatServer(model, delay=until_three_are_there) as server:
        run_endpoint(tmp_path, samples, talker, server, **GREEDY, concurrency=3, shard_samples=2)
    assert 3 == server.most


def test_parameters_are_those_of_the_config_and_of_the_server_at_hand(samples, talker, model, tmp_path):
    with ChatServer(model, owner="vllm") as server:
        run_endpoint(tmp_path, samples, talker, server, **GREEDY, extra_body={"top_k": 7, "stop": ["~"]})
    body = server.conversations[0]
    assert {
        "model": "talker", "max_tokens": 16, "temperature": 0.0, "top_p": 1.0, "top_k": 7, "min_p": 0.0,
        "repetition_penalty": 1.0, "skip_special_tokens": False, "return_token_ids": True, "stop": ["~"],
    } == {name: value for name, value in body.items() if name != "messages"}  # fmt: skip


def test_a_server_that_reads_other_prompts_is_told_apart(samples, talker, model, tmp_path, capsys):
    polite = TinyModel(talker, changed=lambda messages: [{"role": "system", "content": "Be kind."}, *messages])
    with ChatServer(polite) as server:
        stage = run_endpoint(tmp_path, samples, talker, server, **GREEDY, splits=("val",))
    assert [2] == stage.metric("regenerate/answers") == stage.metric("regenerate/prompted_differently")
    notes = [line for line in capsys.readouterr().out.splitlines() if "reads another prompt" in line]
    assert 1 == len(notes)
    assert 'info: the server reads another prompt of sample "picture-blue"' in notes[0]


def test_a_limit_of_drops_may_change_without_a_server(samples, talker, model, tmp_path):
    options = {"max_new_tokens": 13, "shard_samples": 3}
    with ChatServer(model) as server, pytest.raises(DataError, match="more than max_dropped = 0"):
        run_endpoint(tmp_path, samples, talker, server, max_dropped=0, **options)
    shutil.rmtree(tmp_path / "out")
    again = run_endpoint(tmp_path, samples, talker, server, max_dropped=9, **options)
    assert 0 < sum(read_json(again.out_dir / "summary.json")["dropped"].values()) < 9
    assert [0] == again.metric("regenerate/requests")


class Stopping(FakeStage):
    """Is asked to stop once the server has been asked so often."""

    def stop_requested(self):
        return len(self.server.conversations) >= 4


def test_a_stop_is_honoured_while_the_server_thinks_and_no_answer_is_lost(samples, talker, model, local, tmp_path):
    stage = Stopping(tmp_path, {"samples": samples, "target": talker})
    slow = {"owner": "sglang", "delay": lambda body: 60.0 if len(server.conversations) >= 4 else 0.0}
    with ChatServer(model, **slow) as server:
        stage.server = server
        with pytest.raises(StopRequested, match="all answers so far are kept"):
            regenerate_answers(endpoint_config(server, **GREEDY, concurrency=1), stage)
        assert 4 == len(server.conversations)
    first = server.conversations[:3]
    with ChatServer(model, owner="sglang") as server:
        again = run_endpoint(tmp_path, samples, talker, server, **GREEDY)
    assert not [body for body in first if body in server.conversations]
    assert folder_digest(local.out_dir) == folder_digest(again.out_dir)


KILLED = """
import sys
from pathlib import Path
import torch
from fake_stage import FakeStage
from dsl.op import Ref
from ops.artifacts import ImageSamples, TargetModel
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers

torch.set_num_threads(1)
samples, target, folder = map(Path, sys.argv[1:4])
stage = FakeStage(folder, {"samples": ImageSamples(samples, "a"), "target": TargetModel(target, "b")})
config = RegenerateAnswers(
    samples=Ref("a"), target=Ref("b"), backend="endpoint", endpoint=sys.argv[4], model="talker", concurrency=2,
    max_new_tokens=16, finish_reasons=("stop", "length"), min_answer_tokens=1, seed=0, shard_samples=2,
)
regenerate_answers(config, stage)
"""


def test_what_a_killed_stage_had_journalled_is_not_asked_again(samples, talker, model, local, tmp_path):
    process = []

    def kill(body, attempt):
        if len(server.conversations) == 8:
            process[0].send_signal(signal.SIGKILL)
            process[0].wait()

    with ChatServer(model, owner="sglang", fault=kill) as server:
        command = [sys.executable, "-c", KILLED, samples.path, talker.path, tmp_path, server.url]
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        process.append(subprocess.Popen([str(part) for part in command], env=environment))
        assert -signal.SIGKILL == process[0].wait()
    journalled = sum(len(file.read_text().splitlines()) for file in (tmp_path / "work").glob("*.answers"))
    finished = sum(len(row["answers"]) for file in (tmp_path / "work").glob("*.jsonl") for row in read_jsonl(file))
    assert finished > 0
    # Of the eight that were asked, two were in flight.
    assert 6 <= journalled + finished <= 7
    with ChatServer(model, owner="sglang") as again:
        stage = run_endpoint(tmp_path, samples, talker, again, **GREEDY, shard_samples=2)
    total = sum(map(len, answers_of(local).values()))
    assert total - journalled - finished == len(again.conversations)
    assert folder_digest(local.out_dir) == folder_digest(stage.out_dir)


MISTAKES = {
    "needs an endpoint": {"endpoint": None},
    "needs a model": {"model": None},
    r"is not a URL of the form http://host:port/v1": {"endpoint": "host:30000/v1"},
    r'endpoint = "http://...@host/v1" has a user or a password': {"endpoint": "http://me:sesame@host/v1"},
    "has a part after": {"endpoint": "http://host/v1?key=1"},
    "needs either a target or a processor": {"processor": "there"},
    "'dtype' is set on the server": {"dtype": "bfloat16"},
    "extra_body may not contain max_tokens, seed": {"extra_body": {"seed": 1, "max_tokens": 3, "top_k": 2}},
    "'endpoint' is for backend = \"endpoint\" only": {"backend": "huggingface"},
}


@pytest.mark.parametrize(("message", "changes"), MISTAKES.items(), ids=MISTAKES)
def test_a_config_that_does_not_fit_its_backend_is_refused(message, changes):
    good = {"backend": "endpoint", "endpoint": "http://host/v1", "model": "talker"}
    config(**good)
    with pytest.raises(ConfigError, match=message) as error:
        config(**{**good, **changes})
    assert "sesame" not in str(error.value)


def test_all_that_is_wrong_with_a_config_is_told_at_once():
    with pytest.raises(ConfigError, match=r"needs an endpoint.*needs a model.*target or a processor"):
        evolve(config(), target=None, backend="endpoint")
    with pytest.raises(ConfigError, match='backend = "huggingface" needs a target'):
        evolve(config(), target=None)


PIPELINE = """
[pipeline]
name = "endpoint"
seed = 0

[node.ingest]
op = "ingest"
source = "{source}"
require_answers = false
val_fraction = 0.0
test_fraction = 0.0

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.regenerate]
op = "regenerate_answers"
samples = "@inject"
backend = "endpoint"
endpoint = "{url}"
model = "talker"
processor = "{processor}"
api_key_env = "THE_KEY"
max_new_tokens = 16
finish_reasons = ["stop", "length"]
min_answer_tokens = 1
backoff_s = 0.01
retries = 1
concurrency = 1
launch = {{ retries = 1, retry_wait = 0.1 }}
"""
KEY = "sk-opensesame-1234567890"


@pytest.fixture(scope="module")
def broken_off(talker, model, tmp_path_factory):
    """A pipeline whose server refuses one question, and breaks off at the last one until the stage gives it up."""
    folder = tmp_path_factory.mktemp("broken_off")
    questions = folder / "questions.jsonl"
    rows = [{"id": str(n), "conversations": [{"role": "user", "text": f"Describe {n}."}]} for n in range(3)]
    write_jsonl(questions, rows)

    def fault(body, attempt):
        if is_probe(body):
            return Fault() if attempt in (1, 2) else None
        if "1." in str(body["messages"]):
            return Fault(400, f"Bearer {KEY} may not ask that")
        return Fault() if "2." in str(body["messages"]) and attempt < 2 else None

    with ChatServer(model, fault=fault, key=KEY) as server:
        file = folder / "endpoint.toml"
        file.write_text(PIPELINE.format(source=questions, url=server.url, processor=talker.path / "model"))
        done = subprocess.run(
            [sys.executable, "-m", "executor.cli", "run", str(file), "--store", str(folder / "store")],
            env={**os.environ, "THE_KEY": KEY},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done, server, folder / "store"


def test_the_api_key_reaches_the_server_and_no_file(broken_off):
    done, _, store = broken_off
    assert KEY not in done.stdout + done.stderr
    files = [path for path in store.rglob("*") if path.is_file()]
    assert [] == [path for path in files if KEY.encode() in path.read_bytes()]
    assert {"THE_KEY", "400: Bearer <API key> may not ask that"} == {
        shown
        for shown in ("THE_KEY", "400: Bearer <API key> may not ask that")
        if any(shown.encode() in path.read_bytes() for path in files)
    }


def test_a_server_that_breaks_off_is_asked_by_a_later_attempt_for_what_it_has_not_answered(broken_off):
    done, server, _ = broken_off
    assert "does not answer: 2 attempts, the last: RemoteProtocolError" in done.stdout
    assert "retry 1 of 1 in 0.1 s" in done.stdout
    first = ["Describe 0.", "Describe 1.", *["Describe 2."] * 2]
    again = ["Describe 1.", "Describe 2."]  # what was refused is final with its shard only
    assert [*first, *again] == [body["messages"][0]["content"] for body in server.conversations]


class Impatient(FakeStage):
    """Is stopped as soon as the user reads that there is no server."""

    said = ""

    def stop_requested(self):
        self.said += self.capsys.readouterr().out
        return "cannot be reached" in self.said


def test_that_no_server_is_there_is_told_before_the_retries_are_over(samples, talker, tmp_path, capsys):
    with ChatServer(model) as server:
        pass
    stage = Impatient(tmp_path, {"samples": samples, "target": talker})
    stage.capsys = capsys
    with pytest.raises(StopRequested):
        regenerate_answers(endpoint_config(server, retries=1, backoff_s=60.0), stage)
    assert f"info: {server.url} cannot be reached (ConnectError: " in stage.said
    assert "); retrying up to 1 times\n" in stage.said


def test_a_server_that_is_not_there_may_be_later_and_is_told_once(samples, talker, tmp_path, capsys):
    with ChatServer(model) as server:
        pass
    with pytest.raises(TransientError, match="does not answer: 3 attempts, the last: ConnectError"):
        run_endpoint(tmp_path, samples, talker, server, retries=2)
    assert 1 == capsys.readouterr().out.count("cannot be reached")


@pytest.mark.parametrize(("value", "message"), [("", "is not set"), ("a\nb", "must be one line of ASCII")])
def test_an_api_key_that_cannot_be_one_is_told_before_anything_is_asked(
    samples, talker, tmp_path, monkeypatch, value, message
):
    monkeypatch.setenv("THE_KEY", value)
    with ChatServer(model) as server, pytest.raises(ConfigError, match=f'api_key_env = "THE_KEY": .*{message}'):
        run_endpoint(tmp_path, samples, talker, server, api_key_env="THE_KEY")
    assert [] == server.conversations
