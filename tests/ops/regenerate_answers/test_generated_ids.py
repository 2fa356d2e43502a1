"""Answers learnt in the ids that their target generated: written with the samples, and tokenised as they are."""

from __future__ import annotations

import shutil

import pytest
from chat_server import ChatServer, TinyModel
from fake_stage import FakeStage, folder_digest
from family_checkpoints import make_checkpoint
from regenerate_cases import answers_of, config, make_target, run, run_endpoint, turn

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, read_jsonl, write_jsonl
from ops.lib.data.sample_account import Unusable, losses_of
from ops.lib.data.token_shards import TokenReader
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.run import regenerate_answers
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

BABBLED = {
    "temperature": 1.5,
    "max_new_tokens": 24,
    "finish_reasons": ("stop", "length"),
    "min_answer_tokens": 1,
    "drop_retokenised": True,
}


@pytest.fixture(scope="module")
def babbler(tmp_path_factory):
    """An untrained target: the text of what it writes is seldom tokenised as it was written."""
    tmp = tmp_path_factory.mktemp("babbler")
    return make_target(tmp / "target", make_checkpoint("qwen3_vl", tmp / "checkpoint"))


@pytest.fixture(scope="module")
def babbled(parroted, babbler, tmp_path_factory):
    """The stage of the untrained target's answers."""
    return run(tmp_path_factory.mktemp("babbled"), parroted, babbler, **BABBLED)


def answered(folder):
    """The ids of each answer that has some, by sample."""
    return {
        row["id"]: [message["generated_ids"] for message in row["messages"] if "generated_ids" in message]
        for row in read_jsonl(folder / "samples.jsonl")
    }


def tokenized(folder, samples, target, contexts, **options):
    stage = FakeStage(folder, {"samples": samples, "target": target})
    options = {"min_loss_tokens": 1, "preview_samples": 0, **options}
    tokenize_chat(TokenizeChat(samples=Ref("a"), target=Ref("b"), contexts=contexts, **options), stage)
    return stage


def learnt(stage):
    """The learnt runs of ids of each conversation, over all its samples, in order."""
    reader, found = TokenReader(stage.artifact(TokenShards)), {}
    for index, record in enumerate(reader.records):
        sample = reader.sample(index)
        runs, before = found.setdefault(record["id"].partition("@")[0], []), False
        for token, is_learnt in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
            if is_learnt and not before:
                runs.append([])
            if is_learnt:
                runs[-1].append(token)
            before = is_learnt
    return found


def test_every_answer_has_the_ids_that_the_target_generated_and_the_digest_of_its_tokens(babbled, babbler):
    processor = load_processor(str(babbler.path / "model"))
    digest, retokenised = ChatEncoder(processor).vocabulary, 0
    for row in read_jsonl(babbled.out_dir / "samples.jsonl"):
        answers = [message for message in row["messages"] if message["role"] == "assistant"]
        if row["split"] == "test":
            assert not any("generated_ids" in answer for answer in answers)
            continue
        for answer, tokens, reason in zip(answers, row["answer_tokens"], row["finish_reasons"], strict=True):
            ids = answer["generated_ids"]
            assert (digest, tokens, reason == "stop") == (
                answer["tokenizer"],
                len(ids),
                ids[-1] in processor.eos_token_ids,
            )
            text = answer["content"][0]["text"]
            assert processor.tokenizer.decode(ids[:-1] if reason == "stop" else ids) == text
            retokenised += processor.tokenizer(text)["input_ids"] != ids[: -1 if reason == "stop" else None]
    assert retokenised > 5
    assert [0] == babbled.metric("regenerate/retokenised_differently")
    assert "tokenised otherwise than generated" not in read_json(babbled.out_dir / "summary.json")["dropped"]


def test_served_contexts_learn_exactly_what_was_generated_behind_the_prompts_that_were_asked(
    babbled, babbler, tmp_path
):
    stage = tokenized(tmp_path / "served", babbled.artifact(ImageSamples), babbler, "served")
    expected = {name: answers for name, answers in answered(babbled.out_dir).items() if answers}
    assert expected == {name: runs for name, runs in learnt(stage).items() if name in expected}
    assert [0] == stage.metric("tokenize/retokenised")
    assert [sum(map(len, expected.values()))] == stage.metric("tokenize/generated")
    assert {} == read_json(stage.out_dir / "summary.json")["dropped"]
    prompts = Prompts.load(config(), babbler, babbled.out_dir)
    reader, rows = (
        TokenReader(stage.artifact(TokenShards)),
        {row["id"]: row for row in read_jsonl(babbled.out_dir / "samples.jsonl")},
    )
    several = 0
    for index, record in enumerate(reader.records):
        row, (name, _, number) = rows[record["id"].partition("@")[0]], record["id"].partition("@")
        if not expected.get(name):
            continue
        turns = [place for place, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        several += bool(number)
        sample = reader.sample(index)
        last = turns[int(number) - 1] if number else turns[-1]
        asked = prompts.sample({**row, "messages": row["messages"][:last]})
        assert asked.input_ids.tolist() == sample.input_ids[: sample.prompt_tokens].tolist()
    assert several >= 4  # an answer that its text does not give again cannot be the history of the next one


def test_an_only_answer_is_learnt_as_it_was_generated_in_whole_conversations_too(babbled, babbler, tmp_path):
    stage = tokenized(tmp_path, babbled.artifact(ImageSamples), babbler, "whole")
    found, only, several = learnt(stage), 0, 0
    for name, answers in answered(babbled.out_dir).items():
        if len(answers) == 1:
            assert answers == found[name]
            only += 1
        elif answers and name in found:
            several += sum(one != other for one, other in zip(answers, found[name], strict=True))
    assert only >= 4
    assert [several] == stage.metric("tokenize/retokenised")
    last = tokenized(tmp_path / "last", babbled.artifact(ImageSamples), babbler, "whole", train_on="last")
    assert {name: answers[-1:] for name, answers in answered(babbled.out_dir).items() if answers} == {
        name: runs for name, runs in learnt(last).items() if answered(babbled.out_dir)[name]
    }
    assert [0] == last.metric("tokenize/retokenised")


def test_answers_that_their_text_gives_again_leave_the_bytes_of_whole_conversations_as_they_are(
    parroted, talker, tmp_path
):
    stage = run(tmp_path, parroted, talker)
    plain = tmp_path / "plain"
    shutil.copytree(stage.out_dir, plain)
    rows = list(read_jsonl(plain / "samples.jsonl"))
    for row in rows:
        row["messages"] = [
            {key: value for key, value in message.items() if key in ("role", "content")} for message in row["messages"]
        ]
    write_jsonl(plain / "samples.jsonl", rows)
    with_ids = tokenized(tmp_path / "ids", stage.artifact(ImageSamples), talker, "whole")
    without = tokenized(tmp_path / "none", ImageSamples(plain, folder_digest(plain)), talker, "whole")
    assert folder_digest(with_ids.out_dir) == folder_digest(without.out_dir)
    assert [0] == with_ids.metric("tokenize/retokenised")
    assert [] == without.metric("tokenize/retokenised")


@pytest.mark.parametrize("contexts", ["served", "whole"])
def test_ids_of_another_tokenizer_are_not_learnt_and_are_counted(babbled, babbler, tmp_path, contexts):
    folder = tmp_path / "other"
    shutil.copytree(babbled.out_dir, folder)
    rows = [row for row in read_jsonl(folder / "samples.jsonl") if row["split"] != "test"]
    for message in (message for row in rows for message in row["messages"] if "tokenizer" in message):
        message["tokenizer"] = "0" * 64
    write_jsonl(folder / "samples.jsonl", rows)
    stage = tokenized(tmp_path, ImageSamples(folder, folder_digest(folder)), babbler, contexts)
    ids, found = answered(folder), learnt(stage)
    assert sum(ids[name] != runs for name, runs in found.items()) > 4
    [generated], [others] = stage.metric("tokenize/generated"), stage.metric("tokenize/retokenised")
    assert generated == others == sum(len(ids[name]) for name in found)
    loss = losses_of(read_json(stage.out_dir / "summary.json"))[-1]
    assert f"100% of the answers ({others} of {others}) are learnt in other tokens" in loss.text


@pytest.mark.parametrize("ids", [[], [-1], [10**6], ["a"], [True], 5])
def test_ids_that_the_model_does_not_have_drop_the_sample_by_name(babbled, babbler, tmp_path, ids):
    folder = tmp_path / "other"
    shutil.copytree(babbled.out_dir, folder)
    rows = list(read_jsonl(folder / "samples.jsonl"))
    named = next(row for row in rows if row["split"] == "train")
    named["messages"][1]["generated_ids"] = ids
    write_jsonl(folder / "samples.jsonl", rows)
    for contexts in ("served", "whole"):
        stage = tokenized(tmp_path / contexts, ImageSamples(folder, folder_digest(folder)), babbler, contexts)
        assert 1 == read_json(stage.out_dir / "summary.json")["dropped"]["generated ids that the model does not have"]


def test_only_headers_of_turns_and_images_are_special_tokens_that_drop_an_answer(babbler, tmp_path):
    prompts = Prompts.load(config(), babbler, tmp_path)
    tokenizer = prompts.encoder.processor.tokenizer
    words = tokenizer("Yes")["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    dropped = []
    for token in prompts.encoder.processor.special_tokens:
        ids = [*words, tokenizer.convert_tokens_to_ids(token), *words, end]
        try:
            assert prompts.takes(prompts.text(ids[:-1]), ids)
        except Unusable as fault:
            assert ("special token in the text", token) == (fault.reason, fault.detail)
            dropped.append(token)
    assert {"<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>"} <= set(dropped)
    assert {"<|endoftext|>"} <= set(prompts.encoder.processor.special_tokens) - set(dropped)


@pytest.mark.parametrize("owner", ["sglang", "somebody"])
def test_a_server_s_ids_are_kept_where_it_reports_them(parroted, talker, tmp_path, owner):
    with ChatServer(TinyModel(talker), owner=owner) as server:
        stage = run_endpoint(tmp_path / "server", parroted, talker, server)
    local = run(tmp_path / "local", parroted, talker)
    assert answers_of(local) == answers_of(stage)
    if owner == "sglang":
        assert folder_digest(local.out_dir) == folder_digest(stage.out_dir)
    else:
        assert not any(answered(stage.out_dir).values())


def test_the_built_in_sample_loses_no_answer_for_its_tokens(target, tmp_path):
    stage = FakeStage(tmp_path / "ingest")
    ingest(Ingest(source="builtin:digits", max_samples=40, seed=0), stage)
    images = FakeStage(tmp_path / "inject", {"samples": stage.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("ingest")), images)
    stage = FakeStage(tmp_path / "regenerate", {"samples": images.artifact(ImageSamples), "target": target})
    regenerate_answers(config(**BABBLED), stage)
    assert [0] == stage.metric("regenerate/retokenised_differently")
    assert "tokenised otherwise than generated" not in read_json(stage.out_dir / "summary.json")["dropped"]
    ids = answered(stage.out_dir)
    for contexts in ("served", "whole"):
        tokens = tokenized(tmp_path / contexts, stage.artifact(ImageSamples), target, contexts)
        found = learnt(tokens)
        assert {name: answers for name, answers in ids.items() if answers} == {
            name: runs for name, runs in found.items() if ids[name]
        }
        assert [0] == tokens.metric("tokenize/retokenised")


def test_a_later_prompt_that_holds_other_tokens_begins_a_sample_of_its_own(babbler, tmp_path):
    encoder = ChatEncoder(load_processor(str(babbler.path / "model")))
    tokenizer = encoder.processor.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def generated(text, ids):
        return turn("assistant", text) | {"generated_ids": [*ids, end], "tokenizer": encoder.vocabulary}

    usual = tokenizer("It is blue")["input_ids"]
    unusual = [token for character in "It is blue" for token in tokenizer(character)["input_ids"]]
    assert usual != unusual
    ask = turn("user", "What?")
    messages = [
        ask, generated("It is blue", usual), ask, generated("It is blue", unusual), ask,
        generated("It is blue", usual), ask, turn("assistant", "Yes"),
    ]  # fmt: skip
    [found] = encoder.serve_batch([messages], [()], ["a"], [()])
    assert [(1, (1, 3)), (3, (5, 7))] == [(context.number, context.turns) for context in found.contexts]
    for context in found.contexts:
        encoded = encoder.encode_context(messages, context)
        text = tokenizer.decode(encoded.input_ids[encoded.loss_mask])
        expected = "Yes" if context.number == 3 else "It is blue"
        assert f"It is blue<|im_end|>{expected}<|im_end|>" == text
    first = encoder.encode_context(messages, found.contexts[0])
    assert [*unusual, end] == first.input_ids[first.prompt_tokens :].tolist()
