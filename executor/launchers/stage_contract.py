"""The files in the work folder by which the executor and the processes of a stage communicate.

job-<attempt>.json                  StageSpec: what every rank has to do
results-<attempt>/<rank>.json       RankResult: how that rank ended, written by the rank; then workers of the pool
results-<attempt>/exits-<host>.json a list of RankExit: failed ranks, written by their parent
results-<attempt>/stop              requests the stage to stop
results-<attempt>/lost-<n>          worker n of those that share shards ended badly; written by its parent or backend
results-<attempt>/shared            the folder `shared_dir` of those workers, with `pool` for a pool's

The digests of the first, and of the sources that it names, travel by the command line. They alone keep whoever can
write to a shared store or to the disk of a cluster from deciding what code a stage runs: these files are made after
the store was opened and trusted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from dsl.convert import structure, unstructure
from dsl.errors import StoreError, StructureError
from dsl.files import NO_FILE, compact, parse_json, read_json_or_none, read_plain, replace_file, write_json

STOP_REQUESTED = "stop"
SHARED = "shared"
LOST = "lost-"
ONE_OF_SEVERAL = "DFLOW_ONE_OF_SEVERAL"  # the variable that ranks have, and workers that share shards
# The variables that number the workers that share shards.
WORKER, WORKERS = "DFLOW_WORKER", "DFLOW_WORKERS"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
POOL = "DFLOW_POOL"  # a PoolRendezvous as JSON: of the ranks and the workers of a stage with a pool
PROCESS = "DFLOW_PROCESS"  # the number by which a worker of a pool reports how it ended; those of ranks come first


@frozen
class InputArtifact:
    path: Path
    digest: str


@frozen(kw_only=True)
class StageSpec:
    """The executor's instructions for a stage. Paths are absolute.

    node_json: the node as `dsl.graph` writes it. search_path: folders searched for modules. sources: a file with the
    source code that is part of the key, and its digest. artifacts: by node id. attempt: its number in this run, from 1.
    token, lease_id: of the stage's lease. started_before: as in Stage.
    """

    node: str
    node_json: Mapping[str, Any]
    search_path: tuple[str, ...]
    sources: Path
    sources_digest: str
    artifacts: Mapping[str, InputArtifact]
    folder: Path
    token: int
    lease_id: str
    out_dir: Path
    work_dir: Path
    results: Path
    events: Path
    figures: Path
    attempt: int
    started_before: bool
    device: str
    sp_degree: int

    @classmethod
    def read(cls, path: Path, digest: str) -> StageSpec | None:
        """Read the instructions; None where the file does not exist, since a later attempt cleared the folder.

        Raises StoreError where the file has another digest.
        """
        data = read_sealed(path, digest)
        return None if data is None else structure(cls, data)

    def write(self, path: Path) -> str:
        """Write the instructions to a file; returns its digest."""
        return write_sealed(path, unstructure(self))


@frozen(kw_only=True)
class RankError:
    """The error of a failed rank. time: seconds since 1970. names: qualified names of its class and bases.

    trace: the lines of the traceback; empty for dflow's own errors.
    """

    name: str
    message: str
    time: float
    lost_connection: bool = False
    names: tuple[str, ...] = ()
    trace: tuple[str, ...] = ()


@frozen(kw_only=True)
class RankResult:
    """The result of a rank. memory, gpu_memory: peak bytes. gpu: the name of the GPU that it used; empty without one.
    loaded: the files of the user's modules that it imported.
    """

    status: Literal["done", "stopped", "failed"]
    device: str = "cpu"
    loaded: tuple[str, ...] = ()
    memory: int | None = None
    gpu_memory: int | None = None
    gpu: str = ""
    error: RankError | None = None

    @classmethod
    def read(cls, path: Path) -> RankResult | None:
        """Read the result of a rank; None where the rank reported nothing, or the op wrote something else there."""
        try:
            data = read_json_or_none(path)
            result = None if data is None else structure(cls, data)
        except (ValueError, StructureError):
            return None
        return None if result is not None and result.status == "failed" and result.error is None else result

    def write(self, path: Path) -> None:
        """Write the result to a file. Raises OSError or DiskFull."""
        write_json(path, unstructure(self))


@frozen
class RankExit:
    """A failed rank. code: its exit code, or minus the signal's number.

    time: when its parent noticed, in seconds since 1970.
    """

    rank: int
    code: int
    time: float


def read_exits(path: Path) -> list[RankExit]:
    """Read the exits of one host's failed ranks."""
    return list(structure(tuple[RankExit, ...], read_json_or_none(path) or []))


def write_exits(path: Path, exits: list[RankExit]) -> None:
    write_json(path, unstructure(exits))


def report_lost(results: Path, worker: int) -> None:
    """Report a worker as lost, so that the others redo its shards. On a full disk they learn nothing, and fail."""
    with suppress(OSError):
        (results / f"{LOST}{worker}").touch()


def lost_workers(results: Path) -> frozenset[int]:
    """The numbers of the workers whose processes ended before they had finished."""
    return frozenset(int(name.removeprefix(LOST)) for name in _names(results) if name.startswith(LOST))


def is_stop_requested(results: Path) -> bool:
    return STOP_REQUESTED in _names(results)


def _names(folder: Path) -> list[str]:
    """The names in a folder; listed, since NFS may report a new file as missing for a minute."""
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:  # a later attempt cleared the folder
        return []


def write_sealed(path: Path, value: Any) -> str:
    """Write a value in one line; returns the SHA-256 of the file."""
    data = compact(value)
    replace_file(path, data)
    return hashlib.sha256(data).hexdigest()


def read_sealed(path: Path, digest: str) -> Any:
    """Read a JSON file, and check its digest; None where it does not exist. Raises StoreError for another digest."""
    try:
        data = read_plain(path)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        return None
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(
            f"{path}: somebody else has changed it since dflow wrote it; let only people whom you trust write to this "
            "store, and repeat the command"
        )
    return parse_json(data.decode())
