"""What of `inject_images` grows from a trial to the full run."""

from __future__ import annotations

from dsl.smoke import Trial, Work
from ops.lib.scaling import SamplesGrown, kept_samples


def inject_images_work(trial: Trial) -> Work | None:
    given = trial.foreseen["samples"]
    if given is None:
        return None
    samples = kept_samples(trial.artifact, given.samples)
    return Work(
        series=(given.samples.amount("samples"),),
        output=samples.amount("samples").growth,
        foreseen=SamplesGrown(samples=samples),
    )
