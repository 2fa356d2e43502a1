"""Write a TargetModel artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ops.lib.data.files import write_json


def write_target_json(out_dir: Path, info: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Write target.json, which is what `describe_target` gives for the model, and metrics.json."""
    write_json(out_dir / "target.json", dict(info))
    write_json(out_dir / "metrics.json", dict(metrics))
