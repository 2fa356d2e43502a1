"""What a capture lacks on this machine, checked before a run's first stage."""

from __future__ import annotations

from ops.capture_targets.op import CaptureTargets
from ops.lib.missing_libraries import missing_sglang


def unmet(config: CaptureTargets) -> dict[str, str]:
    """SGLang, if it captures."""
    return missing_sglang("backend", 'backend = "sglang"') if config.backend == "sglang" else {}
