"""How `capture_targets` is tried on a few samples."""

from __future__ import annotations

from typing import Any

from dsl.smoke import Trial, Work
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.resources import GPU_BATCH_TOKENS
from ops.lib.scaling import Counts, TokensGrown


def capture_targets_smoke(config: CaptureTargets, samples: int) -> dict[str, Any]:
    """Shards of one batch, so that there are several of them to tell the pace by."""
    return {"shard_tokens": min(config.shard_tokens, config.batch_tokens or GPU_BATCH_TOKENS)}


def capture_targets_work(trial: Trial) -> Work | None:
    given = trial.foreseen["tokens"]
    if given is None:
        return None
    amount = given.tokens.amount("tokens", trial.config.splits)
    kept = TokensGrown(samples=_of(given.samples, trial.config.splits), tokens=_of(given.tokens, trial.config.splits))
    return Work(series=(amount,), output=amount.growth, foreseen=kept)


def _of(counts: Counts, splits: tuple[str, ...]) -> Counts:
    trial = {kind: count for kind, count in counts.trial.items() if kind[1] in splits}
    return Counts(trial, {kind: count for kind, count in counts.full.items() if kind[1] in splits})
