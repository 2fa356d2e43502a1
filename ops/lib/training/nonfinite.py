"""Steps whose loss or gradient is not finite: skipped and counted, up to a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from attrs import Factory, define, frozen

from dsl.errors import DataError

SKIPPED, IN_A_ROW = "nonfinite_steps", "nonfinite_steps_in_a_row"
MOST_SKIPPED = 0.01  # of the steps, beyond which a training says so
LOWER = "lower lr, raise warmup_ratio, or look for values that are not finite in the data and the target"
LEARNABLE = "give every sample an answer to learn from (min_loss_tokens of tokenize_chat)"


@frozen
class SkippedSteps:
    """The steps of a training that changed no weight: `skipped` in all, `nonfinite` of them by loss or gradient."""

    steps: int
    skipped: int
    nonfinite: int

    @property
    def are_many(self) -> bool:
        return self.skipped > MOST_SKIPPED * self.steps

    @property
    def text(self) -> str:
        without = self.skipped - self.nonfinite
        why = [f"{self.nonfinite} with a loss or gradient that is not finite"] if self.nonfinite else []
        why += [f"{without} without a token to learn from"] if without else []
        of_them = f" ({' and '.join(why)})" if why else ""
        return f"{self.skipped} of {self.steps} steps were skipped{of_them}"

    @property
    def advice(self) -> str:
        lower = [LOWER] if self.nonfinite else []
        return "; ".join([*lower, LEARNABLE] if self.skipped > self.nonfinite else lower)


@define
class NonFinite:
    """Decides whether a step of the training may be applied, and counts steps that are not finite.

    limit: the number of consecutive bad steps that ends the training. work_dir: of the checkpoints, for the message.
    counters: those of the TrainState, so that a resumed training continues counting. Only samples of steps since the
    start of this process are named.
    """

    limit: int
    work_dir: Path
    counters: MutableMapping[str, int]
    _row: list[tuple[int, Sequence[object]]] = Factory(list)

    def accepts(self, step: int, loss: float, norm: float, samples: Callable[[], Sequence[object]]) -> bool:
        """Whether the loss and gradient norm of a step (counted from 1) are finite; if not, it must not be applied.

        samples: returns the ids or indices of the step's samples. All ranks must pass the same values. Raises DataError
        at the limit, naming the steps and their samples.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.counters[IN_A_ROW] = 0
            self._row.clear()
            return True
        self.counters[SKIPPED] = self.counters.get(SKIPPED, 0) + 1
        self.counters[IN_A_ROW] = self.counters.get(IN_A_ROW, 0) + 1
        self._row.append((step, samples()))
        if self.counters[IN_A_ROW] >= self.limit:
            raise DataError(self._message(step, loss, norm))
        return False

    def check_applied(self, steps: int, applied: int) -> str | None:
        """A warning at the end of a training if many steps were skipped; None for few. applied: steps that changed
        weights.

        Raises DataError if no step did.
        """
        skipped = SkippedSteps(steps, steps - applied, self.counters.get(SKIPPED, 0))
        if steps and not applied:
            raise DataError(f"the weights are untrained: {skipped.text}; {skipped.advice}")
        return f"{skipped.text}; {skipped.advice}" if skipped.are_many else None

    def _message(self, step: int, loss: float, norm: float) -> str:
        lines = [
            f"step {step}: loss {loss} and gradient norm {norm} are not finite; samples of the step (split train): "
            f"{list(self._row[-1][1])}; the last checkpoint in {self.work_dir} is kept. Look for non-finite values "
            "in these samples, or lower lr"
        ]
        if self.counters[IN_A_ROW] > 1:
            known = "; before this one:" if len(self._row) > 1 else ""
            lines.append(f"{self.counters[IN_A_ROW]} consecutive steps were skipped{known}")
        lines += [f"  step {earlier}, samples {list(samples)}" for earlier, samples in self._row[:-1]]
        return "\n".join(lines)
