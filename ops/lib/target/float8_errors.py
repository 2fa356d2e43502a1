"""The error of float8 states over all data, and whether it is more than rounding. Loads no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field

MOST_BY_ROUNDING = 1 / 16  # the largest relative error of a value with e4m3's 3 bits behind the point


@define(eq=False)
class MeanErrors:
    """The mean of `RoundingError.by_layer` over parts of the data, weighted by their tokens. Thread-safe."""

    layer_ids: Sequence[int]
    _tokens: int = 0
    _sums: list[float] = field(factory=list)  # of the layers, and of the states after the final norm if they are kept
    _lock: threading.Lock = field(factory=threading.Lock)

    @classmethod
    def of(cls, layer_ids: Sequence[int], shards: Iterable[Mapping[str, Any]]) -> MeanErrors:
        """The mean over shards by their entries in features.json."""
        found = cls(layer_ids)
        for shard in shards:
            found.add(shard["tokens"], shard.get("float8_errors", ()))
        return found

    def add(self, tokens: int, errors: Sequence[float]) -> None:
        """Add the errors of a part; one without tokens has none."""
        if not tokens:
            return
        with self._lock:
            sums = self._sums or [0.0] * len(errors)
            self._tokens += tokens
            self._sums = [total + tokens * error for total, error in zip(sums, errors, strict=True)]

    def means(self) -> list[float]:
        """The mean of each layer, then that of the final norm if it is kept; [] if nothing was added."""
        with self._lock:
            return [total / max(1, self._tokens) for total in self._sums]

    def metrics(self, place: str) -> dict[str, float]:
        """The means by metric, such as "capture/float8_error_layer_09" and "capture/float8_error_final"."""
        names = [*(f"layer_{layer:02d}" for layer in self.layer_ids), "final"]
        return {f"{place}/float8_error_{name}": mean for name, mean in zip(names, self.means(), strict=False)}

    def named(self) -> list[tuple[str, float]]:
        """The means with "layer 9" or "the final norm"."""
        names = [*(f"layer {layer}" for layer in self.layer_ids), "the final norm"]
        return list(zip(names, self.means(), strict=False))

    def warning(self, setting: str) -> str | None:
        """A warning that names the layers of which float8 loses more than by rounding; None if there are none.

        setting: the op's field that chose float8.
        """
        lost = [f"{name} ({mean:.1%})" for name, mean in self.named() if mean > MOST_BY_ROUNDING]
        if not lost:
            return None
        return (
            f"float8 features are too coarse for {', '.join(lost)}: rounding explains a relative error of "
            f"{MOST_BY_ROUNDING:.1%} at most, so some channels of this target are so large that others are lost beside "
            f"them; leave {setting} out, or compare tau with and without it"
        )
