"""Hidden states as float8 (e4m3) with a float32 scale per token and layer: half the bytes of bfloat16.

Of a token's state x at a layer: scale = max(max|x| * (1 / 448), the smallest normal float32), value = e4m3(x / scale),
rounded to the nearest, ties to even. So the largest value is exact up to float32's rounding, zeros stay zeros, and a
state that is not finite has a scale that is not finite. Decoded: value * scale in float32, rounded to the dtype asked
for. Rows are independent, and all is IEEE arithmetic, so the bits are equal on any device and for any slicing.

A value of e4m3's normal range is off by at most 1/16 of itself, 2.6 % on average. Values under 2^-6 of a scale have
fewer bits, and those under 2^-10 become zero. In practice that needs a channel that is more than 10,000 times as large
as others of its token and layer, which `RoundingError` measures (ops/lib/target/float8_errors.py judges).

T tokens, W width = L layers * hidden size M
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
PIECE, PIECE_CPU = 2**24, 2**18  # values that are converted at once; fewer stay in a CPU's cache


@frozen(eq=False)
class Float8States:
    """Encoded states of consecutive tokens. values_TW: float8_e4m3fn [T, W]. scales_TL: float32 [T, L]."""

    values_TW: Tensor
    scales_TL: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], layers: int, device: torch.device, *, pinned: bool = False) -> Float8States:
        """Memory for [T, W] values and their scales."""
        return cls(
            torch.empty(shape, dtype=FLOAT8, device=device, pin_memory=pinned),
            torch.empty(shape[0], layers, dtype=torch.float32, device=device, pin_memory=pinned),
        )

    @classmethod
    def encode(cls, states_TW: Tensor, layers: int, error: RoundingError | None = None) -> Float8States:
        """Encode states of any floating dtype, on their device. error: to add the rounding of these states to."""
        encoded = cls.empty((len(states_TW), states_TW.shape[1]), layers, states_TW.device)
        for rows in _pieces(states_TW):
            states_rLM = states_TW[rows].float().unflatten(1, (layers, -1))
            scales_rL = (states_rLM.abs().amax(-1) * (1 / LARGEST)).clamp(min=SMALLEST_SCALE)
            values_rLM = (states_rLM / scales_rL[..., None]).to(FLOAT8)
            encoded.values_TW[rows], encoded.scales_TL[rows] = values_rLM.flatten(1), scales_rL
            if error is not None:
                error.add(states_rLM, values_rLM.float() * scales_rL[..., None])
        return encoded

    @classmethod
    def cat(cls, parts: Sequence[Float8States]) -> Float8States:
        return cls(torch.cat([part.values_TW for part in parts]), torch.cat([part.scales_TL for part in parts]))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The states [T, W] in this dtype."""
        states_TW = torch.empty(self.values_TW.shape, dtype=dtype, device=self.values_TW.device)
        for rows in _pieces(self.values_TW):
            values_rLM = self.values_TW[rows].float().unflatten(1, (self.scales_TL.shape[1], -1))
            states_TW[rows] = (values_rLM * self.scales_TL[rows, :, None]).flatten(1)
        return states_TW

    def put(self, rows: slice, other: Float8States) -> None:
        """Copy other states into these rows; a copy from a GPU to pinned memory is not waited for."""
        self.values_TW[rows].copy_(other.values_TW, non_blocking=True)
        self.scales_TL[rows].copy_(other.scales_TL, non_blocking=True)

    def split(self, counts: Sequence[int]) -> list[Float8States]:
        """Cut into runs of so many rows each."""
        values, scales = self.values_TW.split(list(counts)), self.scales_TL.split(list(counts))
        return [Float8States(*each) for each in zip(values, scales, strict=True)]

    def __len__(self) -> int:
        return len(self.values_TW)

    def __getitem__(self, rows: slice | Tensor) -> Float8States:
        return Float8States(self.values_TW[rows], self.scales_TL[rows])


StoredStates: TypeAlias = Tensor | Float8States


def decoded(states: StoredStates, dtype: torch.dtype = torch.float32) -> Tensor:
    """States as a tensor: encoded ones in the given dtype, others as they are."""
    return states.decode(dtype) if isinstance(states, Float8States) else states


def _pieces(rows_TW: Tensor) -> Iterator[slice]:
    piece = PIECE_CPU if rows_TW.device.type == "cpu" else PIECE
    size = max(1, piece // max(1, rows_TW.shape[1]))
    return (slice(first, first + size) for first in range(0, len(rows_TW), size))


class StateRows:
    """Memory for the states of T tokens at L layers, in a dtype or as float8, filled run by run; and float8's error."""

    def __init__(
        self,
        shape: tuple[int, int],
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        float8: bool,
        pinned: bool = False,
    ) -> None:
        self._layers, self._dtype = layers, dtype
        self._error = RoundingError() if float8 else None
        self.states: StoredStates
        if float8:
            self.states = Float8States.empty(shape, layers, device, pinned=pinned)
        else:
            self.states = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

    def put(self, rows: slice, states_RW: Tensor) -> None:
        """Store states, rounded to the dtype first; a copy from a GPU to pinned memory is not waited for."""
        if isinstance(self.states, Tensor):
            self.states[rows].copy_(states_RW, non_blocking=True)
        else:
            self.states.put(rows, Float8States.encode(states_RW.to(self._dtype), self._layers, self._error))

    def errors(self) -> list[float]:
        """The relative error of float8 at each layer; [] in another dtype."""
        return [] if self._error is None else self._error.by_layer()


class RoundingError:
    """The relative error of float8 at each layer, over the states added.

    Of a channel: sqrt(sum of squared errors / sum of squares) over all tokens; of a layer: the mean over its channels.
    So a large channel hides no others: an error of the whole state would be that of its largest channel, which is
    exact. A channel of zeros counts as exact.
    """

    def __init__(self) -> None:
        self._errors_LM: Tensor | None = None
        self._squares_LM: Tensor | None = None

    def add(self, states_TLM: Tensor, decoded_TLM: Tensor) -> None:
        errors_LM = (decoded_TLM - states_TLM).square().sum(0).double()
        squares_LM = states_TLM.square().sum(0).double()
        self._errors_LM = errors_LM if self._errors_LM is None else self._errors_LM + errors_LM
        self._squares_LM = squares_LM if self._squares_LM is None else self._squares_LM + squares_LM

    def by_layer(self) -> list[float]:
        """The relative error of each layer; [] if nothing was added. It waits for the device."""
        if self._errors_LM is None or self._squares_LM is None:
            return []
        smallest = torch.finfo(torch.float64).tiny
        relative_LM = (self._errors_LM / self._squares_LM.clamp(min=smallest)).sqrt()
        return [float(error) for error in relative_LM.nan_to_num(1.0, posinf=1.0).mean(1).cpu()]
