"""How an op is tried on a few samples, and what its full run is then told by.

An op names two functions, both without torch:

    @op(..., smoke="module:function")   (config, samples) -> the fields that make the config a small one, by name
    @op(..., work="module:function")    (Trial) -> Work: what grows from the trial to the full run

An op without them runs as it is. Its time and its artifact are then taken to grow as its largest input does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.named_function import named_function
from dsl.op import OpSpec


@frozen(kw_only=True)
class Trial:
    """A node that ran on a few samples.

    config: that of the full run; small: that of the trial. artifact: what the trial made. inputs: edge -> the folder of
    what it read, None for none; foreseen: edge -> what that producer's Work foresees; a tuple each for a `tuple` edge.
    """

    config: Any
    small: Any
    artifact: Path
    inputs: Mapping[str, Any]
    foreseen: Mapping[str, Any]


@frozen
class Amount:
    """What one series of `stage.progress` counts through: so much in the trial, so much in the full run, of `unit`.

    fewest: as much of the trial's work at least; less than `full` where the full run does more of it at once.
    """

    trial: float
    full: float
    unit: str
    fewest: float | None = None

    @property
    def growth(self) -> float:
        return self.full / self.trial if self.trial else 1.0

    @property
    def least_growth(self) -> float:
        return self.growth if self.fewest is None or not self.trial else self.fewest / self.trial


@frozen(kw_only=True)
class Work:
    """What grows from a trial to the full run; all else is taken to stay: imports, loading a model.

    series: one for each series of progress that the stage tells, in order. tail: how many times longer what follows the
    last of them may get. output: how many times larger the artifact. notes: sentences for the user. foreseen: anything
    that the readers' own functions understand.
    """

    series: tuple[Amount, ...] = ()
    tail: float = 1.0
    output: float = 1.0
    notes: tuple[str, ...] = ()
    foreseen: Any = None


def load_smoke(spec: OpSpec) -> Callable[[Any, int], Mapping[str, Any]] | None:
    """The function that makes a config small, None where the op names none."""
    function: Callable[[Any, int], Mapping[str, Any]] | None = _load(spec.smoke)
    return function


def load_work(spec: OpSpec) -> Callable[[Trial], Work | None] | None:
    """The function that tells what grows, None where the op names none; its None says that it cannot tell."""
    function: Callable[[Trial], Work | None] | None = _load(spec.work)
    return function


def _load(named: str | None) -> Any:
    return None if named is None else named_function(named)
