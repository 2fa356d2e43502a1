"""How much of the data a trial on a few samples saw, and how much the full run has.

By these the `work` functions of the ops tell each other. Samples are counted by kind, since images and texts differ in
size, and splits in number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

from dsl.smoke import Amount
from ops.lib.data.files import read_jsonl
from ops.lib.data.sample_account import SPLITS

Kind = tuple[str, str]  # category ("image" or "text"), split
TRAINED = "trained"  # foreseen of a target that the trial trained for a few steps only


@frozen
class Counts:
    """Something counted by kind, in the trial and in the full run."""

    trial: Mapping[Kind, float]
    full: Mapping[Kind, float]

    def of(self, splits: Iterable[str]) -> tuple[float, float]:
        """The sums over some splits: trial, full."""
        chosen = set(splits)
        trial = sum(count for (_, split), count in self.trial.items() if split in chosen)
        full = sum(count for (_, split), count in self.full.items() if split in chosen)
        return trial, full

    def amount(self, unit: str, splits: Iterable[str] = SPLITS) -> Amount:
        return Amount(*self.of(splits), unit)


@frozen(kw_only=True)
class SamplesGrown:
    """Samples in an artifact."""

    samples: Counts


@frozen(kw_only=True)
class TokensGrown(SamplesGrown):
    """Tokenised samples, and their tokens."""

    tokens: Counts


@frozen(kw_only=True)
class StepsGrown:
    """A plan of batches: steps, and tokens of a step of the full run."""

    steps: Amount
    tokens_per_step: float


def kept_samples(artifact: Path, given: Counts) -> Counts:
    """The samples in an artifact. Of each kind the full run keeps the share that the trial kept."""
    kept: Counter[Kind] = Counter((row["category"], row["split"]) for row in read_jsonl(artifact / "samples.jsonl"))
    return Counts(kept, {kind: count * _share(kind, kept, given.trial) for kind, count in given.full.items()})


def counted_tokens(artifact: Path, samples: Counts) -> Counts:
    """The tokens of an artifact's samples. Of each kind those of the full run are as long as those of the trial."""
    tokens: Counter[Kind] = Counter()
    for row in read_jsonl(artifact / "samples.jsonl"):
        tokens[row["category"], row["split"]] += row["tokens"]
    return Counts(tokens, {kind: count * _share(kind, tokens, samples.trial) for kind, count in samples.full.items()})


def _share(kind: Kind, part: Mapping[Kind, float], whole: Mapping[Kind, float]) -> float:
    """How much of `part` there is for one of `whole`: of this kind, else of its category, else of all."""
    alike = [{kind}, {other for other in whole if other[0] == kind[0]}, set(whole)]
    for kinds in alike:
        count = sum(whole.get(other, 0) for other in kinds)
        if count:
            return sum(part.get(other, 0) for other in kinds) / count
    return 0.0
