"""Plain DFlash adds nothing to the backbone."""

from __future__ import annotations

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn


def around_sublayers(config: DraftConfig) -> dict[str, Around]:
    return {}


def heads(config: DraftConfig) -> dict[str, Drawn]:
    return {}
