"""Counts the bytes of all tensors that live at the same time, as a GPU's allocator would, without its rounding."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Inside, every storage that an operation makes counts until it is freed; `peak` is the highest sum, in bytes.

    What was there before does not count, nor what a kernel uses inside itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def forget(self, tensors: Any) -> None:
        """Take tensors for ones that were there before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
