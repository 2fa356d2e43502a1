"""Where the time of decoding goes."""

from __future__ import annotations

import time
from typing import Literal

import torch
from attrs import define, field

Part = Literal["prefill", "draft", "verify", "other"]


@define
class DecodeClock:
    """Wall-clock seconds by part, added up over all answers that are decoded with it.

    prefill: the target's forward pass over the prompts. draft: taking in features and proposing. verify: the target's
    forward passes behind the prefill (those of plain decoding too). other: choosing tokens and all else. device: what
    is waited for at each part.
    """

    device: torch.device
    seconds: dict[Part, float] = field(factory=lambda: dict.fromkeys(("prefill", "draft", "verify", "other"), 0.0))
    _last: float = field(default=0.0, init=False)

    def start(self) -> None:
        """What follows is measured."""
        self._last = self._now()

    def lap(self, part: Part) -> None:
        """Everything since the last call, the device's work included, was this part."""
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now

    def _now(self) -> float:
        synchronise(self.device)
        return time.perf_counter()


def synchronise(device: torch.device) -> None:
    """Wait for the device's work; there is nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start(clock: DecodeClock | None) -> None:
    """Begin to measure, where there is a clock."""
    if clock is not None:
        clock.start()


def lap(clock: DecodeClock | None, part: Part) -> None:
    """Everything since the last call was this part, where there is a clock."""
    if clock is not None:
        clock.lap(part)
