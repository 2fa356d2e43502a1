"""Typed batches whose fields are tensors or TensorLists with one row per sample, and a target's input batch.

B batch, S sequence length, R pixel rows, P patch_dim, I images
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from attrs import define, evolve, field, fields
from torch import Tensor
from torch.nn.functional import pad

from dsl.errors import DataError
from ops.lib.data.token_shards import TokenSample
from ops.lib.vision.tensor_list import (
    Index,
    Packed,
    TensorList,
    check_count,
    chunk_slices,
    distinct_rows,
    equal_tensors,
    is_row_number,
    pack,
    row_numbers,
    unpack,
)

Field: TypeAlias = Tensor | TensorList
NAME = "{}[{}]"  # of a tensor in a field with several of them, in messages and `parts`


@define(eq=False)
class TensorBatch:
    """A base class of typed batches: attrs classes whose fields are Tensors [B, ...] or TensorLists of B, or mappings
    of such, in which each name counts as a field.

    Subclasses use eq=False, since attrs would compare tuples of tensors, which raises. Setting a field checks it as in
    a new batch; `attrs.evolve` changes several fields at once. A class makes further checks in `__attrs_post_init__`,
    as ModelInputs does. It has no attrs validators, which would replace `__setattr__`.
    Selections may share memory with their batch; `__setitem__` never writes there. Raises DataError, naming the fields,
    if a field is of another type, if lengths or devices differ, and for B = 0.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field that fits the others; otherwise raise DataError and change nothing."""
        if hasattr(self, name) and name in {attribute.name for attribute in fields(type(self))}:  # not while it is made
            evolve(self, **{name: value})
        object.__setattr__(self, name, value)

    def __attrs_post_init__(self) -> None:
        for name, value in self.parts().items():
            if not isinstance(value, TensorList) and not (isinstance(value, Tensor) and value.ndim):
                what = "a tensor of no dimension" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise DataError(f"{self._name}.{name} is {what}; a field is a Tensor [B, ...] or a TensorList of B")
        lengths = {name: len(value) for name, value in self.parts().items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{self._name}: the fields differ in length: {_listed(lengths)}")
        if 0 in lengths.values():
            raise DataError(f"{self._name}: no rows; a batch has at least one")
        devices = {name: value.device for name, value in self.parts().items()}
        if len(set(devices.values())) > 1:
            raise DataError(f"{self._name}: the fields are on several devices: {_listed(devices)}")

    @property
    def _name(self) -> str:
        return type(self).__name__

    def parts(self) -> dict[str, Field]:
        """The fields by name, in the order of the class."""
        found: dict[str, Field] = {}
        for attribute in fields(type(self)):
            value = getattr(self, attribute.name)
            if isinstance(value, Mapping):
                found |= {NAME.format(attribute.name, name): each for name, each in value.items()}
            else:
                found[attribute.name] = value
        return found

    def _with(self, parts: Mapping[str, Any]) -> Self:
        """The batch with other fields, by their names in `parts`."""
        return evolve(self, **_grouped(type(self), parts))

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts().values())).device

    def __len__(self) -> int:
        return len(next(iter(self.parts().values())))

    def __getitem__(self, index: int | Index) -> Self:
        """The rows selected by a slice, ints, or a tensor of ints or bools; an int selects a batch of one.

        Raises IndexError past the ends, and DataError if nothing is selected.
        """
        rows = row_numbers([index] if is_row_number(index) else index, len(self))
        return self._with({name: _rows(value, rows) for name, value in self.parts().items()})

    def __setitem__(self, index: int | Index, other: Self) -> None:
        """Assign the rows of another batch of the same class to distinct rows of this one, aligned as in `cat`.

        Raises DataError for another class, number of rows, shape, dtype or device, and changes nothing.
        """
        rows = distinct_rows([index] if is_row_number(index) else index, len(self))
        self._check_same_class(other)
        if len(other) != len(rows):
            raise DataError(f"{self._name}: {len(other)} rows do not fit {len(rows)} places")
        own, new = (batch.parts() for batch in self._align([self, other]))
        changed = {}
        for name, value in own.items():
            _check_joinable(f"{self._name}.{name}", [value, new[name]])
            changed[name] = value.clone() if isinstance(value, Tensor) else value[:]
            changed[name][rows] = new[name]
        for name, value in _grouped(type(self), changed).items():
            object.__setattr__(self, name, value)  # of several fields, each may fit only all the others

    def __eq__(self, other: object) -> bool:
        """Whether the other batch has the same class, and equal fields in kind, dtype, shapes and values."""
        if type(self) is not type(other) or self.parts().keys() != other.parts().keys():
            return False
        theirs = other.parts()
        return all(
            value == theirs[name] if isinstance(value, TensorList) else equal_tensors(value, theirs[name])
            for name, value in self.parts().items()
        )

    def __reduce__(self) -> tuple[Any, tuple[type[Self], dict[str, Packed | TensorList]]]:
        """Pickle as plain values, so that unpickling does not run torch's own unpickler; the result is on the CPU."""
        packed: dict[str, Packed | TensorList] = {
            name: pack(value) if isinstance(value, Tensor) else value for name, value in self.parts().items()
        }
        return _unpack_batch, (type(self), packed)

    @classmethod
    def cat(cls, batches: Sequence[Self]) -> Self:
        """The rows of all batches, in order, in one batch.

        Raises DataError for no batches, and for fields that differ in kind, dtype, device or in shape after B.
        """
        if not batches:
            raise DataError(f"{cls.__name__}.cat of no batches")
        for batch in batches:
            batches[0]._check_same_class(batch)
        aligned = [batch.parts() for batch in cls._align(batches)]
        joined = {}
        for name in aligned[0]:
            values = [parts[name] for parts in aligned]
            _check_joinable(f"{cls.__name__}.{name}", values)
            joined[name] = torch.cat(values) if isinstance(values[0], Tensor) else TensorList.cat(values)
        return batches[0]._with(joined)

    @classmethod
    def _align(cls, batches: Sequence[Self]) -> Sequence[Self]:
        """The batches aligned for joining; a class whose rows can be padded overrides this."""
        return batches

    def chunk(self, n: int) -> list[Self]:
        """Split the batch into at most n batches of equal length except the last, as torch.chunk does."""
        return [self[part] for part in chunk_slices(len(self), n)]

    def repeat(self, n: int) -> Self:
        """Repeat the whole batch n times: a b a b."""
        check_count("repeat", n)
        return self[list(range(len(self))) * n]

    def permute(self, order: Sequence[int] | Tensor) -> Self:
        """Reorder the rows: row i of the result is row order[i]. Raises DataError if it is not a permutation."""
        rows = row_numbers(order, len(self))
        if sorted(rows) != list(range(len(self))):
            raise DataError(f"{rows} is not a permutation of {len(self)} rows")
        return self[rows]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Copy the batch to a device; floating-point fields get the dtype, ids and masks keep theirs."""
        moved = {}
        for name, value in self.parts().items():
            moved[name] = value.to(device=device or value.device, dtype=_dtype(value, dtype))
        return self._with(moved)

    def _check_same_class(self, other: object) -> None:
        if type(self) is not type(other):
            raise DataError(f"a {type(other).__name__} cannot be combined with a {self._name}")


@define(eq=False)
class ModelInputs(TensorBatch):
    """One batch for a target, padded on the right with zeros; `cat` and `__setitem__` pad the narrower batches.

    input_ids int64 [B, S]; attention_mask int64 [B, S]; loss_mask bool [B, S]; pixel_values: B x float [R, P];
    image_grid_thw: B x int64 [I, 3]. A text-only row has R = I = 0. seen: what other processors than Qwen's make of
    images, B tensors of any shape by name, with no element in rows without it. Raises DataError if the first three
    differ in shape, or the others are not TensorLists.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    pixel_values: TensorList
    image_grid_thw: TensorList
    seen: Mapping[str, TensorList] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        shapes = {name: list(value.shape) for name, value in self.parts().items() if isinstance(value, Tensor)}
        if list(shapes) != ["input_ids", "attention_mask", "loss_mask"]:
            raise DataError(
                f"ModelInputs: ids and masks are Tensors, the others TensorLists; Tensors are {list(shapes)}"
            )
        if len(shapes["input_ids"]) != 2 or len({*map(tuple, shapes.values())}) > 1:
            raise DataError(f"ModelInputs: ids and masks are of one shape [B, S], not {_listed(shapes)}")

    @property
    def has_images(self) -> bool:
        """Whether any row has an image; known from the shapes, without waiting for a device."""
        return any(len(grid) > 0 for grid in self.image_grid_thw) or bool(self.seen_or_none())

    def seen_or_none(self) -> dict[str, list[Tensor]]:
        """The tensors of other processors than Qwen's by name, in the order of the rows that have them."""
        found = {name: [tensor for tensor in tensors if tensor.numel()] for name, tensors in self.seen.items()}
        return {name: tensors for name, tensors in found.items() if tensors}

    def pixels_or_none(self) -> tuple[Tensor | None, Tensor | None]:
        """pixel_values [R, P] and image_grid_thw [I, 3] of all rows in order; None, None without an image.

        Vision towers fail on empty tensors, so they become None here.
        """
        if not self.has_images:
            return None, None
        return torch.cat(list(self.pixel_values)), torch.cat(list(self.image_grid_thw))

    @classmethod
    def _align(cls, batches: Sequence[Self]) -> Sequence[Self]:
        widest = max(batch.input_ids.shape[1] for batch in batches)
        dtypes = {name: tensors.dtype for batch in batches for name, tensors in batch.seen.items()}
        return [batch.widened(widest).with_names(dtypes) for batch in batches]

    def with_names(self, dtypes: Mapping[str, torch.dtype]) -> Self:
        """The batch with all these names in `seen`, without elements where it lacks one."""
        if self.seen.keys() == dtypes.keys():
            return self
        nothing = {
            name: TensorList([torch.empty(0, dtype=dtype, device=self.device)] * len(self))
            for name, dtype in dtypes.items()
        }
        return evolve(self, seen={name: self.seen.get(name, empty) for name, empty in nothing.items()})

    def widened(self, width: int) -> Self:
        """The batch padded on the right to this width."""
        added = (0, width - self.input_ids.shape[1])
        if added[1] == 0:
            return self
        return evolve(
            self,
            input_ids=pad(self.input_ids, added),
            attention_mask=pad(self.attention_mask, added),
            loss_mask=pad(self.loss_mask, added),
        )


def collate(samples: Sequence[TokenSample], device: torch.device | str = "cpu") -> ModelInputs:
    """A batch of samples, padded with zeros to the longest. Raises DataError for no samples."""
    if not samples:
        raise DataError("a batch of no samples; give one or more")
    longest = max(len(sample.input_ids) for sample in samples)
    dtypes = {name: tensor.dtype for sample in samples for name, tensor in sorted(sample.seen.items())}
    input_ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    attention_mask = torch.zeros(len(samples), longest, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = sample.input_ids
        attention_mask[row, :length] = 1
        loss_mask[row, :length] = sample.loss_mask
    return ModelInputs(
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        pixel_values=TensorList(sample.pixel_values for sample in samples),
        image_grid_thw=TensorList(sample.image_grid_thw for sample in samples),
        seen={
            name: TensorList(sample.seen.get(name, torch.empty(0, dtype=dtype)) for sample in samples)
            for name, dtype in dtypes.items()
        },
    ).to(device)


def _rows(value: Field, rows: list[int]) -> Field:
    """The rows of a field: a view if a tensor's rows are consecutive, so that a slice copies nothing."""
    if isinstance(value, Tensor) and rows == list(range(rows[0], rows[-1] + 1)):
        return value[rows[0] : rows[-1] + 1]
    return value[rows]


def _check_joinable(name: str, values: Sequence[Field]) -> None:
    """Check that values can be rows of one field. Raises DataError that names the field."""
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        raise DataError(f"{name}: {' and '.join(sorted(kinds))} cannot be combined")


def _kind(value: Field) -> str:
    shape = f" [{', '.join(['B', *map(str, value.shape[1:])])}]" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape} of {value.dtype} on {value.device}"


def _dtype(value: Field, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.dtype.is_floating_point else value.dtype


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _unpack_batch(batch_class: type[TensorBatch], packed: dict[str, Packed | TensorList]) -> TensorBatch:
    parts = {name: value if isinstance(value, TensorList) else unpack(value) for name, value in packed.items()}
    return batch_class(**_grouped(batch_class, parts))


def _grouped(batch_class: type[TensorBatch], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a batch by their names in `TensorBatch.parts`: those of mappings together."""
    grouped: dict[str, Any] = {}
    for name, value in parts.items():
        outer, bracket, inner = name.partition("[")
        if bracket:
            grouped.setdefault(outer, {})[inner.removesuffix("]")] = value
        else:
            grouped[name] = value
    return grouped
