"""Conversations with tools: what is learnt of them behind which prompt, and what is dropped by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import QWEN25_VL, TOOLS, unmarked
from fake_stage import FakeStage
from format_reading import inject, read
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from dsl.errors import DataError
from dsl.estimate import Estimate, PlanContext
from dsl.launch import Launch
from dsl.op import Ref
from ops.artifacts import Samples, TokenShards
from ops.evaluate.benchmark_rows import Benchmark
from ops.evaluate.prompts import read_benchmark
from ops.ingest.op import Ingest
from ops.ingest.plan import estimate as ingest_estimate
from ops.ingest.sample import ToolCall, Turn
from ops.inject_images.op import InjectImages
from ops.inject_images.plan import estimate as inject_estimate
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import SamplesForecast
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import estimate as regenerate_estimate
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.contexts import Context
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.plan import estimate
from ops.tokenize_chat.run import tokenize_chat
from ops.tokenize_chat.template import value_or_unusable

TEXTS = "Weather in Paris? I look. sunny rain Sunny. city w Tools type function name description parameters " * 20
W = {"type": "function", "function": {"name": "w", "description": "Weather.", "parameters": {"type": "object"}}}
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PARIS = '<tool_call>\n{"name": "w", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = PARIS.replace("Paris", "Rome")
Row = dict[str, Any]


def say(role: str, text: str = "", **more: Any) -> Row:
    return Turn(role, (text,) if text else (), **more).row()


def call(place: int, **arguments: Any) -> ToolCall:
    return ToolCall(f"call{place:05}", "w", arguments)


def result(text: str, place: int = 1) -> Row:
    return say("tool", text, tool_call_id=f"call{place:05}", name="w")


ASK, SUNNY = say("user", "Weather in Paris?"), say("assistant", "Sunny.")
CALL = say("assistant", tool_calls=(call(1, city="Paris"),))
BOTH = say("assistant", "I look.", tool_calls=(call(1, city="Paris"), call(2, city="Rome")))
ONE = [ASK, CALL, result("sunny"), SUNNY]
PARALLEL = [ASK, BOTH, result("sunny"), result("rain", 2), SUNNY]
THOUGHTFUL = [ASK, {**CALL, "reasoning_content": "I need it."}, result("sunny"), SUNNY]
TWO = [*ONE, say("user", "And Rome?"), say("assistant", tool_calls=(call(2, city="Rome"),)), result("rain", 2), SUNNY]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A processor whose tags are tokens, as in Qwen's."""
    folder = tmp_path_factory.mktemp("tools") / "processor"
    write_builtin_processor(folder, [[say("user", TEXTS)]], vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save_pretrained(folder)
    return folder


def encoder(folder: Path, template: str = TOOLS, **options: Any) -> ChatEncoder:
    return ChatEncoder(load_processor(str(folder), chat_template=template), **options)


@pytest.fixture(scope="module")
def known(folder) -> ChatEncoder:
    return encoder(folder)


def contexts(encoder: ChatEncoder, messages: list[Row], tools: list[Row]) -> Sequence[Context]:
    """The contexts in which a server asks for the answers. Raises Unusable."""
    [found] = encoder.serve_batch([messages], [()], ["a"], [tools])
    if isinstance(found, Unusable):
        raise found
    return found.contexts


def served(encoder: ChatEncoder, messages: list[Row], tools: list[Row]) -> list[str]:
    """The learnt texts; each begins where the prompt of the messages before it ends, token by token."""
    [context] = contexts(encoder, messages, tools)
    encoded = encoder.encode_context(messages, context)
    ids, mask = encoded.input_ids.tolist(), encoded.loss_mask.tolist()
    texts = []
    for turn in (turn for turn, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = encoder.prompt(messages[:turn], tools=tools).tolist()
        assert ids[: len(prompt)] == prompt
        end = mask.index(False, len(prompt)) if False in mask[len(prompt) :] else len(mask)
        texts.append(encoder.processor.tokenizer.decode(ids[len(prompt) : end]))
        mask[len(prompt) : end] = [False] * (end - len(prompt))
    assert not any(mask)
    return texts


CASES = {
    "one call": (ONE, [PARIS, "Sunny."]),
    "text and two calls": (PARALLEL, [f"I look.\n{PARIS}\n{ROME}", "Sunny."]),
    "two questions": (TWO, [PARIS, "Sunny.", ROME, "Sunny."]),
    "a thought before a call": (THOUGHTFUL, [f"<think>\nI need it.\n</think>\n{PARIS}", "Sunny."]),
    "a call at the end": (ONE[:2], [PARIS]),
    "tools and no call": ([ASK, SUNNY], ["Sunny."]),
    "an empty result": ([ASK, CALL, result(""), SUNNY], [PARIS, "Sunny."]),
}


@pytest.mark.parametrize(("messages", "texts"), CASES.values(), ids=CASES)
def test_answers_are_learnt_behind_the_prompt_that_a_server_renders(known, messages, texts):
    assert [f"{text}<|im_end|>" for text in texts] == served(known, messages, [W])
    shown = known.template.render(messages[:1], prompt=True, tools=[W])
    assert json.dumps(W) in shown


WORDS = st.text('ab <>{}"\\', min_size=1, max_size=5).filter(str.strip)
LEAVES = st.recursive(WORDS | st.integers(0, 9) | st.none(), lambda inner: st.lists(inner, max_size=2), max_leaves=3)
STEPS = st.lists(
    st.tuples(st.lists(st.dictionaries(st.sampled_from("xy"), LEAVES, max_size=2), max_size=2), WORDS, st.booleans()),
    min_size=1,
    max_size=4,
)


@given(steps=STEPS)
@settings(max_examples=30, deadline=None)
def test_any_conversation_is_learnt_behind_its_prompts(known, steps):
    messages, count = [ASK], 0
    for arguments, words, asks in steps:
        calls = tuple(call(count + place, **each) for place, each in enumerate(arguments, start=1))
        messages.append(say("assistant", words.strip(), tool_calls=calls))
        messages += [result(words, count + place) for place in range(1, len(calls) + 1)]
        count += len(calls)
        messages += [say("user", words)] if asks and not calls else []
    messages.append(SUNNY)
    learnt = served(known, messages, [W])
    assert len(learnt) == sum(message["role"] == "assistant" for message in messages)
    assert all(text.endswith("<|im_end|>") for text in learnt)


def test_only_the_last_answer_is_learnt_where_that_is_asked(folder):
    encoded = encoder(folder, train_on="last").encode(ONE, tools=[W])
    assert encoded.loss_tokens == int(encoded.loss_mask[encoded.prompt_tokens :].sum()) > 0


LOST = {
    "the call": (TOOLS.replace("message.tool_calls or []", "[]"), ONE, "the call w is not shown"),
    "the second call": (TOOLS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"), PARALLEL,
                        "the call w is not shown"),
    "the arguments": (TOOLS.replace("'arguments': call.function.arguments", "'arguments': {}"), ONE,
                      "the argument 'Paris' of the call w is not shown"),
    "the text beside a call": (TOOLS.replace("{{- content }}\n        {%- for call",
                               "{{- content if not message.tool_calls else '' }}\n        {%- for call"), PARALLEL,
                               "the text 'I look.' is not shown"),
    "a reasoning, but for the last answer": (TOOLS.replace("if message.reasoning_content",
                                             "if message.reasoning_content and not message.tool_calls"), THOUGHTFUL,
                                             "the reasoning is not shown"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "lost"), LOST.values(), ids=LOST)
def test_what_a_template_loses_of_an_answer_drops_the_sample_by_its_name(folder, template, messages, lost):
    assert template != TOOLS
    with pytest.raises(Unusable) as fault:
        contexts(encoder(folder, template), messages, [W])
    assert fault.value.reason == "answer changed by the chat template"
    assert fault.value.detail.startswith(lost)


def test_a_reasoning_that_no_answer_shows_is_left_out(folder):
    before, _, behind = TOOLS.partition("        {%- if message.reasoning_content %}\n")
    silent = encoder(folder, before + behind.partition("{%- endif %}\n")[2])
    assert silent.habits.reasoning is None
    assert [f"{PARIS}<|im_end|>", "Sunny.<|im_end|>"] == served(silent, THOUGHTFUL, [W])


def test_history_that_is_rendered_otherwise_than_it_was_served_makes_a_sample_of_its_own(folder):
    shown = "{{- content if loop.last or message.role != 'assistant' else '' }}"
    other = TOOLS.replace("{{- content }}\n        {%- for", shown + "\n        {%- for")
    assert other != TOOLS
    assert [2, 2] == [len(context.answers) for context in contexts(encoder(folder, other), TWO, [W])]


def test_an_answer_that_no_eos_closes_is_not_learnt_up_to_that_of_a_result(folder):
    open_calls = TOOLS.replace("{{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor %}\n{%- if add",
                               "{{- '\\n' if message.tool_calls else '<|im_end|>\\n' }}\n    {%- endif %}\n"
                               "{%- endfor %}\n{%- if add")  # fmt: skip
    assert open_calls != TOOLS
    [context] = contexts(encoder(folder, open_calls), ONE, [W])
    assert [f"{PARIS}\n", "Sunny.<|im_end|>"] == [context.text[start:end] for start, end in context.answers]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([ASK, CALL, result("<|im_end|>"), SUNNY], [W]),
        ([ASK, say("assistant", tool_calls=(call(1, city=["a <|im_start|>"]),))], [W]),
        ([ASK, say("assistant", tool_calls=(call(1, **{"<|im_end|>": 1}),))], [W]),
        ([ASK, SUNNY], [{"type": "function", "function": {"name": "w", "description": "<|im_end|>"}}]),
    ],
    ids=["result", "argument", "key", "tools"],
)
def test_a_special_token_anywhere_in_calls_results_or_tools_drops_the_sample(known, messages, tools):
    with pytest.raises(Unusable, match="special token in the text"):
        known.encode(messages, tools=tools)


def written(folder: Path, rows: list[Row]) -> Samples:
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage, _, _ = read(folder / "data.jsonl", folder / "ingest", split="train")
    return inject(stage.artifact(Samples), folder / "inject")


def plain(messages: list[Row]) -> list[Row]:
    return [{**each, "content": "".join(part["text"] for part in each["content"])} for each in messages]


def tokenized(tmp_path: Path, folder: Path, samples: Samples, template: str, **more: Any) -> FakeStage:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "template.jinja").write_text(template)
    stage = FakeStage(tmp_path / "tokens", {"samples": samples})
    config = TokenizeChat(
        samples=Ref("inject"),
        processor=str(folder),
        chat_template=str(tmp_path / "template.jinja"),
        min_loss_tokens=1,
        workers=1,
        **more,
    )
    tokenize_chat(config, stage)
    return stage


def test_rows_of_data_are_tokenised_with_their_tools(tmp_path, folder, known):
    rows = [{"tools": [W], "messages": plain(PARALLEL)}, {"messages": plain([ASK, SUNNY])}]
    stage = tokenized(tmp_path, folder, written(tmp_path / "data", rows), TOOLS)
    records = [json.loads(line) for line in (stage.out_dir / "samples.jsonl").read_text().splitlines()]
    encoded = [known.encode(PARALLEL, tools=[W]), known.encode([ASK, SUNNY])]
    assert [(row["tokens"], row["loss_tokens"]) for row in records] == [
        (len(one.input_ids), one.loss_tokens) for one in encoded
    ]


@pytest.mark.parametrize("contexts", ["whole", "served"])
def test_an_answer_with_weight_0_is_in_the_sample_and_not_learnt(tmp_path, folder, contexts):
    *before, last = plain(TWO)
    rows = [
        {"tools": [W], "messages": [{**each, "weight": 0} if each["role"] == "assistant" else each for each in before]}
    ]
    rows[0]["messages"].append(last)
    stage = tokenized(tmp_path, folder, written(tmp_path / "data", rows), TOOLS, contexts=contexts)
    sample, last_only = TokenReader(stage.artifact(TokenShards)).sample(0), encoder(folder, train_on="last")
    whole = last_only.encode(TWO, tools=[W])
    assert (whole.input_ids.tolist(), whole.loss_mask.tolist()) == (
        sample.input_ids.tolist(),
        sample.loss_mask.tolist(),
    )


AS_SGLANG = {
    "type": "function",
    "function": {"name": "w", "description": "Weather.", "parameters": {"type": "object"}},
    "defer_loading": None,
}


@pytest.mark.parametrize("contexts", ["whole", "served"])
def test_tools_are_shown_in_the_form_of_an_engine_and_what_others_would_show_is_recorded(
    tmp_path, folder, known, contexts
):
    samples = written(tmp_path / "data", [{"tools": [W], "messages": plain(ONE)}, {"messages": plain([ASK, SUNNY])}])
    in_form = known.prompt(ONE[:1], tools=[AS_SGLANG]).tolist()
    as_given = known.prompt(ONE[:1], tools=[W]).tolist()
    assert in_form != as_given
    unlike = {"sglang-0.5.21": ['adds "strict": false', "writes keys in another order"]}
    without = {"vllm-0.33.0": ['leaves out "defer_loading"'], **unlike}
    added = {
        "sglang-0.5.23": ['adds "defer_loading": null'],
        "sglang-0.5.21": ['adds "defer_loading": null', *unlike["sglang-0.5.21"]],
    }
    for tools_as, prompt, others in (("sglang-0.5.23", in_form, without), ("given", as_given, added)):
        stage = tokenized(tmp_path / tools_as, folder, samples, TOOLS, contexts=contexts, tools_as=tools_as)
        reader = TokenReader(stage.artifact(TokenShards))
        assert prompt == reader.sample(0).input_ids[: len(prompt)].tolist()
        assert (others, tools_as) == (reader.info["tools_unlike"], reader.info.get("tools_as", "given"))


def test_tokens_without_tools_say_nothing_of_them(tmp_path, folder):
    stage = tokenized(tmp_path, folder, written(tmp_path / "data", [{"messages": plain([ASK, SUNNY])}]), TOOLS)
    assert not {"tools_as", "tools_unlike"} & TokenReader(stage.artifact(TokenShards)).info.keys()


@pytest.mark.parametrize(
    ("messages", "key", "settings", "recorded"),
    [
        (THOUGHTFUL, "thinking", {}, "thinking"),
        (THOUGHTFUL, "thinking", {"history_reasoning": "dropped"}, None),
        (THOUGHTFUL, "reasoning_content", {}, None),
        (ONE, "thinking", {}, None),
    ],
)
def test_the_key_of_earlier_reasoning_is_recorded_where_an_engine_does_not_give_it(
    tmp_path, folder, messages, key, settings, recorded
):
    samples = written(tmp_path / "data", [{"tools": [W], "messages": plain(messages)}])
    template = TOOLS.replace("message.reasoning_content", f"message.{key}")
    stage = tokenized(tmp_path, folder, samples, template, contexts="served", **settings)
    assert recorded == TokenReader(stage.artifact(TokenShards)).info.get("reasoning_key")


def test_a_special_token_counts_only_where_the_form_of_an_engine_shows_it(folder):
    function = {**W["function"], "returns": "<|im_end|>"}
    for tools_as, refused in (("given", True), ("vllm-0.33.0", False)):
        template = encoder(folder, tools_as=tools_as).template
        found = value_or_unusable(template.check, ONE, [{**W, "function": function}])
        assert isinstance(found, Unusable) == refused


def test_a_template_without_tools_ends_the_node_by_name(tmp_path, folder):
    rows = [{"tools": [W], "messages": plain(ONE)}] * 2 + [{"messages": plain([ASK, SUNNY])}]
    samples = written(tmp_path / "data", rows)
    with pytest.raises(DataError, match="shows no tools: none of 2 samples with tools can be used; use a"):
        tokenized(tmp_path, folder, samples, unmarked(QWEN25_VL))


ASKED = {"a question": [*ONE, say("user", "And Rome?")], "a result": ONE[:3], "two results": PARALLEL[:4]}


@pytest.mark.parametrize("last", ASKED)
def test_a_benchmark_asks_with_its_tools(tmp_path, known, last):
    file = tmp_path / "benchmark.jsonl"
    row = {"id": "a", "category": "agents", "tools": [W], "messages": plain(ASKED[last])}
    file.write_text(json.dumps(row) + "\n")
    [prompt] = read_benchmark(Benchmark(file), known)
    expected = known.prompt(ASKED[last], tools=[W]).tolist()
    assert (prompt.length, prompt.sample().input_ids.tolist()) == (len(expected), expected)


@pytest.mark.parametrize("contexts", ["whole", "served"])
def test_prompts_of_a_training_have_their_tools_and_end_with_the_last_question_or_result(
    tmp_path, folder, known, contexts
):
    asked = list(ASKED.values())
    conversations = [*asked, *([*messages, SUNNY] for messages in asked)]
    samples = written(tmp_path / "data", [{"tools": [W], "messages": plain(messages)} for messages in conversations])
    stage = tokenized(tmp_path, folder, samples, TOOLS, prompts_only=True, contexts=contexts)
    reader = TokenReader(stage.artifact(TokenShards))
    made = [reader.sample(place).input_ids.tolist() for place in range(len(reader))]
    assert 2 * [known.prompt(messages, tools=[W]).tolist() for messages in asked] == made


def foreseen(hook: Any, config: Any, source: SamplesForecast | None = None, artifact: Path | None = None) -> Estimate:
    inputs = {"samples": source, "target": None}
    return hook(config, PlanContext(launch=Launch(), inputs=inputs, artifact=artifact, root=Path(), free_disk=0))


def test_tools_in_whole_conversations_are_warned_of_by_the_plan_and_in_the_log(tmp_path, folder):
    rows = [{"tools": [W], "messages": plain(ONE)}, {"messages": plain([ASK, SUNNY])}]
    samples = written(tmp_path / "data", rows)
    stage = tokenized(tmp_path, folder, samples, TOOLS)
    said = 'have tools, and answers are learnt behind a history that no server renders: set contexts = "served"'
    assert [f"1 samples {said}"] == stage.warnings

    found = foreseen(ingest_estimate, Ingest(source=str(tmp_path / "data" / "data.jsonl"), seed=0))
    before = {"samples": Ref("before")}
    for hook, config in (
        (inject_estimate, InjectImages(**before)),
        (regenerate_estimate, RegenerateAnswers(**before, target=Ref("target"), answers="data")),
    ):
        found = foreseen(hook, config, found.forecast)
    of_artifact = SamplesForecast.read(samples.path, samples.digest)
    for source in (found.forecast, of_artifact):
        assert (f"warning: samples {said}",) == foreseen(estimate, TokenizeChat(samples=Ref("a")), source).notes
        for others in ({"contexts": "served"}, {"prompts_only": True}):
            assert () == foreseen(estimate, TokenizeChat(samples=Ref("a"), **others), source).notes
    assert () == foreseen(estimate, TokenizeChat(samples=Ref("a")), of_artifact, stage.out_dir).notes


@pytest.mark.parametrize("has", ["nothing", "default_tools", "builtin"])
def test_a_plan_knows_of_tools_by_default_tools_and_not_without(tmp_path, has):
    (tmp_path / "tools.json").write_text(json.dumps([W]))
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": plain([ASK, SUNNY])}) + "\n")
    options = {"default_tools": str(tmp_path / "tools.json")} if has == "default_tools" else {}
    source = "builtin:digits" if has == "builtin" else str(tmp_path / "data.jsonl")
    found = foreseen(ingest_estimate, Ingest(source=source, seed=0, **options))
    assert (has == "default_tools") == found.forecast.has_tools


def test_answers_that_are_not_closed_before_the_next_are_dropped_with_the_remedy(tmp_path, folder):
    """A template that closes only the last answer: as it is served, each is the last."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% if loop.last and m.role == 'assistant' %}<|im_end|>{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"messages": plain([ASK, SUNNY] * 2)}, {"messages": plain([ASK, SUNNY])}]
    samples = written(tmp_path / "data", rows)
    [warning] = tokenized(tmp_path, folder, samples, template).warnings
    assert 'no EOS token behind an answer: set contexts = "served"' in warning
    (tmp_path / "served").mkdir()
    assert [] == tokenized(tmp_path / "served", folder, samples, template, contexts="served").warnings
