"""From the plan of batches to a rank's work: drawing anchors, dealing, micro-batches, and preparing one of them.

Every rank draws the anchors of the whole global step, only from loss masks (`Labels`). So the denominator of the loss
and the cost of every sample are known everywhere before the first forward pass, and equal on any world size. Features
(`States`) are read only by `pack`: of its micro-batch, each sequence-parallel rank uses one contiguous slice.

Legend: S tokens of a sample, A anchors, K block size, T packed context tokens, t a rank's slice, P sp_degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import BatchPlan
from ops.lib.data.batching import padded_length
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.drafts.backbone.step import MicroBatch, rows_alike
from ops.lib.drafts.losses.slots import Weighted, block_labels, draw_anchors, slot_weights
from ops.lib.sequence_parallel.context_range import ContextRange
from ops.lib.sequence_parallel.exchange import deal_blocks
from ops.lib.target.float8 import FLOAT8, Float8States, StoredStates, decoded
from ops.train_dflash.staging import Sent, Transfer

ROWS = "rows_W"  # of Weighted, among the tensors of a micro-batch
SCALES = ".scales"  # ends the name of the scales of encoded states, among the tensors of a micro-batch
ALIGNMENT = 512  # bytes: where a tensor begins among others, as torch's allocator on a GPU has it


class Labels(Protocol):
    """The samples of a split without their features. width: of a feature. lengths: tokens of each sample."""

    @property
    def width(self) -> int: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def labels(self, index: int) -> tuple[Tensor, Tensor]:
        """The input_ids int64 [S] and loss_mask bool [S] of a sample."""


class States(Protocol):
    """The target's hidden states of samples, by ranges of tokens that exclude `last`."""

    @property
    def width(self) -> int: ...
    def features(self, index: int, first: int, last: int) -> StoredStates:
        """The features of a sample's rows, [last - first, F], in the capture's dtype or encoded, on the CPU or the
        rank's device.
        """

    def final_hidden(self, index: int, first: int, last: int) -> StoredStates:
        """The states after the final norm, [last - first, M]."""


@frozen
class Rows:
    """A range of a sample's tokens, first <= j < last."""

    index: int
    first: int
    last: int


@frozen
class PlannedStep:
    """The samples of one global step."""

    epoch: int
    samples: tuple[int, ...]


@frozen(eq=False)
class Drawn:
    """One sample of a step, with its anchors.

    length: its tokens. anchors int64 [A]; anchor_ids int64 [A]; labels int64 [A, K]; weights float32 [A, K].
    """

    index: int
    length: int
    anchors_A: Tensor
    anchor_ids_A: Tensor
    labels_AK: Tensor
    weights_AK: Tensor

    @property
    def prefix(self) -> int:
        """The number of context tokens that some block sees: those before the last anchor."""
        return int(self.anchors_A[-1]) if len(self.anchors_A) else 0


@frozen(eq=False)
class Place:
    """A rank's position in the mesh, and the device and dtype that it computes in."""

    dp_rank: int
    dp_size: int
    sp_rank: int
    sp_degree: int
    device: torch.device
    dtype: torch.dtype


def read_plan(batches: BatchPlan, lengths: Sequence[int]) -> tuple[list[PlannedStep], int]:
    """The steps of a plan, and its pad_multiple.

    Raises DataError if the plan is empty, or was made for other features, with other numbers of samples or tokens.
    """
    plan = read_json(batches.path / "plan.json")
    if plan["samples"] != len(lengths):
        raise DataError(
            f"{batches.path}: the plan was made for other features: it deals {plan['samples']} samples, "
            f"and the features have {len(lengths)} of the split {plan['split']}"
        )
    padded = [padded_length(length, plan["pad_multiple"]) for length in lengths]
    steps = []
    for row in read_jsonl(batches.path / "steps.jsonl"):
        tokens = sum(padded[sample] for sample in row["samples"])
        if tokens != row["tokens"]:
            raise DataError(
                f"{batches.path}: the plan was made for other features: step {row['step']} has {row['tokens']} "
                f"tokens in the plan, and its samples have {tokens}"
            )
        steps.append(PlannedStep(row["epoch"], tuple(row["samples"])))
    if not steps:
        raise DataError(f"{batches.path}: the plan has no step; there is nothing to train on")
    return steps, plan["pad_multiple"]


def draw(reader: Labels, index: int, weights_K: Tensor, num_anchors: int, *, seed: int, epoch: int) -> Drawn:
    """A sample with the anchors drawn by (seed, epoch, index); there may be none."""
    input_ids_S, loss_mask_S = reader.labels(index)
    anchors_A = draw_anchors(loss_mask_S, num_anchors, seed=seed, epoch=epoch, sample=index)
    return Drawn(
        index=index,
        length=len(input_ids_S),
        anchors_A=anchors_A,
        anchor_ids_A=input_ids_S[anchors_A],
        labels_AK=block_labels(input_ids_S, anchors_A, len(weights_K)),
        weights_AK=slot_weights(loss_mask_S, anchors_A, weights_K),
    )


def micro_batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Cut a list of samples into runs of at most `limit` tokens, similar lengths together, as indices.

    A longer sample is a run of its own.
    """
    batch: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], place)):
        if batch and tokens + lengths[place] > limit:
            yield batch
            batch, tokens = [], 0
        batch.append(place)
        tokens += lengths[place]
    if batch:
        yield batch


def needed(samples: Sequence[Drawn], place: Place) -> list[Rows]:
    """The rows of each sample's features that `pack` reads on this rank, in order; a sample may have none."""
    starts = _starts(samples)
    first, last = _slice(starts[-1], place)
    rows = []
    for sample, start in zip(samples, starts, strict=False):
        low, high = max(first - start, 0), min(last - start, sample.prefix)
        rows.append(Rows(sample.index, low, high) if low < high else Rows(sample.index, 0, 0))
    return rows


@frozen(eq=False)
class Part:
    """A tensor of a micro-batch before it is written: its sources concatenated, followed by zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: Sequence[Tensor]

    @property
    def on_host(self) -> bool:
        return all(source.device.type == "cpu" for source in self.sources)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def write(self, flat: Tensor, first: int = 0) -> None:
        """Write the elements [first, first + len(flat)) of the tensor into flat; every source byte is read once."""
        start, last = 0, first + len(flat)
        for source in self.sources:
            end = start + source.numel()
            low, high = max(first, start), min(last, end)
            if (low, high) == (start, end):
                flat[low - first : high - first].view(source.shape).copy_(source)
            elif low < high:
                flat[low - first : high - first].copy_(source.reshape(-1)[low - start : high - start])
            start = end
        flat[max(0, start - first) :].zero_()


@frozen(eq=False)
class Arrival:
    """The transfer of a micro-batch, and what is left to do behind it: encoded states are decoded on the device.

    scales: those of each encoded tensor, by its name.
    """

    sent: Sent
    scales: Mapping[str, Tensor]
    dtype: torch.dtype

    def arrive(self, batch: MicroBatch) -> MicroBatch:
        """The batch, ready for the computing thread, which calls this; see `Sent.arrive`."""
        self.sent.arrive()
        if not self.scales:
            return batch
        encoded = {name: Float8States(getattr(batch, name), scales) for name, scales in self.scales.items()}
        return evolve(batch, **{name: states.decode(self.dtype) for name, states in encoded.items()})


@frozen(eq=False)
class Packed:
    """A micro-batch on the host. weights_NK: of this rank's blocks, including dummies. weighted: its weighted slots.

    alike_W: the teacher's row of each of these. parts: the tensors of MicroBatch by name, the rows, and the scales of
    encoded states; parts whose sources are on the device stay there. dtype: that of states in the micro-batch.
    """

    parts: Mapping[str, Part]
    seen: tuple[ContextRange, ...]
    weights_NK: Tensor
    weighted: Weighted
    alike_W: Tensor | None
    device: torch.device
    dtype: torch.dtype

    def send(self, transfer: Transfer) -> tuple[MicroBatch, Arrival]:
        """Send the micro-batch to the device; what `Arrival.arrive` returns may be used."""
        host = {name: part for name, part in self.parts.items() if part.on_host}
        places, size = {}, 0
        for name, part in host.items():
            places[name] = size
            size += -(-part.size // ALIGNMENT) * ALIGNMENT

        def write(memory: Tensor, start: int) -> None:
            for name, part in host.items():
                begin = places[name]
                low, high = max(start, begin), min(start + len(memory), begin + part.size)
                if low < high:
                    flat = memory[low - start : high - start].view(part.dtype)
                    part.write(flat, (low - begin) // part.dtype.itemsize)

        sent = transfer.send(size, write)
        tensors = {
            name: sent.memory[places[name] : places[name] + part.size].view(part.dtype).view(part.shape)
            for name, part in host.items()
        }
        for name, part in self.parts.items():
            if name not in host:
                tensors[name] = torch.empty(part.shape, dtype=part.dtype, device=self.device)
                part.write(tensors[name].view(-1))
        weighted = evolve(self.weighted, rows_W=tensors.pop(ROWS))
        names = [name for name in tensors if name.endswith(SCALES)]
        scales = {name.removesuffix(SCALES): tensors.pop(name) for name in names}
        batch = MicroBatch(**tensors, seen=self.seen, weighted=weighted, alike_W=self.alike_W)
        return batch, Arrival(sent, scales, self.dtype)


def pack(reader: States, samples: Sequence[Drawn], place: Place, *, with_teacher: bool = False) -> Packed:
    """The micro-batch of these samples for one rank. Every sample has an anchor.

    The samples' prefixes are packed in order, and padded at the end to a multiple of P; no block sees the padding.
    Blocks are dealt over the SP ranks in serpentine order of their prefixes. A rank with fewer than the others gets
    blocks of weight zero.
    """
    starts = _starts(samples)
    anchors_N = torch.cat([sample.anchors_A for sample in samples])
    start_N = torch.cat(
        [torch.full_like(sample.anchors_A, start) for sample, start in zip(samples, starts, strict=False)]
    )
    dealt, missing = deal_blocks(anchors_N, place.sp_degree)
    count = len(dealt[0]) + missing[0]
    own = dealt[place.sp_rank]

    def mine(values_N: Tensor) -> Part:
        return Part((count, *values_N.shape[1:]), values_N.dtype, [values_N[own]])

    labels_NK = torch.cat([sample.labels_AK for sample in samples])
    weights_NK = torch.cat([sample.weights_AK for sample in samples])
    first, last = _slice(starts[-1], place)
    rows = needed(samples, place)
    features = [reader.features(row.index, row.first, row.last) for row in rows if row.first < row.last]
    parts = {
        **_state_parts("features_tF", features, (last - first, reader.width), place.dtype),
        "positions_t": Part((last - first,), torch.int64, [_positions(starts, first, last)]),
        "anchor_ids_N": mine(torch.cat([sample.anchor_ids_A for sample in samples])),
        "positions_N": mine(anchors_N),
        "labels_NK": mine(labels_NK),
        "weights_NK": mine(weights_NK),
    }
    rows_NK = None
    if with_teacher:
        states, rows_NK = _teacher(reader, samples, own)
        width = decoded(states[0]).shape[1]
        rows_in_all = max(1, sum(len(part) for part in states))
        parts |= _state_parts("teacher_UM", states, (rows_in_all, width), place.dtype)
        parts["teacher_rows_NK"] = Part((count, rows_NK.shape[1]), torch.int64, [rows_NK])
    seen = tuple(
        ContextRange(_padded(start_N[rows], count), _padded((start_N + anchors_N)[rows], count)) for rows in dealt
    )
    return _packed(parts, seen, _padded(labels_NK[own], count), _padded(weights_NK[own], count), rows_NK, place)


def idle_batch(block_size: int, features: int, place: Place, *, teacher: int = 0) -> Packed:
    """A micro-batch of a single block of weight zero without context, to keep a rank without samples in step.

    teacher: width of the target's final hidden states, if the loss reads them.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    labels_NK, weights_NK = torch.zeros(1, block_size, dtype=torch.int64), torch.zeros(1, block_size)
    parts = {
        "features_tF": Part((1, features), place.dtype, []),
        "positions_t": Part((1,), torch.int64, []),
        "anchor_ids_N": Part((1,), torch.int64, []),
        "positions_N": Part((1,), torch.int64, []),
        "labels_NK": Part((1, block_size), torch.int64, []),
        "weights_NK": Part((1, block_size), torch.float32, []),
    }
    rows_NK = torch.zeros(1, block_size, dtype=torch.int64) if teacher else None
    if teacher:
        parts["teacher_UM"] = Part((1, teacher), place.dtype, [])
        parts["teacher_rows_NK"] = Part((1, block_size), torch.int64, [])
    return _packed(parts, (ContextRange(zero, zero),) * place.sp_degree, labels_NK, weights_NK, rows_NK, place)


def _packed(
    parts: Mapping[str, Part],
    seen: tuple[ContextRange, ...],
    labels_NK: Tensor,
    weights_NK: Tensor,
    teacher_rows_NK: Tensor | None,
    place: Place,
) -> Packed:
    """The micro-batch of these parts. The row numbers of weighted slots are transferred with its tensors."""
    weighted = Weighted.of(labels_NK, weights_NK)
    rows = {ROWS: Part(tuple(weighted.rows_W.shape), torch.int64, [weighted.rows_W])}
    alike_W = rows_alike(teacher_rows_NK, weighted)
    return Packed({**parts, **rows}, seen, weights_NK, weighted, alike_W, place.device, place.dtype)


def _state_parts(
    name: str, states: Sequence[StoredStates], shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, Part]:
    """The parts of a tensor of states: themselves in the dtype, or encoded ones and their scales."""
    encoded = [each for each in states if isinstance(each, Float8States)]
    if not encoded:
        return {name: Part(shape, dtype, [each for each in states if isinstance(each, Tensor)])}
    scales = [each.scales_TL for each in encoded]
    return {
        name: Part(shape, FLOAT8, [each.values_TW for each in encoded]),
        name + SCALES: Part((shape[0], scales[0].shape[1]), torch.float32, scales),
    }


def _slice(total: int, place: Place) -> tuple[int, int]:
    """The range of packed tokens [first, last) of this rank: 1 / P of the padded total."""
    size = max(1, -(-total // place.sp_degree))
    return place.sp_rank * size, (place.sp_rank + 1) * size


def _starts(samples: Sequence[Drawn]) -> list[int]:
    """The start of each prefix when they are packed in order, and the end of the last one."""
    return torch.tensor([0, *(sample.prefix for sample in samples)]).cumsum(0).tolist()


def _teacher(reader: States, samples: Sequence[Drawn], own: Tensor) -> tuple[list[StoredStates], Tensor]:
    """The target's final hidden states that own blocks need, without repetition, and the row of each slot's state.

    The token at anchor + k is predicted by the state at anchor + k - 1; rows: int64 [len(own), K]. own: ascending
    places among all blocks of the samples. Slots without a weight (slot 0, and those past the end) get a neighbour's
    row.
    """
    K = samples[0].labels_AK.shape[1]
    slots_K = torch.arange(K)
    nothing_SM = reader.final_hidden(samples[0].index, 0, 0)
    states: list[StoredStates] = [nothing_SM]
    rows = [torch.zeros(0, K, dtype=torch.int64)]
    done = before = 0
    for sample in samples:
        count = len(sample.anchors_A)
        anchors_A = sample.anchors_A[own[(own >= done) & (own < done + count)] - done]
        done += count
        if not len(anchors_A):
            continue
        first = int(anchors_A[0])
        hidden = reader.final_hidden(sample.index, first, min(int(anchors_A[-1]) + K, sample.length))
        places_AK = anchors_A[:, None] - first + (slots_K - 1).clamp(min=0)
        places_U, rows_AK = places_AK.clamp(max=len(hidden) - 1).unique(return_inverse=True)
        states.append(hidden[places_U])
        rows.append(rows_AK + before)
        before += len(places_U)
    return states, torch.cat(rows)


def _positions(starts: Sequence[int], first: int, last: int) -> Tensor:
    """The absolute positions of packed tokens first <= j < last; those of the padding are arbitrary."""
    packed = torch.arange(first, last)
    bounds = torch.tensor(starts)
    return packed - bounds[(torch.searchsorted(bounds, packed, right=True) - 1).clamp(min=0)]


def _padded(values_N: Tensor, count: int) -> Tensor:
    """The given rows, followed by zeros, `count` rows in all."""
    missing = values_N.new_zeros(count - len(values_N), *values_N.shape[1:])
    return torch.cat((values_N, missing)) if len(missing) else values_N
