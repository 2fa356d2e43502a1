"""Needs of `export_draft`: the disk for the serving directory."""

from __future__ import annotations

from attrs import evolve

from dsl.estimate import Estimate, PlanContext
from ops.export_draft.op import ExportDraft
from ops.lib.drafts.backbone.footprint import draft_parameters
from ops.lib.forecasts import DraftForecast
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.thread_table import threads_of_decoding

threads = threads_of_decoding


def estimate(config: ExportDraft, context: PlanContext) -> Estimate:
    draft: DraftForecast | None = context.inputs["draft"]
    if context.artifact is not None:
        return Estimate(forecast=DraftForecast.read(context.artifact, context.identity))
    if draft is None:
        return Estimate()
    return Estimate(
        disk={"draft": draft_parameters(draft.shape) * ITEM_SIZES[config.dtype]},
        forecast=evolve(draft, dtype=config.dtype, identity=context.identity),
    )
