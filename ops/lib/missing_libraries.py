"""Libraries that a config needs and that are not installed: field -> message with the remedy. Loads none."""

from __future__ import annotations

import importlib.util

from dsl.errors import DataError
from ops.lib.sglang.version import require_sglang


def missing_sglang(field: str, what: str) -> dict[str, str]:
    """A hint, by field, to install SGLang where it is missing; else empty. what: the part of dflow that needs it."""
    try:
        require_sglang(what)
    except DataError as error:
        return {field: str(error)}
    return {}


def missing_torchvision(image_backend: str) -> dict[str, str]:
    """A hint to install torchvision, by field, if it is to resize images and is missing; else empty."""
    if image_backend != "torchvision" or importlib.util.find_spec("torchvision") is not None:
        return {}
    return {
        "image_backend": "torchvision is not installed: install the build that fits the installed torch, "
        'or set image_backend = "pillow"'
    }
