"""Estimate of `inject_images` after a trial on a few samples."""

from __future__ import annotations

from dsl.estimate import Estimate, Growth, Outlook
from ops.inject_images.op import InjectImages
from ops.lib.estimates import SamplesForeseen, kept_samples


def estimate(config: InjectImages, outlook: Outlook) -> Estimate | None:
    source: SamplesForeseen | None = outlook.inputs["samples"]
    if outlook.trial is None or source is None:
        return None
    samples = kept_samples(outlook.trial.artifact, source.samples)
    growth = Growth(series=(source.samples.amount("samples"),), output=samples.amount("samples").growth)
    return Estimate(growth=growth, foreseen=SamplesForeseen(samples=samples))
