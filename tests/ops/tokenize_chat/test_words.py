"""Tokenising word by word gives what the tokenizer itself gives, ids and characters, or nothing at all."""

import itertools
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from ops.tokenize_chat.builtin import SPECIAL_TOKENS, write_builtin_processor
from ops.tokenize_chat.words import LETTERS_END_WORDS, UNCOMMON, EncodedTokens, WordTokenizer

TEXT = "It's a cat, isn't it?  We'LL see:\n\n  12 of them.\r\n" * 20


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """tokenizer.json of a small tokenizer, with a tag that is no special token."""
    folder = tmp_path_factory.mktemp("words")
    write_builtin_processor(folder, [[{"role": "user", "content": [{"type": "text", "text": TEXT}]}]], 340)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "<think>\n")])
    return json.loads(tokenizer.to_str())


STYLES = dict(zip(("qwen2", "qwen3.5", "llama3", "o200k"), LETTERS_END_WORDS, strict=True))
ODD = r"\s+|[^\s]{1,5}"  # an expression under which no safe places are known
KINDS = list(itertools.product([*STYLES, "odd"], (False, True), (False, True)))


@pytest.fixture(scope="module")
def kinds(parts):
    """A tokenizer and its words for every expression, with and without NFC and ignore_merges."""
    made = {}
    for style, composes, ignores in KINDS:
        changed = json.loads(json.dumps(parts))
        changed["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = STYLES.get(style, ODD)
        changed["normalizer"] = {"type": "NFC"} if composes else None
        changed["model"]["ignore_merges"] = ignores
        tokenizer = Tokenizer.from_str(json.dumps(changed))
        made[style, composes, ignores] = tokenizer, WordTokenizer.of(tokenizer)
    return made


CUTS = st.sampled_from(
    [*SPECIAL_TOKENS[:3], "<think>", "<think>\n", "'s", "'LL", "  ", " \n", "\r\n", "\t", "cat", "12", "é—“猫”", "a b"]
)
UNCOMMON_CUTS = st.sampled_from(
    [
        "😀",
        "👩‍👩‍👧",
        "e\u0301",
        "\u0301",
        "\u017f",
        "\ufb05",
        "\u00a0",
        "\u2028",
        "\u3000",
        "각",
        "\u1100\u1161\u11a8",
        "ก็",
        "\u212b",
        "q\u0323\u0307",
    ]
)
CHINESE = st.sampled_from(["猫\uff0c", "你好。", "是\uff01", "か、", "ん "])
ANY = st.text(max_size=2) | st.text(st.characters(codec="latin-1"), max_size=5)
TEXTS = st.lists(CUTS | UNCOMMON_CUTS | CHINESE | ANY, max_size=30).map("".join)


def same(expected, got, text) -> bool:
    tokens, places = range(len(expected.ids)), range(len(text) + 1)
    return (
        expected.ids.tolist() == got.ids.tolist()
        and [expected.start_of(token) for token in tokens] == [got.start_of(token) for token in tokens]
        and [expected.token_of(place) for place in places] == [got.token_of(place) for place in places]
    )


@settings(max_examples=600)
@given(text=TEXTS, kind=st.sampled_from(KINDS))
def test_ids_and_characters_are_those_of_the_tokenizer_itself(kinds, text, kind):
    tokenizer, words = kinds[kind]
    got = words.encode(text)
    if got is None:
        assert UNCOMMON.search(text)
        return
    assert same(EncodedTokens(tokenizer.encode(text, add_special_tokens=False)), got, text)


@settings(max_examples=100)
@given(
    text=st.text(st.characters().filter(lambda character: not UNCOMMON.search(character)), max_size=30),
    kind=st.sampled_from(KINDS),
)
def test_common_characters_are_cut_as_by_the_tokenizer_itself(kinds, text, kind):
    tokenizer, words = kinds[kind]
    assert tokenizer.encode(text, add_special_tokens=False).ids == words.encode(text).ids.tolist()


def test_common_characters_are_composed_ones_that_join_with_none_before_them():
    """So that NFC leaves a text of them as it is."""
    common = [character for character in map(chr, range(0x110000)) if not UNCOMMON.search(character)]
    assert all(unicodedata.combining(character) == 0 for character in common)
    assert all(unicodedata.is_normalized("NFC", character) for character in common)
    joining = {unicodedata.normalize("NFD", character)[1:2] for character in map(chr, range(0x110000))}
    assert not joining & set(common)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("odd", ["\u00a0", "\u017f", "\ufb05", "\u2028", "e\u0301", "\x1c", "\U0001f600", "각"])
def test_only_the_part_around_an_uncommon_character_is_left_to_the_tokenizer_itself(kinds, kind, odd):
    tokenizer, words = kinds[kind]
    text = f"It is a cat {odd} cat is it. <|im_end|>\nWe see <think>{odd}{odd}<|im_end|> 猫\uff0c{odd}猫。"
    got = words.encode(text)
    if kind[1] and odd == "e\u0301":  # composed, the two characters leave a gap between the tokens
        assert got is None
        return
    assert same(EncodedTokens(tokenizer.encode(text, add_special_tokens=False)), got, text)


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
