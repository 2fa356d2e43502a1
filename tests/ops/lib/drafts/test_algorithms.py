"""Every algorithm's fast step against its slow reference, and where it starts."""

from __future__ import annotations

import pytest
from draft_cases import random_case
from step_cases import assert_equal_steps

from ops.lib.drafts.backbone.config import from_serving, to_serving
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.losses.loss import Loss

KINDS = ("dflash", "dpace", "focal", "kl")
ALGORITHMS = {
    "dflash2": Dflash2(taps=2, group=4, rank=6, candidates=4),
    "dflash2, three taps": Dflash2(taps=3, group=8, rank=3, candidates=2),
}


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return ALGORITHMS[request.param]


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_equal_the_reference(algorithm, seed):
    assert_equal_steps(random_case(seed, algorithm=algorithm), Loss(kind=KINDS[seed % 4]))


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_every_block_size_equals_the_reference(algorithm, block_size):
    assert_equal_steps(random_case(block_size, samples=3, block_size=block_size, algorithm=algorithm), Loss())


def test_chunks_and_recomputed_layers_change_nothing(algorithm):
    case = random_case(7, samples=3, algorithm=algorithm)
    assert_equal_steps(case, Loss(), anchor_chunk=2)
    assert_equal_steps(case, Loss(), activation_checkpointing=True, anchor_chunk=3)


def test_the_config_goes_through_its_serving_form(algorithm):
    config = random_case(1, algorithm=algorithm).config
    assert config == from_serving(to_serving(config))
    assert to_serving(config)["architectures"] == [algorithm.architecture]
