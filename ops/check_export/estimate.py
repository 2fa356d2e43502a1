"""Needs of `check_export`: the memory of the live stage, in one process, and the disk for the shipped files."""

from __future__ import annotations

from typing import Any

from dsl.estimate import Estimate, Growth, Outlook
from ops.check_export.op import WORKERS, CheckExport, without_worker
from ops.evaluate.estimate import LONGEST
from ops.lib.drafts.backbone.footprint import draft_parameters
from ops.lib.estimates import DraftForeseen, ReportForeseen, TargetForeseen
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.thread_table import threads_of_decoding

TOGETHER = 16  # requests of a batch, as in ops/check_export/live.py, which loads SGLang
RESERVED_BLOCKS = 3  # of a request, as in ops/lib/sglang/dflash_worker.py
PROMPTS = 2  # of a trial

threads = threads_of_decoding


def smoke(config: CheckExport, samples: int) -> dict[str, Any]:
    """A few prompts of each category."""
    return {"live_prompts": min(config.live_prompts or PROMPTS, PROMPTS)}


def estimate(config: CheckExport, outlook: Outlook) -> Estimate:
    """Target and draft in SGLang with a pool for a batch of prompts; then dflow's own target in their place.

    The draft is loaded twice while the two forward passes are compared. dflow's target, which finds where accepted
    lengths diverge, is loaded after SGLang's is released, and needs no pool.
    """
    on_cpu = outlook.launch.device == "cpu"
    growth = (
        None if outlook.trial is None else Growth()
    )  # the time is that of starting the engine, whatever the number of prompts
    target: TargetForeseen | None = outlook.inputs["target"]
    draft: DraftForeseen | None = outlook.inputs["draft"]
    report: ReportForeseen | None = outlook.inputs["report"]
    if target is None or draft is None or report is None:
        return Estimate(growth=growth)
    sizes, shape = target.sizes, draft.shape
    disk = {"draft": draft_parameters(shape) * ITEM_SIZES[draft.dtype]}
    if config.live == "off":
        return Estimate(disk=disk, growth=growth)
    if shape.algorithm.engine not in WORKERS:
        return Estimate(disk=disk, growth=growth, notes=(f"live: skipped, {without_worker(shape.algorithm.engine)}",))
    item_size = ITEM_SIZES[config.dtype or (report.dtype if on_cpu else "bfloat16")]
    tokens = outlook.inputs["tokens"]
    prompt = tokens.longest if tokens is not None else LONGEST
    categories = 1 if sizes.seeing is None else 2
    prompts = config.live_prompts or report.max_prompts
    requests = TOGETHER if prompts is None else min(TOGETHER, prompts * categories)
    pool = requests * (prompt + report.max_new_tokens + RESERVED_BLOCKS * shape.block_size)
    own_cache = shape.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim
    elements = pool * (sizes.cache_per_token + own_cache) + requests * sizes.state_per_sequence
    return Estimate(
        memory={
            "target": sizes.parameters * item_size,
            "drafts": 2 * draft_parameters(shape) * item_size,
            "pool of keys and values": elements * item_size,
            "prefill": sizes.forward_bytes(requests * prompt, item_size),
        },
        disk=disk,
        growth=growth,
        notes=("one process: SGLang's live stage does not shard the target over GPUs",),
    )
