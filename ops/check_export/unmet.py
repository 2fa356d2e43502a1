"""Missing requirements of the gate, before a run's first stage."""

from __future__ import annotations

from ops.check_export.op import CheckExport
from ops.lib.missing_libraries import missing_sglang


def unmet(config: CheckExport) -> dict[str, str]:
    """SGLang, if the live stage is required."""
    if config.live != "required":
        return {}
    missing = missing_sglang("live", "the gate")
    return {name: f'{text}; live = "auto" skips the stage' for name, text in missing.items()}
