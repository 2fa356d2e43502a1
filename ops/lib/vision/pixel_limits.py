"""Limits of the size of images, min_pixels and max_pixels: of a processor's file, and to set for a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from ops.lib.data.files import read_object

PREPROCESSOR = "preprocessor_config.json"


def ordered_pixels(instance: Any, _attribute: object, most: int | None) -> None:
    """The validator of max_pixels. Raises ValueError below min_pixels."""
    least = getattr(instance, "min_pixels", None)
    if least is not None and most is not None and least > most:
        raise ValueError(f"'max_pixels': {most} is less than min_pixels = {least}")


def pixel_limits(preprocessor: Path) -> dict[str, int]:
    """The limits in an image processor's file; empty if it has none, or does not exist. Raises DataError."""
    if not preprocessor.is_file():
        return {}
    config = read_object(preprocessor)
    size = config.get("size") or {}
    if not isinstance(size, dict):
        return {}
    least = size.get("shortest_edge", config.get("min_pixels"))
    most = size.get("longest_edge", config.get("max_pixels"))
    if least is None or most is None:
        return {}
    if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
        raise DataError(f"{preprocessor}: {least!r} and {most!r} are no least and most number of pixels")
    return {"min_pixels": least, "max_pixels": most}


def served_pixels(captured: Mapping[str, Any], model_dir: Path) -> dict[str, int]:
    """The limits of the training's images ("captured" of training.json) if the target's own differ, else none.

    Raises DataError if the target's processor cannot be read.
    """
    used = captured.get("pixel_limits") or {}
    return dict(used) if used != pixel_limits(model_dir / PREPROCESSOR) else {}
