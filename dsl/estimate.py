"""What a node needs, estimated before it runs: for `dflow plan`, and after a trial on a few samples for `--smoke`.

An op estimates by its hook `estimate(config, context)` (dsl/op_class.py), which loads no torch and computes nothing
large. The estimates of a node's producers come before its own, which reads what they foresee.

An op names the most CPU threads that a rank makes use of by its hook `threads(config, folders)`, None for as many as
there are; it counts where `launch.threads` is 0. folders: by edge, the artifacts that the node reads. Threads change
the rounding, so the hook goes by these two only: never by the machine, by what else runs, or by a clock. That is why
it is no part of an Estimate, which knows the free disk and may come from a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from dsl.errors import ConfigError, shortened
from dsl.launch import Launch
from dsl.op_class import Folders, hook

if TYPE_CHECKING:
    from dsl.graph import GraphNode

PROMISED = "promised:"


@frozen(kw_only=True)
class Trial:
    """A run of the node on a few samples.

    config: the small one. artifact: what the trial made. inputs: edge -> the folder that it read, None for none, a
    tuple for a `tuple` edge.
    """

    config: Any
    artifact: Path
    inputs: Mapping[str, Any]


@frozen(kw_only=True)
class PlanContext:
    """What is known of a node.

    inputs: edge -> what its producer forecasts, None where it forecasts nothing, a tuple for a `tuple` edge.
    identity: the digest of what the node made, where the store holds it; else PROMISED and a digest of op, config and
    inputs, which only nodes share that will make the same. artifact: what the node made, where the store holds it.
    root: the folder that the pipeline's paths start from.
    free_disk: free bytes where the store lies. trial: None where none was made.
    """

    launch: Launch
    inputs: Mapping[str, Any]
    artifact: Path | None
    root: Path
    free_disk: int
    trial: Trial | None = None
    identity: str = ""


@frozen
class Amount:
    """What one series of `stage.progress` counts: in the trial, in the full run, and its unit.

    fewest: the least work of the full run; less than `full` where it does more of it at once.
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
class Growth:
    """What grows from a trial to the full run; all else is taken to stay: imports, loading a model.

    series: one for each series of progress that the stage reports, in order. tail: how many times longer what follows
    the last of them may get. output: how many times larger the artifact. notes: sentences for the user.
    """

    series: tuple[Amount, ...] = ()
    tail: float = 1.0
    output: float = 1.0
    notes: tuple[str, ...] = ()


CHECKPOINTS = "checkpoints"  # a part of `Estimate.disk`


@frozen(kw_only=True)
class Estimate:
    """What a node needs, each part by its name in bytes.

    memory: what a rank holds between its steps, on its GPU where it has one. disk: what the node leaves in the store,
    by all ranks, and under CHECKPOINTS what it writes besides and is removed when it is done; disk_per: the amount of
    data that it holds for ("a million tokens") where the amount is not known, "" for the whole; less_disk: what to
    change so that it writes less, for the error where it does not fit. notes: sentences for the user. growth: after a
    trial; None where the op cannot tell. forecast: of the output, anything that the readers' own hooks understand.
    """

    memory: Mapping[str, int] = {}
    disk: Mapping[str, int] = {}
    disk_per: str = ""
    less_disk: str = ""
    notes: tuple[str, ...] = ()
    growth: Growth | None = None
    forecast: Any = None


def useful_threads(node: GraphNode, made: Mapping[str, Path]) -> int | None:
    """The most threads of a rank, None where the op names no limit. made: artifacts by node id, those that the node
    reads among them; one that is gone counts as none. Raises ConfigError where the hook fails.
    """
    try:
        limit: Callable[[Any, Folders], int | None] | None = hook(node.op, "threads")
        if limit is None:
            return None
        threads = limit(node.config, node.by_edge(made))
    except Exception as error:  # noqa: BLE001 - the op's author wrote it: one node fails, not the run
        problem = f"{type(error).__name__}: {error}"
    else:
        if threads is None or (type(threads) is int and threads > 0):
            return threads
        problem = f"it returned {threads!r}, not a number of threads or None"
    raise ConfigError(f'threads() of op "{node.op.name}" failed: {shortened(problem)}')
