"""Needs of `export_draft`: the disk for the serving directory."""

from __future__ import annotations

from attrs import evolve

from dsl.estimate import Estimate, Outlook
from ops.export_draft.op import ExportDraft
from ops.lib.drafts.backbone.footprint import draft_parameters
from ops.lib.estimates import DraftForeseen
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.thread_table import threads_of_decoding

threads = threads_of_decoding


def estimate(config: ExportDraft, outlook: Outlook) -> Estimate:
    draft: DraftForeseen | None = outlook.inputs["draft"]
    if outlook.artifact is not None:
        return Estimate(foreseen=DraftForeseen.read(outlook.artifact, outlook.identity))
    if draft is None:
        return Estimate()
    return Estimate(
        disk={"draft": draft_parameters(draft.shape) * ITEM_SIZES[config.dtype]},
        foreseen=evolve(draft, dtype=config.dtype, identity=outlook.identity),
    )
