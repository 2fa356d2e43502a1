"""Needs of `export_draft`: the disk for the serving directory."""

from __future__ import annotations

from dsl.estimate import Estimate, Outlook
from ops.export_draft.op import ExportDraft
from ops.lib.drafts.backbone.footprint import draft_parameters
from ops.lib.drafts.backbone.speculators_format import FOLDER, unwritable
from ops.lib.estimates import DraftForeseen
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.threads import threads_of_decoding

threads = threads_of_decoding


def estimate(config: ExportDraft, outlook: Outlook) -> Estimate:
    draft: DraftForeseen | None = outlook.inputs["draft"]
    if draft is None:
        return Estimate()
    unfit = unwritable(draft.shape) if FOLDER in config.formats else ()
    return Estimate(
        disk={"draft": draft_parameters(draft.shape) * ITEM_SIZES[config.dtype]},
        foreseen=DraftForeseen(shape=draft.shape, dtype=config.dtype),
        notes=tuple(f"formats: speculators' format cannot express this draft ({why})" for why in unfit),
    )
