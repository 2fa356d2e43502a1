"""Ranks of the job that capture for the others: the last `capture_ranks` of the launch answer, the first ones train.

A training rank requests the rows of one micro-batch at a time, from the thread that prepares it, and reads the whole
answer before the next request. So nothing is captured further ahead than the training's own buffer (`buffer_batches`),
and a capture rank keeps no state: it has no plan, and a restart only loses the buffer. A waiting training rank
always reads, so no answer can block another rank's.

The ranks communicate over stream sockets in a private folder of their machine, not through collectives:
these would have to be ordered with those of the training, which run in another thread, and the death of a rank would
be detected late. A socket breaks immediately, on both sides; the error is one of torch.distributed, which the
executor interprets as the end of another rank. The training ranks form the default process group among
themselves, and everything that is summed, averaged or sharded spans only them.

    request    {"split", "rows": [[sample, first, last], ...]}                or {"end": "done" | "stopped"}
    answer     {"stop": whether this rank was asked to stop, "errors": of RowStates}, then the bytes of
               RowStates.features, and of RowStates.final_hidden if it is kept; of encoded states values, then scales
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import Factory, frozen
from torch import Tensor

from dsl.errors import StopRequested
from dsl.stage import Stage
from ops.lib.target.float8 import Float8States, StoredStates
from ops.lib.target.float8_errors import MeanErrors
from ops.lib.training.rank_group import deal, meeting_store
from ops.train_dflash.batches import Rows
from ops.train_dflash.online import RowStates, Take


@frozen
class TrainingStage:
    """The stage as training ranks see it, without capture ranks. A stop request of a capture rank applies
    to them too.
    """

    whole: Stage
    world_size: int
    stop: threading.Event = Factory(threading.Event)

    @property
    def inputs(self) -> Mapping[str, Any]:
        return self.whole.inputs

    @property
    def out_dir(self) -> Path:
        return self.whole.out_dir

    @property
    def work_dir(self) -> Path:
        return self.whole.work_dir

    @property
    def rank(self) -> int:
        return self.whole.rank

    @property
    def sp_degree(self) -> int:
        return self.whole.sp_degree

    @property
    def worker(self) -> int:
        return self.whole.worker

    @property
    def workers(self) -> int:
        return self.whole.workers

    @property
    def shared_dir(self) -> Path:
        return self.whole.shared_dir

    def lost_workers(self) -> frozenset[int]:
        return self.whole.lost_workers()

    @property
    def device(self) -> str:
        return self.whole.device

    @property
    def started_before(self) -> bool:
        return self.whole.started_before

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.whole.log(metrics, step)

    def progress(self, done: int, total: int) -> None:
        self.whole.progress(done, total)

    def info(self, text: str) -> None:
        self.whole.info(text)

    def warn(self, text: str) -> None:
        self.whole.warn(text)

    def figure(self, name: str, fig: Any) -> None:
        self.whole.figure(name, fig)

    def stop_requested(self) -> bool:
        return self.whole.stop_requested() or self.stop.is_set()


def capture_ranks_of(row: int, rows: int, capture_ranks: int) -> list[int]:
    """The capture ranks, counted from 0, that serve a row of the mesh: a share of them, or one that several
    rows share.
    """
    return [number for number in range(capture_ranks) if number % rows == row % capture_ranks]


def answer_requests(take: Take, stage: Stage, training: TrainingStage) -> None:
    """Answer the capture requests of training ranks until all of them are done.

    Raises StopRequested if they stopped, and DistNetworkError if one disappeared.
    """
    capture_ranks = stage.world_size - training.world_size
    number = stage.rank - training.world_size
    rows = training.world_size // stage.sp_degree
    clients = sum(number in capture_ranks_of(row, rows, capture_ranks) for row in range(rows)) * stage.sp_degree
    store = meeting_store(stage.rank, stage.world_size)
    with Listener(family="AF_UNIX", backlog=max(1, clients)) as listener:
        store.set(_place(number), listener.address)
        connections = [listener.accept() for _ in range(clients)]
        store.delete_key(_place(number))
    answer(connections, take, stage)


def answer(connections: Sequence[Connection], take: Take, stage: Stage) -> None:
    """Answer requests on open connections until they end, and close them."""
    asking, stopped = list(connections), False
    with ExitStack() as closing:
        for opened in asking:
            closing.enter_context(opened)
        while asking:
            for connection in wait(asking):
                assert isinstance(connection, Connection)
                with _broken_connections("a training rank"):
                    request = json.loads(connection.recv_bytes())
                if "end" in request:
                    stopped |= request["end"] == "stopped"
                    asking.remove(connection)
                    continue
                states = take(request["split"], [Rows(*row) for row in request["rows"]])
                with _broken_connections("a training rank"):
                    head = {"stop": stage.stop_requested(), "errors": states.errors}
                    connection.send_bytes(json.dumps(head).encode())
                    for tensor in (*_tensors(states.features), *_tensors(states.final_hidden)):
                        connection.send_bytes(_bytes(tensor.cpu()))
    if stopped:
        raise StopRequested("this rank captured for a training that stopped")


class CaptureRanks:
    """A training rank's connections to its capture ranks, with a `take` like that of `online.Capture`. Thread-safe.

    info: from `online.describe_features`. lengths: tokens of each split's samples. When its context ends, the capture
    ranks are told, and end too; after an error their connection breaks.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        info: Mapping[str, Any],
        lengths: Mapping[str, Sequence[int]],
        stop: threading.Event,
    ) -> None:
        self._connections = connections
        self._lengths = lengths
        self._layer_ids: Sequence[int] = info["target_layer_ids"]
        self._hidden_size: int = info["hidden_size"]
        self._keeps_final: bool = info["final_hidden"]
        self._is_float8 = "feature_dtype" in info
        self._dtype: torch.dtype = getattr(torch, info["dtype"])
        self._stop = stop
        self._one_at_a_time = threading.Lock()

    @classmethod
    def connect(
        cls, training: TrainingStage, info: Mapping[str, Any], lengths: Mapping[str, Sequence[int]]
    ) -> CaptureRanks:
        """Wait until this rank's capture ranks are ready, and connect."""
        rows = training.world_size // training.sp_degree
        capture_ranks = training.whole.world_size - training.world_size
        store = meeting_store(training.whole.rank, training.whole.world_size)
        connections = []
        for number in capture_ranks_of(training.rank // training.sp_degree, rows, capture_ranks):
            connections.append(Client(store.get(_place(number)).decode(), family="AF_UNIX"))
        return cls(connections, info, lengths, training.stop)

    def take(self, split: str, rows: Sequence[Rows]) -> RowStates:
        """Capture the states of these rows, dealt over the capture ranks of this rank."""
        lengths = [self._lengths[split][row.index] for row in rows]
        dealt = deal(lengths, len(self._connections))
        features: list[StoredStates] = [torch.empty(0)] * len(rows)
        final_hidden, errors = list(features), MeanErrors(self._layer_ids)
        with self._one_at_a_time, _broken_connections("a capture rank"):
            for connection, places in zip(self._connections, dealt, strict=True):
                request = [[rows[place].index, rows[place].first, rows[place].last] for place in places]
                if request:
                    connection.send_bytes(json.dumps({"split": split, "rows": request}).encode())
            for connection, places in zip(self._connections, dealt, strict=True):
                if not places:
                    continue
                head = json.loads(connection.recv_bytes())
                if head["stop"]:
                    self._stop.set()
                counts = [rows[place].last - rows[place].first for place in places]
                errors.add(sum(counts), head["errors"])
                received = self._received(connection, counts, len(self._layer_ids))
                for place, part in zip(places, received, strict=True):
                    features[place] = part
                if self._keeps_final:
                    counts = [lengths[place] for place in places]
                    for place, part in zip(places, self._received(connection, counts, 1), strict=True):
                        final_hidden[place] = part
        return RowStates(
            _concatenated(features), _concatenated(final_hidden) if self._keeps_final else None, (*errors.means(),)
        )

    def _received(self, connection: Connection, counts: Sequence[int], layers: int) -> Sequence[StoredStates]:
        """Receive states of so many layers, [count, W] for each count."""
        shape = (sum(counts), layers * self._hidden_size)
        states: StoredStates = torch.empty(shape, dtype=self._dtype)
        if self._is_float8:
            states = Float8States.empty(shape, layers, torch.device("cpu"))
        for tensor in _tensors(states):
            connection.recv_bytes_into(_bytes(tensor))
        return states.split(list(counts))

    def __enter__(self) -> CaptureRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        end = "done" if kind is None else "stopped"
        for connection in self._connections:
            if kind is None or issubclass(kind, StopRequested):
                with _broken_connections("a capture rank"):
                    connection.send_bytes(json.dumps({"end": end}).encode())
            connection.close()


def _tensors(states: StoredStates | None) -> Sequence[Tensor]:
    """The tensors of states as they are sent."""
    if isinstance(states, Float8States):
        return states.values_TW, states.scales_TL
    return () if states is None else (states,)


def _concatenated(parts: Sequence[StoredStates]) -> StoredStates:
    encoded = [part for part in parts if isinstance(part, Float8States)]
    return Float8States.cat(encoded) if encoded else torch.cat([part for part in parts if isinstance(part, Tensor)])


def _bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a buffer."""
    return tensor.flatten().view(torch.uint8).numpy()


def _place(number: int) -> str:
    """The store's key for the address at which a capture rank, counted from 0, listens."""
    return f"capture/{number}"


@contextmanager
def _broken_connections(who: str) -> Iterator[None]:
    """Open a context that turns a broken connection into an error of torch.distributed, like a failed collective."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise dist.DistNetworkError(f"the connection to {who} broke: that rank has ended") from error
