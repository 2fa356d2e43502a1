"""Conversations with tools, answered again: what a server is asked, whose results follow, and where they end."""

from __future__ import annotations

import json

import pytest
from agent_rows import ASK, ASK_AGAIN, NAME, RAIN, RAINY, SUN, SUNNY, TOOLS, calls, conversation, say, why
from agent_templates import EXTENDS, STRIPS
from chat_server import ChatServer, TinyModel, called, is_probe, response
from fake_stage import FakeStage, folder_digest
from family_checkpoints import make_checkpoint
from regenerate_cases import config, endpoint_config, make_target, run, teach
from transformers import AutoTokenizer

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.artifacts import ImageSamples, TokenShards
from ops.evaluate.prompts import encoder_of
from ops.lib.data.files import json_line, read_json, read_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import SamplesForecast
from ops.lib.target.model import Target
from ops.regenerate_answers.conflicts import conflicts
from ops.regenerate_answers.conversations import Conversation, Prompts, matched_calls
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers
from ops.regenerate_answers.shards import Answer
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

CHAIN = conversation(ASK, calls("Paris"), SUN, SUNNY, ASK_AGAIN, calls("Rome"), RAIN, RAINY)
PARALLEL = conversation(ASK, calls("Paris", "Rome"), SUN, RAIN, SUNNY)
ENGINE = "sglang-0.5.23"
OPTIONS = {"min_answer_tokens": 1, "max_new_tokens": 120}


def checkpoint_of(folder, template):
    checkpoint = make_checkpoint("qwen3", folder, lively=False, hidden_size=64, num_hidden_layers=3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def processors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    return {name: checkpoint_of(folder / name, text) for name, text in (("extends", EXTENDS), ("strips", STRIPS))}


def samples_of(folder, *conversations, tools=TOOLS, **more):
    folder.mkdir(parents=True)
    rows = [
        {"id": f"s{n}", "split": "train", "category": "text", "messages": messages, "images": [], "tools": tools} | more
        for n, messages in enumerate(conversations)
    ]
    (folder / "samples.jsonl").write_text("".join(json_line(row) for row in rows))
    return ImageSamples(folder, folder_digest(folder))


def asked(folder, processor, replies, *conversations, owner="somebody", **options):
    """Have conversations answered by a server that gives these replies, in order; returns the stage and the server."""
    remaining = iter(replies)
    samples = samples_of(folder / "in", *conversations)
    with ChatServer(lambda body: response("H", "length") if is_probe(body) else next(remaining), owner=owner) as server:
        stage = FakeStage(folder, {"samples": samples, "target": None})
        served = {"target": None, "processor": str(processor), "concurrency": 1, **OPTIONS, **options}
        regenerate_answers(endpoint_config(server, **served), stage)
    return stage, server


def only_row(stage):
    [row] = read_jsonl(stage.out_dir / "samples.jsonl")
    return row


def roles(row):
    return [message["role"] for message in row["messages"]]


def test_a_server_is_asked_with_tools_calls_and_results_as_the_protocol_has_them(processors, tmp_path):
    replies = [called("Paris"), response("Clear."), called("Rome", content="I look."), response("Wet.")]
    stage, server = asked(tmp_path, processors["extends"], replies, CHAIN)
    bodies = server.conversations
    assert [TOOLS] * 4 == [body["tools"] for body in bodies]
    assert ["auto"] * 4 == [body["tool_choice"] for body in bodies]
    own = {"id": "srv1", "type": "function", "function": {"name": NAME, "arguments": '{"city": "Paris"}'}}
    assert [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [own]},
        {"role": "tool", "content": "result: clear sky", "tool_call_id": "srv1", "name": NAME},
    ] == bodies[1]["messages"]
    row = only_row(stage)
    assert ["user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant"] == roles(row)
    first, second = (row["messages"][place]["tool_calls"] for place in (1, 5))
    assert [{"name": NAME, "arguments": {"city": "Paris"}}] == [call["function"] for call in first]
    # The server gives the second call the id of the first one, so that is made anew.
    assert ["srv1", "call00001"] == [call["id"] for call in (*first, *second)]
    assert ["srv1", "call00001"] == [each["tool_call_id"] for each in row["messages"] if each["role"] == "tool"]
    assert ["stop"] * 4 == row["finish_reasons"]
    assert [{"type": "text", "text": "I look."}] == row["messages"][5]["content"]
    assert ([0], [0]) == (stage.metric("regenerate/cut_at_call"), stage.metric("regenerate/calls_skipped"))


READING = "{%- for each in documents or [] %}{{- '<|im_start|>system\\n' + each.text + '<|im_end|>\\n' }}{%- endfor %}"


@pytest.mark.parametrize("thinking", [None, False])
@pytest.mark.parametrize("prompts", ["messages", "ids"])
def test_a_server_gets_documents_as_arguments_of_the_chat_template(tmp_path, processors, prompts, thinking):
    tokenizer = AutoTokenizer.from_pretrained(processors["strips"])
    (tmp_path / "template.jinja").write_text(READING + STRIPS)
    documents = [{"text": "result: clear sky"}]
    samples = samples_of(tmp_path / "in", CHAIN[:4], documents=documents)
    remaining = iter([called("Paris"), response("Clear.")])
    with ChatServer(lambda b: response("H", "length") if is_probe(b) else next(remaining), owner="sglang") as server:
        stage = FakeStage(tmp_path, {"samples": samples, "target": None})
        options = {"prompts": prompts, "chat_template": str(tmp_path / "template.jinja"), "enable_thinking": thinking}
        processor = {"target": None, "processor": str(processors["strips"]), "concurrency": 1}
        regenerate_answers(endpoint_config(server, **processor, **OPTIONS, **options), stage)
    assert documents == only_row(stage)["documents"]
    rendered = tokenizer.apply_chat_template(
        [{**CHAIN[0], "content": "Weather in Paris?"}],
        tools=TOOLS,
        documents=documents,
        chat_template=READING + STRIPS,
        add_generation_prompt=True,
        tokenize=False,
        **({} if thinking is None else {"enable_thinking": thinking}),
    )
    first = server.conversations[0]
    if prompts == "ids":
        assert "chat_template_kwargs" not in first
        assert tokenizer.encode(rendered, add_special_tokens=False) == first["input_ids"]
    else:
        own = {} if thinking is None else {"enable_thinking": thinking}
        assert [{**own, "documents": documents}] * 2 == [body["chat_template_kwargs"] for body in server.conversations]


@pytest.mark.parametrize("owner", ["sglang", "vllm"])
def test_reasoning_is_sent_under_the_key_of_the_engine(processors, tmp_path, owner):
    thought = called("Paris", content=None)
    thought["choices"][0]["message"]["reasoning_content"] = "I must ask."
    replies = [thought, response("Clear.")]
    stage, server = asked(tmp_path, processors["strips"], replies, CHAIN[:4], owner=owner)
    [_, turn, _] = server.conversations[1]["messages"]
    key = {"sglang": "reasoning_content", "vllm": "reasoning"}[owner]
    assert (["role", "content", key, "tool_calls"], "I must ask.") == (list(turn), turn[key])
    assert "<think>\nI must ask.\n</think>\n\n" == only_row(stage)["messages"][1]["content"][0]["text"]


ENDS = {
    "another function": [called("Paris", name="get_time")],
    "one of two calls": [called("Paris")],
    "more calls": [called("Paris", "Rome", "Oslo")],
    "raw markup of another call": [response('<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>')],
    "arguments that are no JSON": [called("Paris", "Rome", token_ids=[60, 61, 62])],
}


@pytest.mark.parametrize("case", ENDS)
def test_a_conversation_ends_behind_calls_that_are_not_the_datas_and_they_are_learnt(processors, tmp_path, case):
    replies = ENDS[case]
    if case == "arguments that are no JSON":
        replies[0]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"city": '
    stage, server = asked(tmp_path, processors["extends"], replies, PARALLEL)
    assert 1 == len(server.conversations)
    row = only_row(stage)
    assert ["user", "assistant"] == roles(row)
    is_read = "arguments" not in case and "raw" not in case
    assert is_read == ("tool_calls" in row["messages"][1])
    assert ([1], [0]) == (stage.metric("regenerate/cut_at_call"), stage.metric("regenerate/calls_skipped"))


def test_parallel_calls_take_the_results_of_the_same_calls_in_any_order(processors, tmp_path):
    stage, _ = asked(tmp_path, processors["extends"], [called("Rome", "Paris"), response("Both.")], PARALLEL)
    results = [(each["tool_call_id"], each["content"][0]["text"]) for each in only_row(stage)["messages"][2:4]]
    assert [("srv1", "result: wet"), ("srv2", "result: clear sky")] == results


def test_an_answer_without_the_datas_call_goes_on_with_the_users_next_turn(processors, tmp_path):
    replies = [response("No idea."), called("Rome"), response("Wet.")]
    stage, _ = asked(tmp_path, processors["extends"], replies, CHAIN)
    row = only_row(stage)
    assert ["user", "assistant", "user", "assistant", "tool", "assistant"] == roles(row)
    assert ["Weather in Paris?", "And in Rome?"] == [
        each["content"][0]["text"] for each in row["messages"] if each["role"] == "user"
    ]
    assert ([0], [1]) == (stage.metric("regenerate/cut_at_call"), stage.metric("regenerate/calls_skipped"))


def test_a_call_where_the_data_answers_ends_the_conversation(processors, tmp_path):
    replies = [called("Paris"), called("Paris", ids=["srv9"])]
    stage, _ = asked(tmp_path, processors["extends"], replies, CHAIN)
    assert ["user", "assistant", "tool", "assistant"] == roles(only_row(stage))
    assert [1] == stage.metric("regenerate/cut_at_call")


@pytest.mark.parametrize(("rule", "cut"), [("same_name", 0), ("same_call", 1), ("none", 1)])
def test_tool_results_say_whose_results_are_used(processors, tmp_path, rule, cut):
    replies = [called("Oslo"), response("Clear.")]
    stage, _ = asked(tmp_path, processors["extends"], replies, CHAIN[:4], tool_results=rule)
    assert [cut] == stage.metric("regenerate/cut_at_call")
    assert 2 + 2 * (not cut) == len(only_row(stage)["messages"])


def test_calls_match_by_name_and_those_with_the_same_arguments_first():
    [paris_rome] = [turn["tool_calls"] for turn in PARALLEL if "tool_calls" in turn]
    [own] = [turn["tool_calls"] for turn in conversation(calls("Oslo", "Paris"))]
    own = [{**call, "id": call["id"].replace("call", "own")} for call in own]
    assert {"call00001": "own00002", "call00002": "own00001"} == matched_calls(paris_rome, own, "same_name")
    assert matched_calls(paris_rome, own, "same_call") is None
    assert matched_calls(paris_rome, own, "none") is None
    assert matched_calls(paris_rome, own[:1], "same_name") is None
    assert {} == matched_calls([], [], "same_name")


WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("name", ["extends", "strips"])
@pytest.mark.parametrize(
    ("written", "text", "is_call", "is_read"),
    [
        (WRITTEN, "", True, True),
        (WRITTEN.replace('": ', '":').replace("\n", " "), "", True, True),
        ("I look.\n" + WRITTEN, "I look.", True, True),
        ("<think>\nHm.\n</think>\n\nI look.\n" + WRITTEN, "<think>\nHm.\n</think>\n\nI look.", True, True),
        (WRITTEN.replace("Paris", "Rome"), WRITTEN.replace("Paris", "Rome"), True, False),
        ("Sunny.", "Sunny.", False, False),
    ],
)
def test_raw_markup_is_a_call_only_as_the_datas_own(processors, tmp_path, name, written, text, is_call, is_read):
    options = config(
        target=None, backend="endpoint", endpoint="http://h/v1", model="m", processor=str(processors[name])
    )
    prompts = Prompts.load(options, None, tmp_path)
    talk = Conversation({"id": "a", "images": [], "messages": CHAIN, "tools": TOOLS})
    answer = prompts.with_calls(talk, Answer(written, "stop", 9))
    assert (text, is_call, is_read) == (answer.text, answer.called, answer.calls is not None)


def test_images_of_turns_that_are_skipped_are_not_those_of_the_next_ones():
    picture = {"type": "image"}
    messages = conversation(ASK, calls("Paris"), SUN, SUNNY, ASK_AGAIN, SUNNY)
    for place in (0, 2, 4):
        messages[place] = {**messages[place], "content": [picture, *messages[place]["content"]]}
    talk = Conversation({"id": "a", "images": ["ask", "result", "again"], "messages": messages, "tools": TOOLS})
    assert ["ask"] == talk.asked["images"]
    talk.take(Answer("No idea.", "stop", 3))
    assert (["ask", "again"], 1) == (talk.asked["images"], talk.skipped)


def test_a_conversation_that_ends_with_a_result_gets_an_answer(processors, tmp_path):
    stage, _ = asked(tmp_path, processors["extends"], [called("Paris"), response("Clear.")], CHAIN[:3])
    assert ["user", "assistant", "tool", "assistant"] == roles(only_row(stage))


def test_calls_that_cannot_be_read_drop_the_sample_where_no_ids_tell_what_was_written(processors, tmp_path):
    broken = called("Paris")
    broken["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = "{"
    stage, _ = asked(tmp_path, processors["extends"], [broken, response("Sunny.")], CHAIN, [ASK, SUNNY])
    assert {"calls that cannot be read": 1} == read_json(stage.out_dir / "summary.json")["dropped"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A target that knows the calls and answers of CHAIN by heart, loaded in this process."""
    folder = tmp_path_factory.mktemp("caller")
    checkpoint = checkpoint_of(folder / "checkpoint", EXTENDS)
    stage = FakeStage(folder / "tokens", {"samples": samples_of(folder / "in", CHAIN)})
    options = {"contexts": "served", "min_loss_tokens": 1, "preview_samples": 0}
    tokenize_chat(TokenizeChat(samples=Ref("a"), processor=str(checkpoint), **options), stage)
    loaded = Target.load(make_target(folder / "untrained", checkpoint))
    reader = TokenReader(stage.artifact(TokenShards))
    teach(loaded, [reader.sample(index) for index in range(len(reader))], steps=100, lr=4e-3)
    loaded.model.save_pretrained(checkpoint)
    return make_target(folder / "trained", checkpoint)


def test_a_target_here_calls_as_the_data_and_hears_its_results_and_all_is_learnt(caller, tmp_path):
    other = conversation(ASK, calls("Oslo"), SUN, SUNNY)
    stage = run(tmp_path, samples_of(tmp_path / "in", CHAIN, other), caller, **OPTIONS)
    same, cut = read_jsonl(stage.out_dir / "samples.jsonl")
    told = [
        {key: value for key, value in each.items() if key not in ("generated_ids", "tokenizer")}
        for each in same["messages"]
    ]
    assert CHAIN == told
    assert ["user", "assistant"] == roles(cut)  # it calls with another city than the data
    assert ([1], [0]) == (stage.metric("regenerate/cut_at_call"), stage.metric("regenerate/calls_skipped"))
    tokens = FakeStage(tmp_path / "tokens", {"samples": stage.artifact(ImageSamples), "target": caller})
    tokenize_chat(
        TokenizeChat(samples=Ref("a"), target=Ref("b"), contexts="served", min_loss_tokens=1, preview_samples=0), tokens
    )
    reader = TokenReader(tokens.artifact(TokenShards))
    learnt = [sample.input_ids[sample.loss_mask].tolist() for sample in map(reader.sample, range(len(reader)))]
    ids = [[token for turn in row["messages"] for token in turn.get("generated_ids", ())] for row in (same, cut)]
    assert ids == learnt
    assert [0] == tokens.metric("tokenize/retokenised")


def test_answers_are_asked_learnt_and_evaluated_behind_tools_in_the_form_of_one_engine(caller, tmp_path):
    options = {**OPTIONS, "tools_as": ENGINE, "finish_reasons": ("stop", "length"), "max_new_tokens": 8}
    stage = run(tmp_path / "run", samples_of(tmp_path / "in", [ASK, SUNNY]), caller, **options)
    asked = {"enable_thinking": None, "history_reasoning": "kept", "tools_as": ENGINE}
    assert asked == read_json(stage.out_dir / "answered.json")
    [row] = read_jsonl(stage.out_dir / "samples.jsonl")
    tokens = FakeStage(tmp_path / "tokens", {"samples": stage.artifact(ImageSamples), "target": caller})
    more = {"contexts": "served", "min_loss_tokens": 1, "preview_samples": 0}
    tokenize_chat(TokenizeChat(samples=Ref("a"), target=Ref("b"), tools_as=ENGINE, **more), tokens)
    shards = tokens.artifact(TokenShards)
    in_form = json.dumps([{**tool, "defer_loading": None} for tool in TOOLS])  # as the template writes it
    evaluated = encoder_of(shards, Target.load(caller)).encoded_prompt([ASK], tools=TOOLS)
    assert evaluated.rendered.text.startswith(f"<|im_start|>system\nTools: {in_form}<|im_end|>\n")
    prompts = Prompts.load(RegenerateAnswers(samples=Ref("a"), target=Ref("b"), tools_as=ENGINE), caller, tmp_path)
    prompt, _ = prompts.ids({**row, "messages": [ASK]})
    assert evaluated.input_ids.tolist() == prompt
    learnt = TokenReader(shards).sample(0)
    assert [*prompt, *row["messages"][-1]["generated_ids"]] == learnt.input_ids.tolist()


def test_thoughts_of_the_data_are_not_needed_for_its_calls(processors, tmp_path):
    prompts = Prompts.load(
        config(target=None, backend="endpoint", endpoint="http://h/v1", model="m", processor=str(processors["strips"])),
        None,
        tmp_path,
    )
    data = conversation(ASK, why(calls("Paris", text="Wait."), "Why not."), SUN, say("assistant", "Sunny."))
    talk = Conversation({"id": "a", "images": [], "messages": data, "tools": TOOLS})
    answer = prompts.with_calls(talk, Answer("<think>\nHm.\n</think>\n\n" + WRITTEN, "stop", 9))
    assert ("<think>\nHm.\n</think>", data[1]["tool_calls"]) == (answer.text, answer.calls)


def test_behind_the_datas_history_every_answer_is_a_sample_that_learns_only_it(processors, tmp_path):
    replies = [called("Oslo"), response("Clear."), response("No idea."), response("Wet.", "length")]
    options = {"history": "data", "finish_reasons": ("stop", "length")}
    replies.append(response("Fine."))
    stage, server = asked(tmp_path, processors["extends"], replies, CHAIN, [ASK, SUNNY], **options)
    rows = list(read_jsonl(stage.out_dir / "samples.jsonl"))
    assert ["s0@1", "s0@2", "s0@3", "s0@4", "s1"] == [row["id"] for row in rows]
    assert ["last"] * 4 + [None] == [row.get("learnt") for row in rows]
    for row, place in zip(rows, (1, 3, 5, 7, 1), strict=True):
        data = CHAIN if row["id"] != "s1" else [ASK, SUNNY]
        assert (data[:place], place) == (row["messages"][:-1], len(row["messages"]) - 1)
        assert 1 == len(row["finish_reasons"])
    assert "Oslo" == rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"]
    assert [1, 3, 5, 7, 1] == [len(body["messages"]) for body in server.conversations]
    assert ([0], [0]) == (stage.metric("regenerate/cut_at_call"), stage.metric("regenerate/calls_skipped"))
    assert (5, 5) == stage.progressed[-1]
    for contexts in ("served", "whole"):
        made = FakeStage(tmp_path / contexts, {"samples": stage.artifact(ImageSamples)})
        given = {"processor": str(processors["extends"]), "min_loss_tokens": 1, "preview_samples": 0}
        tokenize_chat(TokenizeChat(samples=Ref("a"), contexts=contexts, **given), made)
        reader = TokenReader(made.artifact(TokenShards))
        tokenizer = AutoTokenizer.from_pretrained(processors["extends"])
        learnt = [
            tokenizer.decode(sample.input_ids[sample.loss_mask]) for sample in map(reader.sample, range(len(reader)))
        ]
        assert [row["id"] for row in rows] == [record["id"] for record in reader.records]
        markup = WRITTEN.replace("Paris", "Oslo") + "<|im_end|>"
        assert [markup, "Clear.<|im_end|>", "No idea.<|im_end|>", "Wet.", "Fine.<|im_end|>"] == learnt


@pytest.mark.parametrize(("owner", "path"), [("sglang", "input_ids"), ("vllm", "prompt")])
def test_a_server_that_gets_ids_gives_the_bytes_of_the_target_itself_with_calls_in_its_text(
    caller, tmp_path, owner, path
):
    """Its own template does not count: it would render other prompts, and knows no tools."""
    given = samples_of(tmp_path / "in", CHAIN, conversation(ASK, calls("Oslo"), SUN, SUNNY))
    local = run(tmp_path / "local", given, caller, **OPTIONS)
    model = TinyModel(caller, changed=lambda messages: [{"role": "system", "content": "Be kind."}, *messages])
    with ChatServer(model, owner=owner) as server:
        stage = FakeStage(tmp_path / "served", {"samples": given, "target": caller})
        regenerate_answers(endpoint_config(server, prompts="ids", enable_thinking=None, **OPTIONS), stage)
    assert folder_digest(local.out_dir) == folder_digest(stage.out_dir)
    assert [0] == stage.metric("regenerate/prompted_differently")
    prompts = Prompts.load(config(), caller, given.path)
    row = next(read_jsonl(given.path / "samples.jsonl"))
    first, _ = prompts.ids({**row, "messages": row["messages"][:1]})
    assert first in [body[path] for body in server.conversations]
    assert 5 == len(server.conversations)
    keys = {
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "skip_special_tokens",
    }
    more = {"sglang": {"messages", "separate_reasoning"}, "vllm": set()}[owner]
    assert {path, "return_token_ids", *keys, *more} == {key for body in server.conversations for key in body}


def test_a_server_that_does_not_read_the_ids_is_refused_at_its_first_answer(caller, tmp_path):
    model = TinyModel(caller)

    def deaf(body):
        return model({key: value for key, value in body.items() if key != "input_ids"})

    with (
        ChatServer(deaf, owner="sglang") as server,
        pytest.raises(
            DataError, match=r'did not read the ids of sample "s0", but a prompt of \d+ tokens instead of \d+'
        ),
    ):
        stage = FakeStage(tmp_path, {"samples": samples_of(tmp_path / "in", CHAIN), "target": caller})
        regenerate_answers(endpoint_config(server, prompts="ids", concurrency=1, **OPTIONS), stage)
    assert 1 == len(server.conversations)


def test_ids_go_only_to_servers_that_take_them(caller, tmp_path):
    with ChatServer(TinyModel(caller)) as server:
        stage = FakeStage(tmp_path, {"samples": samples_of(tmp_path / "in", CHAIN), "target": caller})
        with pytest.raises(
            DataError, match='"somebody"\\), and these have no prompts = "ids": if it is SGLang or vLLM, set'
        ):
            regenerate_answers(endpoint_config(server, prompts="ids", **OPTIONS), stage)
        with pytest.raises(ConfigError, match='dialect = "openai" has no ids: set dialect to that of the server'):
            endpoint_config(server, prompts="ids", dialect="openai")
    with pytest.raises(ConfigError, match="'prompts' is for backend = \"endpoint\" only"):
        config(prompts="ids")


def test_samples_with_images_have_no_prompts_of_ids(parroted, tmp_path):
    asked_by_ids = config(prompts="ids", backend="endpoint", endpoint="http://h/v1", model="m")
    told = 'prompts of texts only, and the samples have images: set prompts = "messages"'
    for samples, expected in ((parroted, True), (samples_of(tmp_path / "in", CHAIN), False)):
        known = {"samples": SamplesForecast.read(samples.path, samples.digest), "target": None}
        assert expected == (told in conflicts(asked_by_ids, known).get("prompts", ""))


def looping(ids, eos):
    """A server's answer that is cut in a loop, and one that ends."""
    yield response("a b c d " * 20, "length", response_token_ids=ids[:4] * 20)
    yield response("a b c d", response_token_ids=[*ids[:4], eos])


@pytest.mark.parametrize("dropped", [False, True])
def test_answers_that_repeat_themselves_are_counted_and_dropped_where_the_config_says_so(processors, tmp_path, dropped):
    tokenizer = AutoTokenizer.from_pretrained(processors["extends"])
    ids = tokenizer.encode(" the of and to", add_special_tokens=False)
    assert 4 <= len(ids)
    options = {"owner": "sglang", "finish_reasons": ("stop", "length"), "drop_repetitions": dropped}
    replies = looping(ids, tokenizer.eos_token_id)
    stage, _ = asked(tmp_path, processors["extends"], replies, [ASK, SUNNY], [ASK_AGAIN, RAINY], **options)
    assert [1] == stage.metric("regenerate/repetitions")
    expected = {"repetition": 1} if dropped else {}
    assert expected == read_json(stage.out_dir / "summary.json")["dropped"]
