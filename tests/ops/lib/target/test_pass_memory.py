"""A pass over long texts needs no more memory than its sizes say, and masks stay below their limit."""

from __future__ import annotations

import os
import sys

import pytest
from cache_cases import HIDDEN, cache_target
from peak_memory import peak_memory

from ops.lib.target.cache import decoder_config
from ops.lib.target.sizes import LEAST_CHUNK, MASK_BYTES, MOST_BYTES, SCORE_BYTES, PassSizes

SHORT, LONG = 1024, 8192
LIMIT = 16 << 20  # of masks: those of LONG would need 24 times as much
KEPT_MIB = 48  # by the allocator
CAPTURE = """
import sys
sys.path[:0] = sys.argv[1].split(":")
import torch
from cache_cases import cache_target, text_sample
from ops.capture_targets.backend import device_batch
from ops.lib.target import chunked_prefill
chunked_prefill.MOST_BYTES = int(sys.argv[4])
torch.set_num_threads(1)
sample = text_sample("long", torch.arange(int(sys.argv[3])) % 90 + 3)
features, _ = device_batch(cache_target(sys.argv[2], torch.float32), [sample], (0, 2))
print(features.shape[1])
"""


@pytest.mark.slow
def test_a_long_capture_in_chunks_stays_within_the_figure_of_the_plan():
    name = "mistral"
    peaks = {}
    for tokens in (SHORT, LONG):
        [length], peaks[tokens] = peak_memory(CAPTURE, os.pathsep.join(sys.path), name, tokens, LIMIT)
        assert str(tokens) == length
    text = decoder_config(cache_target(name)).to_dict()
    sizes = PassSizes(text, 4)
    planned = sizes.states(LONG, 2) + sizes.layer(LONG) + LIMIT + sizes.cache(LONG)
    assert peaks[LONG] - peaks[SHORT] <= (planned >> 20) + KEPT_MIB
    assert planned < LONG**2 * MASK_BYTES / 4


TEXT = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6} | {
    "intermediate_size": 128,
    "model_type": "qwen3",
}


@pytest.mark.parametrize(
    ("fields", "rows", "longest", "expected"),
    [
        ({}, 1, 131_072, 0),
        ({}, 2, 1024, 2 * 1024**2 * MASK_BYTES),
        ({}, 2, 131_072, MOST_BYTES),
        ({"sliding_window": 512}, 1, 512, 0),
        ({"sliding_window": 512}, 1, 1024, 1024**2 * MASK_BYTES),
        ({"sliding_window": 512, "use_sliding_window": False}, 1, 1024, 0),
        ({"sliding_window": 512}, 1, 131_072, MOST_BYTES),
        ({"model_type": "gpt_oss"}, 1, 1024, 4 * 1024**2 * SCORE_BYTES),
        ({"model_type": "gpt_oss"}, 1, 2**20, LEAST_CHUNK * 2**20 * 4 * SCORE_BYTES),
        ({"attn_logit_softcapping": 50.0}, 1, 131_072, MOST_BYTES),
        ({"layer_types": ["chunked_attention"] * 6}, 2, 131_072, 2 * 131_072**2 * MASK_BYTES),
    ],
)
def test_masks_and_scores_grow_with_the_square_of_the_length_up_to_the_limit(fields, rows, longest, expected):
    assert expected == PassSizes(TEXT | fields, 2).masks(rows, longest)


def test_all_else_of_a_pass_grows_with_its_tokens():
    sizes = PassSizes(TEXT, 2)
    for one, two in zip(sizes.of_batch(1, 1024, 3).values(), sizes.of_batch(1, 2048, 3).values(), strict=True):
        assert 2 * one == two
    assert 2 * 3 * 1024 * HIDDEN * 2 == sizes.states(1024, 3)
    assert 7 * 2 * 2 * (HIDDEN // 4) * 1024 * 2 == sizes.cache(1024)
