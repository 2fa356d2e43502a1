"""Statistics of an evaluation against slow, obvious references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.evaluate.lossless import compare, difference_text, rounding
from ops.evaluate.statistics import (
    BatchTime,
    acceptance_length,
    accepted_lengths,
    context_part,
    mean_of_prompts,
    reported_groups,
    speedup,
    steps_of,
    tau_by,
    tau_by_position,
)
from ops.evaluate.turns import PromptResult
from ops.lib.drafts.decoding.decode import Decoded


def answer(*accepted: int, cut: int = 0) -> Decoded:
    """An answer of steps that accepted so many; `cut`: tokens of the last step that lie behind EOS or the limit."""
    return Decoded(tuple(range(1 + sum(accepted) + len(accepted) - cut)), accepted)


def test_the_bootstrap_interval_holds_the_true_tau_in_about_95_of_100_experiments():
    rng = np.random.default_rng(0)
    experiments, prompts, held = 300, 60, 0
    true = 1 + 3.5  # every step yields one token and 0 to 7 more, all equally likely
    for seed in range(experiments):
        answers = [answer(*(int(n) for n in rng.integers(0, 8, size=rng.integers(1, 4)))) for _ in range(prompts)]
        measured = acceptance_length(answers, 400, seed)
        held += measured.low <= true <= measured.high
    assert 0.90 <= held / experiments <= 0.99


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=30).map(tuple), min_size=1, max_size=5),
    st.sampled_from([17, 64, 300, 1000]),
    st.integers(0, 3),
)
def test_tau_by_position_equals_a_walk_through_every_answer(accepted, max_new_tokens, cut):
    answers = []
    for lengths in accepted:
        behind = min(cut, lengths[-1]) if lengths else 0
        whole = answer(*lengths, cut=behind)
        if whole.generated <= max_new_tokens:
            answers.append(whole)
    width = 16
    while width * 16 < max_new_tokens:
        width *= 2
    walked: dict[int, list[int]] = {}
    for one in answers:
        place = 0
        for count in one.accepted:
            yielded = len(one.tokens[1 + place : 1 + place + count + 1])
            walked.setdefault(place // width, []).append(yielded)
            place += count + 1
    found = tau_by_position(answers, max_new_tokens, 10, 0) if answers else []
    assert {part.first // width: part.steps for part in found} == {
        number: len(yielded) for number, yielded in walked.items()
    }
    for part in found:
        yielded = walked[part.first // width]
        assert sum(yielded) / len(yielded) == pytest.approx(part.tau)
        if part.prompts > 1:
            assert part.low <= part.tau + 1e-9
            assert part.tau <= part.high + 1e-9
        else:
            assert part.low is None is part.high
        assert part.last - part.first < width


@pytest.mark.parametrize(("count", "least"), [(4, 0.85), (8, 0.87)])
def test_the_interval_of_a_few_prompts_that_differ_holds_the_true_tau_about_as_often_as_it_says(count, least):
    rng = np.random.default_rng(0)

    def experiment(prompts):
        """Prompts of which some are easy and some are hard, as steps that accepted so many."""
        shares = rng.uniform(0.2, 0.95, size=prompts)
        return [np.minimum(7, rng.geometric(1 - share, size=rng.integers(4, 20)) - 1) for share in shares]

    many = experiment(40_000)
    true = sum(steps.sum() + len(steps) for steps in many) / sum(len(steps) for steps in many)
    held = 0
    for seed in range(400):
        measured = acceptance_length([answer(*steps.tolist()) for steps in experiment(count)], 300, seed)
        held += measured.low <= true <= measured.high
    assert least <= held / 400


def test_a_single_prompt_has_no_interval_and_neither_has_a_part_of_the_answer_that_one_prompt_reached():
    alone = acceptance_length([answer(3, 0, 1), answer()], 100, 0)
    assert (7 / 3, None, None) == (alone.tau, alone.low, alone.high)
    first, second = tau_by_position([answer(*[3] * 8), answer(3, 1), answer(2, 1)], 64, 100, 0)
    assert first.low < first.tau < first.high
    assert (1, None, None) == (second.prompts, second.low, second.high)


def test_intervals_of_few_prompts_end_at_what_a_step_can_yield():
    few = [answer(7, 7), answer(7, 7), answer(6, 6), answer(0, 0)]
    measured = acceptance_length(few, 200, 0, block_size=8)
    (part,) = tau_by_position(few, 16, 200, 0, block_size=8)
    assert (1.0, 8.0) == (measured.low, measured.high) == (part.low, part.high)
    narrow = acceptance_length(few[:3], 200, 0, block_size=8)
    assert 1 < narrow.low < narrow.tau < narrow.high == 8
    assert 8 < acceptance_length(few[:3], 200, 0).high


def test_a_step_that_eos_cut_short_yields_what_stands_in_the_answer():
    assert [(0, 3), (3, 1), (4, 2)] == steps_of(answer(2, 0, 4, cut=3))


@given(
    st.lists(st.lists(st.integers(0, 7), max_size=30), min_size=1, max_size=6),
    st.lists(st.integers(0, 100_000), min_size=6, max_size=6),
)
def test_tau_by_context_equals_a_walk_through_every_answer_and_adds_up_to_all(accepted, lengths):
    answers = [answer(*counts, cut=counts[-1] if counts else 0) for counts in accepted]
    walked: dict[str, list[int]] = {}
    for one, length in zip(answers, lengths, strict=False):
        place = 0
        for count in one.accepted:
            before, name = length + place, "00k"
            for bound in (1, 2, 4, 8, 16, 32, 64):
                name = f"{bound:02d}k" if before >= 1024 * bound else name
            walked.setdefault(name, []).append(len(one.tokens[1 + place : 2 + place + count]))
            place += count + 1
    found = tau_by(answers, lambda place, anchor: context_part(lengths[place] + anchor), 10, 0)
    assert {name: (len(yielded), sum(yielded)) for name, yielded in walked.items()} == {
        name: (part.steps, part.generated) for name, part in found.items()
    }
    assert sorted(found) == list(found)
    whole = acceptance_length(answers, 10, 0)
    sums = (sum(part.steps for part in found.values()), sum(part.generated for part in found.values()))
    assert (whole.steps, whole.generated) == sums
    for part in found.values():
        assert part.tau == pytest.approx(part.generated / part.steps)


@pytest.mark.parametrize(
    ("tokens", "part"),
    [(0, "00k"), (1023, "00k"), (1024, "01k"), (4095, "02k"), (4096, "04k"), (65535, "32k"), (10**6, "64k")],
)
def test_a_context_belongs_to_the_power_of_two_thousands_below_it(tokens, part):
    assert part == context_part(tokens)


def test_a_part_with_the_interval_of_its_own_prompts_is_that_of_these_prompts_only():
    easy, hard = [answer(7, 7, 6), answer(7, 5)], [answer(0, 1), answer(0, 0, 0, 2)]
    found = tau_by([*easy, *hard], lambda place, _: "easy" if place < 2 else "hard", 200, 3, block_size=8)
    for name, own in (("easy", easy), ("hard", hard)):
        alone = acceptance_length(own, 200, 3, block_size=8)
        part = found[name]
        assert (alone.tau, alone.low, alone.high, 2) == (part.tau, part.low, part.high, part.prompts)


def test_the_mean_of_prompts_counts_each_prompt_once_and_the_sum_over_steps_each_step():
    answers = [answer(7), answer(*[0] * 9), answer()]
    mean = mean_of_prompts(answers, 100, 0, block_size=8)
    assert ((8 + 1) / 2, 2, 10, 17) == (mean.tau, mean.prompts, mean.steps, mean.generated)
    assert 17 / 10 == acceptance_length(answers, 100, 0).tau
    assert mean.low == 1.0 <= mean.tau <= mean.high == 8.0
    none = mean_of_prompts([answer()], 100, 0)
    assert (None, None, None, 0, 0, 0) == (none.tau, none.low, none.high, none.prompts, none.steps, none.generated)


def test_prompts_without_a_group_and_those_beyond_the_fifty_largest_are_one_part():
    groups = [None, *[f"group {number:02d}" for number in range(60)], *["large"] * 3]
    found = reported_groups(groups)
    assert len(groups) == len(found)
    assert ["group 48", "large"] == sorted(set(found) - {""})[-2:]
    assert (1 + 60 - 49, 50) == (found.count(""), len(set(found) - {""}))


def test_accepted_lengths_count_every_step():
    assert [1, 1, 0, 2] == accepted_lengths([answer(0, 3), answer(3, 1)], 4)


def test_the_speedup_is_paired_by_batch_and_per_token():
    slow_machine = [BatchTime(2.0 * load, 100, 1.0 * load, 100) for load in (1, 5, 30)]
    even = speedup(slow_machine, 200, 0)
    assert [2.0, 2.0, 2.0] == pytest.approx(list(even.values()))
    longer = speedup([BatchTime(2.0, 100, 1.0, 50)], 200, 0)
    assert {"speedup": 1.0, "speedup_low": None, "speedup_high": None} == longer
    mixed = speedup([BatchTime(float(fast), 10, 1.0, 10) for fast in (1, 2, 3, 4)], 2000, 0)
    assert 2.5 == mixed["speedup"]
    assert 0 < mixed["speedup_low"] < 2.5 < mixed["speedup_high"] < 5


@pytest.mark.parametrize("batch_size", [1, 8])
def test_two_ways_that_are_equally_fast_have_no_speedup_where_answers_are_sampled(batch_size):
    rng = np.random.default_rng(1)

    def batch() -> BatchTime:
        plain, speculative = np.minimum(rng.geometric(1 / 30, size=(2, batch_size)), 129)
        return BatchTime(10.0 + plain.max(), int(plain.sum()), 10.0 + speculative.max(), int(speculative.sum()))

    found = [speedup([batch() for _ in range(64 // batch_size)], 100, 0) for _ in range(100)]
    assert 1.0 == pytest.approx(np.mean([one["speedup"] for one in found]), abs=0.05)
    assert 85 <= sum(one["speedup_low"] <= 1 <= one["speedup_high"] for one in found)


def result(plain: Decoded, speculative: Decoded) -> PromptResult:
    return PromptResult("a", "text", plain, speculative, None)


@pytest.mark.parametrize(
    ("plain_near", "speculative_near", "is_tie"),
    [
        ({2: 0.0, 5: 0.01}, {5: 0.0, 2: 0.02}, True),
        ({2: 0.0, 9: 0.01, 5: 0.03}, {9: 0.0, 5: 0.0, 2: 0.02}, True),
        ({2: 0.0, 5: 0.01}, {}, False),
        ({}, {5: 0.0, 2: 0.01}, False),
        ({}, {}, False),
        ({2: 0.0, 9: 0.01}, {5: 0.0, 2: 0.02}, False),
        ({2: 0.0, 5: 0.01}, {5: 0.0, 9: 0.02}, False),
        ({2: 0.0, 9: 0.01}, {5: 0.0, 9: 0.02}, False),
        ({2: 0.0, 5: 0.01}, {5: 0.02, 2: 0.0}, False),
        ({2: 0.01, 5: 0.0}, {5: 0.0, 2: 0.02}, False),
    ],
)
def test_a_difference_is_a_tie_only_where_both_passes_were_undecided_between_these_two_tokens(
    plain_near, speculative_near, is_tie
):
    plain = Decoded((1, 2, 3), margins=(1.0, 0.01, 1.0), near={1: plain_near} if plain_near else {})
    other = Decoded((1, 5, 3), (1,), (1.0, 0.02, 1.0), {1: speculative_near} if speculative_near else {})
    losses = compare([result(plain, other)])
    assert (int(is_tie), int(not is_tie)) == (len(losses.ties), len(losses.errors))
    (difference,) = losses.ties or losses.errors
    assert (1, 2, 5) == (difference.position, difference.plain_token, difference.speculative_token)
    assert (plain_near.get(5), speculative_near.get(2)) == (difference.behind_plain, difference.behind_speculative)
    told = difference_text(difference, str)
    taken = plain_near.get(2, 0) == speculative_near.get(5, 0) == 0
    assert taken != told.endswith("; one of them is not even the best token of its own pass")
    assert (taken and 5 not in plain_near) == ("5 is far from the best one plainly" in told)
    assert (taken and 2 not in speculative_near) == ("2 is far from the best one speculatively" in told)


@pytest.mark.parametrize(("alike", "many"), [(9, False), (8, True)])
def test_ties_are_many_above_one_answer_in_ten(alike, many):
    near = {1: {2: 0.0, 5: 0.0}}
    plain, other = Decoded((1, 2), margins=(1.0, 0.01), near=near), Decoded((1, 5), (0,), (1.0, 0.01), near)
    assert many == compare([result(plain, other), *[result(plain, plain)] * alike]).has_many_ties


def test_an_answer_that_ends_early_is_never_a_tie():
    plain = Decoded((1, 2, 3), margins=(1.0, 1e-9, 1e-9), near={2: {3: 0.0, 4: 1e-9}})
    short = Decoded((1, 2), (0,), (1.0, 1e-9))
    (error,) = compare([result(plain, short)]).errors
    assert (2, 3, None) == (error.position, error.plain_token, error.speculative_token)
    assert (1e-9, None) == (error.plain_margin, error.speculative_margin)
    assert difference_text(error, str).endswith(
        "is none, since the answer had ended, plain decoding gives 3 '3' by a margin of 1.00e-09"
    )


def test_rounding_is_measured_where_both_passes_saw_the_same_tokens():
    plain = Decoded((1, 2, 3, 4), margins=(1.0, 2.0, 0.1, 9.0))
    other = Decoded((1, 2, 5, 4), (2,), (1.5, 2.1, 0.2, 3.0))
    measured = rounding([result(plain, other)])
    assert 2 == measured["tokens"]
    assert [0.3, 0.5] == pytest.approx([measured["median"], measured["largest"]])
    assert None is rounding([])["largest"]
