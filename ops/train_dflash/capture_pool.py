"""A training rank's side of online capture by a pool: it requests units, any worker of `launch.pool` answers.

A unit is what one rank needs of one micro-batch (`online.Ask`): a function of the plan, the mesh and the config alone.
A worker runs it whole, so its bytes do not depend on how many workers there are, on which one answers, or on which
were lost. Units are requested ahead of the training in its order, wait in one queue, and go to whichever worker has the
fewest of this rank's; each is kept until the training takes it. If a worker is lost, its open units go back to the
front of the queue. Nothing else is remembered: a resume requests from its first step on.

One thread per worker always reads what was requested, so a rank that does not train for a while blocks no worker for
long, and one thread looks for new workers and for those that no longer answer.

    request     {"unit": 17, "split": "train", "rows": [[sample, first, last], ...]}
    answer      {"unit": 17, "tensors": [[dtype, shape], ...], "errors": of RowStates, "counters": of the worker}, bytes
                of RowStates.features, then of final_hidden if it is kept; of encoded states values, then scales
    error       {"error": text}: the worker ends, and reports the error itself
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import Factory, define, frozen
from torch import Tensor

from dsl.convert import structure
from dsl.errors import ConfigError, DataError
from dsl.stage import PoolRendezvous, Stage
from ops.lib.stream.frames import Frames
from ops.lib.stream.handshake import WrongSecret, answer_greeting
from ops.lib.stream.rendezvous import announced, connect, report_hung
from ops.lib.target.float8 import Float8States, StoredStates
from ops.train_dflash.batches import Rows
from ops.train_dflash.online import RowStates

OPEN_UNITS = 2  # of a rank at one worker: one is computed while the other waits or is sent
LOOK_S = 0.2
SAY_EVERY_S = 30.0
HUNG_AFTER_S = 60.0  # and HUNG_UNITS times the median unit
HUNG_UNITS = 20
DEVICE = "device"


@frozen(kw_only=True)
class Counters:
    """What a worker did since its first unit: tokens; seconds, of which it computed, or waited to send."""

    tokens: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    blocked: float = 0.0

    def since(self, before: Counters) -> Counters:
        """What was done after `before`; all of it if the worker was started again since."""
        if before.seconds > self.seconds:
            return self
        return Counters(
            tokens=self.tokens - before.tokens,
            seconds=self.seconds - before.seconds,
            busy=self.busy - before.busy,
            blocked=self.blocked - before.blocked,
        )


@define(eq=False)
class _Unit:
    number: int
    split: str
    rows: Sequence[Rows]
    states: RowStates | None = None


@define(eq=False)
class _Worker:
    """A connected worker. open: its units, in the order of their requests. turn: of its last request."""

    name: str
    frames: Frames
    turn: int
    open: list[_Unit] = Factory(list)
    asked: float = 0.0  # when it was requested something last, as time.monotonic()
    counters: Counters = Counters()
    logged: Counters = Counters()

    def silent_for(self) -> float:
        """The seconds since it was heard or requested; 0 if it owes nothing."""
        return time.monotonic() - max(self.frames.heard, self.asked) if self.open else 0.0


class CapturePool:
    """The pool of this rank, with an `ask` like that of `online.Capture`. Thread-safe.

    info: from `online.describe_features`. lengths: tokens of each split's samples. facts: from `agreement`; a worker
    must have the same. Its context ends with all connections.
    """

    def __init__(
        self,
        stage: Stage,
        rendezvous: PoolRendezvous,
        info: Mapping[str, Any],
        lengths: Mapping[str, Sequence[int]],
        facts: Mapping[str, Any],
    ) -> None:
        self._stage = stage
        self._rendezvous = rendezvous
        self._facts = facts
        self._lengths = lengths
        self._layers = len(info["target_layer_ids"])
        self._hidden_size: int = info["hidden_size"]
        self._keeps_final: bool = info["final_hidden"]
        self._is_float8 = "feature_dtype" in info
        self._dtype: torch.dtype = getattr(torch, info["dtype"])
        self._changed = threading.Condition()
        self._queue: deque[_Unit] = deque()
        self._units = self._turns = 0
        self._workers: dict[str, _Worker] = {}
        self._devices: set[str] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._seconds: deque[float] = deque(maxlen=32)  # that answers took
        self._asked_again = self._received = self._received_logged = 0
        self._logged_at = time.perf_counter()
        self._meeting = threading.Thread(target=self._look_after, daemon=True)
        self._meeting.start()

    def ask(self, split: str, rows: Sequence[Rows]) -> Callable[[], RowStates]:
        """Request the states of these rows; what it returns waits for them, on the CPU.

        The wait raises DataError for an answer that does not fit the request, ConfigError for a worker that computes
        something else, and DistNetworkError if a worker failed, or if the stage has to stop while there is none.
        """
        with self._changed:
            unit = _Unit(self._units, split, rows)
            self._units += 1
            self._queue.append(unit)
            self._deal()
        return partial(self._wait, unit)

    def metrics(self) -> dict[str, float]:
        """The metrics since the last call, as this rank sees them; its counters are those of the workers as a whole."""
        with self._changed:
            now = time.perf_counter()
            done = [worker.counters.since(worker.logged) for worker in self._workers.values()]
            for worker in self._workers.values():
                worker.logged = worker.counters
            received, seconds = self._received - self._received_logged, now - self._logged_at
            self._received_logged, self._logged_at = self._received, now
            worked = sum(each.seconds for each in done)
            return {
                "stream/workers": float(len(self._workers)),
                "stream/gigabytes_per_second": received / 1e9 / seconds,
                "stream/asked_again": float(self._asked_again),
                "capture/tokens_per_second": sum(each.tokens for each in done) / seconds,
                "capture/busy_share": sum(each.busy for each in done) / worked if worked else 0.0,
                "capture/blocked_share": sum(each.blocked for each in done) / worked if worked else 0.0,
            }

    def balance(self, waited: float) -> str:
        """A sentence on which side waited, and for how many workers neither would. waited: the training's share."""
        with self._changed:
            counters = [worker.counters for worker in self._workers.values()]
        busy = sum(each.busy for each in counters) / max(1e-9, sum(each.seconds for each in counters))
        workers = self._rendezvous.workers
        balanced = max(1, math.ceil(workers * busy / max(1e-9, 1 - waited) - 1e-6))
        return (
            f"the training waited {waited:.0%} of the time for features, and its pool of {workers} computed {busy:.0%} "
            f"of the time: {balanced} worker{'s' * (balanced != 1)} would keep up"
        )

    def __enter__(self) -> CapturePool:
        return self

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._closed = True
            for worker in self._workers.values():
                worker.frames.end()
        self._meeting.join()

    def _wait(self, unit: _Unit) -> RowStates:
        began = said = time.monotonic()
        with self._changed:
            while unit.states is None:
                if self._error is not None:
                    raise self._error
                if self._changed.wait(LOOK_S) or self._workers:
                    continue
                if self._stage.stop_requested():
                    raise dist.DistNetworkError("stopped while no pool worker was connected")
                if time.monotonic() - said >= SAY_EVERY_S:
                    said = time.monotonic()
                    self._stage.info(f"no pool worker is connected; the training has waited for {said - began:.0f} s")
            return unit.states

    def _deal(self) -> None:
        """Request the units of the queue, as far as workers take them; with the lock held."""
        while self._queue:
            workers = [worker for worker in self._workers.values() if len(worker.open) < OPEN_UNITS]
            if not workers:
                return
            worker = min(workers, key=lambda each: (len(each.open), each.turn))
            unit = self._queue.popleft()
            worker.open.append(unit)
            worker.turn = self._turns = self._turns + 1
            worker.asked = time.monotonic()
            rows = [[row.index, row.first, row.last] for row in unit.rows]
            try:
                worker.frames.send({"unit": unit.number, "split": unit.split, "rows": rows})
            except OSError:
                self._lose(worker)

    def _lose(self, worker: _Worker) -> None:
        """Forget a worker, and request its open units from others; with the lock held."""
        if self._workers.pop(worker.name, None) is None or self._closed:
            return
        worker.frames.end()
        self._asked_again += len(worker.open)
        self._queue.extendleft(reversed(worker.open))
        worker.open.clear()
        left = len(self._workers)
        self._stage.info(f"pool worker {worker.name} is lost; {left} of {self._rendezvous.workers} are connected")
        self._deal()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _read(self, worker: _Worker) -> None:
        """Receive the answers of a worker until its connection ends."""
        try:
            while True:
                head = worker.frames.receive()
                if "error" in head:
                    raise dist.DistNetworkError(f"pool worker {worker.name} failed: {head['error']}")
                with self._changed:
                    if worker.name not in self._workers:  # a request to it failed; others have its units
                        return
                    unit = next((unit for unit in worker.open if unit.number == head["unit"]), None)
                if unit is None:
                    raise DataError(f"pool worker {worker.name} answered unit {head['unit']}, which it was not asked")
                states = self._states(worker, unit, head)
                with self._changed:
                    if worker.name not in self._workers:
                        return
                    self._seconds.append(time.monotonic() - worker.asked)
                    self._received += sum(tensor.nbytes for tensor in tensors_of(states))
                    worker.counters = structure(Counters, head["counters"])
                    worker.open.remove(unit)
                    unit.states = states
                    self._changed.notify_all()
                    self._deal()
        except OSError:
            with self._changed:
                self._lose(worker)
        except BaseException as error:  # noqa: BLE001 every error belongs to the waiting rank
            self._fail(error)
        finally:
            worker.frames.close()

    def _states(self, worker: _Worker, unit: _Unit, head: Mapping[str, Any]) -> RowStates:
        """Receive the states of a unit. Raises DataError if they are not those of its rows."""
        tokens = sum(self._lengths[unit.split][row.index] for row in unit.rows)
        features = self._memory(sum(row.last - row.first for row in unit.rows), self._layers)
        final_hidden = self._memory(tokens, 1) if self._keeps_final else None
        states = RowStates(features, final_hidden, tuple(head["errors"]))
        expected = described(states)
        if expected != head["tensors"]:
            raise DataError(
                f"pool worker {worker.name} answered {head['tensors']} for the samples "
                f"{[row.index for row in unit.rows]} of the split {unit.split}, which have {expected}"
            )
        for tensor in tensors_of(states):
            worker.frames.receive_into(tensor)
        return states

    def _memory(self, tokens: int, layers: int) -> StoredStates:
        shape = (tokens, layers * self._hidden_size)
        if self._is_float8:
            return Float8States.empty(shape, layers, torch.device("cpu"))
        return torch.empty(shape, dtype=self._dtype)

    def _look_after(self) -> None:
        """Connect to workers as they announce themselves, and give up those that do not answer."""
        known: set[str] = set()
        try:
            while not self._closed and self._error is None:
                for name in announced(self._rendezvous):
                    if name not in known:
                        known.add(name)
                        self._connect(name)
                self._give_up_hung()
                time.sleep(LOOK_S)
        except BaseException as error:  # noqa: BLE001 every error belongs to the waiting rank
            self._fail(error)

    def _give_up_hung(self) -> None:
        with self._changed:
            limit = HUNG_AFTER_S + HUNG_UNITS * statistics.median(self._seconds or [0.0])
            for worker in list(self._workers.values()):
                if worker.silent_for() > limit:
                    self._stage.info(f"pool worker {worker.name} has not answered for {limit:.0f} s")
                    report_hung(self._rendezvous, worker.name)
                    self._lose(worker)

    def _connect(self, name: str) -> None:
        try:
            frames = Frames(connect(self._rendezvous, name))
        except OSError:  # it has ended since
            return
        try:
            facts = answer_greeting(frames, bytes.fromhex(self._rendezvous.secret), self._facts)
        except WrongSecret:
            self._stage.warn(f"the process that announced itself as pool worker {name} is none; it is not used")
            frames.close()
            return
        except OSError:
            frames.close()
            return
        device = facts.pop(DEVICE, "")
        self._devices.add(device)
        if (mistake := disagreement(facts, self._facts)) or len(self._devices) > 1:
            kinds = ", ".join(sorted(self._devices))
            frames.close()
            self._fail(ConfigError(f"pool worker {name}: {mistake or f'all must compute on the same device: {kinds}'}"))
            return
        with self._changed:
            if self._closed:
                frames.close()
                return
            number = int(name.partition("-")[0])
            first = (number - self._stage.rank) % self._rendezvous.workers - self._rendezvous.workers  # ranks spread
            worker = self._workers[name] = _Worker(name, frames, first)
            self._deal()
        threading.Thread(target=self._read, args=(worker,), daemon=True).start()


def agreement(stage: Stage, info: Mapping[str, Any], batch_tokens: int) -> dict[str, Any]:
    """What both sides of a connection must have alike; JSON values. info: as in CapturePool."""
    import transformers

    names = ("target_layer_ids", "dtype", "feature_dtype", "final_hidden", "hidden_size")
    return {
        "target": stage.inputs["target"].digest,
        "tokens": stage.inputs["tokens"].digest,
        **{name: list(info[name]) if name == names[0] else info[name] for name in names if name in info},
        "capture_batch_tokens": batch_tokens,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def disagreement(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """A text on the facts that differ; empty if none does."""
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    return "; ".join(f"{name}: {theirs.get(name)} there, {ours.get(name)} here" for name in names)


def tensors_of(states: RowStates) -> list[Tensor]:
    """The tensors of states as they are sent."""
    found: list[Tensor] = []
    for part in (states.features, states.final_hidden):
        if isinstance(part, Float8States):
            found += (part.values_TW, part.scales_TL)
        elif part is not None:
            found.append(part)
    return found


def described(states: RowStates) -> list[list[Any]]:
    """The dtype and shape of each tensor as they are sent; JSON values."""
    return [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors_of(states)]
