"""Missing requirements of tokenising, before a run's first stage."""

from __future__ import annotations

from ops.lib.missing_libraries import missing_torchvision
from ops.tokenize_chat.op import TokenizeChat


def unmet(config: TokenizeChat) -> dict[str, str]:
    """torchvision, if it resizes images."""
    return missing_torchvision(config.image_backend)
