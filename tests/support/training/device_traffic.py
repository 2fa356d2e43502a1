"""A device that is not there: the "meta" device in the place of a GPU, and a count of what would hold the host up.

Tensors on "meta" have no values. Whatever asks for one gets a zero here, or as many rows as there are, and is counted:
on a GPU the host would wait at that place until the device has done everything before it.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
aten = torch.ops.aten
ADDING = (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class Traffic(TorchDispatchMode):
    """A mode that counts operations by name: `waits` where the host would wait for the device, `copies` to the device.

    A copy to the device that is not `non_blocking` waits as well, so it is in both. Pinned memory is not seen here:
    `to_device` pins it, see tests/ops/lib/kernels/test_pinned.py. `sorted` counts additions to indexed places, as the
    gradient of x[index] makes: CUDA sorts the indices first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies = 0
        self.sorted = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(tensor.device == DEVICE for tensor in tensors)
        if on_device and func in ADDING and len(args) > 3 and args[3]:  # accumulate
            self.sorted += 1
        if on_device and func is aten._local_scalar_dense.default:
            self.waits["item"] += 1
            return False if tensors[0].dtype == torch.bool else tensors[0].dtype.is_floating_point * 0.0
        if on_device and func is aten.nonzero.default:
            self.waits["nonzero"] += 1
            return torch.empty(tensors[0].numel(), tensors[0].ndim, dtype=torch.int64, device=DEVICE)
        if on_device and func in INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.waits["index by bool"] += 1
            (mask,) = args[1]
            args = (args[0], [torch.empty(mask.numel(), dtype=torch.int64, device=DEVICE)], *args[2:])
        if func is aten.bincount.default and on_device:
            self.waits["bincount"] += 1
            return torch.empty(args[2], dtype=torch.int64, device=DEVICE)
        if func is aten._to_copy.default and "device" in kwargs and kwargs["device"] is not None:
            there, here = tensors[0].device, torch.device(kwargs["device"])
            if there != here and here == DEVICE:
                self._copied(kwargs.get("non_blocking", False))
            if there == DEVICE and here != DEVICE:
                self.waits["copy to the host"] += 1
                return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if func is aten.copy_.default and args[0].device == DEVICE and args[1].device != DEVICE and args[1].ndim:
            self._copied(len(args) > 2 and args[2])
        return func(*args, **kwargs)

    def _copied(self, non_blocking: bool) -> None:
        self.copies += 1
        if not non_blocking:
            self.waits["copy to the device"] += 1
