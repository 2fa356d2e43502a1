"""Estimate of `inject_images` after a trial on a few samples."""

from __future__ import annotations

from attrs import evolve

from dsl.estimate import Estimate, Growth, Outlook
from ops.inject_images.op import InjectImages
from ops.lib.estimates import SamplesForeseen, kept_samples


def estimate(config: InjectImages, outlook: Outlook) -> Estimate:
    source: SamplesForeseen | None = outlook.inputs["samples"]
    if outlook.artifact is not None:
        foreseen = SamplesForeseen.read(outlook.artifact, outlook.identity)
    else:
        foreseen = SamplesForeseen(identity=outlook.identity, empty=source.empty if source is not None else frozenset())
    if outlook.trial is None or source is None or source.samples is None:
        return Estimate(foreseen=foreseen)
    samples = kept_samples(outlook.trial.artifact, source.samples)
    growth = Growth(series=(source.samples.amount("samples"),), output=samples.amount("samples").growth)
    return Estimate(growth=growth, foreseen=evolve(foreseen, samples=samples))
