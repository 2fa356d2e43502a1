"""The ids of a checkpoint directory: its mask token, and those at which texts begin and end. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError, on_one_line
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import shown_json
from ops.lib.vision.model_types import MASK_TOKENS, SUPPORTED, family_mask_id

TOKENIZER = "tokenizer.json"
ENDS = ("bos_token_id", "eos_token_id")
UNUSED = ("reserved", "unused", "extra_id", "placeholder")  # parts of names of special tokens for later use
SHOWN = 3  # ids in a message


@frozen
class Vocabulary:
    """size: rows of the embedding. ordinary: ids that texts are split into; special: the others, id -> text."""

    size: int
    ordinary: Mapping[int, str]
    special: Mapping[int, str]
    model_type: str

    @classmethod
    def of(cls, directory: Path) -> Vocabulary | None:
        """That of a checkpoint; None without a readable tokenizer.json, or without a size in its config."""
        config = read_settings(directory / "config.json")
        size = _text_part(config).get("vocab_size")
        tokenizer = read_settings(directory / TOKENIZER)
        if not tokenizer or not isinstance(size, int):
            return None
        try:
            ordinary, special = _tokens(tokenizer)
        except (TypeError, ValueError, KeyError, AttributeError):  # the library that loads it reports it
            return None
        return cls(size, ordinary, special, str(config.get("model_type")))

    @property
    def known_mask_id(self) -> int | None:
        """The tokenizer's own mask token, else the family's if the model has it: as `load_processor` finds it."""
        ids = {token: number for tokens in (self.ordinary, self.special) for number, token in tokens.items()}
        for token in MASK_TOKENS:
            if token in ids:
                return ids[token]
        if self.model_type not in SUPPORTED or family_mask_id(self.model_type) >= self.size:
            return None
        return family_mask_id(self.model_type)

    def possible_mask_ids(self) -> Iterator[tuple[int, str]]:
        """Ids that no text gives, and why: embeddings without a token, then special tokens for later use."""
        for number in range(self.size):
            if number not in self.ordinary and number not in self.special:
                yield number, "an embedding without a token of the tokenizer"
        for number, token in sorted(self.special.items()):
            if number < self.size and any(part in token for part in UNUSED):
                yield number, f"the unused special token {on_one_line(token)}"


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
    """Why no mask token is known, or why the given one cannot be it; nothing if the tokenizer cannot be read."""
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None:
        return []
    number = vocabulary.known_mask_id if mask_token_id is None else mask_token_id
    if number is None:
        return [f"{directory}: no mask token is known for this model; {_remedy(vocabulary)}"]
    if not 0 <= number < vocabulary.size:
        outside = f"mask_token_id {number} is outside the vocabulary of {vocabulary.size} in {directory}"
        return [f"{outside}; {_remedy(vocabulary)}"]
    return []


def mask_warning(directory: Path, mask_token_id: int) -> str | None:
    """A warning of a mask token that texts give; None if they do not, or if the tokenizer cannot be read."""
    vocabulary = Vocabulary.of(directory)
    token = None if vocabulary is None else vocabulary.ordinary.get(mask_token_id)
    if token is None or token in MASK_TOKENS:
        return None
    return (
        f"mask_token_id {mask_token_id} is the id that the tokenizer gives to the text {shown_json(token)}, which then "
        "looks masked to the draft; set an id that no text gives"
    )


def _remedy(vocabulary: Vocabulary) -> str:
    found = list(islice(vocabulary.possible_mask_ids(), SHOWN))
    if not found:
        return "set mask_token_id to an id that no text gives"
    listed = ", ".join(f"{number} ({why})" for number, why in found)
    return f"set mask_token_id to an id that no text gives, such as {listed}"


def check_ends(directory: Path) -> None:
    """Raises DataError for ids of the begin or end of a text that the model's vocabulary does not have."""
    config = read_settings(directory / "config.json")
    text = _text_part(config)
    size = text.get("vocab_size")
    if not isinstance(size, int):
        return
    wrong = [
        f"{name} {number} of {file}"
        for file, settings in _naming(directory, config, text)
        for name in ENDS
        for number in _ids(settings.get(name))
        if number >= size
    ]
    if wrong:
        raise DataError(
            f"{directory}: outside the model's vocabulary of {size}: {', '.join(dict.fromkeys(wrong))}; correct the "
            "ids, or copy the file again from the checkpoint's source"
        )


def check_added_tokens(directory: Path) -> None:
    """Raises DataError for tokens of the tokenizer that the model has no embedding for."""
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None:
        return
    beyond = {number: token for number, token in _all_tokens(directory, vocabulary) if number >= vocabulary.size}
    if beyond:
        listed = ", ".join(f"{number} ({on_one_line(beyond[number])})" for number in sorted(beyond)[:SHOWN])
        raise DataError(
            f"{directory}: {len(beyond)} tokens of the tokenizer lie beyond the {vocabulary.size} embeddings of the "
            f"model, such as {listed}; resize the embedding (`resize_token_embeddings` of transformers) and save the "
            "model with its config, or remove these tokens from the tokenizer's files"
        )


def _all_tokens(directory: Path, vocabulary: Vocabulary) -> Iterator[tuple[int, str]]:
    """Those of tokenizer.json, and those that the files beside it add."""
    yield from vocabulary.ordinary.items()
    yield from vocabulary.special.items()
    decoder = read_settings(directory / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if str(number).isdecimal():
            yield int(number), str(token.get("content")) if isinstance(token, Mapping) else str(token)
    for text, number in read_settings(directory / "added_tokens.json").items():
        if isinstance(number, int):
            yield number, text


def _naming(
    directory: Path, config: Mapping[str, Any], text: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "config.json", config
    yield "config.json", text
    yield "generation_config.json", read_settings(directory / "generation_config.json")


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int)]
