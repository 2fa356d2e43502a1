"""Which answers are learnt of the requests of a log, and of conversations beside it."""

from __future__ import annotations

import json

import pytest
from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_jsonl, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.shards import asked_rows
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat


def test_requests_learn_their_last_answer_beside_conversations_that_learn_all(tmp_path):
    """A log beside ShareGPT in one node; the log has the first answer as a request of its own."""
    asked = [{"role": "user", "content": "One?"}]
    then = [*asked, {"role": "assistant", "content": "One."}, {"role": "user", "content": "Two?"}]
    log = [
        {"request": {"messages": messages}, "response": said} for messages, said in ((asked, "One."), (then, "Two."))
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    chat = {"messages": [*then, {"role": "assistant", "content": "Two."}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    sources = (str(tmp_path / "log.jsonl"), str(tmp_path / "chat.jsonl"))
    told = {}
    for learnt in ("all", "last"):
        stage = FakeStage(tmp_path / learnt)
        ingest(Ingest(source=sources, split="train", learnt_in_requests=learnt), stage)
        inject = FakeStage(tmp_path / f"inject-{learnt}", {"samples": stage.artifact(Samples)})
        inject_images(InjectImages(samples=Ref("a")), inject)
        samples = inject.artifact(ImageSamples)
        told[learnt] = {row["id"]: row.get("learnt") for row in read_jsonl(samples.path / "samples.jsonl")}
        asks = RegenerateAnswers(samples=Ref("a"), target=Ref("t"), history="data")
        rows = [row["id"] for row in asked_rows(samples.path, asks)]
        tokens = FakeStage(tmp_path / f"tokens-{learnt}", {"samples": samples})
        config = TokenizeChat(samples=Ref("a"), contexts="served", min_loss_tokens=1, vocab_size=300)
        tokenize_chat(config, tokens)
        reader = TokenReader(tokens.artifact(TokenShards))
        answers = {record["id"]: len(record["answers"]) for record in reader.records}
        if learnt == "last":
            assert {"1/log.jsonl:1": 1, "1/log.jsonl:2": 1, "2/chat.jsonl:1": 2} == answers
            assert ["1/log.jsonl:1", "1/log.jsonl:2", "2/chat.jsonl:1@1", "2/chat.jsonl:1@2"] == rows
        else:
            assert {"1/log.jsonl:1": 1, "1/log.jsonl:2": 2, "2/chat.jsonl:1": 2} == answers
    assert {"1/log.jsonl:1": "last", "1/log.jsonl:2": "last", "2/chat.jsonl:1": None} == told["last"]
    assert {"1/log.jsonl:1": None, "1/log.jsonl:2": None, "2/chat.jsonl:1": None} == told["all"]


@pytest.mark.parametrize("contexts", ["whole", "served"])
def test_answers_of_one_conversation_in_several_samples_count_together_at_the_default_length(tmp_path, contexts):
    def talk(*answers):
        turns = [({"role": "user", "content": "Go on?"}, {"role": "assistant", "content": each}) for each in answers]
        return [turn for pair in turns for turn in pair]

    rows = {"short": talk("Hi.", "Bye."), "calls": talk(*(f"Look at {each}, please." for each in range(4)))}
    rows["alone"] = talk("Only this.")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"id": name, "messages": messages}) + "\n" for name, messages in rows.items())
    )
    stage = FakeStage(tmp_path / "ingest")
    ingest(Ingest(source=str(tmp_path / "data.jsonl"), split="train"), stage)
    inject = FakeStage(tmp_path / "inject", {"samples": stage.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("a")), inject)
    asks = RegenerateAnswers(samples=Ref("a"), target=Ref("t"), history="data")
    samples = inject.artifact(ImageSamples)
    asked = list(asked_rows(samples.path, asks))
    write_jsonl(samples.path / "samples.jsonl", asked)
    tokens = FakeStage(tmp_path / "tokens", {"samples": samples})
    tokenize_chat(TokenizeChat(samples=Ref("a"), contexts=contexts, vocab_size=300), tokens)
    reader = TokenReader(tokens.artifact(TokenShards))
    learnt = [int(reader.sample(place).loss_mask.sum()) for place in range(len(reader))]
    assert [f"calls@{place}" for place in range(1, 5)] == [record["id"] for record in reader.records]
    assert max(learnt) < 32 <= sum(learnt)
    dropped = (tokens.out_dir / "dropped.csv").read_text()
    assert [f"{name},fewer than min_loss_tokens" in dropped for name in ("short@1", "short@2", "alone")] == [True] * 3
    assert 2 == dropped.count("of 32 in the conversation short")
