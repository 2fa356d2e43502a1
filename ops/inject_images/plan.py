"""Estimate of `inject_images` after a trial on a few samples."""

from __future__ import annotations

from attrs import evolve

from dsl.estimate import Estimate, Growth, PlanContext
from ops.inject_images.op import InjectImages
from ops.lib.forecasts import SamplesForecast, kept_samples


def estimate(config: InjectImages, context: PlanContext) -> Estimate:
    source: SamplesForecast | None = context.inputs["samples"]
    if context.artifact is not None:
        forecast = SamplesForecast.read(context.artifact, context.identity)
    elif source is None:
        forecast = SamplesForecast(identity=context.identity)
    else:
        forecast = SamplesForecast(
            identity=context.identity,
            empty=source.empty,
            is_found=source.is_found,
            has_images=source.has_images,
            has_tools=source.has_tools,
        )
    if context.trial is None or source is None or source.samples is None:
        return Estimate(forecast=forecast)
    samples = kept_samples(context.trial.artifact, source.samples)
    growth = Growth(series=(source.samples.amount(),), output=samples.amount().growth)
    return Estimate(growth=growth, forecast=evolve(forecast, samples=samples))
