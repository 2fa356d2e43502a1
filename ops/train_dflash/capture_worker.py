"""A worker of the pool: it owns a target and nothing else, and captures what training ranks request.

The main thread computes one unit at a time, in the order of the requests of all ranks. Each connection has a thread
that reads requests and one that sends answers, so sending overlaps with computing. At most FINISHED units wait to be
sent or are sent; then no further one is computed. The messages are described in capture_pool.py.

On a GPU an answer is copied to pinned memory by its sending thread, on a stream of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from socket import SHUT_RDWR, socket
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from dsl.convert import unstructure
from dsl.stage import PoolRendezvous, Stage
from ops.lib.stream.frames import Frames
from ops.lib.stream.handshake import greet
from ops.lib.stream.rendezvous import keep_alive, listen
from ops.lib.target.float8 import Float8States, StoredStates
from ops.train_dflash.batches import Rows
from ops.train_dflash.capture_pool import DEVICE, Counters, described, disagreement, tensors_of
from ops.train_dflash.online import RowStates

FINISHED = 2  # units in memory beside the one that is computed
LOOK_S = 0.2
REPORTED_WITHIN_S = 2.0


def serve(
    take: Callable[[str, Sequence[Rows]], RowStates],
    stage: Stage,
    rendezvous: PoolRendezvous,
    facts: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Answer requests until the stage is asked to stop, which its parent does once no rank runs.

    facts: from `agreement`. An error of `take` is sent to all ranks, then raised.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    worker = _Worker(dict(facts), bytes.fromhex(rendezvous.secret), name, device)
    with listen(rendezvous) as listening:
        threading.Thread(target=worker.accept, args=(listening,), daemon=True).start()
        try:
            worker.run(take, stage.stop_requested)
        except Exception as error:
            worker.report(f"{type(error).__name__}: {error}")
            raise
        finally:
            listening.shutdown(SHUT_RDWR)  # ends `accept`, which would go on with whatever has the descriptor next


@define(eq=False)
class _Client:
    """A connected rank, and the answers that wait to be sent to it; None ends its sending thread."""

    frames: Frames
    answers: queue.SimpleQueue[tuple[Mapping[str, Any], RowStates] | None] = field(factory=queue.SimpleQueue)


@define(eq=False)
class _Worker:
    facts: Mapping[str, Any]
    secret: bytes
    name: str
    device: torch.device
    requests: queue.SimpleQueue[tuple[_Client, Mapping[str, Any]]] = field(factory=queue.SimpleQueue)
    clients: list[_Client] = field(factory=list)
    room: threading.Semaphore = field(factory=partial(threading.Semaphore, FINISHED))

    def run(self, take: Callable[[str, Sequence[Rows]], RowStates], stops: Callable[[], bool]) -> None:
        """Compute what is requested, until `stops`."""
        counters, began = Counters(), time.monotonic()
        while not stops():
            try:
                client, request = self.requests.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if client not in self.clients:
                continue
            began = began if counters.tokens else time.monotonic()
            asked = time.monotonic()
            while not self.room.acquire(timeout=LOOK_S):
                if stops():
                    return
            started = time.monotonic()
            rows = [Rows(*row) for row in request["rows"]]
            states = take(request["split"], rows)
            now = time.monotonic()
            counters = evolve(
                counters,
                tokens=counters.tokens + sum(row.last - row.first for row in rows),
                seconds=now - began,
                busy=counters.busy + now - started,
                blocked=counters.blocked + started - asked,
            )
            head = {
                "unit": request["unit"],
                "tensors": described(states),
                "errors": list(states.errors),
                "counters": unstructure(counters),
            }
            client.answers.put((head, states))
            del states  # its memory is free once it is sent

    def accept(self, listening: socket) -> None:
        while True:
            try:
                connected, _ = listening.accept()
            except OSError:  # closed: the worker ends
                return
            keep_alive(connected)
            threading.Thread(target=self._read, args=(Frames(connected),), daemon=True).start()

    def report(self, error: str) -> None:
        """Send an error to all ranks, as far as they read it soon."""
        sending = [
            threading.Thread(target=_send_error, args=(client, error), daemon=True) for client in list(self.clients)
        ]
        for each in sending:
            each.start()
        for each in sending:
            each.join(REPORTED_WITHIN_S)

    def _read(self, frames: Frames) -> None:
        """Greet a rank, and read its requests until its connection ends."""
        client = _Client(frames)
        try:
            theirs = greet(frames, self.secret, {**self.facts, DEVICE: self.name})
            if disagreement(theirs, self.facts):  # which the rank reports
                return
            self.clients.append(client)
            threading.Thread(target=self._send, args=(client,), daemon=True).start()
            while True:
                self.requests.put((client, frames.receive()))
        except OSError:
            pass
        finally:
            if client in self.clients:
                self.clients.remove(client)
                client.answers.put(None)
            else:
                frames.close()

    def _send(self, client: _Client) -> None:
        side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        is_broken = False
        while (answer := client.answers.get()) is not None:
            head, states = answer
            try:
                if not is_broken:
                    client.frames.send(head, tensors_of(_on_host(states, side)))
            except OSError:
                is_broken = True  # its reading thread ends as well
            finally:
                del answer, states
                self.room.release()
        client.frames.close()


def _send_error(client: _Client, error: str) -> None:
    with suppress(OSError):  # it is gone
        client.frames.send({"error": error})


def _on_host(states: RowStates, side: torch.cuda.Stream | None) -> RowStates:
    """The states on the CPU; `take` has waited for them."""
    if side is None:
        return states
    with torch.cuda.device(side.device), torch.cuda.stream(side):
        final_hidden = None if states.final_hidden is None else _copied(states.final_hidden)
        copied = RowStates(_copied(states.features), final_hidden, states.errors)
        side.synchronize()
    return copied


def _copied(states: StoredStates) -> StoredStates:
    if isinstance(states, Float8States):
        return Float8States(_pinned(states.values_TW), _pinned(states.scales_TL))
    return _pinned(states)


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
