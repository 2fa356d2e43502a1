"""Charts as inline SVG: lines over numbers with bands, bars with whiskers; axes, ticks, a legend, tooltips.

Drawn 360 px wide, so that text can be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from attrs import frozen
from markupsafe import Markup

from executor.report.scale import Scale, is_wide, thinned
from executor.report.templates import faint, render
from executor.results.run_table import shown_number
from ops.lib.report_sections import Chart, Series

WIDTH, HEIGHT = 360.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 16.0, 22.0, 36.0
ROW, BAR_GAP = 14.0, 8.0  # of horizontal bars
NAME_WIDTH, LETTER = 130.0, 6.0
MOST_MARKED = 40  # points of a series with a tooltip
COLOURS = 8
DASHES = ("", "5 3", "2 2", "8 3 2 3")


@frozen
class Look:
    """How a series is drawn: the place of its colour in STYLE, of its dashes, and the step to mark."""

    colour: int
    dash: int = 0
    selected: float | None = None

    @property
    def stroke(self) -> str:
        return f"var(--series-{self.colour % COLOURS})"


@frozen
class Shape:
    """An element of the picture. title: its tooltip."""

    tag: str
    attributes: Mapping[str, object]
    text: str = ""
    title: str | None = None


def drawn(chart: Chart, looks: Sequence[Look] = ()) -> Markup:
    """The chart with its legend; series are coloured in their order unless looks are given."""
    looks = looks or [Look(place) for place in range(len(chart.series))]
    if not any(math.isfinite(value) for series in chart.series for value in series.y):
        return faint("no value was measured")
    height, shapes = HEIGHT, list[Shape]()
    if chart.kind == "lines":
        shapes = _lines(chart, looks)
    elif is_named(chart):
        height, shapes = _named_bars(chart, looks)
    else:
        shapes = _numbered_bars(chart, looks)
    steps = list(dict.fromkeys(shown_number(look.selected) for look in looks if look.selected is not None))
    legend = list(zip(chart.series, looks, strict=True)) if len(chart.series) > 1 else []
    return render("chart.svg", "chart", chart, (WIDTH, height), shapes, legend, steps)


def together(charts: Sequence[tuple[str, int, Chart]]) -> tuple[Chart, list[Look]]:
    """One chart of those of several runs, (label, place of the run, chart), and how its series look.

    A colour for each run, dashes for the series of one run and for more runs than colours. The chart of one run is
    unchanged.
    """
    first = charts[0][2]
    if len(charts) == 1:
        return first, [Look(place) for place in range(len(first.series))]
    names = {one.name for _, _, chart in charts for one in chart.series}
    series: list[Series] = []
    looks: list[Look] = []
    for label, run, chart in charts:
        for place, one in enumerate(chart.series):
            name = label if len(names) == 1 else f"{label}: {one.name}"
            series.append(Series(name, one.x, one.y, one.low, one.high))
            is_bar = chart.kind == "bars" and len(chart.series) > 1
            looks.append(Look(len(looks)) if is_bar else Look(run, place + run // COLOURS))
    is_log = all(chart.log_y for _, _, chart in charts)
    return Chart(series, first.x_label, first.y_label, first.kind, is_log), looks


def is_named(chart: Chart) -> bool:
    """Whether its x are names, not numbers."""
    return any(isinstance(x, str) for series in chart.series for x in series.x)


def _lines(chart: Chart, looks: Sequence[Look]) -> list[Shape]:
    every = [value for series in chart.series for value in _all_y(series)]
    x_scale = Scale.over((x for series in chart.series for x in _numbers(series)), LEFT, WIDTH - RIGHT)
    y_scale = Scale.over(every, HEIGHT - BOTTOM, TOP, is_log=chart.log_y and is_wide(every))
    shapes = [*_axes(chart, x_scale, y_scale)]
    for series, look in zip(chart.series, looks, strict=True):
        shapes += [*_band(series, x_scale, y_scale, look), _path(series, x_scale, y_scale, look)]
    for series, look in zip(chart.series, looks, strict=True):
        shapes += [*_marks(series, x_scale, y_scale, look), *_ring(series, x_scale, y_scale, look)]
    return shapes


def _path(series: Series, x_scale: Scale, y_scale: Scale, look: Look) -> Shape:
    """Points that are not finite, or not above 0 on a logarithmic axis, leave a gap."""
    x, pieces, is_on = _numbers(series), [], False
    for place in thinned(x, series.y):
        if not _can_stand(series.y[place], y_scale):
            is_on = False
            continue
        pieces.append(f"{'L' if is_on else 'M'}{x_scale.place(x[place]):.1f} {y_scale.place(series.y[place]):.1f}")
        is_on = True
    dash = DASHES[look.dash % len(DASHES)] or None
    attributes = {"d": " ".join(pieces), "class": "line", "stroke": look.stroke, "stroke-dasharray": dash}
    return Shape("path", attributes, title=series.name)


def _band(series: Series, x_scale: Scale, y_scale: Scale, look: Look) -> Iterable[Shape]:
    x = _numbers(series)
    bounds = [
        (x_scale.place(x[place]), y_scale.place(low), y_scale.place(high))
        for place, low, high in _intervals(series)
        if _can_stand(low, y_scale) and _can_stand(high, y_scale)
    ]
    if bounds:
        around = [(at, high) for at, _, high in bounds] + [(at, low) for at, low, _ in reversed(bounds)]
        points = " ".join(f"{at:.1f},{y:.1f}" for at, y in around)
        yield Shape("polygon", {"points": points, "class": "band", "fill": look.stroke})


def _marks(series: Series, x_scale: Scale, y_scale: Scale, look: Look) -> Iterable[Shape]:
    """A point at each value of a short series; at some of a long one, invisible, with tooltips."""
    x = _numbers(series)
    whole = [place for place in range(len(x)) if _can_stand(series.y[place], y_scale)]
    every = -(-len(whole) // MOST_MARKED) if whole else 1
    intervals = {place: (low, high) for place, low, high in _intervals(series)}
    for place in dict.fromkeys([*whole[::every], *whole[-1:]]):
        title = f"{series.name}: {shown_number(series.y[place])}{_interval_text(intervals.get(place))}"
        at = {"cx": f"{x_scale.place(x[place]):.1f}", "cy": f"{y_scale.place(series.y[place]):.1f}"}
        size = {"r": 2.2, "fill": look.stroke} if every == 1 else {"r": 6, "fill": "transparent"}
        yield Shape("circle", at | size, title=f"{title} at {shown_number(x[place])}")


def _ring(series: Series, x_scale: Scale, y_scale: Scale, look: Look) -> Iterable[Shape]:
    for x, y in zip(_numbers(series), series.y, strict=True):
        if x == look.selected and _can_stand(y, y_scale):
            at = {"cx": f"{x_scale.place(x):.1f}", "cy": f"{y_scale.place(y):.1f}"}
            ring = {"r": 6, "fill": "transparent", "stroke": look.stroke, "class": "selected"}
            title = f"{series.name}: {shown_number(y)} at {shown_number(x)}, the selected step"
            yield Shape("circle", at | ring, title=title)


def _numbered_bars(chart: Chart, looks: Sequence[Look]) -> list[Shape]:
    """Upright bars at whole numbers."""
    numbers = sorted({x for series in chart.series for x in _numbers(series)})
    y_scale = Scale.over([0.0, *(value for series in chart.series for value in _all_y(series))], HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(numbers)
    thick = room * 0.8 / len(chart.series)
    starts = {number: LEFT + room * (place + 0.1) for place, number in enumerate(numbers)}
    shapes = list(_y_axis(chart, y_scale))
    every = -(-len(numbers) // 12)
    for number in numbers[::every]:
        shapes.append(_text(starts[number] + room * 0.4, HEIGHT - BOTTOM + 14, shown_number(number), anchor="middle"))
    shapes.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, chart.x_label, anchor="middle", kind="label"))
    for row, (series, look) in enumerate(zip(chart.series, looks, strict=True)):
        intervals = {place: (low, high) for place, low, high in _intervals(series)}
        for place, x in enumerate(_numbers(series)):
            left = starts[x] + row * thick
            title = f"{series.name}, {chart.x_label} {shown_number(x)}"
            shapes += _bar(series, place, title, intervals, look, y_scale, (left, thick), upright=True)
    return shapes


def _named_bars(chart: Chart, looks: Sequence[Look]) -> tuple[float, list[Shape]]:
    """Horizontal bars, each below its name; with the height of the picture."""
    names = list(dict.fromkeys(str(x) for series in chart.series for x in series.x))
    every = [0.0, *(value for series in chart.series for value in _all_y(series))]
    scale = Scale.over(every, LEFT - 40, WIDTH - 60)
    step = ROW + len(chart.series) * ROW + BAR_GAP
    shapes: list[Shape] = []
    for row, (series, look) in enumerate(zip(chart.series, looks, strict=True)):
        intervals = {place: (low, high) for place, low, high in _intervals(series)}
        for place, x in enumerate(series.x):
            top = names.index(str(x)) * step + ROW + row * ROW + 4
            title = f"{series.name}, {x}"
            shapes += _bar(series, place, title, intervals, look, scale, (top, ROW - 3), upright=False)
    for place, name in enumerate(names):
        shapes.append(_text(LEFT - 40, place * step + 13, name))
    height = len(names) * step + ROW
    shapes.append(_text(WIDTH - RIGHT, height - 4, chart.y_label, anchor="end", kind="label"))
    return height, shapes


def _bar(
    series: Series,
    place: int,
    title: str,
    intervals: dict[int, tuple[float, float]],
    look: Look,
    scale: Scale,
    span: tuple[float, float],
    *,
    upright: bool,
) -> Iterable[Shape]:
    """span: the bar's position across its length, and its thickness."""
    value = series.y[place]
    if not math.isfinite(value):
        return
    zero, end = scale.place(0.0), scale.place(value)
    across, thick = span
    low, size = min(zero, end), abs(end - zero)
    box = (across, low, thick, size) if upright else (low, across, size, thick)
    names = ("x", "y", "width", "height")
    sizes = {name: f"{number:.1f}" for name, number in zip(names, box, strict=True)}
    text = f"{title}: {shown_number(value)}{_interval_text(intervals.get(place))}"
    yield Shape("rect", sizes | {"fill": look.stroke}, title=text)
    if place in intervals:
        least, most = map(scale.place, intervals[place])
        yield _whisker(least, most, across + thick / 2, thick / 4, upright=upright)
    if not upright:
        furthest = max([end, *(scale.place(bound) for bound in intervals.get(place, ()))])
        yield _text(furthest + 4, across + thick - 1, shown_number(value))


def _whisker(low: float, high: float, middle: float, half: float, *, upright: bool) -> Shape:
    ends = (
        f"M{middle:.1f} {low:.1f}V{high:.1f}M{middle - half:.1f} {low:.1f}h{2 * half:.1f}"
        f"M{middle - half:.1f} {high:.1f}h{2 * half:.1f}"
        if upright
        else f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - half:.1f}v{2 * half:.1f}"
        f"M{high:.1f} {middle - half:.1f}v{2 * half:.1f}"
    )
    return Shape("path", {"d": ends, "class": "whisker"})


def _axes(chart: Chart, x_scale: Scale, y_scale: Scale) -> Iterable[Shape]:
    yield from _y_axis(chart, y_scale)
    bottom = HEIGHT - BOTTOM
    yield Shape("path", {"d": f"M{LEFT} {bottom}H{WIDTH - RIGHT}", "class": "axis"})
    is_whole = all(float(x).is_integer() for series in chart.series for x in _numbers(series))
    for tick in x_scale.ticks():
        if is_whole and not float(tick).is_integer():
            continue
        yield _text(x_scale.place(tick), bottom + 14, _tick_text(tick), anchor="middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, chart.x_label, anchor="middle", kind="label")


def _y_axis(chart: Chart, scale: Scale) -> Iterable[Shape]:
    for tick in scale.ticks():
        place = scale.place(tick)
        yield Shape("path", {"d": f"M{LEFT} {place:.1f}H{WIDTH - RIGHT}", "class": "grid"})
        yield _text(LEFT - 5, place + 3.5, _tick_text(tick), anchor="end")
    labels = filter(None, (chart.y_label, "log scale" if scale.is_log else ""))
    yield _text(4, 12, ", ".join(labels), kind="label")


def _text(x: float, y: float, text: str, *, anchor: str | None = None, kind: str | None = None) -> Shape:
    return Shape("text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": kind}, text)


def _tick_text(value: float) -> str:
    """`12k`, `3M`: short enough for an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


def _interval_text(interval: tuple[float, float] | None) -> str:
    return f" [{shown_number(interval[0])}, {shown_number(interval[1])}]" if interval else ""


def _intervals(series: Series) -> Iterable[tuple[int, float, float]]:
    for place, (low, high) in enumerate(zip(series.low, series.high, strict=True)):
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
            yield place, low, high


def _all_y(series: Series) -> Iterable[float]:
    yield from series.y
    for _, low, high in _intervals(series):
        yield low
        yield high


def _numbers(series: Series) -> Sequence[float]:
    return cast(Sequence[float], series.x)


def _can_stand(value: float, scale: Scale) -> bool:
    return math.isfinite(value) and (value > 0 or not scale.is_log)
