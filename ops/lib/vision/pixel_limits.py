"""The settings of a checkpoint's image processor, and its limits of the size of images: min_pixels and max_pixels.

Everything that counts or makes the tokens of an image reads them here: `load_processor`, `dflow init`, and the command
of a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DataError

# Of image_processor_type: three names of one, which differ in the library that resizes.
IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
DEFAULTS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}  # of transformers' Qwen2VLImageProcessor
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # in `size`


def ordered_pixels(instance: Any, _attribute: object, most: int | None) -> None:
    """The validator of max_pixels. Raises ValueError below min_pixels."""
    least = getattr(instance, "min_pixels", None)
    if least is not None and most is not None and least > most:
        raise ValueError(f"'max_pixels': {most} is less than min_pixels = {least}")


def image_settings(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The file and the settings of the image processor, where transformers looks for them: in processor_config.json as
    version 5 saves them, else in preprocessor_config.json. Empty without one. Raises DataError for an unreadable file.
    """
    from ops.lib.data.checkpoint_code import read_settings  # of no use to a plan

    whole, own = (directory / name for name in IMAGE_PROCESSOR_FILES)
    nested = read_settings(whole).get("image_processor")
    return (whole, nested) if isinstance(nested, dict) else (own, read_settings(own))


def pixel_limits(place: Path | str, settings: Mapping[str, Any]) -> dict[str, int]:
    """The limits in an image processor's settings; empty if these are. Raises DataError, which begins with the place.

    As in transformers, min_pixels and max_pixels come before `size`, and each limit is read by itself.
    """
    if not settings:
        return {}
    size = settings.get("size")
    size = size if isinstance(size, dict) else {}
    found = {
        name: settings.get(name) or size.get(edge) or size.get(name) or DEFAULTS[name] for name, edge in EDGES.items()
    }
    least, most = found.values()
    if not all(type(limit) is int and limit > 0 for limit in found.values()) or least > most:
        raise DataError(f"{place}: {least!r} and {most!r} are no least and most number of pixels of an image")
    return found


def chosen_limits(
    source: Path | str,
    place: Path | str,
    settings: Mapping[str, Any],
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> dict[str, int]:
    """The limits of a processor's settings, with those of a node in their place; empty if the settings are.

    source: the processor; place: the file of the settings. Raises DataError for an image processor of an unknown kind,
    and for limits that exclude each other.
    """
    if not settings:
        return {}
    kind = settings.get("image_processor_type", "")
    if kind not in IMAGE_PROCESSORS:
        known = ", ".join(IMAGE_PROCESSORS)
        raise DataError(f'processor {source}: unknown image_processor_type "{kind}"; supported: {known}')
    wanted = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    limits = pixel_limits(f"processor {place}", settings) | {name: each for name, each in wanted.items() if each}
    if limits["min_pixels"] > limits["max_pixels"]:
        raise DataError(f"processor {source}: min_pixels {limits['min_pixels']} > max_pixels {limits['max_pixels']}")
    return limits


def served_pixels(captured: Mapping[str, Any], model_dir: Path) -> dict[str, int]:
    """The limits of the training's images ("captured" of training.json) if the target's own differ, else none.

    Raises DataError if the target's processor cannot be read.
    """
    used = captured.get("pixel_limits") or {}
    return dict(used) if used != pixel_limits(*image_settings(model_dir)) else {}
