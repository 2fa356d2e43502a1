"""Which test files `-m gpu` imports: where a GPU is lent, libraries that the others need may be missing. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

OF_A_DEVICE = re.compile(r"mark\.gpu\b|def \w+\((?:[^()]*\W)?(?:device|cuda)\W")


def is_of_a_device(file: Path) -> bool:
    """Whether a test in the file is marked `gpu`, or uses the fixture `device` or `cuda`."""
    return OF_A_DEVICE.search(file.read_text()) is not None
