"""Documents that answers stand on: in tokens, contexts and prompts as a server renders them, or dropped by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_rows import say, write_agent_processor
from agent_templates import EXTENDS, SHOWN
from fake_stage import FakeStage
from format_reading import inject, read
from transformers import AutoTokenizer

from dsl.op import Ref
from ops.artifacts import Samples, TokenShards
from ops.evaluate.benchmark_rows import Benchmark
from ops.evaluate.prompts import read_benchmark
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.tokenize_chat.template import DOCUMENTS_NOT_SHOWN, SPECIAL_IN_TEXT

DOCUMENTS = [{"title": "Paris", "text": "It is sunny in Paris."}, {"title": "Rome", "text": 'It rains "here".'}]
READS = (
    "{%- for document in documents or [] %}"
    "{{- '<|im_start|>system\\n' + document.title + ': ' + (document.text|tojson) + '<|im_end|>\\n' }}{%- endfor %}"
)
PLAIN = SHOWN + EXTENDS.replace("message.content", "shown(message.content)")
SHOWING = READS + PLAIN
TITLES = READS.replace(" + ': ' + (document.text|tojson)", "") + PLAIN
ASK, SUNNY, AND, RAINY = (
    say("user", "How is it?"),
    say("assistant", "Sunny."),
    say("user", "And?"),
    say("assistant", "Wet."),
)
TALK = [ASK, SUNNY, AND, RAINY]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents") / "processor"
    write_agent_processor(folder)
    return folder


def encoder(folder, template: str) -> ChatEncoder:
    return ChatEncoder(load_processor(str(folder), chat_template=template))


@pytest.fixture(scope="module")
def showing(folder):
    return encoder(folder, SHOWING)


def rendered(folder, messages: list[dict[str, Any]], template: str = SHOWING) -> list[int]:
    """The prompt that transformers renders with the documents, as a server does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [{**each, "content": "".join(part["text"] for part in each["content"])} for each in messages]
    shown = tokenizer.apply_chat_template(
        texts, documents=DOCUMENTS, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(shown, add_special_tokens=False)


def row(**more: Any) -> dict[str, Any]:
    turns = [{**each, "content": "".join(part["text"] for part in each["content"])} for each in TALK]
    return {"messages": turns, "documents": DOCUMENTS, "split": "train", **more}


@pytest.mark.parametrize("contexts", ["whole", "served"])
@pytest.mark.parametrize("prompts_only", [False, True])
def test_tokens_have_the_documents_that_a_server_renders(tmp_path, folder, contexts, prompts_only):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row(), row(documents=None))))
    samples = inject(read(tmp_path / "data.jsonl", tmp_path / "ingest")[0].artifact(Samples), tmp_path / "inject")
    (tmp_path / "template.jinja").write_text(SHOWING)
    stage = FakeStage(tmp_path / "tokens", {"samples": samples, "target": None})
    config = TokenizeChat(
        samples=Ref("inject"),
        processor=str(folder),
        chat_template=str(tmp_path / "template.jinja"),
        min_loss_tokens=1,
        contexts=contexts,
        prompts_only=prompts_only,
    )
    tokenize_chat(config, stage)
    reader = TokenReader(stage.artifact(TokenShards))
    with_documents, without = (reader.sample(place) for place in range(2))
    prompt = rendered(folder, TALK[:3])
    assert prompt == with_documents.input_ids.tolist()[: len(prompt)]
    assert prompts_only == (len(prompt) == len(with_documents.input_ids))
    assert len(without.input_ids) < len(with_documents.input_ids)
    if not prompts_only:
        mask = with_documents.loss_mask.tolist()
        before = len(rendered(folder, TALK[:1]))
        assert before == mask.index(True)
        assert without.loss_mask.sum() == sum(mask)


def test_the_prompt_of_each_answer_is_that_of_transformers(folder, showing):
    [served] = showing.serve_batch([TALK], [()], ["a"], [()], documents=[DOCUMENTS])
    ids = showing.encode_context(TALK, served.contexts[0]).input_ids.tolist()
    for turn in (1, 3):
        prompt = rendered(folder, TALK[:turn])
        assert prompt == ids[: len(prompt)] == showing.prompt(TALK[:turn], documents=DOCUMENTS).tolist()
        assert prompt == showing.served_prompt(TALK[:turn], (), True, documents=DOCUMENTS).input_ids.tolist()


@pytest.mark.parametrize("template", [PLAIN, TITLES], ids=["none", "only titles"])
@pytest.mark.parametrize("is_quoted", [False, True])
def test_a_template_that_does_not_show_them_drops_the_sample_by_name(folder, template, is_quoted):
    """is_quoted: whether a message has the text of a document, which then is in the prompt all the same."""
    asked = say("user", DOCUMENTS[0]["text"] if is_quoted else "How?")
    coder, talk = encoder(folder, template), [asked, SUNNY]
    [served] = coder.serve_batch([talk], [()], ["a"], [()], documents=[DOCUMENTS])
    [whole] = coder.encode_batch([talk], [()], ["a"], [()], [DOCUMENTS])
    for found in (served, whole):
        assert isinstance(found, Unusable)
        assert (DOCUMENTS_NOT_SHOWN, "the document 'It is sunny in Paris.' is not in the prompt") == found.args
    for asking in (coder.encoded_prompt, lambda messages, **more: coder.served_prompt(messages, (), True, **more)):
        with pytest.raises(Unusable, match=DOCUMENTS_NOT_SHOWN):
            asking(talk[:1], documents=DOCUMENTS)


def test_a_document_that_a_message_quotes_is_shown(showing):
    quoting = [say("user", f"{DOCUMENTS[1]['text']} Is it so?"), SUNNY]
    [served] = showing.serve_batch([quoting], [()], ["a"], [()], documents=[DOCUMENTS])
    assert not isinstance(served, Unusable)


def test_a_special_token_in_a_document_drops_the_sample(showing):
    [served] = showing.serve_batch([TALK], [()], ["a"], [()], documents=[[{"title": "x", "text": "a<|im_end|>b"}]])
    assert (SPECIAL_IN_TEXT, "<|im_end|>") == served.args


def test_a_benchmark_asks_with_its_documents(tmp_path, folder, showing):
    asked = {**row(id="a", category="rag"), "messages": row()["messages"][:3]}
    (tmp_path / "benchmark.jsonl").write_text(json.dumps(asked) + "\n")
    [prompt] = read_benchmark(Benchmark(tmp_path / "benchmark.jsonl"), showing)
    expected = rendered(folder, TALK[:3])
    assert (prompt.length, prompt.sample().input_ids.tolist()) == (len(expected), expected)
