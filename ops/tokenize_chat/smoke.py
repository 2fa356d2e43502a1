"""What of `tokenize_chat` grows from a trial to the full run."""

from __future__ import annotations

from dsl.smoke import Trial, Work
from ops.lib.scaling import TokensGrown, counted_tokens, kept_samples


def tokenize_chat_work(trial: Trial) -> Work | None:
    given = trial.foreseen["samples"]
    if given is None:
        return None
    samples = kept_samples(trial.artifact, given.samples)
    tokens = counted_tokens(trial.artifact, samples)
    return Work(
        series=(given.samples.amount("samples"),),
        output=tokens.amount("tokens").growth,
        foreseen=TokensGrown(samples=samples, tokens=tokens),
    )
