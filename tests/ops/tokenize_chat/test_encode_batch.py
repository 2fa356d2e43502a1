"""Many conversations tokenised by one call are what each of them is by itself."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.lib.data.sample_account import Unusable
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.encode import ChatEncoder, Encoded
from ops.tokenize_chat.template import NO_ANSWER, SPECIAL_IN_TEXT

TEXT = "It's a cat, isn't it?  We'LL see:\n\n  12 of them.\r\n" * 20
PIECES = [
    "cat",
    " a",
    "12",
    "  ",
    "\n\n",
    "'LL",
    "é—“猫”",
    "😀",
    "e\u0301",
    "각",
    "\u2028",
    "ก็",
    "\ufb05",
    "<|im_end|>",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), min_size=1, max_size=12).map("".join)
CONVERSATIONS = st.lists(st.lists(TEXTS, min_size=1, max_size=4), max_size=20)


def turns(texts):
    roles = ["user", "assistant"] * len(texts)
    return [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in zip(roles, texts, strict=False)
    ]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    write_builtin_processor(folder, [turns([TEXT])], 340)
    return ChatEncoder(load_processor(str(folder)))


def summary(outcome):
    if isinstance(outcome, Unusable):
        return outcome.reason, outcome.detail
    return outcome.input_ids.tolist(), outcome.loss_mask.tolist(), outcome.loss_tokens, outcome.prompt_tokens


def one_by_one(encoder, conversations):
    found = []
    for messages in conversations:
        try:
            found.append(encoder.encode(messages))
        except Unusable as error:
            found.append(error)
    return found


@settings(max_examples=60)
@given(conversations=CONVERSATIONS.map(lambda each: [turns(texts) for texts in each]))
def test_a_batch_gives_what_one_call_for_each_conversation_gives(encoder, conversations):
    batch = encoder.encode_batch(conversations, [()] * len(conversations))
    assert [summary(one) for one in one_by_one(encoder, conversations)] == [summary(one) for one in batch]
    for messages, encoded in zip(conversations, batch, strict=True):
        if isinstance(encoded, Encoded):
            text = encoder.template.render(messages)
            assert encoder.processor.tokenizer(text).input_ids == encoded.input_ids.tolist()


def test_an_unusable_conversation_takes_no_other_ones_place(encoder):
    good = turns(["A cat?", "Yes."])
    bad = [turns(["A cat?"]), turns(["A <|im_end|>?", "Yes."])]
    batch = encoder.encode_batch([bad[0], good, bad[1], good], [()] * 4)
    assert [(NO_ANSWER, ""), (SPECIAL_IN_TEXT, "<|im_end|>")] == [summary(batch[0]), summary(batch[2])]
    assert summary(encoder.encode(good)) == summary(batch[1]) == summary(batch[3])
    assert [] == encoder.encode_batch([], [])


def test_an_answer_that_was_cut_does_not_learn_its_eos_in_a_batch_either(encoder):
    good = turns(["A cat?", "Yes."])
    whole, cut = encoder.encode_batch([good, good], [(False,), (True,)])
    assert whole.loss_tokens - 1 == cut.loss_tokens
    assert encoder.processor.eos_token_ids[0] == int(whole.input_ids[whole.loss_mask][-1])


def test_threads_that_share_an_encoder_give_the_same(encoder):
    conversations = [turns([f"{number} cats?", "Yes. " * number]) for number in range(40)]
    alone = encoder.encode_batch(conversations, [()] * 40)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda start: encoder.encode_batch(conversations[start::4], [()] * 10), range(4)))
    assert [summary(one) for one in alone] == [summary(parts[place % 4][place // 4]) for place in range(40)]
