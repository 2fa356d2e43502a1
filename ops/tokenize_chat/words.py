"""Tokens of a text with the characters that each covers: by the tokenizer itself, or word by word with a memory.

Byte-level BPE cuts a text at its added tokens, each piece by a regular expression into words, and each word by its
merges, whatever stands around it. Most of the time goes into the expression, which the Rust library runs slowly, and
into the same words over and over. `WordTokenizer` does the first with Python's `regex` and looks the second up. It
takes old and common characters only, of whose classes both engines think alike. A piece with others is cut further at
places where the expression cuts in any case, and the tokenizer itself encodes the parts that have them (or the piece,
under an expression of which no such places are known). `encode` of the tokenizer itself defines what must come out.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, Protocol, Self

import numpy as np
import regex
from tokenizers import Encoding, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

KNOWN_WORDS = 20_000  # kept; later ones are cut anew each time
# Neither blanks beyond ASCII, nor the long s and its ligatures, which are an "s" to one engine more than to the other.
UNCOMMON = re.compile(
    "[^\\t\\n\\r\\x20-\\x7e\u00a1-\u00ac\u00ae-\u017e\u0391-\u03a1\u03a3-\u03ce\u0410-\u044f\u2010-\u2027\u2030-\u205e"
    "\u3001-\u3003\u3008-\u3011\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uff01-\uff0f]"
)

# Expressions under which words never reach from a letter to a blank, a line's end or a mark of these behind it, and do
# not look back: those of Qwen2 to Qwen3, of Qwen3.5, of Llama 3 and of o200k.
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
)
LETTERS_END_WORDS = (
    _START + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS,
    _START + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BLANKS,
    _START + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS,
    _CASES + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS,
)
SAFE_PLACE = re.compile(r"(?<=[a-zA-Z\u3041-\u3096\u4e00-\u9fa5])(?=[ \n\u3001-\u3003\uff01\uff0c])")

Word = tuple[list[int], list[int], list[int]]


class Tokens(Protocol):
    """ids int64 [S] of a text's tokens, and the characters that they cover."""

    ids: np.ndarray

    def token_of(self, place: int) -> int | None:
        """The token that covers the character at `place`; None where none does."""

    def start_of(self, token: int) -> int:
        """The first character of a token."""


class EncodedTokens:
    """Tokens as the tokenizer itself returns them."""

    def __init__(self, encoding: Encoding) -> None:
        self.ids = np.array(encoding.ids, dtype=np.int64)
        self.token_of = encoding.char_to_token
        self._span = encoding.token_to_chars

    def start_of(self, token: int) -> int:
        return self._span(token)[0]


class WordTokens:
    """Tokens that follow each other without a gap.

    advances: by how many characters a token reaches further than the one before it; shared: how many of that one's
    last characters it begins with, where it has a part of them only.
    """

    def __init__(self, ids: list[int], advances: list[int], shared: list[int]) -> None:
        self.ids = np.array(ids, dtype=np.int64)
        self._ends = np.cumsum(np.array(advances, dtype=np.int64))
        self._shared = shared

    def token_of(self, place: int) -> int | None:
        token = int(np.searchsorted(self._ends, place, side="right"))
        return token if token < len(self.ids) else None

    def start_of(self, token: int) -> int:
        return int(self._ends[token - 1]) - self._shared[token] if token else 0


class WordTokenizer:
    """A byte-level BPE tokenizer, word by word; threads may share one."""

    def __init__(self, tokenizer: Tokenizer, expression: str, added: dict[str, int]) -> None:
        """Raises regex.error for an expression that Python's engine does not know."""
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._cuts_safely = expression in LETTERS_END_WORDS
        self._bytes = ByteLevel(add_prefix_space=False, use_regex=False)
        self._find = regex.compile(expression).findall
        self._groups = regex.compile(expression).groups
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split if added else None
        self._known: dict[str, Word] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """None for a tokenizer that does anything else than what this module describes."""
        parts = json.loads(tokenizer.to_str())
        expression = _expression(parts)
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        if expression is None or any(token[flag] for token in parts["added_tokens"] for flag in flags):
            return None
        added = {token["content"]: token["id"] for token in parts["added_tokens"]}
        try:
            made = cls(tokenizer, expression, added)
        except regex.error:
            return None
        return None if made._groups else made

    def encode(self, text: str) -> WordTokens | None:
        """The tokens; None for a text that has to be encoded by the tokenizer itself, as one that NFC composes."""
        ids: list[int] = []
        advances: list[int] = []
        shared: list[int] = []
        pieces = self._cut(text) if self._cut else [text]
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._added[piece])
                advances.append(len(piece))
                shared.append(0)
                continue
            for word in self._words(piece):
                parts = self._known.get(word) or self._cut_word(word)
                ids += parts[0]
                advances += parts[1]
                shared += parts[2]
        # Less where the expression leaves gaps, or where the model knows no token for a byte.
        return WordTokens(ids, advances, shared) if sum(advances) == len(text) else None

    def _words(self, piece: str) -> Iterator[str]:
        """The words of a piece; parts of it with uncommon characters are left whole."""
        if not UNCOMMON.search(piece):
            yield from self._find(piece)
            return
        places = [place.start() for place in SAFE_PLACE.finditer(piece)] if self._cuts_safely else []
        places = [0, *places, len(piece)]
        done = 0
        for uncommon in UNCOMMON.finditer(piece):
            if uncommon.start() < done:
                continue
            before = bisect_right(places, uncommon.start()) - 1
            start, end = places[before], places[bisect_left(places, uncommon.end(), lo=before + 1)]
            yield from self._find(piece[done:start])
            yield piece[start:end]
            done = end
        yield from self._find(piece[done:])

    def _cut_word(self, word: str) -> Word:
        """Ids, advances and shared characters of the tokens of a word, or of a part with uncommon characters."""
        cut = self._encode(word) if UNCOMMON.search(word) else self._merge(word)
        if len(self._known) < KNOWN_WORDS:
            self._known[word] = cut
        return cut

    def _encode(self, part: str) -> Word:
        """By the tokenizer itself; nothing where its tokens leave gaps or go back."""
        encoding = self._tokenizer.encode(part, add_special_tokens=False)
        cut: Word = (encoding.ids, [], [])
        reached = 0
        for start, end in encoding.offsets:
            if start > reached or end < reached:
                return [], [], []
            cut[1].append(end - reached)
            cut[2].append(reached - start)
            reached = end
        return cut

    def _merge(self, word: str) -> Word:
        """By the merges of the model."""
        tokens = [token for part, _ in self._bytes.pre_tokenize_str(word) for token in self._model.tokenize(part)]
        character_of = [place for place, character in enumerate(word) for _ in character.encode()]
        cut: Word = ([], [], [])
        first = end = 0
        for token in tokens:
            last = first + len(token.value) - 1  # a character of the value is a byte of the word
            if last >= len(character_of):
                break
            cut[0].append(token.id)
            cut[1].append(character_of[last] + 1 - end)
            cut[2].append(end - character_of[first])
            first, end = last + 1, character_of[last] + 1
        return cut


def _expression(parts: dict[str, Any]) -> str | None:
    """The expression that cuts pieces into words, or None where more than that happens. parts: tokenizer.json."""
    model, normalizer = parts["model"], parts["normalizer"]
    steps = (parts["pre_tokenizer"] or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = steps
    simple = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and not any(model.get(name) for name in ("unk_token", "byte_fallback"))
        and (normalizer is None or normalizer["type"] == "NFC")
        and _keeps_offsets(parts["post_processor"])
        and not byte_level["add_prefix_space"]
        and not byte_level["use_regex"]
        and (split["behavior"], split["invert"]) == ("Isolated", False)
    )
    return split["pattern"].get("Regex") if simple else None


def _keeps_offsets(step: dict[str, Any] | None) -> bool:
    """Whether a post-processor does nothing to tokens encoded without special ones."""
    if step is None or step["type"] == "TemplateProcessing":
        return True
    if step["type"] == "Sequence":
        return all(map(_keeps_offsets, step["processors"]))
    return step["type"] == "ByteLevel" and not step["trim_offsets"]
