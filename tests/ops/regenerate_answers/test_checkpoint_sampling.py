"""sampling = "checkpoint": tokens drawn as the target's generation_config.json recommends, here and by a server."""

from __future__ import annotations

import json
import math
import re
import shutil

import pytest
import torch
from attrs import evolve
from chat_server import ChatServer, TinyModel
from fake_stage import FakeStage, folder_digest
from hypothesis import given, settings
from hypothesis import strategies as st
from regenerate_cases import answers_of, config, run, run_endpoint
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dsl.errors import ConfigError, DataError, StopRequested
from ops.artifacts import ImageSamples, TargetModel
from ops.lib.data.files import read_jsonl, write_jsonl
from ops.lib.drafts.decoding.sampling import choose, token_at, uniform_draws
from ops.lib.target.model import Target
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import smoke
from ops.regenerate_answers.run import regenerate_answers
from ops.regenerate_answers.sampling import Sampling, checkpoint_sampling

RECOMMENDED = {"do_sample": True, "temperature": 4.0, "top_p": 0.9, "top_k": 5, "min_p": 0.05}
OPTIONS = {"max_new_tokens": 12, "finish_reasons": ("stop", "length"), "min_answer_tokens": 1}


@pytest.fixture(scope="module")
def target(talker, tmp_path_factory) -> TargetModel:
    """The target of the tests, which recommends to draw wildly."""
    return recommending(talker, tmp_path_factory.mktemp("target") / "target", RECOMMENDED)


def recommending(talker, folder, recommended) -> TargetModel:
    shutil.copytree(talker.path, folder)
    file = folder / "model" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **recommended}))
    return TargetModel(folder, folder_digest(folder))


@pytest.fixture(scope="module")
def texts(parroted, tmp_path_factory) -> ImageSamples:
    """The questions without images."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [row for row in read_jsonl(parroted.path / "samples.jsonl") if not row["images"]]
    write_jsonl(folder / "samples.jsonl", rows)
    return ImageSamples(folder, folder_digest(folder))


def warped(logits_V, sampling):
    """The distribution that transformers draws from."""
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    scores = logits_V[None].double()
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([0.13, 0.5, 0.87, 1.0]),
    top_k=st.integers(0, 14),
    min_p=st.sampled_from([0.0, 0.03, 0.31, 1.0]),
)
def test_the_distribution_is_that_of_transformers(logits, temperature, top_p, top_k, min_p):
    sampling = Sampling(temperature, top_p, top_k, min_p)
    logits_V = torch.tensor(logits, dtype=torch.float64) / 10
    draws = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    tokens = choose(logits_V.expand(2000, -1), draws, temperature, top_p, top_k, min_p)
    shares = torch.bincount(tokens, minlength=len(logits)) / 2000
    assert (shares - warped(logits_V, sampling)).abs().max() <= 0.001


def test_every_answer_is_drawn_from_the_distribution_of_transformers_by_numbers_of_its_own(texts, target, tmp_path):
    stage = run(tmp_path, texts, target, **OPTIONS, sampling="checkpoint", seed=3)
    loaded = Target.load(target)
    prompts = Prompts.load(config(**OPTIONS), target, texts.path)
    sampling = Sampling(4.0, 0.9, 5, 0.05)
    for row in read_jsonl(stage.out_dir / "samples.jsonl"):
        if row["split"] == "test":
            continue
        draws, ids = uniform_draws(3, row["id"], 0, 12), row["messages"][1]["generated_ids"]
        prompt, _ = prompts.ids({**row, "messages": row["messages"][:1]})
        for place, token in enumerate(ids):
            loaded.forget_positions()
            logits_V = loaded.model(torch.tensor([prompt + ids[:place]])).logits[0, -1]
            assert int(token_at(warped(logits_V, sampling)[None], draws[place : place + 1])) == token


def test_the_digest_is_the_same_however_prompts_are_grouped_and_wherever_a_run_was_stopped(parroted, target, tmp_path):
    options = {**OPTIONS, "sampling": "checkpoint", "seed": 1}
    whole = run(tmp_path / "whole", parroted, target, **options)
    alone = run(tmp_path / "alone", parroted, target, **options, shard_samples=4, batch_tokens=1)
    assert folder_digest(whole.out_dir) == folder_digest(alone.out_dir)
    stopped = FakeStage(tmp_path / "cut", {"samples": parroted, "target": target}, stop_after=9)
    with pytest.raises(StopRequested):
        regenerate_answers(config(**options), stopped)
    assert folder_digest(whole.out_dir) == folder_digest(run(tmp_path / "cut", parroted, target, **options).out_dir)
    assert answers_of(whole) != answers_of(run(tmp_path / "other", parroted, target, **{**options, "seed": 2}))


def test_a_server_is_asked_to_draw_as_the_checkpoint_recommends_with_a_seed_for_each_answer(
    texts, target, tmp_path, capsys
):
    with ChatServer(TinyModel(target), owner="sglang") as server:
        run_endpoint(tmp_path, texts, target, server, **OPTIONS, sampling="checkpoint")
    bodies = server.conversations
    names = ("temperature", "top_p", "top_k", "min_p")
    assert {(4.0, 0.9, 5, 0.05)} == {tuple(body[name] for name in names) for body in bodies}
    assert len(bodies) == len({body["seed"] for body in bodies}) == 5
    said = (
        "info: sampling by generation_config.json of the target: temperature = 4, top_p = 0.9, top_k = 5, min_p = 0.05"
    )
    assert said in capsys.readouterr().out


def test_a_server_of_openais_parameters_alone_is_refused_what_it_cannot_do(texts, target, tmp_path):
    with (
        ChatServer(TinyModel(target)) as server,
        pytest.raises(
            DataError, match=r'"somebody"\), and these have no top_k = 5 and no min_p = 0.05: if it is SGLang'
        ),
    ):
        run_endpoint(tmp_path, texts, target, server, **OPTIONS, sampling="checkpoint")
    assert [] == server.conversations


def test_what_the_checkpoint_recommends_besides_is_named(texts, talker, tmp_path, capsys):
    penalised = {"do_sample": True, "temperature": 1.0, "repetition_penalty": 1.05, "typical_p": 1.0}
    run(tmp_path, texts, recommending(talker, tmp_path / "t", penalised), **OPTIONS, sampling="checkpoint")
    assert "warning: repetition_penalty = 1.05 of generation_config.json is not used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({"do_sample": True}, Sampling(1.0)),
        ({"temperature": 0.6}, Sampling(0.6)),
        ({"do_sample": True, "top_k": 20, "top_p": None}, Sampling(1.0, 1.0, 20)),
        ({"do_sample": True, "temperature": 1, "top_p": 0.95, "top_k": 64, "min_p": 0}, Sampling(1.0, 0.95, 64)),
        ({}, "is missing, or recommends no sampling: set temperature and top_p of this node instead"),
        ({"eos_token_id": 2, "do_sample": None}, "is missing, or recommends no sampling"),
        ({"do_sample": False, "temperature": 0.6}, "says do_sample = false, so greedy decoding: leave sampling"),
        ({"do_sample": True, "temperature": 0.0}, "temperature = 0.0 is not a number above 0"),
        ({"temperature": "hot"}, "temperature = 'hot' is not a number above 0"),
        ({"top_p": 1.5}, "top_p = 1.5 is not a number above 0, and at most 1"),
        ({"top_k": 2.5}, "top_k = 2.5 is not a whole number"),
        ({"top_k": math.inf}, "top_k = inf is not a whole number"),
        ({"top_k": True}, "top_k = True is not a whole number"),
        ({"min_p": math.nan}, "min_p = nan is not a number from 0 to 1"),
    ],
)
def test_a_checkpoint_recommends_what_its_file_says_or_is_refused(recommended, expected):
    if isinstance(expected, Sampling):
        assert expected == checkpoint_sampling(recommended)
        return
    with pytest.raises(DataError, match=re.escape(expected)):
        checkpoint_sampling(recommended)


def test_a_config_says_one_thing_about_sampling():
    for mistake in ({"temperature": 0.7}, {"top_p": 0.9}):
        with pytest.raises(
            ConfigError, match=f"'{next(iter(mistake))}' is the checkpoint's with sampling = \"checkpoint\""
        ):
            config(sampling="checkpoint", **mistake)
    server = {"backend": "endpoint", "endpoint": "http://h/v1", "model": "m"}
    with pytest.raises(ConfigError, match='extra_body may not contain top_k with sampling = "checkpoint"'):
        config(sampling="checkpoint", extra_body={"top_k": 3}, **server)
    smoked = evolve(config(sampling="checkpoint"), **smoke(config(sampling="checkpoint"), 3))
    assert ("greedy", 1.0) == (smoked.sampling, smoked.temperature)
    assert isinstance(smoked, RegenerateAnswers)
