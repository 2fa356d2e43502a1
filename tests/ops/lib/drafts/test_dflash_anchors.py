"""Anchors, noise blocks, labels, weights and mask against slow references."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import ConfigError
from ops.lib.drafts.losses.slots import block_labels, block_tokens, block_weights, draw_anchors, slot_weights

masks = st.lists(st.booleans(), min_size=1, max_size=40)


def eligible(mask):
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


@given(mask=masks, num_anchors=st.integers(1, 40), seed=st.integers(0, 5))
def test_anchors_are_drawn_without_replacement_from_positions_whose_successor_is_in_the_mask_too(
    mask, num_anchors, seed
):
    anchors = draw_anchors(torch.tensor(mask), num_anchors, seed=seed, epoch=0, sample=0).tolist()
    assert sorted(set(anchors)) == anchors
    assert set(anchors) <= set(eligible(mask))
    assert len(anchors) == min(num_anchors, len(eligible(mask)))


def test_the_tail_of_a_sequence_is_drawn_as_well():
    mask = torch.arange(30) >= 10
    drawn = {int(a) for epoch in range(200) for a in draw_anchors(mask, 4, seed=0, epoch=epoch, sample=0)}
    assert drawn == set(range(10, 29))


@pytest.mark.parametrize(
    "answers", [[(0, 131_072)], [(start + 3000, start + 4096) for start in range(0, 131_072, 4096)]]
)
def test_anchors_of_a_long_sample_are_spread_over_all_that_is_learnt(answers):
    mask = torch.zeros(131_072, dtype=torch.bool)
    for first, end in answers:
        mask[first:end] = True
    places = torch.tensor(eligible(mask.tolist()))
    parts = torch.searchsorted(places, draw_anchors(mask, 512, seed=0, epoch=0, sample=0)) * 8 // len(places)
    counts = torch.bincount(parts, minlength=8)
    assert 8 == len(counts) and 0.6 * 64 < counts.min() and counts.max() < 1.4 * 64


def test_anchors_depend_on_seed_epoch_and_sample():
    mask = torch.ones(200, dtype=torch.bool)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1), (0, 1, 11)]
    draws = {tuple(draw_anchors(mask, 20, seed=s, epoch=e, sample=i).tolist()) for s, e, i in keys}
    assert len(draws) == len(keys)


def test_a_draw_is_the_same_on_every_machine():
    mask = torch.arange(40) >= 20
    assert draw_anchors(mask, 5, seed=3, epoch=1, sample=7).tolist() == [20, 21, 22, 32, 33]


@given(mask=masks, block_size=st.integers(2, 9), seed=st.integers(0, 5))
def test_blocks_labels_and_weights_equal_a_loop_over_slots(mask, block_size, seed):
    ids = torch.randint(0, 50, (len(mask),), generator=torch.Generator().manual_seed(seed))
    anchors = draw_anchors(torch.tensor(mask), 40, seed=seed, epoch=0, sample=0)
    gamma = block_size / 3
    blocks, labels, weights = [], [], []
    for anchor in anchors.tolist():
        blocks.append([int(ids[anchor])] + [99] * (block_size - 1))
        labels.append([int(ids[anchor + k]) if anchor + k < len(ids) else 0 for k in range(block_size)])
        row, alive = [], True
        for k in range(block_size):
            alive = alive and anchor + k < len(mask) and mask[anchor + k]
            row.append(math.exp(-(k - 1) / gamma) if alive and k > 0 else 0.0)
        weights.append(row)
    empty = torch.zeros(0, block_size)
    assert block_tokens(ids, anchors, block_size, 99).tolist() == blocks
    assert block_labels(ids, anchors, block_size).tolist() == labels
    slow = torch.tensor(weights) if weights else empty
    torch.testing.assert_close(
        slot_weights(torch.tensor(mask), anchors, block_weights(block_size, gamma)), slow, rtol=1e-6, atol=0
    )


def test_a_gap_in_the_mask_ends_the_block():
    mask = torch.tensor([1, 1, 1, 0, 1, 1]).bool()
    weights = slot_weights(mask, torch.tensor([0]), torch.ones(6))
    assert weights.tolist() == [[1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(("block_size", "gamma"), [(17, 7), (16, 7), (10, 5), (8, 4), (12, 6), (4, 2)])
def test_the_default_gamma_follows_the_block_size(block_size, gamma):
    assert block_weights(block_size).tolist() == block_weights(block_size, gamma).tolist()
    assert block_weights(block_size)[:2].tolist() == [0, 1]


def test_a_gamma_of_zero_is_refused():
    with pytest.raises(ConfigError, match="gamma: must be positive, got 0"):
        block_weights(16, 0.0)
