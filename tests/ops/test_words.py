"""Tokenising word by word gives what the tokenizer itself gives, ids and characters, or nothing at all."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from ops.tokenize_chat.builtin import SPECIAL_TOKENS, write_builtin_processor
from ops.tokenize_chat.words import UNCOMMON, EncodedTokens, WordTokenizer

TEXT = "It's a cat, isn't it?  We'LL see:\n\n  12 of them.\r\n" * 20


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """tokenizer.json of a small tokenizer, with a tag that is no special token."""
    folder = tmp_path_factory.mktemp("words")
    write_builtin_processor(folder, [[{"role": "user", "content": [{"type": "text", "text": TEXT}]}]], 340)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "<think>\n")])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def both(parts):
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    return tokenizer, WordTokenizer.of(tokenizer)


CUTS = st.sampled_from(
    [*SPECIAL_TOKENS[:3], "<think>", "<think>\n", "'s", "'LL", "  ", " \n", "\r\n", "\t", "cat", "12", "é—“猫”"]
)
ANY = st.text(max_size=2) | st.text(st.characters(codec="latin-1"), max_size=5)
TEXTS = st.lists(CUTS | ANY, max_size=30).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_ids_and_characters_are_those_of_the_tokenizer_itself(both, text):
    tokenizer, words = both
    expected = EncodedTokens(tokenizer.encode(text, add_special_tokens=False))
    got = words.encode(text)
    if got is None:
        assert UNCOMMON.search(text)
        return
    assert expected.ids.tolist() == got.ids.tolist()
    assert [expected.start_of(token) for token in range(len(expected.ids))] == [
        got.start_of(token) for token in range(len(got.ids))
    ]
    assert [expected.token_of(place) for place in range(len(text) + 1)] == [
        got.token_of(place) for place in range(len(text) + 1)
    ]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters().filter(lambda character: not UNCOMMON.search(character)), max_size=30))
def test_common_characters_are_cut_as_by_the_tokenizer_itself(both, text):
    tokenizer, words = both
    assert tokenizer.encode(text, add_special_tokens=False).ids == words.encode(text).ids.tolist()


@pytest.mark.parametrize("character", ["\u00a0", "\u017f", "\ufb05", "\u2028", "\u0301", "\x1c", "\U0001f600"])
def test_uncommon_characters_are_left_to_the_tokenizer_itself(both, character):
    assert both[1].encode(f"a {character} cat") is None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}},
        {"post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"model": {"dropout": 0.5}},
        {"added_tokens": {"lstrip": True}},
        {"added_tokens": {"normalized": True}},
    ],
)
def test_a_tokenizer_that_does_more_is_left_to_itself(parts, change):
    changed = json.loads(json.dumps(parts))
    ((name, value),) = change.items()
    if name == "added_tokens":
        changed[name][0].update(value)
    else:
        changed[name] = {**changed[name], **value} if name == "model" else value
    assert WordTokenizer.of(Tokenizer.from_str(json.dumps(changed))) is None
