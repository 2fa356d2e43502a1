"""How far two backends lie apart: by layer and kind of token, against a slow reference; and what counts as rounding."""

import pytest
import torch

from ops.capture_targets.agreement import FLOAT32_TOLERANCE, NARROW_TOLERANCE, compare_states
from ops.lib.data.token_shards import TokenSample

IMAGE, LAYERS, HIDDEN = 5, (1, 4, 6), 8


def sample(name: str, ids: list[int]) -> TokenSample:
    tokens = torch.tensor(ids)
    empty = torch.empty(0, 4), torch.empty(0, 3, dtype=torch.int64)
    return TokenSample(name, "text", tokens, torch.ones(len(ids), dtype=torch.bool), *empty, prompt_tokens=1)


SAMPLES = [sample("a", [1, 2, IMAGE, IMAGE, 3]), sample("b", [1, 2, 3]), sample("c", [1, IMAGE, IMAGE, 2])]


def states(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(each.input_ids), len(LAYERS) * HIDDEN, generator=generator) for each in SAMPLES]


def moved(by: float, seed: int = 1) -> list[torch.Tensor]:
    return [a + by * b for a, b in zip(states(), states(seed), strict=True)]


def test_every_layer_has_its_furthest_text_and_image_token_as_a_plain_loop_finds_them():
    ours, theirs = states(), moved(0.1)
    expected = {}
    for place, layer in enumerate(LAYERS):
        part = slice(place * HIDDEN, (place + 1) * HIDDEN)
        for each, a, b in zip(SAMPLES, ours, theirs, strict=True):
            for position, token in enumerate(each.input_ids.tolist()):
                kind = "image" if token == IMAGE else "text"
                apart = [
                    abs(x - y) for x, y in zip(a[position, part].tolist(), b[position, part].tolist(), strict=True)
                ]
                length = sum(x * x for x in a[position, part].tolist()) ** 0.5
                relative = sum(x * x for x in apart) ** 0.5 / length
                best = expected.setdefault((layer, kind), [0.0, 0.0, "", 0])
                best[0] = max(best[0], *apart)
                if relative > best[1]:
                    best[1:] = [relative, each.id, position]
    found = compare_states(SAMPLES, ours, theirs, LAYERS, IMAGE, "float32")
    assert [(row.layer, row.kind) for row in found] == list(expected)
    for row in found:
        absolute, relative, name, position = expected[row.layer, row.kind]
        assert (row.furthest.sample, row.furthest.position) == (name, position)
        assert row.furthest.absolute == pytest.approx(absolute, rel=1e-5)
        assert row.furthest.relative == pytest.approx(relative, rel=1e-5)


def test_only_the_layer_and_kind_that_differ_disagree():
    theirs = states()
    theirs[2][1, HIDDEN : 2 * HIDDEN] += 0.5
    found = compare_states(SAMPLES, states(), theirs, LAYERS, IMAGE, "float32")
    assert [(row.layer, row.kind) for row in found if not row.agrees] == [(4, "image")]
    (wrong,) = [row for row in found if not row.agrees]
    assert (wrong.furthest.sample, wrong.furthest.position) == ("c", 1)
    assert wrong.row()["agrees"] is False


def test_a_text_target_has_no_image_tokens():
    found = compare_states(SAMPLES, states(), states(), LAYERS, None, "float32")
    assert [(row.layer, row.kind, row.agrees) for row in found] == [(layer, "text", True) for layer in LAYERS]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_state_that_is_no_number_never_agrees(value):
    theirs = states()
    theirs[0][0, 0] = value
    found = compare_states(SAMPLES, states(), theirs, LAYERS, IMAGE, "float32")
    assert [(row.layer, row.kind) for row in found if not row.agrees] == [(1, "text")]


@pytest.mark.parametrize(("apart", "agrees"), [(0.02, True), (0.05, False)])
def test_in_a_small_dtype_backends_may_differ_by_three_times_the_rounding_of_one(apart, agrees):
    """The first lies 0.01 from float32."""
    exact, ours = states(), moved(0.01)
    theirs = [a + apart * b for a, b in zip(ours, states(2), strict=True)]
    found = compare_states(SAMPLES, ours, theirs, LAYERS, IMAGE, "bfloat16", exact)
    assert {agrees} == {row.agrees for row in found}
    assert FLOAT32_TOLERANCE < min(row.allowed for row in found)


def test_without_float32_a_small_dtype_has_a_tolerance_of_its_own():
    found = compare_states(SAMPLES, states(), moved(0.001), LAYERS, IMAGE, "float16")
    assert {NARROW_TOLERANCE["float16"]} == {row.allowed for row in found}
