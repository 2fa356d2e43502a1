"""The kind of each token of an answer, against the parts of what a target writes by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agent_rows import (
    ASK,
    ASK_AGAIN,
    RAINY,
    SAMPLES,
    SUN,
    SUNNY,
    TOOLS,
    WHY,
    calls,
    conversation,
    why,
    with_template,
    write_agent_processor,
)
from agent_templates import OPENS, STRIPS, TEMPLATES, with_parts
from chat_samples import SERVED, png, row, run_tokenize, write_rows

from ops.artifacts import TokenShards
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import KINDS, TokenReader
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.kinds import CALL, END, REASONING, TEXT, Markup, Opening, TokenKinds, opening_of_calls

# By hand: the ends of a thought, and the opening of a call.
PARTS = {
    "extends": ((), "<tool_call>"),
    "strips": (("</think>",), "<tool_call>"),
    "opens": (("</think>",), "<tool_call>"),
    "prefilled": (("<channel|>",), "<|tool_call>"),
    "endless": ((), "<tool_call>"),
    "rewrites": ((), "<tool_call>"),
    "channels": (("<|end|><|start|>assistant<|channel|>final<|message|>", "<|end|><|start|>assistant"), " to="),
    "moves tools": ((), "[CALLS]"),
    "dated": ((), "<tool_call>"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_agent_processor(tmp_path_factory.mktemp("processor") / "base")


@pytest.fixture(scope="module")
def encoders(base):
    made = {}
    for name in PARTS:
        template = TEMPLATES[name]
        processor = with_template(base, template.text, template.eos, template.special)
        for thinking in (None, False, True) if "enable_thinking" in template.text else (None,):
            made[name, thinking] = ChatEncoder(processor, thinking)
    return made


def split_by_hand(name: str, answer: str, eos: tuple[str, ...]) -> dict[int, str]:
    """The parts of an answer's text, by kind."""
    closings, opening = PARTS[name]
    ends = [answer.index(closing) + len(closing) for closing in closings if closing in answer]
    thought = ends[0] if ends else 0
    end = next((len(answer) - len(token) for token in eos if answer.endswith(token)), len(answer))
    call = answer.find(opening, thought)
    call = end if call < 0 else call
    parts = {REASONING: answer[:thought], TEXT: answer[thought:call], CALL: answer[call:end], END: answer[end:]}
    return {kind: text for kind, text in parts.items() if text}


@pytest.mark.parametrize("name", PARTS)
def test_the_kinds_are_those_of_the_parts_that_a_target_writes(encoders, name):
    seen = set()
    for (of, _thinking), encoder in encoders.items():
        if of != name:
            continue
        for sample, messages in SAMPLES.items():
            [found] = encoder.serve_batch([messages], [()], [sample], [TOOLS])
            if isinstance(found, Unusable):
                continue
            for context in found.contexts:
                encoded = encoder.encode_context(messages, context)
                ids, kinds = encoded.input_ids[encoded.loss_mask], encoded.kinds
                assert len(kinds) == encoded.loss_tokens
                starts = [int(encoded.loss_mask[:first].sum()) for first, _ in encoded.answers]
                for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                    answer, of_answer = ids[start:end], kinds[start:end]
                    text = encoder.processor.tokenizer.decode(answer)
                    shown = {
                        kind: encoder.processor.tokenizer.decode(answer[of_answer == kind])
                        for kind in (REASONING, TEXT, CALL, END)
                        if (of_answer == kind).any()
                    }
                    assert split_by_hand(name, text, TEMPLATES[name].eos) == shown
                    assert of_answer.tolist() == sorted(of_answer.tolist())
                    seen |= set(shown)
    assert {TEXT, CALL, END} <= seen
    assert (REASONING in seen) == bool(PARTS[name][0])


def test_a_call_in_bare_json_is_one_only_as_the_first_characters_of_an_answer():
    header = "<s>user\nw</s><s>assistant\n"
    opening = opening_of_calls(header, header, f'{header}{{"name": "look", "parameters"', None, ("look",))
    assert Opening('{"name": "', comes_first=True) == opening
    markup = Markup(("<think>",), ("</think>",), opening)
    assert (0, 0) == markup.parts('{"name": "f"}', False)
    text = 'See {"name": "f"}'
    assert (0, len(text)) == markup.parts(text, False)
    assert (10 + len("</think>"), 18) == markup.parts('<think>why</think>{"name": "f"}', False)


def test_the_opening_of_a_call_is_what_stands_before_it_with_and_without_a_text():
    """Without, gpt-oss writes it behind the header of its prompt; with a text, behind another header."""
    header, named = "<|start|>assistant", ("look",)
    opening = opening_of_calls(
        header, f"{header}<|channel|>final<|message|>", f"{header} to=functions.look<|channel|>", None, named
    )
    assert Opening(" to=functions.", comes_first=True) == opening
    beside = "<|end|><|start|>assistant to=functions.look"
    opening = opening_of_calls(header, f"{header}<|channel|>final", f"{header} to=functions.look", beside, named)
    assert Opening(" to=functions.") == opening
    assert Opening("<call>") == opening_of_calls("a: ", "a: ", "a: <call>look", "(look", named)
    assert opening_of_calls("", "", "tools: look", None, named) is None
    assert opening_of_calls("a: ", "a: ", "a: ", None, named) is None
    called = "a: <think>\n</think>\n\n<tool_call>\nlook"
    assert Opening("<tool_call>") == opening_of_calls("a: ", "a: ", called, "\n\n<tool_call>\nlook", named)


def test_a_name_in_the_place_of_a_texts_recipient_is_that_of_a_call():
    header = "<|start|>assistant"
    called = f'{header} to=look<|message|><invoke name="look">'
    opening = opening_of_calls(header, f"{header} to=user<|message|>", called, None, ("look",))
    assert Opening(" to=", unless="user<|message|>", comes_first=True) == opening
    markup = Markup((), (), opening)
    assert (0, 0) == markup.parts(" to=user_of<|message|><invoke", False)
    for text in (" to=user<|message|>Sunny.", " to=user<|message|>It has to=look in it."):
        assert (0, len(text)) == markup.parts(text, False)


def test_an_answer_that_was_cut_inside_its_thought_is_reasoning_as_a_whole():
    markup = Markup(("<think>",), ("</think>",), Opening("<tool_call>"))
    assert markup.is_opened_by("assistant\n<think>\n") and not markup.is_opened_by("<think>\n\n</think>\n\n")
    assert (12, 12) == markup.parts("I may say it", True)
    assert (0, 12) == markup.parts("I may say it", False)
    assert (16, 16) == markup.parts("<think>I may say", False)
    assert (0, 22) == markup.parts("The tag </think> ends.", False)


@pytest.mark.parametrize(
    "text",
    ["Ünïcödé \u4f60\u597d <tool_call>\u597d", "a</think>b<tool_call>c", "\U0001f600</think>\u00e9\u00e9<tool_call>"],
)
def test_kinds_of_tokens_that_hold_parts_of_characters(text):
    """Tokens of one byte each: a token's kind is that of the character that it belongs to."""
    markup = Markup(("<think>",), ("</think>",), Opening("<tool_call>"))
    before = list(b"a: <think>\n" if "</think>" in text else b"a: ")
    kinds = TokenKinds(markup, lambda ids: bytes(ids).decode(errors="replace"), ()).of(list(text.encode()), before)
    thought, call = markup.parts(text, "</think>" in text)
    by_character = [REASONING] * thought + [TEXT] * (call - thought) + [CALL] * (len(text) - call)
    expected = [kind for kind, character in zip(by_character, text, strict=True) for _ in character.encode()]
    assert expected == kinds.tolist()


def test_kinds_and_turns_are_stored_for_contexts_of_a_server_only(tmp_path):
    rows = [
        row("chat", [ASK, SUNNY, ASK_AGAIN, RAINY]),
        row("why", [ASK, why(SUNNY, WHY)]),
        row("chain", conversation(ASK, calls("Paris"), SUN, SUNNY), tools=TOOLS),
        row("seen", [ASK, SUNNY, ASK_AGAIN, RAINY], png(24, 32)),
    ]
    samples = write_rows(tmp_path / "in", rows)
    (tmp_path / "strips").write_text(with_parts(STRIPS))
    options = SERVED | {"chat_template": str(tmp_path / "strips")}
    reader = TokenReader(run_tokenize(tmp_path / "served", samples, **options).artifact(TokenShards))
    turns = {record["id"]: [turn for _, turn in record["answers"]] for record in reader.records}
    assert {"chat@1": [0], "chat@2": [1], "why": [0], "chain@1": [0], "chain@2": [1]} == {
        name: turn for name, turn in turns.items() if not name.startswith("seen")
    }
    assert [[0], [1]] == [turns["seen@1"], turns["seen@2"]]
    for place, record in enumerate(reader.records):
        sample = reader.sample(place)
        assert torch.equal(sample.kinds > 0, sample.loss_mask)
        assert torch.equal(sample.kinds, reader.kinds(place))
        assert record["prompt_tokens"] == sample.answers[-1][0]
        assert [record["answers"][0][0]] == np.flatnonzero(np.diff(sample.loss_mask.int(), prepend=0) == 1).tolist()
        assert END == sample.kinds[sample.loss_mask][-1]
        assert (CALL in sample.kinds.tolist()) == (record["id"] == "chain@1")
        assert REASONING in sample.kinds.tolist()  # an empty thought is one too
        assert sample.prompt().kinds.sum() == 0
    whole = run_tokenize(tmp_path / "whole", samples, **options | {"contexts": "whole", "enable_thinking": False})
    reader = TokenReader(whole.artifact(TokenShards))
    assert all("answers" not in record for record in reader.records)
    assert all(reader.kinds(place) is None and reader.sample(place).kinds is None for place in range(len(reader)))


def test_a_prompt_has_its_turn_and_no_kinds(tmp_path):
    (tmp_path / "opens").write_text(with_parts(OPENS))
    samples = write_rows(tmp_path / "in", [row("a", [ASK, SUNNY, ASK_AGAIN]), row("b", [ASK], png(24, 32))])
    options = SERVED | {"chat_template": str(tmp_path / "opens"), "prompts_only": True}
    reader = TokenReader(run_tokenize(tmp_path, samples, **options).artifact(TokenShards))
    lengths = [len(reader.sample(place).input_ids) for place in range(2)]
    assert [[[lengths[0], 1]], [[lengths[1], 0]]] == [record["answers"] for record in reader.records]
    assert reader.sample(0).kinds is None


def test_the_numbers_of_kinds_are_those_of_the_format():
    assert ("none", "reasoning", "text", "call", "end") == KINDS
