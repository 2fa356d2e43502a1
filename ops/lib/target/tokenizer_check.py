"""Signs that a checkpoint's tokenizer is another model's, by its files. Loads no torch.

Each file is valid by itself, and nothing else refuses them: a draft would be trained on tokens that the target does not
know. None of the signs is certain, so they are warnings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import shown_json
from ops.lib.target.token_ids import (
    CONFIG,
    GENERATION,
    SHOWN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Vocabulary,
    all_tokens,
    end_ids,
    token_text,
)

SPECIAL_TOKENS = "special_tokens_map.json"
# A text that a template means as one token: brackets with a bar on one side at least.
MARK = re.compile(r"<(?:[|\uff5c][^<>\s'\"{}]{1,60}|[^<>\s'\"{}]{1,60}[|\uff5c])>")
# Parts of marks that a plain conversation does not have; a tokenizer may lack them.
SELDOM = re.compile(
    "tool|function|call|observation|python|plugin|interpreter|image|img|video|audio|vision|media|box|document|citation"
    "|think|reason",
    re.IGNORECASE,
)
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
EOS = "eos_token"  # which a template may write by this name


def tokenizer_warnings(directory: Path, templates: Iterable[str]) -> tuple[str, ...]:
    """A warning with all signs that tokenizer.json is not the one of the checkpoint's other files; empty without any,
    and without a readable tokenizer.json.

    templates: the chat templates that are used with it.
    """
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None:
        return ()
    ids = {text: number for number, text in all_tokens(directory, vocabulary)}
    ids |= {text: number for part in (vocabulary.ordinary, vocabulary.special) for number, text in part.items()}
    eos = _eos_token(directory)
    named = end_ids(directory)
    found = [*_moved(directory, vocabulary), *_wrong_eos(vocabulary, ids, eos, named)]
    ends = {text for text, number in ids.items() if text == eos or number in named}
    for template in templates:
        found += _of_template(template, ids, ends, is_suspected=bool(found))
    if not found:
        return ()
    return (
        f"the tokenizer of {directory} does not fit its other files: {'; '.join(dict.fromkeys(found))}. Copy "
        f"{TOKENIZER}, {TOKENIZER_CONFIG}, {GENERATION} and the chat template again, all from the target's source",
    )


def _moved(directory: Path, vocabulary: Vocabulary) -> Iterator[str]:
    """Tokens to which tokenizer_config.json gives ids of other tokens, some of them."""
    given = read_settings(directory / TOKENIZER_CONFIG).get("added_tokens_decoder")
    numbered = given.items() if isinstance(given, Mapping) else ()
    own = {**vocabulary.ordinary, **vocabulary.special}
    wrong = [
        f"{number} is {shown_json(token_text(token))} there and {shown_json(own[int(number)])} here"
        for number, token in numbered
        if str(number).isdecimal() and own.get(int(number), token_text(token)) != token_text(token)
    ]
    if wrong:
        yield f"{TOKENIZER_CONFIG} gives {len(wrong)} ids to other tokens than {TOKENIZER}: {', '.join(wrong[:SHOWN])}"


def _eos_token(directory: Path) -> str | None:
    """The text of the EOS token that the tokenizer's settings name."""
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        if token := read_settings(directory / name).get(EOS):
            return token_text(token)
    return None


def _wrong_eos(vocabulary: Vocabulary, ids: Mapping[str, int], eos: str | None, ends: Collection[int]) -> Iterator[str]:
    """Why the EOS token of the tokenizer's settings is not the model's. ends: the ids at which the model ends."""
    if eos is None:
        return
    if eos not in ids:
        yield f"{EOS} {shown_json(eos)} of {TOKENIZER_CONFIG} is no token of {TOKENIZER}"
        return
    if ends and ids[eos] not in ends:
        own = {**vocabulary.ordinary, **vocabulary.special}
        listed = ", ".join(f"{number} ({shown_json(own.get(number, 'no token'))})" for number in sorted(ends))
        yield (
            f"{EOS} {shown_json(eos)} of {TOKENIZER_CONFIG} has the id {ids[eos]}, and eos_token_id of {CONFIG} and "
            f"{GENERATION} is {listed}"
        )


def _of_template(template: str, ids: Mapping[str, int], ends: Collection[str], *, is_suspected: bool) -> Iterator[str]:
    """What a chat template writes that the tokenizer does not know.

    ends: the texts of the EOS tokens. is_suspected: whether other files differ. A template without any mark that is a
    token may mean them as plain text.
    """
    marks = [mark for mark in dict.fromkeys(MARK.findall(COMMENT.sub("", template))) if not SELDOM.search(mark)]
    missing = [mark for mark in marks if mark not in ids]
    closes = EOS in template or any(end in template for end in ends)
    if ends and not closes:
        shown = ", ".join(map(shown_json, sorted(ends)[:SHOWN]))
        yield f"the chat template writes none of its EOS tokens ({shown}), so that no answer ends"
    if missing and (is_suspected or not closes or any(mark in ids for mark in marks if mark not in ends)):
        yield (
            f"the chat template writes {', '.join(missing[:SHOWN])}{' and others' * (len(missing) > SHOWN)}, which "
            f"{TOKENIZER} does not have: they become several tokens each"
        )
