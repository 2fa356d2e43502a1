"""The points of a space that are tried."""

from __future__ import annotations

from typing import Any

from dsl.tune import Choice, Option, Range, Tune, TuneTable
from executor.tune.points import halving_steps, points_of


def choice(name: str, *values: Any) -> Choice:
    path = tuple(name.split("."))
    return Choice(name, path, tuple(Option(str(value), {path: value}) for value in values))


GRID = (choice("train.lr", 0.1, 0.2, 0.3), choice("train.num_layers", 1, 2, 3, 4))
RANGES = (
    Range("train.lr", ("tune",), ("train", "lr"), 1e-4, 1e-2, True),
    Range("train.num_layers", ("tune",), ("train", "num_layers"), 1, 40, False),
)


def tune(axes: Any, **values: Any) -> Tune:
    return Tune(TuneTable(rungs=(10, 20, 40), space={"train": {}}, **values), axes)


def shown(points: Any) -> list[tuple[str, ...]]:
    return [tuple(option.shown for option in point.values()) for point in points]


def test_without_a_number_of_trials_every_combination_is_tried() -> None:
    points = points_of(tune(GRID))
    assert [(str(lr), str(layers)) for lr in (0.1, 0.2, 0.3) for layers in (1, 2, 3, 4)] == shown(points.tried)
    assert ((), 0) == (points.beyond, points.others)


def test_drawn_points_are_different_depend_on_the_seed_and_begin_like_those_of_more_trials() -> None:
    for axes in (GRID, RANGES):
        five, eleven, other = (
            shown(points_of(tune(axes, trials=trials, seed=seed)).tried) for trials, seed in ((5, 3), (11, 3), (5, 4))
        )
        assert five == eleven[:5] != other
        assert 11 == len(set(eleven))
    assert 1 == points_of(tune(GRID, trials=11)).others


def test_values_of_a_range_lie_in_it_evenly_by_their_logarithm_and_whole_where_its_ends_are() -> None:
    points = points_of(tune(RANGES, trials=400)).tried
    rates = [point["train.lr"].changes["train", "lr"] for point in points]
    layers = [point["train.num_layers"].changes["train", "num_layers"] for point in points]
    assert 1e-4 <= min(rates) and max(rates) <= 1e-2
    assert 160 < sum(rate < 1e-3 for rate in rates) < 240
    assert set(range(2, 40)) <= set(layers) <= set(range(1, 41))
    assert {int} == set(map(type, layers))


def test_a_budget_of_steps_leaves_out_the_last_trials() -> None:
    assert 8 * 10 + 4 * 10 + 2 * 20 == halving_steps(8, (10, 20, 40), 2)
    assert 9 * 10 + 3 * 10 + 1 * 20 == halving_steps(9, (10, 20, 40), 3)
    points = points_of(tune(GRID, budget_steps=170))
    assert (8, 4) == (len(points.tried), len(points.beyond))
    assert () == points_of(tune(GRID, budget_steps=39)).tried


def test_more_trials_than_a_range_has_whole_numbers_are_all_of_them_and_nothing_is_left_out() -> None:
    layers = Range("train.num_layers", ("tune",), ("train", "num_layers"), 1, 3, log=False)
    few, many = (points_of(tune((layers,), trials=trials)) for trials in (2, 9))
    assert (2, None) == (len(few.tried), few.others)
    assert (3, 0) == (len(many.tried), many.others)
