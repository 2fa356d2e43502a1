"""Expected properties of artifacts before they exist, which the `estimate` hooks of the ops pass to each other.

After a trial on a few samples, samples and tokens are counted as well, in the trial and for the full run: by kind,
since images and texts differ in size, and splits in number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from dsl.estimate import Amount
from ops.lib.data.files import read_jsonl, read_object
from ops.lib.data.sample_account import SPLITS
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.target.sizes import TargetSizes

MILLION = 1_000_000

Kind = tuple[str, str]  # category ("image" or "text"), split


@frozen
class Counts:
    """Something counted by kind, in the trial and in the full run."""

    trial: Mapping[Kind, float]
    full: Mapping[Kind, float]

    def of(self, splits: Iterable[str]) -> tuple[float, float]:
        """The sums over some splits: trial, full."""
        chosen = self.only(splits)
        return sum(chosen.trial.values()), sum(chosen.full.values())

    def only(self, splits: Iterable[str]) -> Counts:
        chosen = set(splits)
        trial, full = (
            {kind: count for kind, count in counts.items() if kind[1] in chosen} for counts in (self.trial, self.full)
        )
        return Counts(trial, full)

    def amount(self, unit: str, splits: Iterable[str] = SPLITS) -> Amount:
        return Amount(*self.of(splits), unit)


@frozen(kw_only=True)
class TargetForeseen:
    """A target's config.json, and its sizes. is_tried: a trial trained it, for a few steps only."""

    config: Mapping[str, Any]
    sizes: TargetSizes
    is_tried: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], *, is_tried: bool = False) -> TargetForeseen:
        """Raises DataError for a config that lacks a size."""
        return cls(config=config, sizes=TargetSizes.of(config), is_tried=is_tried)


@frozen(kw_only=True)
class SamplesForeseen:
    """Samples, after a trial."""

    samples: Counts


@frozen(kw_only=True)
class TokensCounted(SamplesForeseen):
    """Tokenised samples, and their tokens, after a trial."""

    tokens: Counts

    def only(self, splits: Iterable[str]) -> TokensCounted:
        return TokensCounted(samples=self.samples.only(splits), tokens=self.tokens.only(splits))


@frozen(kw_only=True)
class TokensForeseen:
    """Token shards. by_split: counted tokens, None before they exist. expected: by the user, or None. longest: tokens
    of the longest sample that is kept. vocab_size: of a built-in processor, else None. counted: the samples and their
    tokens, after a trial.
    """

    by_split: Mapping[str, int] | None
    expected: int | None
    longest: int
    vocab_size: int | None
    counted: TokensCounted | None = None

    def count(self, splits: tuple[str, ...]) -> int | None:
        """Tokens of the splits; the expected number counts for any of them."""
        if self.by_split is None:
            return self.expected
        return sum(self.by_split.get(split, 0) for split in splits)


@frozen(kw_only=True)
class FeaturesForeseen:
    """Stored features: of how many layers, of what dtype, and of which tokens. counted: as of TokensForeseen.
    target_layer_ids: None if they are not known.
    """

    num_layers: int
    dtype: str
    tokens: TokensForeseen | None
    counted: TokensCounted | None = None
    target_layer_ids: tuple[int, ...] | None = None


@frozen(kw_only=True)
class StepsForeseen:
    """A plan of batches, after a trial: steps, and tokens of a step of the full run."""

    steps: Amount
    tokens_per_step: float


@frozen(kw_only=True)
class DraftForeseen:
    """The shape of a draft. dtype: of its weights in the store. knows_layers: whether the ids of shape.target_layer_ids
    are right, and not only their number.
    """

    shape: DraftConfig
    dtype: str = "float32"
    knows_layers: bool = False


@frozen(kw_only=True)
class ReportForeseen:
    """An evaluation: of how many prompts of a category (None: all), how many new tokens each, in which dtype."""

    max_prompts: int | None
    max_new_tokens: int
    dtype: str


def first_counted(*foreseen: TokensForeseen | FeaturesForeseen | None) -> TokensCounted | None:
    """The samples and tokens of the first of these that has them counted."""
    return next((one.counted for one in foreseen if one is not None and one.counted is not None), None)


def read_config(path: Path) -> dict[str, Any]:
    """A config.json without any library. Raises DataError if it is missing or not a JSON object."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None


def amount(count: int | None) -> tuple[int, str]:
    """The number of tokens that a need is given for, and its unit: the data's tokens, or a million if unknown."""
    return (MILLION, "a million tokens") if count is None else (count, "")


def kept_samples(artifact: Path, source: Counts) -> Counts:
    """The samples in an artifact. The full run is assumed to keep the same share of each kind as the trial."""
    kept: Counter[Kind] = Counter((row["category"], row["split"]) for row in read_jsonl(artifact / "samples.jsonl"))
    return Counts(kept, {kind: count * _share(kind, kept, source.trial) for kind, count in source.full.items()})


def counted_tokens(artifact: Path, samples: Counts) -> Counts:
    """The tokens of an artifact's samples. Those of the full run are assumed as long as the trial's, by kind."""
    tokens: Counter[Kind] = Counter()
    for row in read_jsonl(artifact / "samples.jsonl"):
        tokens[row["category"], row["split"]] += row["tokens"]
    return Counts(tokens, {kind: count * _share(kind, tokens, samples.trial) for kind, count in samples.full.items()})


def _share(kind: Kind, part: Mapping[Kind, float], whole: Mapping[Kind, float]) -> float:
    """The ratio of `part` to `whole`: of this kind, else of its category, else of all."""
    alike = [{kind}, {other for other in whole if other[0] == kind[0]}, set(whole)]
    for kinds in alike:
        count = sum(whole.get(other, 0) for other in kinds)
        if count:
            return sum(part.get(other, 0) for other in kinds) / count
    return 0.0
