"""Where the time of decoding goes."""

from __future__ import annotations

import time
from typing import Literal

import torch
from attrs import define, field

Part = Literal["prefill", "draft", "verify", "other"]


@define
class DecodeClock:
    """A clock for the wall-clock seconds of each part of decoding, summed over all answers.

    prefill: the target's forward pass over the prompts. draft: reading features and proposing. verify: the target's
    later forward passes, in plain decoding too. other: choosing tokens and all else. device: synchronised at each part.
    """

    device: torch.device
    seconds: dict[Part, float] = field(factory=lambda: dict.fromkeys(("prefill", "draft", "verify", "other"), 0.0))
    _last: float = field(default=0.0, init=False)

    def start(self) -> None:
        """Begin to measure: time before this call does not count."""
        self._last = self._now()

    def lap(self, part: Part) -> None:
        """Add the time since the last call, including the device's work, to a part."""
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now

    def _now(self) -> float:
        synchronise(self.device)
        return time.perf_counter()


def synchronise(device: torch.device) -> None:
    """Wait for the device's work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start(clock: DecodeClock | None) -> None:
    """Start the clock, if there is one."""
    if clock is not None:
        clock.start()


def lap(clock: DecodeClock | None, part: Part) -> None:
    """Add the time since the last call to a part, if there is a clock."""
    if clock is not None:
        clock.lap(part)
