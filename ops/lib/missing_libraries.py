"""Libraries that a config asks for and that are not installed: field -> sentence with the way out. Loads none."""

from __future__ import annotations

import importlib.util

from dsl.errors import DataError
from ops.lib.sglang.version import require_sglang


def missing_sglang(field: str, what: str) -> dict[str, str]:
    """what: the part of dflow that needs it, as the sentence names it."""
    try:
        require_sglang(what)
    except DataError as error:
        return {field: str(error)}
    return {}


def missing_torchvision(image_backend: str) -> dict[str, str]:
    """Where it resizes images."""
    if image_backend != "torchvision" or importlib.util.find_spec("torchvision") is not None:
        return {}
    return {
        "image_backend": "torchvision is not installed here: install the build of it that fits the installed torch, "
        'or take image_backend = "pillow"'
    }
