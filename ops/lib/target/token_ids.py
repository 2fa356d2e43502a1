"""The ids of a checkpoint directory: its mask token, and those at which texts begin and end. Loads no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from dsl.errors import DataError, on_one_line
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import shown_json
from ops.lib.vision.family_config import MASK_TOKENS, family_mask_id, with_defaults
from ops.lib.vision.processor_files import template_texts

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION)
ENDS = ("bos_token_id", "eos_token_id")
UNUSED = ("reserved", "unused", "extra_id", "placeholder")  # parts of names of special tokens for later use
# An added token for later use that the tokenizer does not call special: a word of a vocabulary has no brackets.
NAMED_UNUSED = re.compile(rf"^[<\[].*({'|'.join(UNUSED)}).*[>\]]$")
# Parts of names of tokens with a meaning; a template that writes the role between brackets does not show its tokens.
ROLES = ("system", "developer", "user", "human", "assistant", "model", "tool", "function", "observation")
MEANT = ("end", "eos", "bos", "pad", "unk", "start", "begin", "eot", *ROLES)
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")  # of tokenizer_config.json
NOT_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
SHOWN = 3  # ids in a message


@frozen
class Vocabulary:
    """The vocabulary of a checkpoint.

    size: rows of the embedding. ordinary: ids that texts are split into; special: the others, id -> text.
    eos_token_ids: at which an answer ends, as `load_processor` finds them, None where the tokenizer's own is not known;
    pad_token_id: None likewise. in_use: special tokens with a meaning of their own (bos, eos, pad, unk), and the text
    of the chat template, in which others may stand. unmade: ids of ordinary tokens that no valid text makes, and why.
    """

    size: int
    ordinary: Mapping[int, str]
    special: Mapping[int, str]
    model_type: str
    eos_token_ids: tuple[int, ...] | None = None
    pad_token_id: int | None = None
    in_use: frozenset[str] = frozenset()
    chat_template: str = ""
    unmade: Mapping[int, str] = Factory(dict)

    @classmethod
    def of(cls, directory: Path) -> Vocabulary | None:
        """The vocabulary of a checkpoint; None without a readable tokenizer.json, or without a size in its config."""
        files = tuple(directory / name for name in FILES)
        return _read(directory, tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files))

    @property
    def known_mask_id(self) -> int | None:
        """The id of the tokenizer's own mask token, else that of the family if the model has it, as in
        `load_processor`.
        """
        ids = {token: number for tokens in (self.ordinary, self.special) for number, token in tokens.items()}
        for token in MASK_TOKENS:
            if token in ids:
                return ids[token]
        number = family_mask_id(self.model_type)
        return number if number is not None and number < self.size else None

    def possible_mask_ids(self) -> Iterator[tuple[int, str]]:
        """Ids that no text gives, and why: embeddings without a token, then special tokens for later use, the last of
        other special tokens that nothing uses, bytes that are no text, and at the end an ordinary token, the rarest,
        which a text may give.
        """
        for number in range(self.size):
            if number not in self.ordinary and number not in self.special:
                yield number, "an embedding without a token of the tokenizer"
        for number, token in sorted(self.special.items()):
            if number < self.size and any(part in token for part in UNUSED):
                yield number, f"the unused special token {on_one_line(token)}"
        for number, token in sorted(self.ordinary.items()):
            if number < self.size and NAMED_UNUSED.match(token):
                yield number, f"the unused token {on_one_line(token)}"
        for number, token in sorted(self.special.items(), reverse=True):
            used = token in self.in_use or token in self.chat_template or any(part in token.lower() for part in MEANT)
            if number < self.size and not used:
                yield number, f"the special token {on_one_line(token)}, which the chat template does not have"
        yield from self.unmade.items()
        rarest = max((number for number in self.ordinary if number < self.size), default=None)
        if rarest is not None:
            yield rarest, f"the last token of the vocabulary, {shown_json(self.ordinary[rarest])}, which is rare"

    def is_of_texts(self, number: int) -> bool:
        """Whether a text can give an id: that of a word, and not of a token for later use or of no valid text."""
        token = self.ordinary.get(number)
        return (
            token is not None
            and token not in MASK_TOKENS
            and not NAMED_UNUSED.match(token)
            and number not in self.unmade
        )


@lru_cache(maxsize=8)  # a plan asks several times, and a tokenizer.json has ten megabytes
def _read(directory: Path, _changed: tuple[int, ...]) -> Vocabulary | None:
    config, tokenizer = with_defaults(read_settings(directory / CONFIG)), read_settings(directory / TOKENIZER)
    text = _text_part(config)
    size = text.get("vocab_size")
    if not tokenizer or not isinstance(size, int):
        return None
    try:
        ordinary, special = _tokens(tokenizer)
    except (TypeError, ValueError, KeyError, AttributeError):  # the library that loads it reports it
        return None
    ids = {token: number for tokens in (ordinary, special) for number, token in tokens.items()}
    settings = read_settings(directory / TOKENIZER_CONFIG)
    eos, pad = (ids.get(token_text(settings.get(name))) for name in ("eos_token", "pad_token"))
    others = _ids(read_settings(directory / GENERATION).get("eos_token_id"))
    return Vocabulary(
        size,
        ordinary,
        special,
        str(config.get("model_type")),
        eos_token_ids=None if eos is None else tuple(dict.fromkeys([eos, *others])),
        pad_token_id=text.get("pad_token_id") if pad is None else pad,
        in_use=frozenset(_in_use(directory, config, text, special)),
        chat_template="\n".join(template_texts(directory)),
        unmade=_unmade(tokenizer, ordinary, size),
    )


def _unmade(tokenizer: Mapping[str, Any], ordinary: Mapping[int, str], size: int) -> dict[int, str]:
    """Ids of bytes that UTF-8 does not have, in a byte-level vocabulary, which writes them as characters of the same
    number.
    """
    if '"ByteLevel"' not in json.dumps(tokenizer.get("decoder")):
        return {}
    bytes_of = {chr(byte): byte for byte in NOT_IN_UTF8}
    return {
        number: f"the byte 0x{bytes_of[token]:02X}, which no valid text has"
        for number, token in sorted(ordinary.items())
        if number < size and token in bytes_of
    }


def _in_use(
    directory: Path, config: Mapping[str, Any], text: Mapping[str, Any], special: Mapping[int, str]
) -> Iterator[str]:
    settings = read_settings(directory / TOKENIZER_CONFIG)
    yield from (token_text(settings[name]) for name in NAMED if settings.get(name))
    for _, part in _naming(directory, config, text):
        for name in (*ENDS, "pad_token_id"):
            yield from (special[number] for number in _ids(part.get(name)) if number in special)


def token_text(token: Any) -> str:
    """The text of a token in tokenizer_config.json, which holds it directly or in a table."""
    return str(token.get("content") if isinstance(token, Mapping) else token)


def _tokens(tokenizer: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, str]]:
    """The ordinary and the special tokens of a tokenizer.json."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    named = vocab.items() if isinstance(vocab, Mapping) else ((row[0], number) for number, row in enumerate(vocab))
    ids = {number: str(token) for token, number in named}  # of Unigram: a list of [token, score]
    special = {}
    for added in tokenizer.get("added_tokens") or ():
        ids[added["id"]] = str(added["content"])
        if added.get("special"):
            special[added["id"]] = ids[added["id"]]
    return {number: token for number, token in ids.items() if number not in special}, special


def mask_mistakes(directory: Path, mask_token_id: int | None) -> list[str]:
    """A text on why no mask token is known or the given one is unsuitable; empty if it is fine or the tokenizer
    unreadable.
    """
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None:
        return []
    number = vocabulary.known_mask_id if mask_token_id is None else mask_token_id
    if number is None:
        return [f"{directory}: no mask token is known for this model; {_remedy(vocabulary)}"]
    if not 0 <= number < vocabulary.size:
        outside = f"mask_token_id {number} is outside the vocabulary of {vocabulary.size} in {directory}"
        return [f"{outside}; {_remedy(vocabulary)}"]
    wrong = mask_of_texts(number, vocabulary.eos_token_ids or (), {vocabulary.pad_token_id})
    return [f"{wrong}; {_remedy(vocabulary)}"] if wrong else []


def mask_of_texts(mask_token_id: int, eos_token_ids: Collection[int], pad_token_ids: Collection[int | None]) -> str:
    """A text on why an id cannot be the mask token, since it is a pad or EOS id; empty if it can."""
    if mask_token_id not in eos_token_ids and mask_token_id not in pad_token_ids:
        return ""
    return f"mask_token_id {mask_token_id} is the pad or an EOS id of the target, and must be an id that no text gives"


def mask_warning(directory: Path, mask_token_id: int) -> str | None:
    """A warning if normal text can contain the mask token, with an id that gives none or the statement that there is
    none; None if it cannot, or if the tokenizer cannot be read.
    """
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None or not vocabulary.is_of_texts(mask_token_id):
        return None
    warning = (
        f"mask_token_id {mask_token_id} is the id that the tokenizer gives to the text "
        f"{shown_json(vocabulary.ordinary[mask_token_id])}, which then looks masked to the draft; "
        "set an id that no text gives"
    )
    for number, why in vocabulary.possible_mask_ids():
        if not vocabulary.is_of_texts(number):
            return f"{warning}, such as {number} ({why})"
    return f"{warning}; this vocabulary has none: take one that the data does not have, as `dflow init` does"


def _remedy(vocabulary: Vocabulary) -> str:
    found = list(islice(vocabulary.possible_mask_ids(), SHOWN))
    if not found:
        return "set mask_token_id to an id that no text gives"
    listed = ", ".join(f"{number} ({why})" for number, why in found)
    return f"set mask_token_id to an id that no text gives, such as {listed}"


def foreign_tokens(
    vocab_size: int, eos_token_ids: Collection[int], target_size: int, target_eos: Collection[int]
) -> str:
    """A text on why tokens cannot belong to a target's vocabulary; empty where they may.

    A tokenizer of another model with small ids would otherwise go unnoticed, and the draft would be trained on
    nonsense.
    """
    if vocab_size > target_size:
        why = f"they need {vocab_size} embeddings, and the target has {target_size}"
    elif set(eos_token_ids).isdisjoint(target_eos):
        why = f"their EOS ids are {list(eos_token_ids)}, and the target ends at {list(target_eos)}"
    else:
        return ""
    return f"the tokens do not fit the target: {why}; give tokenize_chat the target's checkpoint as processor"


def check_ends(directory: Path) -> None:
    """Raises DataError for ids of the begin or end of a text that the model's vocabulary does not have."""
    config = with_defaults(read_settings(directory / CONFIG))
    text = _text_part(config)
    size = text.get("vocab_size")
    if not isinstance(size, int):
        return
    wrong = [
        f"{name} {shown_json(number)} of {file}"
        for file, settings in _naming(directory, config, text)
        for name in ENDS
        for number in _ids(settings.get(name))
        if not isinstance(number, int) or number >= size
    ]
    if wrong:
        raise DataError(
            f"{directory}: outside the model's vocabulary of {size}: {', '.join(dict.fromkeys(wrong))}; correct the "
            "ids, or copy the file again from the checkpoint's source"
        )


def check_added_tokens(directory: Path) -> None:
    """Check that the model has an embedding for every token of the tokenizer. Raises DataError."""
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None:
        return
    beyond = {number: token for number, token in all_tokens(directory, vocabulary) if number >= vocabulary.size}
    if beyond:
        listed = ", ".join(f"{number} ({on_one_line(beyond[number])})" for number in sorted(beyond)[:SHOWN])
        raise DataError(
            f"{directory}: {len(beyond)} tokens of the tokenizer lie beyond the {vocabulary.size} embeddings of the "
            f"model, such as {listed}; resize the embedding (`resize_token_embeddings` of transformers) and save the "
            "model with its config, or remove these tokens from the tokenizer's files"
        )


def all_tokens(directory: Path, vocabulary: Vocabulary) -> Iterator[tuple[int, str]]:
    """All tokens of a checkpoint: those of tokenizer.json, and those added by other files."""
    yield from vocabulary.ordinary.items()
    yield from vocabulary.special.items()
    decoder = read_settings(directory / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if str(number).isdecimal():
            yield int(number), str(token.get("content")) if isinstance(token, Mapping) else str(token)
    for text, number in read_settings(directory / "added_tokens.json").items():
        if isinstance(number, int):
            yield number, text


def end_ids(directory: Path) -> frozenset[int]:
    """The ids at which a text of the model ends, as config.json and generation_config.json name them."""
    config = read_settings(directory / CONFIG)
    named = (part.get("eos_token_id") for _, part in _naming(directory, config, _text_part(config)))
    return frozenset(number for ids in named for number in _ids(ids) if isinstance(number, int))


def _naming(
    directory: Path, config: Mapping[str, Any], text: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield CONFIG, config
    yield CONFIG, text
    yield GENERATION, read_settings(directory / GENERATION)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def _ids(value: Any) -> list[Any]:
    """The ids in a JSON member, as a list without null. In a wrong file some may be no numbers."""
    values = value if isinstance(value, list) else [value]
    return [number for number in values if number is not None]
