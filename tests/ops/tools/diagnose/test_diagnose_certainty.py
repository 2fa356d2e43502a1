"""What a diagnosis says of few prompts: it seldom accuses, and finds what is plainly wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from simulated_answers import simulated

from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import Decoded
from ops.tools.diagnose.bench import paired_gain, unpaired_gain
from ops.tools.diagnose.judgement import CAUSE
from ops.tools.diagnose.outcomes import decoding_finding, random_finding

BLOCK, LENGTH, TRIALS = 16, 128, 100
PROMPTS = (4, 5, 6, 7)


def count(prompts: int, judge: Callable[[np.random.Generator, np.ndarray], bool]) -> int:
    """The share of drafts, in percent, for which `judge` is true, given the chance of a right slot by prompt."""
    generator = np.random.default_rng(prompts)
    return sum(judge(generator, generator.beta(4, 3, prompts)) for _ in range(TRIALS)) * 100 // TRIALS


def decoded(generator: np.random.Generator, right_N: Sequence[float] | np.ndarray) -> list[Decoded]:
    return [simulated(generator, float(right), BLOCK, LENGTH) for right in right_N]


@pytest.mark.parametrize("prompts", PROMPTS)
def test_of_a_healthy_draft_nobody_says_that_nothing_was_learnt(prompts):
    def is_accused(generator, right_N):
        return random_finding(decoded(generator, right_N), decoded(generator, 0.005 + 0 * right_N)).level == CAUSE

    assert 0 == count(prompts, is_accused)


@pytest.mark.parametrize("prompts", PROMPTS)
def test_of_a_draft_that_learnt_nothing_it_is_said(prompts):
    def is_named(generator, right_N):
        return random_finding(*(decoded(generator, 0.005 + 0 * right_N) for _ in range(2))).level == CAUSE

    assert 90 <= count(prompts, is_named)


@pytest.mark.parametrize("prompts", PROMPTS)
def test_a_use_that_leaves_next_to_nothing_of_tau_is_found(prompts):
    """As of blocks that stand one position late."""

    def is_found(generator, right_N):
        return paired_gain(decoded(generator, right_N), decoded(generator, 0.2 * right_N)).is_certain

    assert (90 if prompts == 4 else 97) <= count(prompts, is_found)


@pytest.mark.parametrize("prompts", PROMPTS)
def test_a_use_that_helps_some_prompts_and_harms_others_is_seldom_taken_for_better(prompts):
    def is_accused(generator, right_N):
        others_N = np.clip(right_N + generator.normal(0, 0.2, prompts), 0.01, 0.97)
        return paired_gain(decoded(generator, others_N), decoded(generator, right_N)).is_certain

    assert 2 >= count(prompts, is_accused)


@pytest.mark.parametrize("prompts", PROMPTS)
def test_two_groups_of_prompts_alike_are_seldom_told_apart(prompts):
    def is_told_apart(generator, right_N):
        others_N = generator.beta(4, 3, prompts)
        return unpaired_gain(decoded(generator, right_N), decoded(generator, others_N)).is_certain

    assert 2 >= count(prompts, is_told_apart)


@pytest.mark.parametrize("prompts", PROMPTS)
def test_training_and_decoding_that_agree_are_seldom_said_to_differ(prompts, monkeypatch):
    samples = [TokenSample("", "text", *[None] * 4, 0) for _ in range(prompts)]
    training = {"final_metrics": {"train/expected_tau": 2.33, "train/accuracy": 0.57}}  # of independent slots

    def found(generator, right_N):
        return decoding_finding(samples, decoded(generator, right_N), training, {"text": 9}, BLOCK, is_own=True)

    assert 2 >= count(prompts, lambda generator, right_N: found(generator, right_N).level == CAUSE)
    assert 95 <= count(prompts, lambda generator, right_N: found(generator, 0.2 * right_N).level == CAUSE)
