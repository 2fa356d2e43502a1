"""The graph and the curves that a report draws, read back from matplotlib's figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from dsl.pipeline import Copy
from executor.report.page import panels_of
from executor.report.pictures import MOST_PARTS, Curve, curves_figure, embedded, graph_figure, parts_figure, shown_name
from ops.tools.diagnose.judgement import PartFigures

EVIL = "$x_^{<script>alert(1)</script>}\x1b"


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    """parents by node; those come first."""
    ids = [f"n{k}" for k in range(draw(st.integers(1, 14)))]
    return {
        node_id: tuple(draw(st.lists(st.sampled_from(ids[:k]), unique=True, max_size=5))) if k else ()
        for k, node_id in enumerate(ids)
    }


def drawn(parents: dict[str, tuple[str, ...]]) -> tuple[dict[str, FancyBboxPatch], dict[str, FancyArrowPatch]]:
    """The boxes by their names, and the arrows by theirs."""
    figure = graph_figure(parents, {node_id: [node_id] for node_id in parents}, {}, {})
    (axes,) = figure.axes
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    arrows = {str(patch.get_gid()): patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)}
    names = {text.get_text(): text.get_position() for text in axes.texts if text.get_text()}
    by_name = {
        name: box
        for name, (x, y) in names.items()
        for box in boxes
        if box.get_x() < x < box.get_x() + box.get_width() and box.get_y() < y < box.get_y() + box.get_height()
    }
    return by_name, arrows


@given(graphs())
@settings(max_examples=50, deadline=None)
def test_each_node_stands_below_all_that_it_reads_with_an_arrow_from_each(
    parents: dict[str, tuple[str, ...]],
) -> None:
    boxes, arrows = drawn(parents)
    assert parents.keys() == boxes.keys()
    assert {f"{up} -> {down}" for down, ids in parents.items() for up in ids} == arrows.keys()
    for down, ids in parents.items():
        for up in ids:
            assert boxes[up].get_y() + boxes[up].get_height() < boxes[down].get_y()
    found = list(boxes.values())
    for place, one in enumerate(found):
        for other in found[:place]:
            is_beside = abs(one.get_x() - other.get_x()) > one.get_width()
            assert is_beside or one.get_y() > other.get_y() + other.get_height() or other.get_y() > one.get_y()


def test_an_arrow_past_the_boxes_between_leads_around_them() -> None:
    boxes, arrows = drawn({"a": (), "b": ("a",), "c": ("b", "a")})
    right = boxes["b"].get_x() + boxes["b"].get_width()
    points = arrows["a -> c"].get_path().vertices
    assert right == pytest.approx(points[0][0]) and points[:, 0].max() > right + 10
    middle = boxes["b"].get_x() + boxes["b"].get_width() / 2
    assert (middle, middle) == (arrows["a -> b"].get_path().vertices[0][0], arrows["a -> b"].get_path().vertices[1][0])


def test_a_copy_has_the_name_in_the_file_and_the_values_that_were_chosen_for_it() -> None:
    copy = Copy("filter", {"filter.kept": "5", "filter.text": '"x"'})
    assert ["filter", "kept=5", 'text="x"'] == shown_name("filter-kept_5-text_x", copy)
    both = Copy("eval", {"train.seed": "1", "data.seed": "2"})
    assert ["eval", "train.seed=1", "data.seed=2"] == shown_name("eval-1-2", both)
    assert ["a"] == shown_name("a", None)


def test_names_are_texts_whatever_they_hold() -> None:
    figure = graph_figure({"a": ()}, {"a": [EVIL, "漢" * 50]}, {}, {"a": "$"}, EVIL)
    shown = embedded(figure, EVIL)
    curves = embedded(curves_figure({EVIL: [Curve(EVIL, [(1, 1.0)]), Curve("_b", [(1, 1.0)])]}), EVIL)
    for text in (shown, curves):
        assert "<script>" not in text and "data:image/png;base64," in text


def axes_of(panels: dict[str, list[Curve]]) -> Any:
    (axes,) = curves_figure(panels).axes
    return axes


def test_a_curve_has_its_points_and_its_interval() -> None:
    axes = axes_of({"tau": [Curve("val/tau", [(1, 2.0), (5, 3.0)], [(1.0, 3.0), None]), Curve("tau", [(1, 1.0)])]})
    first, other = axes.lines
    assert ([1, 5], [2.0, 3.0]) == (list(first.get_xdata()), list(first.get_ydata()))
    (band,) = axes.collections
    (path,) = band.get_paths()
    assert {1.0} == set(path.vertices[:, 0]) and {1.0, 3.0} <= set(path.vertices[:, 1])
    assert ["val/tau", "tau"] == [text.get_text().strip() for text in axes.get_legend().get_texts()]
    assert [1.0] == list(other.get_ydata())


@pytest.mark.parametrize(
    ("title", "values", "scale"),
    [
        ("train/loss", [20.0, 0.1], "log"),
        ("train/loss", [20.0, 0.3], "linear"),
        ("train/loss", [20.0, 0.0], "linear"),
        ("train/loss", [20.0, math.nan, 0.1, math.inf], "log"),
        ("train/lr", [1e-3, 1e-8], "linear"),
    ],
)
def test_an_axis_is_logarithmic_where_values_are_far_apart_but_not_that_of_a_learning_rate(
    title: str, values: list[float], scale: str
) -> None:
    assert scale == axes_of({title: [Curve(title, list(enumerate(values)))]}).get_yscale()


def test_what_is_not_finite_leaves_a_gap() -> None:
    (line,) = axes_of({"x": [Curve("x", list(enumerate([1.0, math.nan, math.inf, 1e300, 2.0])))]}).lines
    assert [True, False, False, False, True] == [math.isfinite(value) for value in line.get_ydata()]


@given(st.lists(st.tuples(st.integers() | st.floats(), st.floats(), st.floats(), st.floats()), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
@example([(1, 1e308, -1e308, 1e308), (10**400, -1e308, math.nan, math.inf)])
@example([(1, 5e-324, 5e-324, 1e-323), (2, 1.7e308, 0.0, 0.0)])
def test_any_numbers_make_a_picture(points: list[tuple[float, float, float, float]]) -> None:
    curve = Curve("a", [(step, value) for step, value, *_ in points], [(low, high) for *_, low, high in points])
    assert "data:image/png" in embedded(curves_figure({"a": [curve, curve]}), "a")


def panels(*names: str) -> dict[str, list[str]]:
    found = panels_of({name: [(1, 1.0), (2, 2.0)] for name in names})
    return {title: [curve.name for curve in curves] for title, curves in found.items()}


def test_metrics_of_the_same_kind_share_a_panel_and_a_lone_one_has_its_whole_name() -> None:
    assert {"val/tau": ["val/tau"], "loss": ["train/loss", "val/loss"]} == panels("train/loss", "val/tau", "val/loss")
    assert {"a/x": ["a/x"]} == panels("a/x", "a/x_low", "a/x_high", "a/slot_01", "a/slot_02")
    assert ["val/tau", "train/loss", "train/lr"] == list(panels("train/lr", "train/grad_norm", "train/loss", "val/tau"))
    assert {} == panels_of({"a/x": [(1, 1.0)]})


def part(label: str, **changes: Any) -> PartFigures:
    given = {"tau": 3.0, "low": 2.0, "high": 4.5, "prompts": 4, "share": 0.5, "learnt": 0.25}
    return PartFigures(label=label, **{**given, **changes})


def test_tau_by_part_stands_above_the_shares_of_held_out_and_learnt_tokens() -> None:
    tables = {"context": [part("below 1k", share=0.75), part("1k to 2k", tau=1.5, share=0.25, learnt=0.0)]}
    above, below = parts_figure(tables).axes
    assert [3.0, 1.5] == above.lines[0].get_ydata().tolist()
    assert ["below 1k", "1k to 2k"] == [text.get_text() for text in below.get_xticklabels()]
    assert [0.75, 0.25, 0.25, 0.0] == [bar.get_height() for bar in below.patches]
    assert ["held out", "learnt"] == [text.get_text() for text in below.get_legend().get_texts()]
    gone = {"kind": [part("text", learnt=None), part("call", learnt=None, low=None, high=None)]}
    assert 2 == len(parts_figure(gone).axes[1].patches)


def test_any_names_numbers_and_many_parts_are_drawn() -> None:
    many = [part(f"{EVIL}{number}", share=1 / (number + 1)) for number in range(50)]
    odd = [part("a", tau=math.inf, high=1e308), part("b", tau=math.nan, low=-math.inf, share=-1.0)]
    figure = parts_figure({"group": many, "turn": odd})
    assert "image/png" in embedded(figure, "tau")
    labels = [text.get_text() for text in figure.axes[2].get_xticklabels() + figure.axes[1].get_xticklabels()]
    assert MOST_PARTS <= len(labels) < 50
