"""Frames over a stream socket: a JSON object, and the bytes of the tensors that belong to it.

    u32 length (little-endian), JSON of that length, then each tensor's bytes; who receives them knows shape and dtype

Nothing is unpickled. Both ends are of the same byte order, since dflow's hosts are.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

LENGTH = struct.Struct("<I")
LONGEST_HEAD = 2**24  # bytes


class BrokenStream(OSError):
    """The other end of a stream is gone, or sends something else than frames."""


class Frames:
    """A connected socket of frames. One thread sends and another may receive at the same time.

    heard: when bytes came last, as time.monotonic(). All methods raise OSError for a connection that broke.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self.heard = time.monotonic()

    def send(self, head: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a frame. tensors: contiguous, on the CPU."""
        text = json.dumps(head).encode()
        if len(text) > LONGEST_HEAD:
            raise ValueError(f"a head of {len(text):,} bytes; at most {LONGEST_HEAD:,} are sent")
        with self._sending:
            self._socket.sendall(LENGTH.pack(len(text)) + text)
            for tensor in tensors:
                self._socket.sendall(_memory(tensor))

    def receive(self) -> dict[str, Any]:
        """Receive the head of a frame; its tensors follow by `receive_into`."""
        size = bytearray(LENGTH.size)
        self._fill(memoryview(size))
        length = LENGTH.unpack(size)[0]
        if length > LONGEST_HEAD:
            raise BrokenStream(f"a head of {length:,} bytes was announced; at most {LONGEST_HEAD:,} are read")
        text = bytearray(length)
        self._fill(memoryview(text))
        try:
            head = json.loads(text)
        except ValueError as error:
            raise BrokenStream(f"a head that is no JSON: {error}") from error
        if not isinstance(head, dict):
            raise BrokenStream("a head that is no JSON object")
        return head

    def receive_into(self, tensor: Tensor) -> None:
        """Receive a tensor into contiguous memory of the CPU."""
        self._fill(_memory(tensor))

    def limit(self, seconds: float | None) -> None:
        """Let sending and receiving fail after so many seconds without progress; None: never."""
        self._socket.settimeout(seconds)

    def end(self) -> None:
        """Break the connection, so that both ends, and every thread that waits for it, see an OSError."""
        with suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, memory: memoryview) -> None:
        while memory:
            count = self._socket.recv_into(memory)
            if not count:
                raise BrokenStream("the other end closed the connection")
            self.heard = time.monotonic()
            memory = memory[count:]


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
