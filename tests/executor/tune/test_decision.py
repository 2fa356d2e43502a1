"""What successive halving decides by its records: whichever order they are in, and wherever it was killed."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from executor.tune.decision import HOUR, Decision, Failure, Result, Rules, decide
from executor.tune.points import halving_steps
from ops.train_dflash.answers import Answer

Record = Result | Failure
Train = Callable[[int, int], Record]
PROMPTS = 6


def result(trial: int, steps: int, generated: list[int], seconds: float = 1.0) -> Result:
    """A result whose answers have these tokens from four verification steps each."""
    answers = (Answer(f"prompt {place}", "text", tokens, 4) for place, tokens in enumerate(generated))
    return Result(trial, steps, seconds, tuple(answers))


@st.composite
def searches(draw: st.DrawFn) -> tuple[Rules, dict[tuple[int, int], Record]]:
    """Rules, and what each trial gives at every rung: tokens of each prompt, or a failure."""
    rungs = sorted(draw(st.sets(st.integers(1, 50), min_size=1, max_size=4)))
    hours = draw(st.none() | st.floats(0.5, 100).map(lambda seconds: seconds / HOUR))
    rules = Rules(draw(st.integers(1, 9)), tuple(rungs), draw(st.integers(1, 4)), hours)
    tokens = st.lists(st.integers(4, 60), min_size=PROMPTS, max_size=PROMPTS)
    outcomes: dict[tuple[int, int], Record] = {}
    for trial in range(rules.trials):
        for steps in rungs:
            if draw(st.integers(0, 9)) == 0:
                outcomes[trial, steps] = Failure(trial, steps, "not finite")
            else:
                outcomes[trial, steps] = result(trial, steps, draw(tokens), draw(st.floats(0.1, 5)))
    return rules, outcomes


def searched(rules: Rules, train: Train, known: list[Record]) -> tuple[Decision, list[Record]]:
    """The end of a search that does what is pending, and all its records."""
    records = [*known]
    while (decision := decide(rules, records)).pending:
        records += [train(trial, decision.steps) for trial in decision.pending]
    return decision, records


@settings(max_examples=60, deadline=None)
@given(searches(), st.randoms(use_true_random=False), st.data())
def test_neither_the_order_of_records_nor_a_kill_at_any_point_changes_the_decision(search, random, data) -> None:  # type: ignore[no-untyped-def]
    rules, outcomes = search
    decision, records = searched(rules, lambda trial, steps: outcomes[trial, steps], [])
    assert len(set(records)) == len(records), "a training was asked for twice"
    random.shuffle(records)
    assert decision == decide(rules, records)
    done = data.draw(st.integers(0, len(records)))  # killed: any of the trainings that ran side by side are finished
    again, _ = searched(rules, lambda trial, steps: outcomes[trial, steps], records[:done])
    assert decision == again
    strangers = [each for each in outcomes.values() if each not in records]  # of a search with other rules
    if rules.budget_hours is None:
        assert decision == decide(rules, [*records, *strangers])


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(8)), st.integers(2, 4), st.sampled_from([(10, 20), (5, 10, 20), (3, 6, 12, 24)]))
def test_where_curves_do_not_cross_it_finds_the_best_of_all_in_the_announced_steps(
    order: list[int], eta: int, rungs: tuple[int, ...]
) -> None:
    rules = Rules(len(order), rungs, eta)
    trained: list[tuple[int, int]] = []

    def train(trial: int, steps: int) -> Result:
        trained.append((trial, steps))
        return result(trial, steps, [10 + steps + 3 * order[trial]] * PROMPTS)

    decision, _ = searched(rules, train, [])
    full_grid = [train(trial, rungs[-1]) for trial in range(len(order))]
    best = max(full_grid, key=lambda each: each.tau)
    assert best.trial == decision.winner == order.index(7)
    before = {steps: earlier for earlier, steps in zip((0, *rungs), rungs, strict=False)}
    spent = sum(steps - before[steps] for _, steps in trained[: -len(order)])
    assert halving_steps(8, rungs, eta) == spent < 8 * rungs[-1]


def test_a_full_grid_after_a_halving_trains_what_that_stopped_and_nothing_twice() -> None:
    rungs, asked = (10, 20, 40), list[tuple[int, int]]()

    def train(trial: int, steps: int) -> Result:
        asked.append((trial, steps))
        return result(trial, steps, [10 + trial * (steps if steps == 40 else 1)] * PROMPTS)

    halving, known = searched(Rules(4, rungs, 2), train, [])
    assert [(trial, steps) for steps in rungs for trial in range(4)] != sorted(asked, key=lambda each: each[::-1])
    grid, _ = searched(Rules(4, rungs, 1), train, known)
    assert sorted(asked) == [(trial, steps) for trial in range(4) for steps in rungs]
    assert (3, 3) == (halving.winner, grid.winner)
    assert all(len(rung.kept) == 4 for rung in grid.rungs[:-1])


def test_one_in_eta_goes_on_and_the_others_are_told_apart_by_paired_prompts() -> None:
    # Prompts differ by far more than trials: only their differences, prompt by prompt, tell the second one apart.
    hard_and_easy = [4, 12, 20, 28, 36, 60]
    best = result(0, 10, hard_and_easy)
    worse = result(1, 10, [tokens - 1 for tokens in hard_and_easy])
    mixed = result(2, 10, [4, 14, 17, 30, 33, 60])
    far = result(3, 10, [4] * PROMPTS)
    decision = decide(Rules(4, (10, 20), 2), [far, mixed, worse, best])
    assert ((0, 2), 20) == (decision.pending, decision.steps)
    (rung,) = decision.rungs
    assert [0, 2, 1, 3] == [each.trial for each in rung.ranked]
    assert (0, 2) == rung.kept
    assert [False, False, True, True] == [each.is_told_apart for each in rung.ranked]
    second = rung.ranked[2]
    assert second.above is not None and second.bounds is not None and second.above_bounds is not None
    assert -0.25 == round(second.above, 12)
    assert second.bounds[0] < best.tau < second.bounds[1]


def test_equal_trials_are_ranked_by_number_and_failed_ones_stop() -> None:
    same = [20] * PROMPTS
    records = [result(2, 5, same), result(1, 5, same), Failure(0, 5, "not finite"), result(3, 5, [8] * PROMPTS)]
    decision = decide(Rules(4, (5, 9)), records)
    assert (1, 2) == decision.pending
    assert [Failure(0, 5, "not finite")] == list(decision.rungs[0].failed)
    none_left = decide(Rules(1, (5, 9)), [Failure(0, 5, "not finite")])
    assert (None, ()) == (none_left.winner, none_left.pending)


def test_a_budget_of_hours_begins_with_one_trial_and_keeps_what_fits_at_the_known_pace() -> None:
    rules = Rules(6, (10, 30), 2, budget_hours=100 / HOUR)
    assert ((0,), 10) == (decide(rules, []).pending, decide(rules, []).steps)
    records: list[Record] = [result(0, 10, [30] * PROMPTS, 25.0)]
    assert (1, 2, 3) == decide(rules, records).pending  # 100 s at 25 s each
    assert (4, 5) == decide(rules, records).not_begun
    records += [result(trial, 10, [30 - trial] * PROMPTS, 5.0) for trial in (1, 2, 3)]
    decision = decide(rules, records)  # 60 s are left; the best needs 50, the next one 10
    assert ((0, 1), ()) == (decision.pending, decision.rungs[0].unaffordable)
    records[0] = result(0, 10, [30] * PROMPTS, 24.0)
    records[1] = result(1, 10, [29] * PROMPTS, 20.0)
    decision = decide(rules, records)  # 46 s are left, fewer than the best needs
    assert ((), (0, 1), 0) == (decision.pending, decision.rungs[0].unaffordable, decision.winner)
