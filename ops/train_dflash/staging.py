"""Moves the bytes of a micro-batch to the device: written once, side by side, and copied once.

On a CPU they are written to the micro-batch's own memory, and nothing is copied. For a GPU they are written to pinned
memory and copied on a separate stream while the device computes. Pinned buffers are used in turn: one is reused when
the copy from it is done. The computing thread calls `Sent.arrive` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

from ops.lib.kernels.host_to_device import to_device

BUFFERS = 2  # one is written to while the other is copied

Write = Callable[[Tensor], None]  # fills host bytes, uint8 [size]


class Event(Protocol):
    """The end of a copy: torch.cuda.Event, or a test's substitute."""

    def synchronize(self) -> None:
        """Return when the copy is done."""

    def wait(self) -> None:
        """Let the calling thread's current stream wait for it."""


@frozen(eq=False)
class Sent:
    """uint8 [size] on the device, and the end of the copy that fills it; None if it is filled."""

    memory: Tensor
    copied: Event | None = None

    def arrive(self) -> None:
        """The computing thread calls this before it uses the memory; its stream waits, the thread does not.

        The memory belongs to the stream of the copy; recording the computing stream keeps it until that has used it.
        """
        if self.copied is not None:
            self.copied.wait()
            if self.memory.is_cuda:
                self.memory.record_stream(torch.cuda.current_stream(self.memory.device))


class Transfer(Protocol):
    """Brings bytes to a device; for one thread at a time."""

    def send(self, size: int, write: Write) -> Sent: ...


@frozen
class Direct:
    """New memory for every call: the device's own on a CPU; elsewhere copied on the caller's stream."""

    device: torch.device

    def send(self, size: int, write: Write) -> Sent:
        memory = torch.empty(size, dtype=torch.uint8)
        write(memory)
        return Sent(to_device(memory, self.device))


@define(eq=False)
class _Buffer:
    memory: Tensor | None = None
    copied: Event | None = None


@define(eq=False)
class Staged:
    """Through host buffers that are used in turn.

    allocate: returns uint8 [size] on the host. copy: starts the copy of such bytes to the device; returns the memory
    there and the copy's end.
    """

    allocate: Callable[[int], Tensor]
    copy: Callable[[Tensor], tuple[Tensor, Event]]
    _buffers: list[_Buffer] = field(init=False, factory=lambda: [_Buffer() for _ in range(BUFFERS)])
    _turn: int = field(init=False, default=0)

    def send(self, size: int, write: Write) -> Sent:
        buffer = self._buffers[self._turn]
        if buffer.copied is not None:
            buffer.copied.synchronize()
            buffer.copied = None
        if buffer.memory is None or len(buffer.memory) < size:
            buffer.memory = self.allocate(size)
        written = buffer.memory[:size]
        write(written)
        memory, buffer.copied = self.copy(written)
        self._turn = (self._turn + 1) % BUFFERS
        return Sent(memory, buffer.copied)


def transfer_to(device: torch.device) -> Transfer:
    """The transfer that keeps the device busy: on a separate stream on a GPU."""
    return Staged(_pinned, _SideStream(device).copy) if device.type == "cuda" else Direct(device)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _SideStream:
    """Copies from pinned memory on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, host: Tensor) -> tuple[Tensor, Event]:
        """In a new thread the current GPU is the first one; the stream sets its own device."""
        with torch.cuda.stream(self._stream):
            memory = host.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return memory, copied
