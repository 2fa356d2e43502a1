"""A list of tensors that differ in shape, such as the pixel rows of the images of a batch.

It behaves like a tensor along its first dimension: index, slice, chunk, cat, repeat, move.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias, TypeGuard

import torch
from torch import Tensor

from dsl.errors import DataError

Index: TypeAlias = slice | Sequence[int] | Tensor

# dtype, shape and raw bytes of a tensor
Packed = tuple[str, tuple[int, ...], bytes]


class TensorList:
    """A list of tensors of any shapes, with one dtype and one device, never empty.

    A selection is a new list that shares the tensors: setting an item in one list does not change the other. Raises
    DataError for no tensors, for anything but tensors, or for more than one dtype or device.
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        if not self._tensors:
            raise DataError("a TensorList of no tensors: it has neither device nor dtype; give one tensor or more")
        _check_tensors(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def __getitem__(self, index: int | Index) -> Any:
        """Select tensors: one by an int; a TensorList by a slice, ints, an int64 tensor, or a bool tensor as a mask.

        Raises IndexError past the ends, and DataError if nothing is selected.
        """
        if is_row_number(index):
            return self._tensors[operator.index(index)]
        return TensorList(self._tensors[row] for row in row_numbers(index, len(self)))

    def __setitem__(self, index: int | Index, value: Any) -> None:
        """Assign a tensor to an int, or a TensorList to as many distinct rows.

        Raises IndexError past the ends, and DataError for values that do not fit, and changes nothing.
        """
        if is_row_number(index):
            rows, values = [operator.index(index)], [value]
        else:
            if not isinstance(value, TensorList):
                raise DataError(f"several rows of a TensorList need a TensorList, not a {type(value).__name__}")
            rows, values = distinct_rows(index, len(self)), list(value)
            if len(rows) != len(values):
                raise DataError(f"{len(values)} tensors do not fit {len(rows)} rows of a TensorList")
        tensors = list(self._tensors)
        for row, tensor in zip(rows, values, strict=True):
            tensors[row] = tensor
        _check_tensors(tensors)
        self._tensors = tensors

    def __eq__(self, other: object) -> bool:
        """Whether the other is a TensorList of equal dtype, shapes and values; the device does not matter."""
        return (
            isinstance(other, TensorList)
            and len(self) == len(other)
            and all(equal_tensors(one, two) for one, two in zip(self, other, strict=True))
        )

    def __repr__(self) -> str:
        return f"TensorList({self.shapes}, dtype={self.dtype}, device={self.device})"

    def __reduce__(self) -> tuple[Any, tuple[list[Packed]]]:
        return _unpack_list, ([pack(tensor) for tensor in self],)

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._tensors[0].dtype

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(tensor.shape) for tensor in self]

    @classmethod
    def cat(cls, lists: Iterable[TensorList]) -> Self:
        """The tensors of all lists, in order, as one TensorList."""
        return cls(tensor for tensors in lists for tensor in tensors)

    def chunk(self, n: int) -> list[TensorList]:
        """Split the list into at most n parts of equal length except the last, as torch.chunk does."""
        return [self[part] for part in chunk_slices(len(self), n)]

    def repeat(self, n: int) -> TensorList:
        """Repeat the whole list n times: a b a b."""
        check_count("repeat", n)
        return TensorList(self._tensors * n)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TensorList:
        """Copy the list to a device and dtype; None keeps the current one."""
        return TensorList(tensor.to(device=device or tensor.device, dtype=dtype or tensor.dtype) for tensor in self)


def is_row_number(index: Any) -> TypeGuard[SupportsIndex]:
    """Whether an index selects one row: an int or an integer tensor of no dimension, but not a bool."""
    if isinstance(index, Tensor):
        return index.ndim == 0 and index.dtype != torch.bool and not index.is_floating_point()
    return not isinstance(index, bool) and hasattr(index, "__index__")


def row_numbers(index: Index, length: int) -> list[int]:
    """The rows from 0 to length - 1 that an index selects, in its order.

    Raises IndexError for a row past the ends, TypeError for another kind of index, DataError if none is selected.
    """
    if isinstance(index, slice):
        rows = list(range(length)[index])
    elif isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == (length,):
        rows = index.nonzero()[:, 0].tolist()
    else:
        chosen = index.tolist() if isinstance(index, Tensor) else index
        if not isinstance(chosen, Sequence) or not all(is_row_number(row) for row in chosen):
            raise TypeError(
                f"rows are selected by a slice, ints, a tensor of ints [N] or of bools [{length}], not by {index!r}"
            )
        rows = [range(length)[operator.index(row)] for row in chosen]
    if not rows:
        raise DataError(f"{index!r} selects none of {length} rows; a batch or list has at least one")
    return rows


def distinct_rows(index: Index, length: int) -> list[int]:
    """The rows that an index selects for assignment. Raises DataError for a repeated row."""
    rows = row_numbers(index, length)
    if len(set(rows)) != len(rows):
        raise DataError(f"{index!r} selects a row twice; only one value can be assigned to it")
    return rows


def chunk_slices(length: int, n: int) -> list[slice]:
    """Slices of ceil(length / n) rows; possibly fewer than n."""
    check_count("chunk", n)
    size = -(-length // n)
    return [slice(start, start + size) for start in range(0, length, size)]


def check_count(what: str, n: int) -> None:
    """Check that a count is at least 1. Raises DataError."""
    if n < 1:
        raise DataError(f"{what}({n}): the number must be at least 1")


def equal_tensors(one: Any, other: Any) -> bool:
    """Whether both are tensors of the same dtype, shape and values; the device does not matter."""
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def pack(tensor: Tensor) -> Packed:
    """A tensor as plain values: dtype, shape and bytes, only those of its view.

    Pickling a tensor would store the whole storage behind the view, and unpickling would call torch.load on an inner
    pickle, which can run any code.
    """
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw


def unpack(packed: Packed) -> Tensor:
    """Restore a packed tensor, on the CPU."""
    dtype, shape, raw = packed
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


def _unpack_list(tensors: list[Packed]) -> TensorList:
    return TensorList(unpack(packed) for packed in tensors)


def _check_tensors(tensors: Sequence[Any]) -> None:
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise DataError(f"item {place} of a TensorList is a {type(tensor).__name__}, not a tensor")
        if tensor.device != tensors[0].device or tensor.dtype != tensors[0].dtype:
            raise DataError(
                f"item {place} of a TensorList is {tensor.dtype} on {tensor.device}, item 0 {tensors[0].dtype} on "
                f"{tensors[0].device}; a TensorList has one dtype and one device: convert them with to()"
            )
