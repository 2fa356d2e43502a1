"""Chat templates of real models: what is learnt of seven conversations with tools, or why it is not, by name.

The templates are those of packages that ship them: trl (Apache-2.0), if it is installed, and the folders of *.jinja
files that DFLOW_CHAT_TEMPLATES names, such as `models/templates` of llama.cpp (MIT). Without either the tests are
skipped; agent_templates.py has small ones with the same rules. `python tests/ops/tokenize_chat/test_real_templates.py`
prints the table of docs/chat_templates.md.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from agent_rows import (
    ASK,
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
from agent_templates import text_of
from chat_samples import run_tokenize
from format_reading import inject, read
from known_templates import KNOWN
from published_templates import published_templates
from served_oracle import Known, Sample, Server, samples

from ops.artifacts import Samples, TokenShards
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.tokenizer_check import tokenizer_warnings
from ops.lib.vision.processor import Processor
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
BUT_NOT = {  # of templates with the other tokens, in which these stand inside answers
    "<|end|>": ("<|return|>", "<|calls|>"),
    "<|user|>": ("<|im_end|>", "<|end|>", "</s>", "<|eot|>", "<|end_of_text|>"),
    "<|message_sep|>": ("'role': 'function call'",),
}
MARKUP = re.compile(r"<[^<>\s'\"{}]{2,40}>|\[/?[A-Z_]+\]|\[e~\[|\]~b\]|\]~!b\[")
TEXTS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
DOCS = Path(__file__).resolve().parents[3] / "docs" / "chat_templates.md"

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


def tokenized(encoder: ChatEncoder, sample: str) -> list[Sample]:
    """The samples that tokenize_chat makes of a conversation. Raises Unusable."""
    messages = SAMPLES[sample]
    [found] = encoder.serve_batch([messages], [()], [sample], [TOOLS])
    if isinstance(found, Unusable):
        raise found
    encoded = [encoder.encode_context(messages, context) for context in found.contexts]
    return [Sample(tuple(each.input_ids.tolist()), tuple(each.loss_mask.tolist())) for each in encoded]


def learnt(encoder: ChatEncoder, sample: str) -> list[list[tuple[list[int], list[int]]]]:
    """Of each sample, the (prompt's ids, learnt ids) of its answers, by the mask. Raises Unusable."""
    contexts = []
    for each in tokenized(encoder, sample):
        runs, ids, mask = [], list(each.ids), list(each.mask)
        for start in [at for at in range(len(mask)) if mask[at] and not mask[at - 1]]:
            end = mask.index(False, start) if False in mask[start:] else len(mask)
            runs.append((ids[:start], ids[start:end]))
        contexts.append(runs)
    return contexts


def outcome(encoder: ChatEncoder, sample: str) -> str:
    """The number of samples of a conversation, or the reason why it is dropped."""
    try:
        return str(len(tokenized(encoder, sample)))
    except Unusable as dropped:
        return dropped.reason


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_agent_processor(tmp_path_factory.mktemp("processor") / "base")


@pytest.fixture(scope="module")
def elsewhere():
    """A process that has loaded nothing of dflow."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


def server_of(encoder: ChatEncoder, thinking: bool | None) -> Server:
    options = {} if thinking is None else {"enable_thinking": thinking}
    return Server(encoder.processor.tokenizer, encoder.eos_texts, tuple(TOOLS), options)


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
def test_every_sample_has_the_ids_and_the_mask_of_a_server_and_its_target_or_is_dropped_by_name(
    base, elsewhere, name, thinking
):
    encoder = ChatEncoder(real_processor(base, FOUND[name]), thinking)
    received = [[{**each, "content": text_of(each)} for each in messages] for messages in SAMPLES.values()]
    known = itertools.repeat(KNOWN.get(name, Known()))
    of_server = elsewhere.map(samples, itertools.repeat(server_of(encoder, thinking)), known, received, chunksize=99)
    made = []  # as in the docs: how many samples, or 0 for a conversation that is dropped
    for sample, expected in zip(SAMPLES, of_server, strict=True):
        try:
            found = tokenized(encoder, sample)
        except Unusable as dropped:
            assert (expected, True) == (dropped.reason, bool(dropped.detail))
            made.append(0)
            continue
        made.append(len(found))
        ends = [len(each.ids) for each in expected]
        assert expected == [Sample(each.ids[:end], each.mask[:end]) for each, end in zip(found, ends, strict=True)]
        assert not any(any(each.mask[end:]) for each, end in zip(found, ends, strict=True))
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
