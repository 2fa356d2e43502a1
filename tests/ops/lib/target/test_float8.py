"""float8 states against a slow reference, bit by bit, and the measure of what they lose."""

from __future__ import annotations

import math

import pytest
import torch

from dsl.errors import DataError
from ops.lib.target.feature_shards import check_finite
from ops.lib.target.float8 import FLOAT8, Float8States, RoundingError, StateRows
from ops.lib.target.float8_errors import MOST_BY_ROUNDING, MeanErrors

F32 = torch.float32
TINY = 2.0**-126  # the smallest normal float32
ALL_E4M3 = sorted(
    {m * 2.0**-9 for m in range(8)} | {(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)} - {480.0}
)


def rounded(value: float) -> float:
    """A Python number rounded to float32."""
    return torch.tensor(value, dtype=torch.float64).float().item()


def nearest_e4m3(value: float) -> float:
    """The nearest of all e4m3 numbers, and the one with an even last bit of two that are equally near."""
    size = abs(value)
    place = min(range(len(ALL_E4M3)), key=lambda number: (abs(ALL_E4M3[number] - size), number % 2))
    return math.copysign(ALL_E4M3[place], value)


def reference(state: list[float]) -> tuple[float, list[float], list[float]]:
    """The scale, the values and the decoded float32 numbers of one token at one layer."""
    scale = max(rounded(max(map(abs, state)) * rounded(1 / 448)), TINY)
    values = [nearest_e4m3(rounded(x / scale)) for x in state]
    return scale, values, [rounded(value * scale) for value in values]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def states_of(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """[7 tokens, 2 layers of 40]"""
    torch.manual_seed(3)
    states = torch.randn(7, 80) * torch.logspace(-2, 2, 7)[:, None]
    if kind == "outlier":
        states[:, 5] *= 600.0
        states[3, 50] = 3e4
        states = states.clamp(-60_000, 60_000)  # of float16
    if kind == "zeros":
        states[2] = 0.0
        states[4, 40:] = 0.0
        states[:, 11] = -0.0
    if kind == "subnormal":
        states *= 1e-38
        states[1] *= 1e-5
    if kind == "largest":
        states[:, ::3] = 3.3e38 if dtype != torch.float16 else 65504.0
        states[0, 1] = -states[0, 0]
    if kind == "e4m3":  # every number of the format, under the scale 1
        numbers = torch.tensor(ALL_E4M3[-40:])
        states[:, :40], states[:, 40:] = numbers, -numbers
    return states.to(dtype)


def test_the_reference_has_all_numbers_of_the_format():
    numbers = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float().tolist()
    assert numbers == ALL_E4M3
    assert 448.0 == ALL_E4M3[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "outlier", "zeros", "subnormal", "largest", "e4m3"])
def test_values_scales_and_decoded_numbers_are_those_of_the_slow_reference_bit_by_bit(kind, dtype):
    states_TW = states_of(kind, dtype)
    encoded = Float8States.encode(states_TW, 2)
    expected = [[reference(part) for part in (row[:40], row[40:])] for row in states_TW.float().tolist()]
    scales = torch.tensor([[part[0] for part in row] for row in expected], dtype=F32)
    values = torch.tensor([[x for part in row for x in part[1]] for row in expected], dtype=F32)
    numbers = torch.tensor([[x for part in row for x in part[2]] for row in expected], dtype=F32)
    assert torch.equal(bits(scales), bits(encoded.scales_TL))
    assert torch.equal(bits(values), bits(encoded.values_TW.float()))
    for wanted in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(bits(numbers.to(wanted)), bits(encoded.decode(wanted)))


def test_the_largest_value_is_448_and_comes_back_as_it_was_in_bfloat16():
    states_TW = states_of("outlier", torch.bfloat16)
    encoded = Float8States.encode(states_TW, 2)
    largest = states_TW.unflatten(1, (2, 40)).abs().amax(-1)
    assert torch.equal(encoded.values_TW.float().unflatten(1, (2, 40)).abs().amax(-1), torch.full((7, 2), 448.0))
    assert torch.equal(encoded.decode(torch.bfloat16).unflatten(1, (2, 40)).abs().amax(-1), largest)


def test_rows_are_independent_so_any_slice_pieces_and_order_give_the_same_bits(monkeypatch):
    states_TW = states_of("outlier", torch.float32)
    whole = Float8States.encode(states_TW, 2)
    monkeypatch.setattr("ops.lib.target.float8.PIECE_CPU", 170)  # two rows
    pieces = Float8States.encode(states_TW, 2)
    parts = Float8States.cat([whole[:3], whole[torch.tensor([3])], *whole[4:].split([0, 2, 1])])
    for other in (pieces, parts):
        assert torch.equal(bits(whole.values_TW), bits(other.values_TW))
        assert torch.equal(whole.scales_TL, other.scales_TL)
    assert torch.equal(whole.decode(F32)[2:5], whole[2:5].decode(F32))
    assert 7 == len(whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["plain", "outlier", "zeros", "subnormal", "largest", "e4m3"])
def test_a_gpu_encodes_and_decodes_to_the_bits_of_a_cpu(kind):
    states_TW = states_of(kind, torch.bfloat16)
    expected, found = Float8States.encode(states_TW, 2), Float8States.encode(states_TW.cuda(), 2)
    assert torch.equal(bits(expected.values_TW), bits(found.values_TW.cpu()))
    assert torch.equal(bits(expected.scales_TL), bits(found.scales_TL.cpu()))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(bits(expected.decode(dtype)), bits(found.decode(dtype).cpu()))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_state_that_is_not_finite_shows_in_its_scale_and_is_refused_by_sample_and_layer(value):
    states_TW = states_of("plain", torch.bfloat16)
    states_TW[4, 60] = value
    encoded = Float8States.encode(states_TW, 2)
    assert [[4, 1]] == (~encoded.scales_TL.isfinite()).nonzero().tolist()
    rows = [("a", 3), ("b", 4)]
    with pytest.raises(DataError) as caught:
        check_finite(encoded, rows, ["layer 1", "layer 9"], "dtype of capture_targets", torch.bfloat16)
    assert str(caught.value).startswith(
        "sample b: 1 of 8 states of a token and layer are not finite in bfloat16, first in those of layer 9; the target"
    )
    check_finite(encoded[:4], [("a", 4)], ["layer 1", "layer 9"], "dtype of capture_targets", torch.bfloat16)


def error_with_channel(factor: float) -> list[float]:
    """The measured errors of two layers, in the second of which one channel is `factor` times as large as others."""
    torch.manual_seed(0)
    states_TW = torch.randn(300, 256)
    states_TW[:, 200] *= factor
    rows = StateRows((300, 256), 2, torch.bfloat16, torch.device("cpu"), float8=True)
    for first in range(0, 300, 100):
        rows.put(slice(first, first + 100), states_TW[first : first + 100])
    stored = states_TW.bfloat16().double()
    lost = rows.states.decode(torch.float64) - stored
    slow = [
        sum(float((lost[:, c].square().sum() / stored[:, c].square().sum()).sqrt()) for c in channels) / 128
        for channels in (range(128), range(128, 256))
    ]
    assert rows.errors() == pytest.approx(slow, rel=1e-4)
    return rows.errors()


def test_the_error_is_that_of_rounding_until_a_channel_hides_the_others_and_only_then_is_there_a_warning():
    for factor, low, high, warned in ((1, 0.024, 0.028, False), (600, 0.024, 0.03, False), (3e5, 0.2, 1.0, True)):
        errors = error_with_channel(factor)
        assert low < errors[1] < high, factor
        assert 0.024 < errors[0] < 0.028
        found = MeanErrors((3, 17))
        found.add(300, errors)
        text = found.warning("feature_dtype of capture_targets")
        assert warned == (text is not None) == (errors[1] > MOST_BY_ROUNDING)
        if text is not None:
            assert f"too coarse for layer 17 ({errors[1]:.1%}): rounding explains a relative error of 6.2% at" in text
            assert "leave feature_dtype of capture_targets out" in text


def test_errors_of_parts_are_weighted_by_their_tokens_and_empty_states_have_none():
    found = MeanErrors((3,))
    found.add(0, ())
    assert ({}, None) == (found.metrics("train"), found.warning("x"))
    found.add(30, (0.02, 0.04))
    found.add(10, (0.06, 0.04))
    assert found.metrics("train") == pytest.approx(
        {"train/float8_error_layer_03": 0.03, "train/float8_error_final": 0.04}
    )
    nothing = RoundingError()
    Float8States.encode(torch.zeros(0, 8), 2, nothing)
    assert [] == nothing.by_layer()
    Float8States.encode(torch.zeros(4, 8), 2, nothing)
    assert [0.0, 0.0] == nothing.by_layer()
