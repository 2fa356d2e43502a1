"""What the gate needs, and what it lacks on this machine."""

from __future__ import annotations

from typing import Any

from dsl.estimate import Estimate, Growth, PlanContext
from ops.check_export.op import WORKERS, CheckExport, without_worker
from ops.lib.drafts.backbone.sizes import draft_parameters
from ops.lib.forecasts import DraftForecast, ReportForecast, TargetForecast
from ops.lib.missing_libraries import missing_sglang
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.thread_table import threads_of_decoding

PROMPTS = 2  # of a trial

threads = threads_of_decoding


def smoke(config: CheckExport, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: a few prompts of each category."""
    return {"live_prompts": min(config.live_prompts or PROMPTS, PROMPTS)}


def estimate(config: CheckExport, context: PlanContext) -> Estimate:
    """Estimate memory: target and draft in SGLang, then dflow's own target, after SGLang's is released.

    The draft is loaded twice while the two forward passes are compared.
    """
    on_cpu = context.launch.device == "cpu"
    growth = (
        None if context.trial is None else Growth()
    )  # the time is that of starting the engine, whatever the number of prompts
    target: TargetForecast | None = context.inputs["target"]
    draft: DraftForecast | None = context.inputs["draft"]
    report: ReportForecast | None = context.inputs["report"]
    if target is None or draft is None or report is None:
        return Estimate(growth=growth)
    shape = draft.shape
    disk = {"draft": draft_parameters(shape) * ITEM_SIZES[draft.dtype]}
    if config.live == "off":
        return Estimate(disk=disk, growth=growth)
    if shape.algorithm.engine not in WORKERS:
        return Estimate(disk=disk, growth=growth, notes=(f"live: skipped, {without_worker(shape.algorithm.engine)}",))
    item_size = ITEM_SIZES[config.dtype or (report.dtype if on_cpu else "bfloat16")]
    return Estimate(
        memory={
            "target": target.sizes.parameters * item_size,
            "drafts": 2 * draft_parameters(shape) * item_size,
        },
        disk=disk,
        growth=growth,
        notes=("one process: SGLang's live stage does not shard the target over GPUs",),
    )


def missing_here(config: CheckExport) -> dict[str, str]:
    """A hint to install SGLang, by field, if the live stage requires it."""
    if config.live != "required":
        return {}
    missing = missing_sglang("live", "the gate")
    return {name: f'{text}; live = "auto" skips the stage' for name, text in missing.items()}
