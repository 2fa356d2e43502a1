"""How `check_export` is tried on a few samples."""

from __future__ import annotations

from typing import Any

from dsl.smoke import Trial, Work
from ops.check_export.op import CheckExport

PROMPTS = 2


def check_export_smoke(config: CheckExport, samples: int) -> dict[str, Any]:
    """A few prompts of each category where SGLang decodes some."""
    return {"live_prompts": min(config.live_prompts or PROMPTS, PROMPTS)}


def check_export_work(trial: Trial) -> Work:
    """Starting the engine takes the time, not the prompts."""
    return Work()
