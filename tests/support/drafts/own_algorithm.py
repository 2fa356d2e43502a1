"""The algorithm of a user's own in own_drafts/slot_bias, known for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsl.op_table import INIT, use_draft_folders
from ops.lib.drafts.algorithms import Algorithm, algorithm_class

FOLDER = Path(__file__).parent / "own_drafts" / "slot_bias"


@contextmanager
def known_slot_bias() -> Iterator[Algorithm]:
    """Open a context in which the user's algorithm slot_bias is known; yields its config with another scale."""
    use_draft_folders([FOLDER / INIT])
    try:
        yield algorithm_class("slot_bias")(scale=0.5)  # type: ignore[call-arg]
    finally:
        forget()


def forget() -> None:
    use_draft_folders([])
    for name in [name for name in sys.modules if name.partition(".")[0] == "slot_bias"]:
        del sys.modules[name]
    sys.path[:] = [folder for folder in sys.path if not (Path(folder) / "slot_bias").is_dir()]
