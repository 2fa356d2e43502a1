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

from attrs import field, frozen

from dsl.errors import ConfigError, shortened
from dsl.launch import Launch
from dsl.op_class import Folders, hook

if TYPE_CHECKING:
    from dsl.graph import GraphNode

PROMISED = "promised:"


@frozen(kw_only=True)
class Trial:
    """A trial run of the node on a few samples.

    config: the reduced config. artifact: the folder that the trial made. inputs: edge -> the folder that it read, None
    for none, a tuple for a `tuple` edge.
    """

    config: Any
    artifact: Path
    inputs: Mapping[str, Any]


@frozen(kw_only=True)
class PlanContext:
    """The facts about a node from which its needs are estimated.

    inputs: edge -> the forecast of the node that it reads, or None without one; a tuple for a `tuple` edge. artifact:
    the folder of the node's output, where the store holds it. identity: that output's digest; else PROMISED and a
    digest of op, config and inputs, which only nodes with equal output share. root: the folder that the pipeline's
    paths start from. free_disk: free bytes where the store lies. trial: the trial run's figures, None without one.
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
    """The amount of work in one series of `stage.progress`: in the trial run and in the full run.

    fewest: the least work that the full run can have; less than `full` where it does more at once.
    """

    trial: float
    full: float
    fewest: float | None = field(default=None, kw_only=True)

    @property
    def growth(self) -> float:
        return self.full / self.trial if self.trial else 1.0

    @property
    def least_growth(self) -> float:
        return self.growth if self.fewest is None or not self.trial else self.fewest / self.trial


@frozen(kw_only=True)
class Growth:
    """The growth from a trial to the full run; everything else, such as imports, is assumed to stay.

    series: one amount for each series of progress that the stage reports, in order. tail: the factor by which the time
    after the last series may grow. output: the factor by which the artifact grows. notes: sentences for the user.
    fails: whether the full run would fail at this node, as far as the trial shows; a note says why, and what to do.
    """

    series: tuple[Amount, ...] = ()
    tail: float = 1.0
    output: float = 1.0
    notes: tuple[str, ...] = ()
    fails: bool = False


CHECKPOINTS = "checkpoints"  # a part of `Estimate.disk`


@frozen(kw_only=True)
class CaptureWork:
    """What capturing a target's states costs, on any machine.

    tokens: those that are captured once; None if unknown. token_flops: operations of one token in a sample of mean
    length. token_bytes: its features. weights: bytes that each pass reads, pass_tokens: the tokens that it reads them
    for. memory: bytes on a GPU, during a pass. is_sparse: whether the target is a mixture of experts. dtype: of the
    pass. is_float8: whether the features are float8.
    """

    tokens: int | None
    token_flops: float
    token_bytes: int
    weights: int
    pass_tokens: int
    memory: int
    is_sparse: bool
    dtype: str
    is_float8: bool


@frozen(kw_only=True)
class TrainingWork:
    """What a training costs, on any machine.

    tokens: those trained on, in all epochs together; None if unknown. epochs: how often each is read. step_tokens: of a
    global step, at most. sample_tokens: of a mean sample; is_counted: whether it is counted in the data, else every
    sample is taken to be of the greatest length. sample_flops, longest_flops: operations of a step on a mean sample
    and on the longest one. update_bytes: weights gathered and gradients reduced in a step. memory: bytes on a rank's
    GPU, by the number of ranks. buffer_batches: micro-batches that a rank has requested at most. dtype: of the draft.
    capture: the work of an online capture; None if it reads stored features.
    """

    tokens: int | None
    epochs: float
    step_tokens: int
    sample_tokens: float
    is_counted: bool
    sample_flops: float
    longest_flops: float
    update_bytes: int
    memory: Callable[[int], int]
    sp_degree: int
    buffer_batches: int
    dtype: str
    capture: CaptureWork | None = None


@frozen(kw_only=True)
class Estimate:
    """The resources that a node needs, each as bytes by the name of the part.

    memory: what a rank holds between its steps, on its GPU if it has one. per_pass: what it needs besides for the
    longest sample, at most. disk: what all ranks leave in the store; under CHECKPOINTS, what is removed when the node
    is done. disk_per: the amount of data that `disk` holds for, such as "a million tokens"; "" for all of it.
    less_disk: how to make the node write less, for the error when it does not fit. notes: sentences for the user.
    growth: known after a trial run, if the op can tell. forecast: of the output, in a form that the hooks of its
    readers understand. work: for the cost on other machines (`dflow plan --gpus`); None where it is unknown.
    """

    memory: Mapping[str, int] = {}
    per_pass: Mapping[str, int] = {}
    disk: Mapping[str, int] = {}
    disk_per: str = ""
    less_disk: str = ""
    notes: tuple[str, ...] = ()
    growth: Growth | None = None
    forecast: Any = None
    work: CaptureWork | TrainingWork | None = None


def useful_threads(node: GraphNode, made: Mapping[str, Path]) -> int | None:
    """The number of threads beyond which a rank gains nothing; None where the op sets no limit.

    made: artifact folders by node id; a missing one counts as unknown. Raises ConfigError where the op's hook fails.
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
