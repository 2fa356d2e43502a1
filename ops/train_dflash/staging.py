"""Moves the bytes of a micro-batch to the device: written once, side by side, and copied once.

On a CPU they are written to the micro-batch's own memory, and nothing is copied. For a GPU they are written to pinned
memory, a piece after the other, and copied on a separate stream while the device computes. Pinned buffers are used in
turn: one is reused when the copy from it is done. So they do not grow with the context: torch rounds pinned memory up
to a power of two and never gives it back. The computing thread calls `Sent.arrive` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

from ops.lib.kernels.device import to_device

BUFFERS = 2  # one is written to while the other is copied
PIECE = 2**28  # bytes of a buffer at most; a multiple of the tensors' alignment

Write = Callable[[Tensor, int], None]  # fills host memory, uint8, which begins at this byte of the whole


class Event(Protocol):
    """The end of a copy: torch.cuda.Event, or a test's substitute."""

    def synchronize(self) -> None:
        """Wait until the copy is done."""

    def wait(self) -> None:
        """Let the calling thread's current stream wait for the copy."""


@frozen(eq=False)
class Sent:
    """Device memory, uint8 [size], and the event that ends the copy into it; None if it is already filled."""

    memory: Tensor
    copied: Event | None = None

    def arrive(self) -> None:
        """Let the current stream wait for the copy; the computing thread calls this before it uses the memory.

        The thread itself does not wait. The memory belongs to the copying stream; recording the computing stream keeps
        it until that has used it.
        """
        if self.copied is not None:
            self.copied.wait()
            if self.memory.is_cuda:
                self.memory.record_stream(torch.cuda.current_stream(self.memory.device))


class Transfer(Protocol):
    """An interface that brings bytes to a device; for one thread at a time."""

    def send(self, size: int, write: Write) -> Sent: ...


@frozen
class Direct:
    """Sends bytes through new memory for every call; to a GPU they are copied on the caller's stream."""

    device: torch.device

    def send(self, size: int, write: Write) -> Sent:
        memory = torch.empty(size, dtype=torch.uint8)
        write(memory, 0)
        return Sent(to_device(memory, self.device))


@define(eq=False)
class _Buffer:
    memory: Tensor | None = None
    copied: Event | None = None


@define(eq=False)
class Staged:
    """Sends bytes to the device through host buffers that are used in turn.

    allocate: returns uint8 [size] on the host. room: the same on the device. copy: starts a copy from host to device
    memory of equal size, after earlier copies, and returns its end event. piece: the most bytes of a buffer.
    """

    allocate: Callable[[int], Tensor]
    room: Callable[[int], Tensor]
    copy: Callable[[Tensor, Tensor], Event]
    piece: int = PIECE
    _buffers: list[_Buffer] = field(init=False, factory=lambda: [_Buffer() for _ in range(BUFFERS)])
    _turn: int = field(init=False, default=0)

    def send(self, size: int, write: Write) -> Sent:
        memory, copied = self.room(size), None
        for start in range(0, size, self.piece):
            copied = self._send(memory[start : start + self.piece], start, write)
        return Sent(memory, copied)

    def _send(self, memory: Tensor, start: int, write: Write) -> Event:
        buffer = self._buffers[self._turn]
        if buffer.copied is not None:
            buffer.copied.synchronize()
            buffer.copied = None
        if buffer.memory is None or len(buffer.memory) < len(memory):
            buffer.memory = self.allocate(len(memory))
        written = buffer.memory[: len(memory)]
        write(written, start)
        buffer.copied = self.copy(written, memory)
        self._turn = (self._turn + 1) % BUFFERS
        return buffer.copied


def transfer_to(device: torch.device) -> Transfer:
    """The fastest transfer to a device: on a separate stream for a GPU."""
    if device.type != "cuda":
        return Direct(device)
    side = _SideStream(device)
    return Staged(_pinned, side.room, side.copy)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _SideStream:
    """Copies from pinned memory on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def room(self, size: int) -> Tensor:
        """Allocate device memory, uint8 [size], on the stream's own device.

        In a new thread, the current GPU would be the first one.
        """
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy(self, host: Tensor, memory: Tensor) -> Event:
        with torch.cuda.stream(self._stream):
            memory.copy_(host, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return copied
