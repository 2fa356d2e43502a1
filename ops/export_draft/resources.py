"""What `export_draft` needs: the disk for the serving directory."""

from __future__ import annotations

from dsl.resources import Outlook, Resources
from ops.lib.drafts.dflash.footprint import draft_parameters
from ops.lib.estimates import DraftForeseen
from ops.lib.target.sizes import ITEM_SIZES


def export_draft_resources(outlook: Outlook) -> Resources:
    draft: DraftForeseen | None = outlook.inputs["draft"]
    if draft is None:
        return Resources()
    dtype = outlook.config.dtype
    return Resources(
        disk={"draft": draft_parameters(draft.shape) * ITEM_SIZES[dtype]},
        foreseen=DraftForeseen(shape=draft.shape, dtype=dtype),
    )
