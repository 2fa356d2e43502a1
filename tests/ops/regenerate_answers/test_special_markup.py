"""Targets that write calls and thoughts in special tokens: chains of their answers are asked for, kept and learnt."""

from __future__ import annotations

import copy
import json
import re

import pytest
from agent_rows import ASK, NAME, SUN, SUNNY, TEXTS, TOOLS, calls, conversation, say
from agent_templates import EXTENDS, TEMPLATES
from attrs import frozen
from chat_server import ChatServer, is_probe, response
from fake_stage import FakeStage, folder_digest
from regenerate_cases import endpoint_config
from tokenizers import AddedToken
from transformers import AutoTokenizer

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import ImageSamples, TokenShards
from ops.lib.data.files import json_line, read_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.run import regenerate_answers
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

CHAIN = conversation(ASK, calls("Paris"), SUN, SUNNY)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor") / "base"
    write_builtin_processor(folder, [[say("user", TEXTS)]], vocab_size=420)
    return folder


def processor_of(folder, base, template, eos, special):
    """A text-only processor with a template of agent_templates.py, whose markup is special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*eos, *special)])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(list(eos))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


class Writer:
    """A server whose target writes given texts, one after the other, and reports their ids, or only how many.

    parsed: the answer as the server's parsers leave it, for each text; None without parsers.
    """

    def __init__(self, processor, *written, parsed=None, reports_ids=True):
        self.reports_ids = reports_ids
        self.tokenizer = AutoTokenizer.from_pretrained(processor)
        self.written = iter(zip(written, parsed or [None] * len(written), strict=True))

    def __call__(self, body):
        if is_probe(body):
            return response("H", "length")
        text, parsed = next(self.written)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = parsed or response(self.tokenizer.decode(ids[:-1]))
        if self.reports_ids:
            answer["choices"][0]["token_ids"] = ids
        return answer | {"usage": {"completion_tokens": len(ids)}}


def answered(folder, processor, server, messages=CHAIN, **options):
    """The stage of a server's answers to one conversation, and the bodies of its requests."""
    (folder / "in").mkdir(parents=True)
    row = {"id": "s", "split": "train", "category": "text", "messages": messages, "images": [], "tools": TOOLS}
    (folder / "in" / "samples.jsonl").write_text(json_line(row))
    stage = FakeStage(folder, {"samples": ImageSamples(folder / "in", folder_digest(folder / "in")), "target": None})
    with ChatServer(server, owner="somebody") as running:
        own = {"target": None, "processor": str(processor), "concurrency": 1, "min_answer_tokens": 1, **options}
        regenerate_answers(endpoint_config(running, max_new_tokens=120, **own), stage)
    return stage, running.conversations


def learnt(folder, samples, processor, **options):
    """The text of each sample's prompt up to its first answer, and those of its learnt runs, in served contexts."""
    stage = FakeStage(folder, {"samples": samples.artifact(ImageSamples)})
    made = {"contexts": "served", "min_loss_tokens": 1, "preview_samples": 0, **options}
    tokenize_chat(TokenizeChat(samples=Ref("a"), processor=str(processor), **made), stage)
    reader, tokenizer = TokenReader(stage.artifact(TokenShards)), AutoTokenizer.from_pretrained(processor)
    found = []
    for sample in map(reader.sample, range(len(reader))):
        runs, before = [], False
        for token, is_learnt in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
            if is_learnt and not before:
                runs.append([])
            if is_learnt:
                runs[-1].append(token)
            before = is_learnt
        prompt = sample.input_ids[: int(sample.loss_mask.int().argmax())]
        found.append((tokenizer.decode(prompt), [tokenizer.decode(run) for run in runs]))
    return found


CALL_HEADERS = {
    "as it writes it": "<|channel|>commentary to=functions.get_weather <|constrain|>json",
    "recipient first": " to=functions.get_weather<|channel|>commentary json",
}
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
CALL = ANALYSIS.format("I need it.") + '{}<|message|>{{"city": "Paris"}}<|call|>'
FINAL = ANALYSIS.format("Clear.") + "<|channel|>final<|message|>Sunny.<|return|>"
PARSED_CALL = {"id": "srv1", "type": "function", "function": {"name": NAME, "arguments": '{"city": "Paris"}'}}


def parsed(text, calls=(), thought=None):
    """An answer as a server's parsers leave it."""
    answer = response(text, "tool_calls" if calls else "stop")
    more = {"tool_calls": list(calls), "reasoning_content": thought}
    answer["choices"][0]["message"] |= {key: value for key, value in more.items() if value}
    return answer


@pytest.fixture(scope="module")
def channels(base, tmp_path_factory):
    template = TEMPLATES["channels"]
    special = (*template.special, "<|constrain|>")
    return processor_of(tmp_path_factory.mktemp("channels"), base, template.text, template.eos, special)


@pytest.mark.parametrize("has_parser", [False, True], ids=["raw", "parsed"])
@pytest.mark.parametrize("header", CALL_HEADERS)
def test_the_calls_of_gpt_oss_are_kept_with_their_analysis_and_the_datas_results_follow(
    channels, tmp_path, header, has_parser
):
    call = CALL.format(CALL_HEADERS[header])
    answers = [parsed(None, [PARSED_CALL], "I need it."), parsed("Sunny.", thought="Clear.")] if has_parser else None
    stage, _ = answered(tmp_path, channels, Writer(channels, call, FINAL, parsed=answers))
    [row] = read_jsonl(stage.out_dir / "samples.jsonl")
    assert ["user", "assistant", "tool", "assistant"] == [message["role"] for message in row["messages"]]
    [own] = row["messages"][1]["tool_calls"]
    assert {"name": NAME, "arguments": {"city": "Paris"}} == own["function"]
    assert own["id"] == row["messages"][2]["tool_call_id"]
    assert ([0], [0]) == (stage.metric("regenerate/cut_at_call"), stage.metric("regenerate/retokenised_differently"))
    tools = json.dumps(TOOLS, ensure_ascii=False)
    asked = f"<|start|>system<|message|>Tools: {tools}<|end|><|start|>user<|message|>Weather in Paris?<|end|>"
    asked += "<|start|>assistant"
    history = (
        f"{asked}<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant to={NAME}<|message|>"
        '{"city": "Paris"}<|call|><|start|>tool<|message|>result: clear sky<|end|><|start|>assistant'
    )
    assert [(asked, [call]), (history, [FINAL])] == learnt(tmp_path / "tokens", stage, channels)


@pytest.mark.parametrize(
    ("written", "is_read"),
    [
        (CALL.format(CALL_HEADERS["as it writes it"]).replace(NAME, "get_time"), True),
        (CALL.format(CALL_HEADERS["as it writes it"]).replace('"}', ""), False),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL.partition("assistant")[2].format(
            CALL_HEADERS["as it writes it"]).replace(NAME, "get_time"), True),
    ],
    ids=["another function", "arguments that are no JSON", "a text before it"],
)  # fmt: skip
def test_a_call_of_gpt_oss_that_is_not_the_datas_ends_the_conversation_and_is_learnt(
    channels, tmp_path, written, is_read
):
    stage, _ = answered(tmp_path, channels, Writer(channels, written))
    [row] = read_jsonl(stage.out_dir / "samples.jsonl")
    assert (2, is_read) == (len(row["messages"]), "tool_calls" in row["messages"][1])
    assert [1] == stage.metric("regenerate/cut_at_call")
    assert [[written]] == [runs for _, runs in learnt(tmp_path / "tokens", stage, channels)]


@pytest.mark.parametrize(
    "written",
    [
        "<|channel|>commentary<|message|>{}<|return|>",
        CALL.format(CALL_HEADERS["as it writes it"]).replace("Paris", "<|start|>user"),
        CALL.format("<|channel|>other to=functions.get_weather"),
    ],
    ids=["no recipient", "a header in an argument", "another channel"],
)
def test_other_channels_and_headers_inside_a_call_of_gpt_oss_drop_the_sample(channels, tmp_path, written):
    with pytest.raises(DataError, match="no answer of the target is left"):
        answered(tmp_path, channels, Writer(channels, written))


TOOLS_SHOWN = json.dumps(TOOLS, ensure_ascii=False)
ARGUMENTS = '{"city": "Paris"}'
# A system turn that names the tokens, which no template shows again, as in Magistral.
HIDES = "{{- '<|im_start|>system\\nThink in [THINK][/THINK].<|im_end|>\\n' }}" + EXTENDS


@frozen
class Thinker:
    """A target that thinks in special tokens: what it writes in CHAIN, and the texts before its two answers."""

    template: str
    eos: tuple[str, ...]
    special: tuple[str, ...]
    written: tuple[str, str]
    asked: tuple[str, str]
    enable_thinking: bool | None = None


HIDDEN_ASK = (
    "<|im_start|>system\nThink in [THINK][/THINK].<|im_end|>\n"
    f"<|im_start|>system\nTools: {TOOLS_SHOWN}<|im_end|>\n<|im_start|>user\nWeather in Paris?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
HIDDEN_CALL = f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
SHOWN_ASK = f"<|turn>system\nTools: {TOOLS_SHOWN}<turn|>\n<|turn>user\nWeather in Paris?<turn|>\n<|turn>model\n"
SHOWN_CALL = f"<|channel>thought\nI need it.\n<channel|><|tool_call>call:{NAME}{ARGUMENTS}<tool_call|><|tool_response>"
THINKERS = {
    "hidden in history": Thinker(
        HIDES,
        ("<|im_end|>",),
        ("[THINK]", "[/THINK]"),
        ("[THINK]I need it.[/THINK]" + HIDDEN_CALL, "[THINK]It says clear.[/THINK]Sunny.<|im_end|>"),
        (
            HIDDEN_ASK,
            f"{HIDDEN_ASK}{HIDDEN_CALL}\n<|im_start|>user\n<tool_response>result: clear sky</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
    ),
    "shown in history": Thinker(
        TEMPLATES["prefilled"].text,
        TEMPLATES["prefilled"].eos,
        TEMPLATES["prefilled"].special,
        (SHOWN_CALL, "<|channel>thought\nIt says clear.\n<channel|>Sunny.<turn|>"),
        (SHOWN_ASK, f"{SHOWN_ASK}{SHOWN_CALL}<|result>result: clear sky<result|>"),
        enable_thinking=True,
    ),
}
SERVERS = {
    "raw": None,
    "parsed": [parsed(None, [PARSED_CALL], "I need it."), parsed("Sunny.", thought="It says clear.")],
    "thought lost": [parsed(None, [PARSED_CALL]), parsed("Sunny.")],
}


@pytest.fixture(scope="module", params=THINKERS)
def thinker(request, base, tmp_path_factory):
    one = THINKERS[request.param]
    return one, processor_of(tmp_path_factory.mktemp("thinker"), base, one.template, one.eos, one.special)


@pytest.mark.parametrize("server", SERVERS)
def test_every_answer_of_a_chain_is_kept_and_learnt_where_the_target_thinks_in_special_tokens(
    thinker, tmp_path, server
):
    one, processor = thinker
    thinking = {"enable_thinking": one.enable_thinking}
    replies = Writer(processor, *one.written, parsed=copy.deepcopy(SERVERS[server]))
    stage, bodies = answered(tmp_path, processor, replies, **thinking)
    [row] = read_jsonl(stage.out_dir / "samples.jsonl")
    call, answer = (message for message in row["messages"] if message["role"] == "assistant")
    assert ("I need it.", "It says clear.") == (call["reasoning_content"], answer["reasoning_content"])
    assert ([], "Sunny.") == (call["content"], answer["content"][0]["text"])
    is_shown = one.enable_thinking is True
    assert ("I need it." if is_shown else None) == bodies[1]["messages"][1].get("reasoning_content")
    first, second = zip(one.asked, one.written, strict=True)
    expected = [(first[0], [first[1], second[1]])] if is_shown else [(asked, [said]) for asked, said in (first, second)]
    assert expected == learnt(tmp_path / "tokens", stage, processor, **thinking)
    assert second[0].startswith("".join(first)) == is_shown


REWRITING = {"strips": False, "endless": None, "rewrites": None}  # enable_thinking of templates that rewrite history


@pytest.fixture(scope="module", params=REWRITING)
def rewriting(request, base, tmp_path_factory):
    one = TEMPLATES[request.param]
    folder = processor_of(tmp_path_factory.mktemp("rewriting"), base, one.text, one.eos, one.special)
    return request.param, one, folder


def test_without_ids_answers_count_in_the_contexts_of_a_server_where_a_template_rewrites_history(rewriting, tmp_path):
    name, template, processor = rewriting
    thinking = {"enable_thinking": REWRITING[name]}
    ends = ("<|observation|>", "<|user|>") if name == "endless" else ("", "")
    spoken = [template.writes(CHAIN[place], REWRITING[name]) + end for place, end in zip((1, 3), ends, strict=True)]

    def asked(folder, *written, text=None):
        replies = [parsed(text, [PARSED_CALL]), parsed("Sunny.")]
        server = Writer(processor, *written, parsed=replies, reports_ids=False)
        stage, _ = answered(folder, processor, server, **thinking)
        return stage, stage.metric("regenerate/retokenised_differently")

    stage, differently = asked(tmp_path / "same", *spoken)
    assert ([0], 4) == (differently, len(next(iter(read_jsonl(stage.out_dir / "samples.jsonl")))["messages"]))
    runs = [run for _, found in learnt(tmp_path / "tokens", stage, processor, **thinking) for run in found]
    assert [spoken[0], spoken[1].removesuffix(ends[1])] == runs
    _, differently = asked(tmp_path / "more", spoken[0], "Hm. " + spoken[1])
    assert [1] == differently
    if name == "rewrites":  # it does not show the text beside a call
        _, differently = asked(tmp_path / "lost", "I look." + spoken[0], spoken[1], text="I look.")
        assert [1] == differently


def test_answers_behind_dropped_reasoning_are_learnt_behind_it_or_refused(base, tmp_path):
    one = THINKERS["shown in history"]
    processor = processor_of(tmp_path / "processor", base, one.template, one.eos, one.special)
    options = {"enable_thinking": True, "history_reasoning": "dropped"}
    stage, bodies = answered(tmp_path, processor, Writer(processor, *one.written), **options)
    assert "reasoning_content" not in bodies[1]["messages"][1]
    [row] = read_jsonl(stage.out_dir / "samples.jsonl")
    assert "I need it." == row["messages"][1]["reasoning_content"]
    without = one.asked[1].replace("<|channel>thought\nI need it.\n<channel|>", "")
    expected = [(one.asked[0], [one.written[0]]), (without, [one.written[1]])]
    assert expected == learnt(tmp_path / "tokens", stage, processor, **options)
    own = Prompts(ChatEncoder(load_processor(str(processor)), True), tmp_path, keeps_reasoning=False)
    ids, _ = own.ids(row | {"messages": row["messages"][:3]})
    assert without == AutoTokenizer.from_pretrained(processor).decode(ids)
    said = 'the answers were generated with history_reasoning = "dropped", and this node has "kept": give'
    with pytest.raises(DataError, match=re.escape(said)):
        learnt(tmp_path / "kept", stage, processor, enable_thinking=True)
