"""The current step of a diagnosis: `3 of 6, the draft's inputs: ...`."""

from __future__ import annotations

from collections.abc import Callable

TARGET, EXPORT, FED, RANDOM, FEATURES, TRAINING = STEPS = (
    "loading the target",
    "the draft as exported",
    "the draft's inputs",
    "random weights",
    "the stored features",
    "the samples of the training",
)


class Steps:
    """report: called with each step that begins, and with each part of it."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._tell = report
        self._now = ""

    def begin(self, step: str) -> None:
        """One of STEPS."""
        self._now = f"{STEPS.index(step) + 1} of {len(STEPS)}, {step}"
        self._tell(self._now)

    def part(self, what: str) -> None:
        self._tell(f"{self._now}: {what}")
