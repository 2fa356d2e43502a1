"""Decoding of batches of prompts, plain and speculative."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ops.dflash.clock import DecodeClock
from ops.dflash.decode import Decoded, decode_plain, decode_speculative
from ops.dflash.model import DraftModel
from ops.dflash.use import DraftUse
from ops.load_target.model import Target
from ops.tokenize_chat.shards import TokenSample

__all__ = ["DecodeClock", "DecodeSettings", "decode_plain_batch", "decode_speculative_batch"]


@frozen
class DecodeSettings:
    """max_new_tokens: behind the first token, at most. temperature: 0 is greedy. seed: of the draws above 0."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


def decode_plain_batch(
    target: Target, samples: Sequence[TokenSample], settings: DecodeSettings, clock: DecodeClock | None = None
) -> list[Decoded]:
    """The target's own answer to each prompt."""
    return [decode_plain(target, sample, settings.max_new_tokens) for sample in samples]


def decode_speculative_batch(
    target: Target,
    draft: DraftModel,
    samples: Sequence[TokenSample],
    settings: DecodeSettings,
    use: DraftUse | None = None,
    clock: DecodeClock | None = None,
) -> list[Decoded]:
    """The answer to each prompt by speculative decoding; use: how the draft is fed, as in training unless given."""
    return [decode_speculative(target, draft, sample, settings.max_new_tokens, use) for sample in samples]
