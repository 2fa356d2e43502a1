"""The loss mask of every kind of chat template: with and without marks, with thoughts kept, stripped, or opened by the
generation prompt, and what the target is prompted with.
"""

import pytest
import torch
from chat_templates import PLAIN, QWEN3, QWEN25_VL, QWEN35, marked, unmarked
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from dsl.errors import ConfigError
from ops.lib.data.sample_account import Unusable
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.answer_spans import render_answers
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.template import Template

TEXTS = "What is it?\n\nA cat.\n\nSure? Very. I see ears, so it is one. Answer: Question: \n\n" * 20
TEMPLATES = {"qwen3": QWEN3, "qwen3.5": QWEN35, "qwen2.5-vl": QWEN25_VL, "plain": PLAIN}
THINKING = ("qwen3", "qwen3.5")
STRINGS_ONLY = ("qwen3", "plain")


def say(role: str, text: str, **more: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}], **more}


ASK, ASK_AGAIN = say("user", "What is it?"), say("user", "Sure?")
SHORT = [ASK, say("assistant", "A cat.")]
TWO_TURNS = [*SHORT, ASK_AGAIN, say("assistant", "Very.")]
THOUGHTFUL = [ASK, say("assistant", "A cat.", reasoning_content="I see ears.")]
THOUGHTS_IN_TEXT = [
    ASK,
    say("assistant", "<think>\nI see ears.\n</think>\n\nA cat."),
    ASK_AGAIN,
    say("assistant", "<think>\nSo it is one.\n</think>\n\nVery."),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A processor's folder for every template, marked and not; the tags of a thought are tokens, as in Qwen's."""
    first = tmp_path_factory.mktemp("templates") / "first"
    write_builtin_processor(first, [[say("user", TEXTS)]], vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(first)
    tags = [AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")]
    tokenizer.add_tokens(tags)
    image_processor = (first / "preprocessor_config.json").read_text()
    made = {}
    for name, template in TEMPLATES.items():
        for form in (unmarked, marked):
            folder = first.parent / f"{name}-{form.__name__}"
            tokenizer.chat_template = form(template)
            tokenizer.save_pretrained(folder)
            if name not in STRINGS_ONLY:
                (folder / "preprocessor_config.json").write_text(image_processor)
            made[name, form is marked] = folder
    return made


def encoder(folders, name, marks=False, **options) -> ChatEncoder:
    return ChatEncoder(load_processor(str(folders[name, marks])), **options)


@pytest.fixture(scope="module")
def known(folders):
    """An encoder for every template and form, and every enable_thinking that it reads."""
    return {
        (*key, thinking): encoder(folders, *key, enable_thinking=thinking)
        for key in folders
        for thinking in ((None, False, True) if key[0] in THINKING else (None,))
    }


def learnt(encoder: ChatEncoder, messages) -> tuple[list[str], str]:
    """The text of every run of learnt tokens, and that of the prompt."""
    encoded = encoder.encode(messages)
    decode = encoder.processor.tokenizer.decode
    bounds = (encoded.loss_mask[1:] != encoded.loss_mask[:-1]).nonzero()[:, 0] + 1
    runs = torch.tensor_split(encoded.input_ids, bounds)
    return [decode(run) for run in runs[1::2]], decode(encoded.input_ids[: encoded.prompt_tokens])


EMPTY = "<think>\n\n</think>\n\n"
CASES = {
    "no thoughts": ("qwen2.5-vl", TWO_TURNS, {}, ["A cat.<|im_end|>", "Very.<|im_end|>"]),
    "plain words": ("plain", TWO_TURNS, {}, [" A cat.<|im_end|>", " Very.<|im_end|>"]),
    "an empty thought is put in": ("qwen3", TWO_TURNS, {}, ["A cat.<|im_end|>", EMPTY + "Very.<|im_end|>"]),
    "an empty thought is in the prompt": (
        "qwen3",
        TWO_TURNS,
        {"enable_thinking": False},
        ["A cat.<|im_end|>", "Very.<|im_end|>"],
    ),
    "a thought in its own key": (
        "qwen3",
        THOUGHTFUL,
        {"enable_thinking": True},
        ["<think>\nI see ears.\n</think>\n\nA cat.<|im_end|>"],
    ),
    "earlier thoughts are stripped": (
        "qwen3",
        THOUGHTS_IN_TEXT,
        {},
        ["A cat.<|im_end|>", "<think>\nSo it is one.\n</think>\n\nVery.<|im_end|>"],
    ),
    "the prompt opens the thought": (
        "qwen3.5",
        THOUGHTS_IN_TEXT,
        {},
        ["A cat.<|im_end|>", "So it is one.\n</think>\n\nVery.<|im_end|>"],
    ),
    "an earlier thought that nothing closes, opened by the prompt": (
        "qwen3.5",
        [ASK, say("assistant", "<think>\nI see ears."), *THOUGHTS_IN_TEXT[2:]],
        {},
        ["I see ears.<|im_end|>", "So it is one.\n</think>\n\nVery.<|im_end|>"],
    ),
    "the prompt opens and closes the thought": (
        "qwen3.5",
        [ASK, say("assistant", "<think>\nI see ears.\n</think>\n\nA cat."), *TWO_TURNS[2:]],
        {"enable_thinking": False},
        ["A cat.<|im_end|>", "Very.<|im_end|>"],
    ),
    "blanks that the template strips": (
        "qwen3.5",
        [say("user", " What is it? \n"), say("assistant", "\n A cat. "), *TWO_TURNS[2:]],
        {"enable_thinking": False},
        ["A cat.<|im_end|>", "Very.<|im_end|>"],
    ),
    "blanks that the template keeps": (
        "qwen3",
        [say("user", "What is it? \n"), say("assistant", "  A cat. "), *TWO_TURNS[2:]],
        {"enable_thinking": False},
        ["  A cat. <|im_end|>", "Very.<|im_end|>"],
    ),
}


@pytest.mark.parametrize("marks", [False, True], ids=["by offsets", "by marks"])
@pytest.mark.parametrize(("name", "messages", "options", "expected"), CASES.values(), ids=CASES)
def test_answers_are_learnt_as_the_target_would_generate_them(folders, name, messages, options, expected, marks):
    some = encoder(folders, name, marks, **options)
    runs, prompt = learnt(some, messages)
    assert expected == runs
    serving = some.processor.tokenizer.apply_chat_template(
        [{"role": turn["role"], "content": turn["content"][0]["text"]} for turn in messages[:-1]],
        add_generation_prompt=True,
        tokenize=False,
        **options,
    )
    assert serving == prompt


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("messages", [SHORT, TWO_TURNS, THOUGHTS_IN_TEXT, [*TWO_TURNS, *THOUGHTS_IN_TEXT]])
def test_marks_and_offsets_give_the_same_mask(folders, name, train_on, messages):
    thoughts = {} if name in ("plain", "qwen2.5-vl") else {"enable_thinking": "<think>" in str(messages)}
    masks = [encoder(folders, name, marks, train_on=train_on, **thoughts).encode(messages) for marks in (False, True)]
    assert masks[0].input_ids.tolist() == masks[1].input_ids.tolist()
    assert masks[0].loss_mask.tolist() == masks[1].loss_mask.tolist()
    assert masks[0].prompt_tokens == masks[1].prompt_tokens


WORDS = st.sampled_from(["cat", "<think>", "</think>", "Answer:", "assistant", "\n", "\n\n", " ", ".", "é", "猫"])
SAYING = st.lists(WORDS, min_size=1, max_size=6).map("".join).filter(str.strip)


def outcomes_of(known, name, thinking, messages) -> list:
    """The outcomes of the unmarked and the marked template: ids, mask and prompt length, or the reason for none."""
    outcomes = []
    for marks in (False, True):
        try:
            encoded = known[name, marks, thinking].encode(messages)
            outcomes.append((encoded.input_ids.tolist(), encoded.loss_mask.tolist(), encoded.prompt_tokens))
        except Unusable as error:
            outcomes.append(error.reason)
    return outcomes


@settings(max_examples=60)
@given(turns=st.lists(st.tuples(SAYING, SAYING), min_size=1, max_size=4), name=st.sampled_from([*TEMPLATES]))
@example(turns=[("cat", "<think>\ncat"), ("cat", "cat</think>")], name="qwen3.5")
def test_marks_and_offsets_agree_whatever_the_texts_or_both_refuse(known, turns, name):
    messages = [say(*turn) for ask, answer in turns for turn in (("user", ask), ("assistant", answer))]
    by_offsets, by_marks = outcomes_of(known, name, None, messages)
    assert by_offsets == by_marks


THOUGHT = st.sampled_from(["", "<think>\nI see.\n</think>\n\n", None])
TURN = st.tuples(st.sampled_from(["system", "user", "assistant", "assistant"]), SAYING, THOUGHT)


@settings(max_examples=150)
@given(turns=st.lists(TURN, max_size=5), last=SAYING, key=st.sampled_from([*TEMPLATES]), thinking=st.booleans())
def test_roles_in_any_order_give_one_mask_by_marks_and_offsets_or_the_sample_is_dropped(
    known, turns, last, key, thinking
):
    """Answers in a row, a system turn in the middle, no question at all: never an error, never two masks."""
    messages = [turn_of(*turn) for turn in [*turns, ("assistant", last, "")]]
    by_offsets, by_marks = outcomes_of(known, key, thinking if key in THINKING else None, messages)
    if not isinstance(by_offsets, str) and not isinstance(by_marks, str):
        assert by_offsets == by_marks


ODD = [*SHORT, say("assistant", "Very.")]
ODD_AND_THOUGHTFUL = [*THOUGHTFUL, say("assistant", "Very.")]
DROPPED, UNFIT = "answer not found in the rendered text", "reasoning does not fit the generation prompt"


@pytest.mark.parametrize("marks", [False, True], ids=["by offsets", "by marks"])
@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("qwen3", ODD, DROPPED),
        ("qwen3.5", ODD, ["A cat.<|im_end|>", "Very.<|im_end|>"]),
        ("qwen3", ODD_AND_THOUGHTFUL, UNFIT),
        ("qwen3.5", ODD_AND_THOUGHTFUL, UNFIT),
    ],
)
def test_answers_in_a_row_are_learnt_without_what_is_prompted_or_dropped(folders, name, messages, expected, marks):
    some = encoder(folders, name, marks, enable_thinking=False)
    try:
        assert expected == learnt(some, messages)[0]
    except Unusable as error:
        assert expected == error.reason


@pytest.mark.parametrize("marks", [False, True], ids=["by offsets", "by marks"])
def test_an_earlier_answer_with_a_part_of_the_prompted_thought_is_dropped(folders, marks):
    messages = [ASK, say("assistant", "<think>\n\n</think>", reasoning_content="I see ears."), *TWO_TURNS[2:]]
    with pytest.raises(Unusable) as raised:
        encoder(folders, "qwen3.5", marks, enable_thinking=False).encode(messages)
    assert UNFIT == raised.value.reason


@pytest.mark.parametrize("form", [unmarked, marked])
def test_an_answer_that_no_eos_closes_before_the_next_one_is_dropped(folders, form):
    """Else the mask would go on over the next question."""
    processor = load_processor(str(folders["qwen3", False]))
    processor.tokenizer.chat_template = form(
        "{% for message in messages %}{% if message.role == 'user' %}\n\nQuestion: {{ message.content }}{% else %}"
        "\n\nAnswer:{begin} {{ message.content }}{% if loop.last %}<|im_end|>{% endif %}{end}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}\n\nAnswer:{% endif %}"
    )
    some = ChatEncoder(processor)
    assert [" A cat.<|im_end|>"] == learnt(some, SHORT)[0]
    with pytest.raises(Unusable) as raised:
        some.encode(TWO_TURNS)
    assert "no EOS token behind an answer" == raised.value.reason
    assert [" Very.<|im_end|>"] == learnt(ChatEncoder(processor, train_on="last"), TWO_TURNS)[0]


def turn_of(role, text, thought):
    """thought: in front of the answer's text; None: in a key of its own."""
    if role != "assistant":
        return say(role, text)
    return say(role, text, reasoning_content="I see.") if thought is None else say(role, thought + text)


@pytest.mark.parametrize("marks", [False, True])
def test_train_on_last_learns_the_last_answer_only(folders, marks):
    runs, _ = learnt(encoder(folders, "qwen3", marks, train_on="last", enable_thinking=False), TWO_TURNS)
    assert ["Very.<|im_end|>"] == runs


def test_ids_and_mask_equal_what_transformers_returns_for_a_marked_template(folders):
    """The marks of these templates end with the EOS, so that the library's own mask is the loss mask."""
    for name in ("qwen3", "plain"):
        some = encoder(folders, name, marks=True)
        messages = [{**turn, "content": turn["content"][0]["text"]} for turn in TWO_TURNS]
        expected = some.processor.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        encoded = some.encode(TWO_TURNS)
        assert expected["input_ids"] == encoded.input_ids.tolist()
        assert expected["assistant_masks"] == encoded.loss_mask.int().tolist()


@pytest.mark.parametrize(
    "marked_part", ["{begin}{{ message.content }}{end}<|im_end|>\n", "{begin}{{ message.content }}<|im_end|>\n{end}"]
)
def test_the_eos_is_learnt_and_nothing_behind_it_wherever_the_mark_ends(folders, tmp_path, marked_part):
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}" + marked_part + "{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    processor = load_processor(str(folders["qwen3", False]))
    processor.tokenizer.chat_template = marked(template)
    assert ["A cat.<|im_end|>", "Very.<|im_end|>"] == learnt(ChatEncoder(processor), TWO_TURNS)[0]


def test_an_answer_without_a_thought_behind_a_prompt_that_opens_one_is_dropped_with_a_hint(folders):
    with pytest.raises(Unusable) as raised:
        encoder(folders, "qwen3.5").encode(SHORT)
    assert "answer begins inside a token" == raised.value.reason
    assert "<think>" in raised.value.detail


def test_a_thought_behind_a_prompt_that_closes_it_is_dropped_with_a_hint(folders):
    with pytest.raises(Unusable) as raised:
        encoder(folders, "qwen3", enable_thinking=False).encode(THOUGHTFUL)
    assert "reasoning does not fit the generation prompt" == raised.value.reason
    assert "enable_thinking" in raised.value.detail


def test_enable_thinking_needs_a_template_that_reads_it(folders):
    with pytest.raises(ConfigError, match="does not read enable_thinking"):
        encoder(folders, "qwen2.5-vl", enable_thinking=False)


def test_a_message_that_the_template_takes_amiss_cannot_be_used(folders):
    processor = load_processor(str(folders["qwen3.5", False]))
    processor.tokenizer.chat_template = "{{ 'text: ' + messages[0].content }}"  # a list of parts here
    with pytest.raises(Unusable, match="chat template fails on the messages"):
        ChatEncoder(processor).encode(SHORT)


def test_marks_around_nothing_leave_the_answer_unfound(folders):
    processor = load_processor(str(folders["qwen3", False]))
    processor.tokenizer.chat_template = unmarked(QWEN3) + "{% generation %}{% endgeneration %}"
    with pytest.raises(Unusable, match="marks nothing of the last answer"):
        ChatEncoder(processor).encode(SHORT)


def test_the_prompt_is_the_one_that_encode_counts(folders):
    for name in TEMPLATES:
        some = encoder(folders, name)
        messages = THOUGHTS_IN_TEXT if name == "qwen3.5" else TWO_TURNS
        encoded = some.encode(messages)
        assert encoded.input_ids[: encoded.prompt_tokens].tolist() == some.prompt(messages[:-1]).tolist()


def test_earlier_answers_are_found_with_at_most_three_renderings(folders):
    """However long the conversation: a thinking template costs no rendering for every answer."""
    template = Template(load_processor(str(folders["qwen3.5", False])), enable_thinking=False)
    asked = []

    def counted(renderings):
        texts = None
        while True:
            try:
                wanted = renderings.send(texts)
            except StopIteration as end:
                return end.value
            asked.extend(len(one.messages) for one in wanted)
            texts = yield wanted

    rendered = template.finish(counted(render_answers(template.has_marks, TWO_TURNS * 5, last_only=False)))
    assert [20, 19, 20] == asked
    assert ["A cat.", "Very."] * 5 == [rendered.text[start:].split("<|im_end|>")[0] for start, _ in rendered.answers]
