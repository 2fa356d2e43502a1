"""Tokens of a text with the characters that each covers: by the tokenizer itself, or word by word with a memory.

Byte-level BPE cuts a text at its added tokens, each piece by a regular expression into words, and each word by its
merges, whatever stands around it. Most of the time goes into the expression, which the Rust library runs slowly, and
into the same words over and over. `WordTokenizer` does the first with Python's `regex` and looks the second up. It
takes texts of old and common characters only, of whose classes both engines think alike; `encode` of the tokenizer
itself defines what must come out.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol, Self
from unicodedata import is_normalized

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

    advances: by how many characters a token reaches further than the one before it; shared: 1 where it begins within
    the last character of that one, else 0.
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

    def __init__(self, tokenizer: Tokenizer, expression: str, added: dict[str, int], composes: bool) -> None:
        """Raises regex.error for an expression that Python's engine does not know."""
        self._model = tokenizer.model
        self._bytes = ByteLevel(add_prefix_space=False, use_regex=False)
        self._find = regex.compile(expression).findall
        self._groups = regex.compile(expression).groups
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split if added else None
        self._known: dict[str, Word] = {}
        self._composes = composes

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
            made = cls(tokenizer, expression, added, composes=parts["normalizer"] is not None)
        except regex.error:
            return None
        return None if made._groups else made

    def encode(self, text: str) -> WordTokens | None:
        """The tokens; None for a text that has to be encoded by the tokenizer itself."""
        if UNCOMMON.search(text) or (self._composes and not is_normalized("NFC", text)):
            return None
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
            for word in self._find(piece) if piece else ():
                parts = self._known.get(word) or self._cut_word(word)
                ids += parts[0]
                advances += parts[1]
                shared += parts[2]
        # Less where the expression leaves gaps, or where the model knows no token for a byte.
        return WordTokens(ids, advances, shared) if sum(advances) == len(text) else None

    def _cut_word(self, word: str) -> Word:
        """Ids, advances and shared characters of the tokens of a word."""
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
        if len(self._known) < KNOWN_WORDS:
            self._known[word] = cut
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
