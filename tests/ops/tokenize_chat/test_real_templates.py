"""Chat templates of real models: what is learnt of seven conversations with tools, or why it is not, by name.

The templates are those of packages that ship them: trl (Apache-2.0), if it is installed, and the folders of *.jinja
files that DFLOW_CHAT_TEMPLATES names, such as `models/templates` of llama.cpp (MIT). Without either the tests are
skipped; agent_templates.py has small ones with the same rules. `python tests/ops/tokenize_chat/test_real_templates.py`
prints the table of docs/chat_templates.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from agent_rows import (
    ASK,
    NAME,
    SAMPLES,
    SUN,
    SUNNY,
    TOOLS,
    WHY,
    WHY_SUN,
    calls,
    conversation,
    say,
    why,
    with_template,
    write_agent_processor,
)
from agent_templates import calls_of, text_of
from chat_samples import run_tokenize
from format_reading import inject, read
from published_templates import published_templates
from transformers.utils.chat_template_utils import render_jinja_template

from ops.artifacts import Samples, TokenShards
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.tokenizer_check import tokenizer_warnings
from ops.lib.vision.processor import Processor
from ops.lib.vision.template_kinds import CLOCK, clock_now
from ops.tokenize_chat.contexts import as_shown
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.kinds import CALL, REASONING, TEXT

# Tokens that end an answer by the kind of its markup; real checkpoints name them in generation_config.json.
ENDS = (
    *("<|im_end|>", "<|return|>", "<|call|>", "<|calls|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>"),
    *(
        "<|tool_response>",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    *("<seed:eos>", "<|end|>", "<SPECIAL_12>", "<|message_sep|>", "<|role_end|>", "<|eot|>", "<|end_of_msg|>", "<sep>"),
    *("</assistant>", "<end_of_sentence>", "<|user|>", "<|observation|>"),
)
BUT_NOT = {"<|end|>": ("<|return|>",), "<|user|>": ("<|im_end|>", "<|end|>", "</s>", "<|eot|>", "<|end_of_text|>")}
MARKUP = re.compile(r"<[^<>\s'\"{}]{2,40}>|\[/?[A-Z_]+\]|\[e~\[|\]~b\]|\]~!b\[")
TEXTS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
INSIDE = ("<|end|>", "<SPECIAL_12>", "</s>", "<|message_sep|>")  # of ENDS, what stands inside answers too
DOCS = Path(__file__).resolve().parents[3] / "docs" / "chat_templates.md"
RESULTS = ("result: clear sky", "result: wet")


FOUND = published_templates()
WHY_NOT = "no chat templates here: install trl, or name a folder of them in DFLOW_CHAT_TEMPLATES"
CASES = [
    (name, thinking)
    for name, text in FOUND.items()
    for thinking in ((True, False) if "enable_thinking" in text else (None,))
]
pytestmark = pytest.mark.skipif(not FOUND, reason=WHY_NOT)


def real_processor(base: Processor, text: str) -> Processor:
    ends = [end for end in ENDS if end in text and not any(other in text for other in BUT_NOT.get(end, ()))]
    if "eos_token" in text and not ends:
        ends = ["</s>"]
    marks = sorted(set(MARKUP.findall(text)) - {*TEXTS, *ends})
    processor = with_template(
        base, text, ends or ["<|im_end|>"], [mark for mark in marks if "|" in mark or "\uff5c" in mark]
    )
    processor.tokenizer.eos_token = (ends or ["<|im_end|>"])[0]
    return processor


def learnt(encoder: ChatEncoder, sample: str) -> list[list[tuple[list[int], list[int]]]]:
    """Of each context, the (prompt's ids, learnt ids) of its answers, by the mask. Raises Unusable."""
    messages = SAMPLES[sample]
    [found] = encoder.serve_batch([messages], [()], [sample], [TOOLS])
    if isinstance(found, Unusable):
        raise found
    contexts = []
    for context in found.contexts:
        encoded = encoder.encode_context(messages, context)
        runs = []
        ids, mask = encoded.input_ids.tolist(), encoded.loss_mask.tolist()
        for start in [at for at in range(len(mask)) if mask[at] and not mask[at - 1]]:
            end = mask.index(False, start) if False in mask[start:] else len(mask)
            runs.append((ids[:start], ids[start:end]))
        contexts.append(runs)
    return contexts


def outcome(encoder: ChatEncoder, sample: str) -> str:
    """The number of samples of a conversation, or the reason why it is dropped."""
    try:
        return str(len(learnt(encoder, sample)))
    except Unusable as dropped:
        return dropped.reason


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_agent_processor(tmp_path_factory.mktemp("processor") / "base")


def expected(encoder: ChatEncoder, name: str, sample: str, thinking: bool | None) -> Iterator[tuple[str, str]]:
    """What a server renders before each answer, by transformers, and what its target writes: what the messages with the
    answer have behind the prompt, or, where they rewrite the history, the same answer to a first question.
    """
    text = FOUND[name]
    own, history, _ = as_shown(encoder.habits, SAMPLES[sample], keeps_reasoning=True)
    options = {**encoder.processor.tokenizer.special_tokens_map, CLOCK: clock_now}
    options |= {} if thinking is None else {"enable_thinking": thinking}

    def rendered(messages, prompt=False):
        shown = [for_harmony(each, text) for each in messages]
        [found], _ = render_jinja_template([shown], TOOLS, chat_template=text, add_generation_prompt=prompt, **options)
        return found

    for turn, message in enumerate(own):
        if message["role"] == "assistant":
            prompt, full = rendered(history[:turn], prompt=True), rendered([*history[:turn], message])
            if name == "diffusion_gemma" and history[turn - 1]["role"] == "tool":  # as gemma4_v5, which it was made of
                before, header, answer = full.rpartition("<|turn>model\n")
                assert prompt.startswith(before) and header not in prompt[len(before) :]
                full = before + answer
            first = rendered([ASK], prompt=True), rendered([ASK, message])
            yield prompt, behind(encoder, *((prompt, full) if full.startswith(prompt) else first))


def behind(encoder: ChatEncoder, prompt: str, full: str) -> str:
    """The answer behind a prompt, up to its last EOS. Where `full` lacks what the prompt holds, such as an empty
    thought, it begins with the first token that differs.
    """
    start = len(prompt)
    if not full.startswith(prompt):
        asked, given = (encoder.processor.tokenizer(each, return_offsets_mapping=True) for each in (prompt, full))
        same = [one == other for one, other in zip(asked.input_ids, given.input_ids, strict=False)]
        start = given.offset_mapping[same.index(False)][0]
    answer = full[start:]
    return answer[
        : max((answer.rfind(end) + len(end) for end in encoder.eos_texts if end in answer), default=len(answer))
    ]


def pair_of_ids(encoder: ChatEncoder, prompt: str, written: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt, and of the answer behind it."""
    asked, both = (
        encoder.processor.tokenizer(each, add_special_tokens=False).input_ids for each in (prompt, prompt + written)
    )
    assert asked == both[: len(asked)]
    return asked, both[len(asked) :]


def for_harmony(message, template):
    message = {**message, "content": text_of(message)}
    if "<|channel|>final<|message|>" in template and "reasoning_content" in message:
        message["thinking"] = message.pop("reasoning_content")
    return message


def of_docs() -> dict[tuple[str, bool | None], list[int]]:
    """The table of docs/chat_templates.md, 0 for a reason; empty where another trl is installed than it was made of."""
    text = DOCS.read_text("utf-8")
    if find_spec("trl") is not None and f"of trl {version('trl')} " not in text:
        return {}
    cells = [re.split(r" ?\| ?", row)[1:-1] for row in text.splitlines() if row.startswith("| ")]
    return {
        (name, json.loads(thinking or "null")): [int(each) if each.isdigit() else 0 for each in found]
        for name, thinking, *found in cells[2:]
    }


IN_DOCS = of_docs()


@pytest.mark.parametrize(("name", "thinking"), CASES)
def test_every_sample_is_learnt_as_served_or_dropped_by_name(base, name, thinking):
    text = FOUND[name]
    encoder = ChatEncoder(real_processor(base, text), thinking)
    decode, ends = encoder.processor.tokenizer.decode, encoder.eos_texts
    made = []  # as in the docs: how many samples, or 0 for a conversation that is dropped
    for sample, messages in SAMPLES.items():
        try:
            contexts = learnt(encoder, sample)
        except Unusable as dropped:
            assert dropped.reason and dropped.detail
            made.append(0)
            continue
        made.append(len(contexts))
        answers = [message for message in messages if message["role"] == "assistant"]
        runs = [run for context in contexts for run in context]
        wanted = [pair_of_ids(encoder, *pair) for pair in expected(encoder, name, sample, thinking)]
        for place, (asked, written) in enumerate(wanted):  # an EOS that only the next message writes is learnt too
            if written[-1] not in encoder.processor.eos_token_ids and place + 1 < len(runs):
                following = runs[place + 1][0]
                if following[: len(asked) + len(written)] == [*asked, *written]:
                    wanted[place] = asked, [*written, following[len(asked) + len(written)]]
        assert wanted == runs
        texts = [decode(written) for _, written in runs]
        for answer, shown in zip(answers, texts, strict=True):
            assert text_of(answer).strip() in shown
            assert all(call["name"] in shown and call["arguments"]["city"] in shown for call in calls_of(answer))
            assert shown.count(NAME) >= len(calls_of(answer))
            assert not any(result in shown for result in RESULTS)
            assert not any(end in shown[: -len(end)] for end in ends if end not in INSIDE)
        if encoder.habits.reasoning is not None:
            reasons = [message.get("reasoning_content", "") for message in answers]
            assert all(reason in shown for reason, shown in zip(reasons, texts, strict=True))
    assert IN_DOCS.get((name, thinking), made) == made


@pytest.mark.skipif("diffusion_gemma" not in FOUND, reason="not among them")
def test_an_answer_behind_a_result_of_diffusion_gemma_goes_on_in_the_turn_of_the_call(base):
    """History has a header there, with which no prompt ends: a server's prompt ends with the result."""
    processor = real_processor(base, FOUND["diffusion_gemma"])

    def ids(*parts: str) -> list[int]:
        return [one for part in parts for one in processor.tokenizer(part, add_special_tokens=False).input_ids]

    [[called, (asked, written)]] = learnt(ChatEncoder(processor, False), "one call")
    result = ids("response:get_weather{value:", '<|"|>', "result: clear sky", '<|"|>', "}", "<tool_response|>")
    assert ids("Sunny.", "<turn|>") == written
    assert [*called[0], *called[1], *result] == asked
    assert ids("<|turn>", "model\n") == called[0][-len(ids("<|turn>", "model\n")) :]
    assert ids("<|tool_response>") == called[1][-1:]

    [[_, (asked, written)]] = learnt(ChatEncoder(processor, True), "reasoning")
    assert ids("It says clear.\n", "<channel|>", "Sunny.", "<turn|>") == written
    assert (
        ids("<tool_response|>", "<|channel>", "thought\n")
        == asked[-len(ids("<tool_response|>", "<|channel>", "thought\n")) :]
    )


MARKERS = {REASONING: "Qx looks within", TEXT: "Zw says so much", CALL: "Jv_finds_it"}
CALLED = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": MARKERS[CALL]}}]
CALLING = {"type": "function", "function": {"name": MARKERS[CALL], "arguments": {"city": MARKERS[CALL][::-1]}}}


AS_REASONING = ("gptoss", "openai-gpt-oss-120b")  # the text beside a call is an analysis in their templates


def marked(text: bool = False, thought: bool = False, calling: bool = False) -> dict[str, Any]:
    """An answer of these parts, each a marker that nothing else holds."""
    answer = say("assistant", MARKERS[TEXT] if text else "", **({"tool_calls": [CALLING]} if calling else {}))
    return why(answer, MARKERS[REASONING]) if thought else answer


MARKED = [
    conversation(ASK, *([first, SUN] if behind else []), marked(text, thought, calling))
    for behind in (False, True)
    for thought in (False, True)
    for first in [marked(thought=thought, calling=True)]
    for text, calling in ((True, False), (False, True), (True, True))
]


def kinds_of_markers(encoder: ChatEncoder, messages: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """The kind of the marker in which a token of the last answer lies, and the kind that it has; none of a dropped one.

    A slow oracle: where each token stands in the answer is found by decoding all tokens up to it.
    """
    tools = CALLED if any("tool_calls" in message for message in messages) else []
    [found] = encoder.serve_batch([messages], [()], ["a"], [tools])
    if isinstance(found, Unusable):
        return
    encoded = encoder.encode_context(messages, found.contexts[-1])
    first, decode = encoded.answers[-1][0], encoder.processor.tokenizer.decode
    ids = encoded.input_ids[first:][encoded.loss_mask[first:]].tolist()
    answer, kinds = decode(ids), encoded.kinds[-len(ids) :].tolist()
    ends = [len(decode(ids[:end])) for end in range(len(ids) + 1)]
    for kind, marker in MARKERS.items():
        for one in (marker, marker[::-1]):
            for place in re.finditer(re.escape(one), answer):
                for number, token_kind in enumerate(kinds):
                    if place.start() <= ends[number] < ends[number + 1] <= place.end():
                        yield kind, token_kind


@pytest.mark.parametrize("name", FOUND)
def test_each_token_of_a_thought_a_text_and_a_call_has_its_kind(base, name):
    seen = set()
    for thinking in (None,) if "enable_thinking" not in FOUND[name] else (True, False):
        encoder = ChatEncoder(real_processor(base, FOUND[name]), thinking)
        for messages in MARKED:
            is_analysis = name in AS_REASONING and "tool_calls" in messages[-1]
            for kind, found in kinds_of_markers(encoder, messages):
                seen.add(kind)
                assert (REASONING if kind == TEXT and is_analysis else kind) == found, (thinking, messages[1:])
    assert TEXT in seen or not seen  # all of them are dropped


@pytest.mark.skipif("qwen3" not in FOUND, reason="not among them")
def test_a_conversation_of_200_calls_is_one_sample_within_the_default_seconds_for_its_renderings(tmp_path):
    count = 200
    chain = [ASK]
    for place in range(count):
        chain += [why(calls(f"place {place}"), WHY), say("tool", f"At place {place} there is a house. " * 5)]
    written = [{**each, "content": text_of(each)} for each in conversation(*chain, why(SUNNY, WHY_SUN))]
    (tmp_path / "data.jsonl").write_text(json.dumps({"tools": TOOLS, "messages": written}) + "\n")
    samples = inject(
        read(tmp_path / "data.jsonl", tmp_path / "ingest", split="train")[0].artifact(Samples), tmp_path / "in"
    )
    write_agent_processor(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").unlink()  # of texts only, as Qwen3
    (tmp_path / "template.jinja").write_text(FOUND["qwen3"])
    stage = run_tokenize(
        tmp_path / "tokens",
        samples,
        processor=str(tmp_path / "base"),
        chat_template=str(tmp_path / "template.jinja"),
        contexts="served",
        max_length=200_000,
    )
    [record] = TokenReader(stage.artifact(TokenShards)).records
    assert count + 1 == len(record["answers"])


@pytest.mark.parametrize("name", FOUND)
def test_no_real_template_is_taken_for_another_tokenizers(tmp_path, name):
    """Of its tokens, and of a tokenizer that has the ends only: then all other marks are plain text."""
    text = FOUND[name]
    ends = [end for end in (*ENDS, "<end_of_utterance>") if end in text] or ["</s>"]
    marks = sorted(set(MARKUP.findall(text)) - {*TEXTS, *ends})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[0]}))
    for tokens in ([*ends, *marks], ends):
        added = [{"id": number, "content": token, "special": True} for number, token in enumerate(tokens)]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": added}))
        config = {"model_type": "llama", "vocab_size": 500, "eos_token_id": list(range(len(ends)))}
        (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": len(tokens)}))
        assert () == tokenizer_warnings(tmp_path, [text])


def table(base: Processor) -> str:
    """A row for each template and setting: samples of each conversation, or the number of the reason below."""
    reasons: dict[str, int] = {}
    rows = []
    for name, thinking in CASES:
        encoder = ChatEncoder(real_processor(base, FOUND[name]), thinking)
        found = [outcome(encoder, sample) for sample in SAMPLES]
        cells = [each if each.isdigit() else f"({reasons.setdefault(each, len(reasons) + 1)})" for each in found]
        rows.append(f"| {name} | {json.dumps(thinking) if thinking is not None else ''} | {' | '.join(cells)} |")
    head = f"| template | enable_thinking | {' | '.join(SAMPLES)} |\n|{' --- |' * (2 + len(SAMPLES))}"
    notes = "\n".join(f"- ({number}) {reason}" for reason, number in reasons.items())
    return f"{head}\n" + "\n".join(rows) + f"\n\n{notes}"


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        print(table(write_agent_processor(Path(folder) / "base")))
