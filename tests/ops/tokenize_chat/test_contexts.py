"""Answers in the contexts of a server: ids and mask against a slow reference, which renders each prompt by
transformers and appends what the target writes, by hand.
"""

from __future__ import annotations

import json

import pytest
from agent_rows import (
    ASK,
    ASK_AGAIN,
    NAME,
    RAINY,
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
from agent_templates import ALWAYS_PROMPTS, CLOSED, ENDS_TWICE, IN_WORDS, OPENS, TEMPLATES, chat_calls, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.lib.data.sample_account import Unusable
from ops.lib.vision.template_kinds import clock_now
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.kinds import END, REASONING, TEXT
from ops.tokenize_chat.rendering import agreement
from ops.tokenize_chat.template import (
    ANSWER_CHANGED,
    NO_TOKEN_BOUNDARY,
    OTHER_THOUGHT,
    RESULTS_NOT_SHOWN,
    SPECIAL_IN_TEXT,
    TOOLS_NOT_SHOWN,
    value_or_unusable,
)

FITTING = ("extends", "strips", "opens", "prefilled", "endless", "rewrites", "channels", "moves tools", "dated")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_agent_processor(tmp_path_factory.mktemp("processor") / "base")


@pytest.fixture(scope="module")
def encoders(base):
    """An encoder for every template and enable_thinking that it reads."""
    made = {}
    for name, template in TEMPLATES.items():
        processor = with_template(base, template.text, template.eos, template.special)
        for thinking in (None, False, True) if "enable_thinking" in template.text else (None,):
            made[name, thinking] = ChatEncoder(processor, thinking)
    return made


def served(encoder, messages, cut=(), tools=TOOLS, keeps_reasoning=True):
    """(ids, mask) of every context. Raises Unusable."""
    [found] = encoder.serve_batch([messages], [cut], ["a"], [tools], keeps_reasoning)
    if isinstance(found, Unusable):
        raise found
    encoded = [encoder.encode_context(messages, context) for context in found.contexts]
    return [(each.input_ids.tolist(), each.loss_mask.tolist()) for each in encoded], found


def for_template(message, key):
    """A message as the template takes it: a text, and the thought under its key."""
    message = {**message, "content": text_of(message)}
    thought = message.pop("reasoning_content", None)
    return message if thought is None or key is None else {**message, key: thought}


def expected(encoder, name, thinking, messages, keeps_reasoning=True):
    """(text, spans that are learnt) of every context: each prompt by transformers, each answer by hand."""
    template, contexts = TEMPLATES[name], []
    options = {} if thinking is None else {"enable_thinking": thinking}
    given = [for_template(message, template.key) for message in messages]
    history = given if keeps_reasoning else [for_template({**each, "reasoning_content": ""}, None) for each in messages]
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = encoder.processor.tokenizer.apply_chat_template(
            history[:turn],
            tools=TOOLS,
            add_generation_prompt=True,
            tokenize=False,
            strftime_now=clock_now,
            **options,
        )
        written = template.writes(message, thinking)
        if contexts and prompt.startswith(contexts[-1][0]):
            contexts[-1] = (prompt + written, [*contexts[-1][1], (len(prompt), len(prompt + written))])
        else:
            contexts.append((prompt + written, [(len(prompt), len(prompt + written))]))
    closed = []
    for text, spans in contexts:
        for place, (start, end) in enumerate(spans):
            next_eos = [eos for eos in template.eos if text.startswith(eos, end)]
            if next_eos and not text[:end].endswith(template.eos):
                spans[place] = start, end + len(next_eos[0])
        closed.append((text, spans))
    return closed


def tokens_of(encoder, text, spans):
    """(ids, mask): a token is learnt if it lies in a span."""
    tokens = encoder.processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(start <= first and last <= end for start, end in spans) for first, last in tokens.offset_mapping]
    return tokens.input_ids, inside


def check(encoders, name, thinking, messages, keeps_reasoning=True):
    encoder = encoders[name, thinking]
    contexts = expected(encoder, name, thinking, messages, keeps_reasoning)
    found, _ = served(encoder, messages, keeps_reasoning=keeps_reasoning)
    assert len(contexts) == len(found)
    for (text, spans), (ids, mask) in zip(contexts, found, strict=True):
        wanted_ids, wanted_mask = tokens_of(encoder, text, spans)
        length = len(wanted_ids)
        assert wanted_ids == ids[:length]
        assert wanted_mask == mask[:length]
        assert not any(mask[length:])
        assert encoder.processor.tokenizer.decode(ids[length:]).strip() == ""  # what stands behind the last EOS
    return [len(spans) for _, spans in contexts]


def fits(name, thinking, messages):
    """Whether the template shows all of the answers, after a prompt of the same kind."""
    answers = [message for message in messages if message["role"] == "assistant"]
    with_calls = [answer for answer in answers if "tool_calls" in answer]
    has_reasons = [bool(answer.get("reasoning_content")) for answer in answers]
    if name == "opens":
        return all(has_reasons)
    if (name, thinking) == ("strips", False):
        return not any(has_reasons)
    if name == "prefilled" and thinking is not True:
        after_call = [
            turn > 0 and messages[turn - 1]["role"] == "tool"
            for turn, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return not any(thinks and not inside for thinks, inside in zip(has_reasons, after_call, strict=True))
    if name in ("rewrites", "moves tools", "channels") and any(text_of(answer) for answer in with_calls):
        return False
    return name not in ("dated", "channels") or all(len(answer["tool_calls"]) == 1 for answer in with_calls)


CASES = [
    (name, thinking, sample)
    for name in FITTING
    for thinking in ((None, False, True) if "enable_thinking" in TEMPLATES[name].text else (None,))
    for sample in SAMPLES
]


@pytest.mark.parametrize(("name", "thinking", "sample"), CASES)
def test_ids_and_mask_are_those_of_a_server_or_the_sample_is_dropped_by_name(encoders, name, thinking, sample):
    messages = SAMPLES[sample]
    if fits(name, thinking, messages):
        assert sum(check(encoders, name, thinking, messages)) == sum(each["role"] == "assistant" for each in messages)
        return
    with pytest.raises(Unusable) as dropped:
        served(encoders[name, thinking], messages)
    expected_reason = {
        "opens": OTHER_THOUGHT,
        "strips": OTHER_THOUGHT,
        "prefilled": OTHER_THOUGHT,
        "rewrites": ANSWER_CHANGED,
        "moves tools": ANSWER_CHANGED,
        "channels": ANSWER_CHANGED,
        "dated": "refused by the chat template",
    }
    assert expected_reason[name] == dropped.value.reason


WORDS = st.sampled_from(["Paris", "It is", " sunny ", "20", "\n", "I look", 'a "quote"', "é😀", "<b>", "\\"])
SENTENCES = st.lists(WORDS, min_size=1, max_size=4).map(lambda words: "x" + "".join(words) + "x")


@st.composite
def conversations(draw):
    """Queries with chains of calls and their results, and answers; reasoning in all answers, in some, or in none."""
    thinks = draw(st.sampled_from([lambda: True, lambda: False, lambda: draw(st.booleans())]))

    def answer(message):
        return why(message, draw(SENTENCES)) if thinks() else message

    messages = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(say("user", draw(SENTENCES)))
        for _ in range(draw(st.integers(0, 3))):
            cities = draw(st.lists(SENTENCES, min_size=1, max_size=2))
            text = draw(st.just("") | SENTENCES)
            messages += [answer(calls(*cities, text=text)), *(say("tool", draw(SENTENCES)) for _ in cities)]
        messages.append(answer(say("assistant", draw(SENTENCES))))
    return conversation(*messages)


@settings(max_examples=150)
@given(
    messages=conversations(), which=st.sampled_from(sorted({case[:2] for case in CASES}, key=str)), kept=st.booleans()
)
def test_random_conversations_are_learnt_as_served(encoders, messages, which, kept):
    name, thinking = which
    if not fits(name, thinking, messages):
        with pytest.raises(Unusable):
            served(encoders[which], messages, keeps_reasoning=kept)
        return
    check(encoders, name, thinking, messages, kept)


@pytest.mark.parametrize(
    ("name", "thinking", "sample", "answers"),
    [
        ("extends", None, "two queries", [4]),
        ("strips", None, "reasoning", [2]),
        ("strips", None, "reasoning, then a query", [2, 1]),
        ("strips", None, "one call", [1, 1]),
        ("strips", False, "two queries", [1, 1, 1, 1]),
        ("prefilled", True, "two queries", [4]),
        ("endless", None, "two queries", [4]),
        ("rewrites", None, "two queries", [2, 2]),
        ("channels", None, "reasoning, then a query", [2, 1]),
        ("channels", None, "two queries", [2, 2]),
        ("moves tools", None, "two queries", [2, 2]),
    ],
)
def test_answers_whose_prompts_extend_each_other_share_a_sample(encoders, name, thinking, sample, answers):
    assert answers == check(encoders, name, thinking, SAMPLES[sample])


def test_dropped_reasoning_of_the_history_makes_each_call_of_a_chain_a_sample(encoders):
    chain = [ASK]
    for _ in range(5):
        chain += [why(calls("Paris"), WHY), SUN]
    chain = conversation(*chain, why(SUNNY, WHY_SUN))
    assert [6] == check(encoders, "strips", None, chain)
    assert [1] * 6 == check(encoders, "strips", None, chain, keeps_reasoning=False)


@pytest.mark.parametrize(("name", "lost"), [("loses calls", f"the call {NAME}"), ("no tools", f"the tool {NAME}")])
def test_what_a_template_does_not_show_is_named(encoders, name, lost):
    with pytest.raises(Unusable) as dropped:
        served(encoders[name, None], SAMPLES["one call"])
    assert dropped.value.reason == {"loses calls": ANSWER_CHANGED, "no tools": TOOLS_NOT_SHOWN}[name]
    assert dropped.value.detail.startswith(lost)


def found_of(encoder, messages, tools=TOOLS):
    """What the two ways of tokenising, and the two of asking before the last answer, say of a conversation."""
    before = messages[:-1]
    [in_contexts] = encoder.serve_batch([messages], [()], ["a"], [tools])
    [whole] = encoder.encode_batch([messages], [()], ["a"], [tools])
    asked = value_or_unusable(encoder.encoded_prompt, before, "a", tools)
    return in_contexts, whole, asked, value_or_unusable(encoder.served_prompt, before, tools, True)


NAMING = {
    "a question": conversation(say("user", f"Please {NAME}, {TOOLS[0]['function']['description']}"), SUNNY),
    "a call": conversation(say("user", TOOLS[0]["function"]["description"]), calls("Paris"), SUN, SUNNY),
}


@pytest.mark.parametrize("said", NAMING)
def test_a_tool_that_only_the_conversation_names_is_not_shown(encoders, said):
    for found in found_of(encoders["no tools", None], NAMING[said]):
        assert (TOOLS_NOT_SHOWN, f"the tool {NAME} is not in the prompt") == found.args
    for found in found_of(encoders["extends", None], NAMING[said]):
        assert not isinstance(found, Unusable)


def test_a_tool_whose_name_is_the_beginning_of_another_ones_has_to_be_shown_itself(base):
    shows_one = TEMPLATES["extends"].text.replace("tools|tojson", "tools[1:]|tojson")
    encoder = ChatEncoder(with_template(base, shows_one, ["<|im_end|>"]))
    longer = {"type": "function", "function": {**TOOLS[0]["function"], "name": f"{NAME}_tomorrow"}}
    for found in found_of(encoder, [ASK, SUNNY], [*TOOLS, longer]):
        assert (TOOLS_NOT_SHOWN, f"the tool {NAME} is not in the prompt") == found.args


def test_results_that_the_template_loses_drop_the_sample_by_name(encoders):
    """Also where the user says the same, and where only one of two results is lost."""
    same = conversation(say("user", "result: clear sky?"), calls("Paris"), SUN, SUNNY)
    lost = "the result 'result: clear sky' is not in the prompt"
    for name, messages in (("loses results", same), ("shows the last result", SAMPLES["parallel"])):
        for found in found_of(encoders[name, None], messages):
            assert (RESULTS_NOT_SHOWN, f"turn 3: {lost}") == found.args
    for found in found_of(encoders["shows the last result", None], same):
        assert not isinstance(found, Unusable)
    empty = conversation(ASK, calls("Paris"), say("tool"), SUNNY)
    for found in found_of(encoders["loses results", None], empty):
        assert not isinstance(found, Unusable)


@pytest.mark.parametrize(
    ("name", "sample", "lost"),
    [
        ("rewrites", "text and call", "the text 'I look.'"),
        ("channels", "parallel", f"the call {NAME}"),
        ("channels", "text and call", "the text 'I look.'"),
    ],
)
def test_the_part_of_an_answer_that_is_lost_is_named(encoders, name, sample, lost):
    with pytest.raises(Unusable) as dropped:
        served(encoders[name, None], SAMPLES[sample])
    assert (ANSWER_CHANGED, True) == (dropped.value.reason, dropped.value.detail.startswith(f"{lost} is not shown"))


def test_a_thought_that_does_not_fit_its_prompt_is_reported_with_the_end_of_the_prompt(encoders):
    for name, thinking, sample, ends in (
        ("opens", None, "one call", "the prompt ends with '<think>\\n', the answer has no reasoning"),
        ("strips", False, "reasoning", "the prompt ends with '<think>\\n\\n</think>\\n\\n', the answer has reasoning"),
        (
            "prefilled",
            False,
            "reasoning",
            "the prompt ends with '<|channel>thought\\n<channel|>', the answer has reaso",
        ),
    ):
        with pytest.raises(Unusable) as dropped:
            served(encoders[name, thinking], SAMPLES[sample])
        assert dropped.value.reason == OTHER_THOUGHT
        assert dropped.value.detail.startswith(ends)


def test_a_thought_in_the_text_is_the_same_as_one_in_its_own_key(encoders):
    for name in ("strips", "opens", "channels"):
        in_text = [ASK, say("assistant", f"<think>\n{WHY_SUN}\n</think>\n\nSunny.")]
        in_key = [ASK, why(SUNNY, WHY_SUN)]
        assert served(encoders[name, None], in_key)[0] == served(encoders[name, None], in_text)[0]


def learnt_texts(encoder, messages):
    """The text of each answer that is learnt."""
    decode, texts = encoder.processor.tokenizer.decode, []
    for ids, mask in served(encoder, messages)[0]:
        starts = [place for place, is_learnt in enumerate(mask) if is_learnt and not mask[place - 1]]
        ends = [place for place, is_learnt in enumerate([*mask, False]) if not is_learnt and mask[place - 1]]
        texts += [decode(ids[start:end]) for start, end in zip(starts, ends[-len(starts) :], strict=True)]
    return texts


def answers_of(sample):
    return [message for message in SAMPLES[sample] if message["role"] == "assistant"]


@pytest.mark.parametrize("sample", SAMPLES)
def test_an_answer_ends_with_its_first_eos_and_begins_with_its_own_tag(base, sample):
    """Also of a template that writes a second one, and of one whose prompts share the first characters of the tag."""
    special = ("<|start_text|>", "<|start_thought|>", "<|end_thought|>")
    for template, tag in ((ENDS_TWICE, ""), (ALWAYS_PROMPTS, "<|start_text|>")):
        encoder = ChatEncoder(with_template(base, template, ["<|im_end|>"], special))
        written = [f"{tag}{chat_calls(answer)}<|im_end|>" for answer in answers_of(sample)]
        assert written == learnt_texts(encoder, SAMPLES[sample])


def test_a_thought_in_words_is_learnt_behind_the_prompt_that_begins_it_and_needed_there(base):
    encoder = ChatEncoder(with_template(base, IN_WORDS, ["<|im_end|>"]))
    written = [
        f"{each['reasoning_content']}\n[FINAL]\n{chat_calls(each)}<|im_end|>" for each in answers_of("reasoning")
    ]
    assert written == learnt_texts(encoder, SAMPLES["reasoning"])
    with pytest.raises(Unusable, match=r"the prompt ends with 'My thoughts:.*the answer has no reasoning") as dropped:
        served(encoder, SAMPLES["one call"])
    assert OTHER_THOUGHT == dropped.value.reason


def test_no_thought_is_learnt_behind_a_prompt_that_has_ended_it(base):
    encoder = ChatEncoder(with_template(base, CLOSED, ["<|im_end|>"]))
    assert [f"{chat_calls(each)}<|im_end|>" for each in answers_of("one call")] == learnt_texts(
        encoder, SAMPLES["one call"]
    )
    with pytest.raises(Unusable, match=r"the prompt ends with .*</think>', the answer has reasoning") as dropped:
        served(encoder, SAMPLES["reasoning"])
    assert OTHER_THOUGHT == dropped.value.reason


def test_reasoning_that_no_key_shows_is_removed_and_counted(encoders):
    with_reasons, found = served(encoders["extends", None], SAMPLES["reasoning"])
    assert served(encoders["extends", None], SAMPLES["one call"])[0] == with_reasons
    assert (2, 0) == (found.without_reasoning, found.empty_thoughts)


def test_empty_thoughts_after_a_prompt_that_expects_one_are_counted(encoders):
    assert 4 == served(encoders["strips", None], SAMPLES["two queries"])[1].empty_thoughts
    assert 0 == served(encoders["strips", False], SAMPLES["two queries"])[1].empty_thoughts
    assert 0 == served(encoders["strips", None], SAMPLES["reasoning"])[1].empty_thoughts


def test_each_end_is_learnt_once_and_the_last_answer_without_one_is_kept(encoders):
    encoder = encoders["endless", None]
    [(ids, mask)], _ = served(encoder, SAMPLES["two queries"])
    learnt = encoder.processor.tokenizer.decode([each for each, is_learnt in zip(ids, mask, strict=True) if is_learnt])
    assert ["<|observation|>", "<|user|>", "<|observation|>"] == [
        token for token in learnt.replace("<|", " <|").replace("|>", "|> ").split() if token.startswith("<|")
    ]
    assert learnt.endswith(text_of(RAINY))


def test_a_cut_answer_does_not_learn_its_end(encoders):
    encoder = encoders["extends", None]
    [(ids, whole)], _ = served(encoder, SAMPLES["one call"])
    [(same, cut)], _ = served(encoder, SAMPLES["one call"], cut=[False, True])
    assert ids == same
    different = [place for place, pair in enumerate(zip(whole, cut, strict=True)) if pair[0] != pair[1]]
    assert [ids[place] for place in different] == list(encoder.processor.eos_token_ids)


def test_a_special_token_in_a_call_a_tool_or_a_result_drops_the_sample(encoders):
    encoder, marked = encoders["extends", None], "a <|im_end|> b"
    for messages, tools in (
        (conversation(ASK, calls(marked), SUN, SUNNY), TOOLS),
        (conversation(ASK, calls("Paris"), say("tool", marked), SUNNY), TOOLS),
        (conversation(ASK, why(calls("Paris"), marked), SUN, SUNNY), TOOLS),
        (SAMPLES["one call"], json.loads(json.dumps(TOOLS).replace("the sky", marked))),
    ):
        with pytest.raises(Unusable, match="special token") as dropped:
            served(encoder, messages, tools=tools)
        assert (SPECIAL_IN_TEXT, "<|im_end|>") == (dropped.value.reason, dropped.value.detail)


def test_ids_of_calls_are_made_anew_where_the_template_takes_no_others(encoders):
    long = json.loads(json.dumps(SAMPLES["parallel"]).replace("call0", "call_from_elsewhere_0"))
    encoder = encoders["moves tools", None]
    assert served(encoder, SAMPLES["parallel"])[0] == served(encoder, long)[0]


def test_only_the_last_answer_is_learnt_on_request(base):
    template = TEMPLATES["strips"]
    encoder = ChatEncoder(with_template(base, template.text, template.eos), train_on="last")
    messages = SAMPLES["two queries"]
    [(ids, mask)], found = served(encoder, messages)
    [(_, spans)] = expected(encoder, "strips", None, messages)[-1:]
    assert (4, 1) == (found.contexts[0].number, len(spans))
    wanted_ids, wanted_mask = tokens_of(encoder, *expected(encoder, "strips", None, messages)[-1])
    assert (wanted_ids, wanted_mask) == (ids[: len(wanted_ids)], mask[: len(wanted_ids)])


def test_prompts_are_those_of_the_answers(encoders):
    messages = SAMPLES["reasoning, then a query"]
    for kept in (True, False):
        prompt = encoders["strips", None].served_prompt(messages[:-1], TOOLS, kept).input_ids.tolist()
        contexts, _ = served(encoders["strips", None], messages, keeps_reasoning=kept)
        assert prompt == contexts[-1][0][: len(prompt)]


def test_templates_that_extend_give_the_same_bytes_as_the_whole_conversation(encoders):
    plain = [ASK, SUNNY, ASK_AGAIN, RAINY]
    for name, messages in (("extends", plain), ("extends", SAMPLES["two queries"]), ("dated", plain)):
        encoder = encoders[name, None]
        whole = encoder.encode(messages, tools=TOOLS)
        [(ids, mask)], _ = served(encoder, messages)
        assert (whole.input_ids.tolist(), whole.loss_mask.tolist()) == (ids, mask)


@pytest.mark.parametrize("sample", ["one call", "ends with a call"])
def test_calls_and_tools_that_the_template_loses_drop_the_whole_conversation_too(encoders, sample):
    for name, reason in (("loses calls", ANSWER_CHANGED), ("no tools", TOOLS_NOT_SHOWN)):
        with pytest.raises(Unusable) as dropped:
            encoders[name, None].encode(SAMPLES[sample], tools=TOOLS)
        assert (reason, True) == (dropped.value.reason, NAME in dropped.value.detail)


@given(st.text("ab", max_size=30), st.text("ab", max_size=30))
def test_the_agreement_of_two_texts_is_their_common_start(one, other):
    length = agreement(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_an_answer_that_begins_inside_a_token_drops_the_sample(base):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    encoder = ChatEncoder(with_template(base, template, ["<|im_end|>"]))
    with pytest.raises(Unusable) as dropped:
        served(encoder, [ASK, say("assistant", "Sunny")], tools=())
    assert dropped.value.reason == NO_TOKEN_BOUNDARY


def test_reasoning_is_found_under_any_key(base):
    keys = {
        name: ChatEncoder(with_template(base, each.text, each.eos)).habits.reasoning for name, each in TEMPLATES.items()
    }
    keys["channels"] = "thinking"  # reasoning_content, which is passed to it as its own key
    assert {name: each.key for name, each in TEMPLATES.items()} == keys
    shown = TEMPLATES["strips"].text.replace("message.reasoning_content or ''", "message.reasoning or ''")
    assert ChatEncoder(with_template(base, shown, ["<|im_end|>"])).habits.reasoning == "reasoning"
    in_text = TEMPLATES["extends"].text + "{# </think> #}"
    assert ChatEncoder(with_template(base, in_text, ["<|im_end|>"])).habits.reasoning == "content"


def test_an_answer_whose_prompt_goes_on_behind_a_result_has_no_header_and_begins_inside_its_thought(base):
    """As Diffusion Gemma: only history has a header behind results, and prompts open a thought only there."""
    asks = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    goes_on = "{{- '<think>\\n' if messages[-1].role == 'tool' else '<|im_start|>assistant\\n' }}"
    assert OPENS.count(asks) == 1
    template = TEMPLATES["opens"]
    encoder = ChatEncoder(with_template(base, OPENS.replace(asks, goes_on), template.eos, template.special))
    messages = conversation(ASK, calls("Paris"), SUN, why(SUNNY, WHY_SUN))
    [found] = encoder.serve_batch([messages], [()], ["a"], [TOOLS])
    [encoded] = [encoder.encode_context(messages, context) for context in found.contexts]
    first, decode = encoded.answers[1][0], encoder.processor.tokenizer.decode
    assert decode(encoded.input_ids[:first]).endswith("</tool_response><|im_end|>\n<think>\n")
    learnt = encoded.input_ids[first:][encoded.loss_mask[first:]]
    kinds = encoded.kinds[-len(learnt) :]
    parts = [decode(learnt[kinds == kind]) for kind in (REASONING, TEXT, END)]
    assert ["It says clear.\n</think>", "\n\nSunny.", "<|im_end|>"] == parts
