"""What a run function sees of the outside world: its stage, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

NOW = "dflow: now: "  # starts a line by which a process of `dflow diagnose` names its next step
RENDEZVOUS = "DFLOW_RENDEZVOUS"  # the variable that names the file over which the ranks of one host meet
# Variables that keep the communication of the ranks of one host on the loopback interface.
LOOPBACK_ONLY = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_GLOO_LAZY_INIT": "0",  # else gloo connects after the peers are checked
    "NCCL_SOCKET_IFNAME": "=lo",  # without "=": every interface with this prefix
}


HUNG = ".hung"  # ends the name of a file by which a rank reports that a worker of the pool no longer answers


@frozen(kw_only=True)
class PoolRendezvous:
    """How the ranks of a stage meet the workers of its pool (`launch.pool`).

    worker: this process among them, 0 <= worker < workers; None for a rank. start: how often this worker was started
    before. folder: where workers announce themselves; all processes of the stage see it, and the first one makes it.
    private: the folder of their sockets on one host. address: this host's own among several; empty on one host.
    secret: 32 random bytes of this attempt as hexadecimal digits.
    """

    workers: int
    worker: int | None = None
    start: int = 0
    folder: Path
    private: Path
    address: str = ""
    secret: str

    @property
    def name(self) -> str:
        """The name of this start of this worker, in the folder and in messages."""
        return f"{self.worker}-{self.start}"


class Stage(Protocol):
    """One execution of a node. Ops write files under `out_dir`, report through the methods, and return.

    inputs      field name -> Artifact, None, or a tuple of Artifacts (for `tuple[X, ...]` edges)
    out_dir     empty folder whose files become the artifact
    work_dir    folder kept between attempts of the same key, for resuming in the middle
    rank        0 <= rank < world_size; only what rank 0 logs is recorded
    sp_degree   a divisor of world_size: ranks r with the same r // sp_degree share a sequence; 1: none do
    worker      0 <= worker < workers: processes that share the shards of the stage, each with rank 0 of world_size 1
    workers     their number (launch.shard_workers); 1: this process makes all shards, or shares them by rank
    pool        how this process meets the other side of the stage's pool; None without one. A worker of a pool has
                rank 0 of world_size 1; what it logs is not recorded
    shared_dir  folder of this attempt that all its workers see; empty at its start, removed at its end
    device      "cpu" or "cuda"
    started_before  an earlier attempt of the same key began, in this run or another, and left no artifact
    """

    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def out_dir(self) -> Path: ...
    @property
    def work_dir(self) -> Path: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def sp_degree(self) -> int: ...
    @property
    def worker(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def pool(self) -> PoolRendezvous | None: ...
    @property
    def shared_dir(self) -> Path: ...
    @property
    def device(self) -> str: ...
    @property
    def started_before(self) -> bool: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics named with their group (`train/loss`).

        In an attempt that resumes, the first call cuts what earlier attempts logged at this step or later.
        """

    def progress(self, done: int, total: int) -> None:
        """Report the progress of the stage: `done` of `total` units of work."""

    def info(self, text: str) -> None:
        """Show a line to the user while the run goes on. Every rank prints it to the log; only rank 0's is shown."""

    def warn(self, text: str) -> None:
        """Show a warning to the user at once, and again with the results, in `dflow status` and in reports."""

    def figure(self, name: str, fig: Any) -> None:
        """Save a matplotlib figure as `figures/<name>.png` among the node's MLflow artifacts."""

    def lost_workers(self) -> frozenset[int]:
        """The numbers of the workers whose process ended before it had finished."""

    def stop_requested(self) -> bool:
        """True after SIGTERM or Ctrl-C: save progress under work_dir and raise StopRequested."""
