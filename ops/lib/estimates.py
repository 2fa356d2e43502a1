"""What is known of artifacts before they are made: by these the `resources` functions of the ops tell each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.lib.drafts.dflash.config import DraftConfig
from ops.lib.target.sizes import TargetSizes

MILLION = 1_000_000


@frozen(kw_only=True)
class TargetForeseen:
    """A target's config.json, and its sizes."""

    config: Mapping[str, Any]
    sizes: TargetSizes

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TargetForeseen:
        """Raises DataError for a config that lacks a size."""
        return cls(config=config, sizes=TargetSizes.of(config))


@frozen(kw_only=True)
class TokensForeseen:
    """Token shards. by_split: counted tokens, None before they are made. expected: by the user's word, None without it.
    longest: tokens of the longest sample that is kept. vocab_size: of a built-in processor, else None.
    """

    by_split: Mapping[str, int] | None
    expected: int | None
    longest: int
    vocab_size: int | None

    def count(self, splits: tuple[str, ...]) -> int | None:
        """Tokens of the splits; the expected number stands for any of them."""
        if self.by_split is None:
            return self.expected
        return sum(self.by_split.get(split, 0) for split in splits)


@frozen(kw_only=True)
class FeaturesForeseen:
    """Stored features: of how many layers, of what dtype, and of which tokens."""

    num_layers: int
    dtype: str
    tokens: TokensForeseen | None


@frozen(kw_only=True)
class DraftForeseen:
    """The shape of a draft that is to be trained, or was. dtype: of its weights in the store."""

    shape: DraftConfig
    dtype: str = "float32"


@frozen(kw_only=True)
class ReportForeseen:
    """An evaluation: of how many prompts of a category (None: all), how many new tokens each, in which dtype."""

    max_prompts: int | None
    max_new_tokens: int
    dtype: str


def read_config(path: Path) -> dict[str, Any]:
    """A config.json without any library. Raises DataError where it is not there or no JSON object."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise DataError(f"{path}: holds no JSON object")
    return config


def amount(count: int | None) -> tuple[int, str]:
    """How many tokens a need is told for, and the words for it: of the data, or a million where their count is open."""
    return (MILLION, "a million tokens") if count is None else (count, "")
