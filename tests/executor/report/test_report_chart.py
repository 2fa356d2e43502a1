"""Charts as text: where points stand, against a slow reference; ticks, gaps, long curves, and escapes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from counting_runs import counting, run
from hypothesis import example, given
from hypothesis import strategies as st

from executor.records.metric_points import Point
from executor.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Look, drawn, together
from executor.report.figures import curves
from executor.report.run_data import find_records, read_runs
from executor.report.scale import LOG_FROM, Scale, is_wide, thinned
from executor.store.artifact_store import Store
from ops.lib.report_sections import Chart, Series

FINITE = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)
EVERY_FINITE = st.floats(allow_nan=False, allow_infinity=False)


def svg(chart: Chart) -> ElementTree.Element:
    """The picture, which is XML too."""
    found = ElementTree.fromstring(drawn(chart)).find("svg")
    assert found is not None
    return found


def places(chart: Chart) -> list[tuple[float, float]]:
    """The points of the first line."""
    path = next(path for path in svg(chart).iter("path") if path.get("class") == "line")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d", ""))]


def reference(value: float, values: list[float], start: float, end: float, *, is_log: bool = False) -> float:
    """Where a value stands between the smallest and the largest one, as one would work it out by hand."""
    bent = [math.log(each) if is_log else each for each in [value, *values]]
    share = (bent[0] - min(bent[1:])) / (max(bent[1:]) - min(bent[1:]))
    return start + share * (end - start)


@pytest.mark.parametrize(
    ("x", "y", "log_y"),
    [
        ([0, 1, 2, 5], [3.0, -1.0, 2.5, 0.0], False),
        ([10, 20, 30], [0.001, 0.1, 5.0], True),
        ([1, 2, 3], [1.0, 2.0, 3.0], True),  # less than two powers of ten: drawn as it is
        ([1, 2, 3], [0.0, 10.0, 1000.0], True),  # 0 has no logarithm
    ],
)
def test_the_points_of_a_line_stand_where_a_slow_reference_puts_them(x, y, log_y) -> None:
    is_log = log_y and min(y) > 0 and max(y) >= 100 * min(y)
    expected = [
        (reference(at, x, LEFT, WIDTH - RIGHT), reference(value, y, HEIGHT - BOTTOM, TOP, is_log=is_log))
        for at, value in zip(x, y, strict=True)
    ]
    found = places(Chart([Series("s", x, y)], "x", "y", log_y=log_y))
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert one == pytest.approx(other, abs=0.051)


def test_bars_begin_at_zero_and_end_at_their_value_also_below_it() -> None:
    chart = svg(Chart([Series("s", [1, 2, 3], [4.0, -2.0, 1.0])], "slot", "y", "bars"))
    bars = [(float(bar.get("y", "")), float(bar.get("height", ""))) for bar in chart.iter("rect")]
    zero = reference(0.0, [4.0, -2.0], HEIGHT - BOTTOM, TOP)
    expected = []
    for value in (4.0, -2.0, 1.0):
        end = reference(value, [4.0, -2.0], HEIGHT - BOTTOM, TOP)
        expected.append((min(zero, end), abs(zero - end)))
    assert [pytest.approx(each, abs=0.11) for each in expected] == bars


@pytest.mark.parametrize("chart_x", [[1, 2, 3], ["image", "text", "code"]])
def test_bars_that_are_all_zero_lie_on_an_axis_from_zero_to_one(chart_x) -> None:
    chart = svg(Chart([Series("s", chart_x, [0.0, 0.0, 0.0])], "slot", "y", "bars"))
    is_upright = chart_x[0] == 1
    bars = [[float(bar.get(name, "")) for name in ("x", "y", "width", "height")] for bar in chart.iter("rect")]
    at = [(y, height) if is_upright else (x, width) for x, y, width, height in bars]
    assert [(HEIGHT - BOTTOM if is_upright else LEFT - 40, 0.0)] * 3 == at
    shown = ["".join(text.itertext()) for text in chart.iter("text") if text.get("text-anchor") == "end"]
    assert (["0", "0.2", "0.4", "0.6", "0.8", "1"] if is_upright else ["y"]) == shown


def test_bars_under_names_have_whiskers_of_their_intervals_and_say_so() -> None:
    series = Series("tau", ["image", "text"], [4.0, 2.0], [3.0, None], [6.0, None])
    chart = svg(Chart([series], "category", "tau", "bars"))
    titles = ["".join(title.itertext()) for title in chart.iter("title")]
    assert ["tau, image: 4 [3, 6]", "tau, text: 2"] == titles
    whiskers = [path.get("d", "") for path in chart.iter("path") if path.get("class") == "whisker"]
    bar = next(chart.iter("rect"))
    per_unit = float(bar.get("width", "")) / 4
    low, high = (float(found) for found in re.match(r"M([\d.]+) [\d.]+H([\d.]+)", whiskers[0]).groups())  # type: ignore[union-attr]
    assert 1 == len(whiskers)
    assert (3 * per_unit, 6 * per_unit) == pytest.approx(
        (low - float(bar.get("x", "")), high - float(bar.get("x", ""))), abs=0.2
    )


@given(st.lists(EVERY_FINITE, min_size=1, max_size=30))
@example([1e308, -1e308])
@example([5e-324, 1e-323])
def test_every_value_stands_inside_and_a_larger_one_further(values: list[float]) -> None:
    scale = Scale.over(values, 10.0, 200.0)
    placed = [scale.place(value) for value in sorted(values)]
    assert all(10.0 - 1e-6 <= place <= 200.0 + 1e-6 for place in placed)
    assert placed == sorted(placed)


@given(FINITE, st.floats(min_value=1e-9, max_value=1e12))
def test_ticks_are_round_a_few_and_inside(low: float, span: float) -> None:
    scale = Scale.over([low, low + span], 0.0, 100.0)
    ticks = scale.ticks()
    margin = (scale.high - scale.low) * 1e-6 + abs(low) * 1e-9
    assert all(scale.low - margin <= tick <= scale.high + margin for tick in ticks)
    assert len(ticks) <= 12


@given(st.lists(EVERY_FINITE, min_size=2, max_size=2), st.booleans())
@example([1e308, -1e308], False)
@example([5e-324, 1e-323], False)
@example([5e-324, 1.7e308], True)
def test_any_two_floats_have_an_axis_with_a_few_ticks(ends: list[float], is_log: bool) -> None:
    scale = Scale.over(ends, 0.0, 100.0, is_log=is_log)
    assert all(math.isfinite(tick) and -0.1 <= scale.place(tick) <= 100.1 for tick in scale.ticks())
    assert len(scale.ticks()) <= 12


@given(st.lists(st.tuples(EVERY_FINITE, st.floats(), st.floats(), st.floats()), min_size=1, max_size=6))
@example([(1.0, 1e308, -1e308, 1e308), (2.0, -1e308, math.nan, math.inf)])
def test_any_floats_make_a_picture(points: list[tuple[float, float, float, float]]) -> None:
    x, y, low, high = (list(values) for values in zip(*points, strict=True))
    names = [str(place) for place in range(len(x))]
    for series, kind in ((Series("s", x, y, low, high), "lines"), (Series("s", x, y), "bars")):
        shown = drawn(Chart([series, Series("other", x, y)], "x", "y", kind, log_y=True))
        assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', re.sub(r"<title>.*?</title>", "", shown))
    assert drawn(Chart([Series("s", names, y, low, high)], "x", "y", "bars"))


def test_ticks_of_a_logarithmic_axis_are_powers_of_ten() -> None:
    assert [0.001, 0.01, 0.1, 1.0] == pytest.approx(Scale.over([0.0005, 3.0], 0, 100, is_log=True).ticks())


def test_what_is_not_finite_leaves_a_gap_and_all_of_it_a_sentence() -> None:
    text = drawn(Chart([Series("s", [1, 2, 3, 4], [1.0, float("nan"), 2.0, float("inf")])], "x", "y"))
    assert 2 == text.count("M", text.index('class="line"') - 80, text.index('class="line"'))
    assert "no value was measured" in drawn(Chart([Series("s", [1], [float("nan")])], "x", "y"))
    assert "no value was measured" in drawn(Chart([], "x", "y"))


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=3000))
def test_a_long_curve_keeps_its_ends_and_its_peaks(y: list[float]) -> None:
    kept = thinned(range(len(y)), y)
    assert kept == sorted(set(kept))
    assert {0, len(y) - 1} <= set(kept)
    assert (min(y), max(y)) == (min(y[place] for place in kept), max(y[place] for place in kept))
    assert len(kept) <= 402


def test_a_curve_of_a_million_steps_stays_small() -> None:
    count = 1_000_000
    text = drawn(Chart([Series("s", range(count), [math.sin(step / 1000) for step in range(count)])], "step", ""))
    assert len(text) < 20_000


def test_names_are_escaped_wherever_they_stand() -> None:
    evil = "</title><script>'\"&"
    for chart in (
        Chart([Series(evil, [1, 2], [1.0, 2.0]), Series(evil, [1], [1.0], [0.5], [2.0])], evil, evil),
        Chart([Series(evil, [evil], [1.0], [0.5], [2.0])], evil, evil, "bars"),
        Chart([Series(evil, [1], [1.0])], evil, evil, "bars"),
    ):
        assert "<script>" not in drawn(chart)
        ElementTree.fromstring(drawn(chart))


def test_the_charts_of_runs_become_one_with_a_colour_for_each_run_and_dashes_for_series() -> None:
    chart = Chart([Series("train/loss", [1], [1.0]), Series("val/loss", [1], [2.0])], "step", "")
    one, looks = together([("ab12", 0, chart), ("cd34", 3, chart)])
    assert ["ab12: train/loss", "ab12: val/loss", "cd34: train/loss", "cd34: val/loss"] == [s.name for s in one.series]
    assert [Look(0, 0), Look(0, 1), Look(3, 0), Look(3, 1)] == looks
    other = Chart([Series("val/loss", [1], [2.0])], "step", "")
    assert "cd34: val/loss" == together([("ab12", 0, chart), ("cd34", 1, other)])[0].series[-1].name
    assert ["ab12", "cd34"] == [s.name for s in together([("ab12", 0, other), ("cd34", 1, other)])[0].series]
    alone, looks = together([("ab12", 0, chart)])
    assert (chart, [Look(0), Look(1)]) == (alone, looks)


@given(st.lists(st.floats(min_value=-10, max_value=1e6), max_size=5))
def test_an_axis_is_logarithmic_only_where_all_is_above_zero_and_far_apart(values: list[float]) -> None:
    expected = bool(values) and all(value > 0 for value in values) and max(values) >= LOG_FROM * min(values)
    assert expected == is_wide(values)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["x", "x_low"], ["a/x", "a/x_low"]),
        (["x", "x_low", "x_high"], ["a/x"]),
        (["x_low", "x_high"], ["a/x_low", "a/x_high"]),
    ],
)
def test_a_bound_has_a_chart_of_its_own_unless_both_are_drawn_around_a_figure(
    tmp_path: Path, names: list[str], expected: list[str]
) -> None:
    toy = counting(tmp_path)
    run(toy)
    store = Store.open(toy.store, write=False)
    facts = read_runs(store, find_records(store.records, []))[0]
    metrics = {f"a/{name}": 1.0 for name in names}
    facts.nodes["filter"].events.points[:] = [Point(1.0, step, metrics) for step in (1, 2, 3)]
    facts.nodes["source"].events.points.clear()
    assert expected == re.findall("<h4>(.*?)</h4>", curves([facts]))
