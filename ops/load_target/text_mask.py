"""Mask tokens in a vocabulary whose tokens are all of texts: ids that no valid text makes, and a warning on others."""

from __future__ import annotations

import json
from pathlib import Path

from ops.lib.data.checkpoint_code import read_settings
from ops.lib.target.token_ids import TOKENIZER, Vocabulary, mask_warning

NOT_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))


def unmade_ids(directory: Path) -> dict[int, str]:
    """Ids of ordinary tokens that no valid text makes, and why: bytes that UTF-8 does not have, in a byte-level
    vocabulary, which writes these bytes as the characters of the same number.
    """
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None or '"ByteLevel"' not in json.dumps(read_settings(directory / TOKENIZER).get("decoder")):
        return {}
    bytes_of = {chr(byte): byte for byte in NOT_IN_UTF8}
    return {
        number: f"the byte 0x{bytes_of[token]:02X}, which no valid text has"
        for number, token in sorted(vocabulary.ordinary.items())
        if number < vocabulary.size and token in bytes_of
    }


def text_mask_warning(directory: Path, mask_token_id: int) -> str | None:
    """A warning if normal text can contain the mask token, with an id that gives none or the statement that there is
    none; None if it cannot, or if the tokenizer cannot be read.
    """
    vocabulary, warning = Vocabulary.of(directory), mask_warning(directory, mask_token_id)
    if vocabulary is None or warning is None:
        return warning
    unmade = unmade_ids(directory)
    if mask_token_id in unmade:
        return None
    others = {number: why for number, why in vocabulary.possible_mask_ids() if number not in vocabulary.ordinary}
    if found := next(iter((others | unmade).items()), None):
        return f"{warning}, such as {found[0]} ({found[1]})"
    return f"{warning}; this vocabulary has none: take one that the data does not have, as `dflow init` does"
