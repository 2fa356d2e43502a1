"""What an export needs of its draft and target, as promised and as they are. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ops.export_draft.op import ExportDraft
from ops.lib.drafts.backbone.speculators import FOLDER, unwritable
from ops.lib.forecasts import DraftForecast, TargetStated, by_field, of_another_target


def conflicts(config: ExportDraft, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: a draft of another target, or a format that cannot express the draft."""
    return by_field(_mistakes(config, forecast["draft"], forecast["target"]))


def _mistakes(
    config: ExportDraft, draft: DraftForecast | None, target: TargetStated | None
) -> Iterator[tuple[str, str]]:
    if draft is None:
        return
    if wrong := of_another_target(draft, target):
        yield "target", f"{wrong}; give train_dflash and export_draft the same target"
    for why in unwritable(draft.shape) if FOLDER in config.formats else ():
        yield (
            "formats",
            f"speculators' format cannot express this draft ({why}): leave it out of formats, vLLM reads the serving "
            "directory itself too",
        )
