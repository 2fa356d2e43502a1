"""Where boxes and edges stand in the picture of a graph, for any graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.report.graph_layout import BOX_WIDTH, LETTERS, Layout, Place, layout_of, wrapped

Piece = tuple[Place, Place]


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    """parents by node; those come first."""
    ids = [f"n{k}" for k in range(draw(st.integers(1, 14)))]
    return {
        node_id: tuple(draw(st.lists(st.sampled_from(ids[:k]), unique=True, max_size=5))) if k else ()
        for k, node_id in enumerate(ids)
    }


def placed(parents: dict[str, tuple[str, ...]]) -> Layout:
    return layout_of(parents, {node_id: [node_id * (1 + k % 9)] for k, node_id in enumerate(parents)})


def pieces(layout: Layout) -> list[tuple[str, Piece]]:
    """Each with the node whose line it is part of, from the lesser to the greater end."""
    return [
        (up, (min(ends), max(ends)))
        for (up, _), corners in layout.edges.items()
        for ends in pairwise(corners)
        if ends[0] != ends[1]
    ]


@given(graphs())
@settings(max_examples=200)
def test_each_edge_leads_from_the_bottom_of_what_is_read_down_into_the_top_of_what_reads_it(
    parents: dict[str, tuple[str, ...]],
) -> None:
    layout = placed(parents)
    assert {(up, down) for down, ids in parents.items() for up in ids} == set(layout.edges)
    for (up, down), corners in layout.edges.items():
        above, below = layout.boxes[up], layout.boxes[down]
        assert (above.middle, above.y + above.height) == corners[0]
        assert below.x < corners[-1][0] < below.x + BOX_WIDTH
        assert below.y == corners[-1][1] > corners[-2][1], "from above"


@given(graphs())
@settings(max_examples=200)
def test_no_line_crosses_a_box_and_boxes_stay_apart(parents: dict[str, tuple[str, ...]]) -> None:
    layout = placed(parents)
    for _, ((left, top), (right, bottom)) in pieces(layout):
        assert left == right or top == bottom
        for box in layout.boxes.values():
            is_beside = right <= box.x or left >= box.x + BOX_WIDTH
            assert is_beside or bottom <= box.y or top >= box.y + box.height
        assert 0 < left <= right < layout.width and 0 < top <= bottom < layout.height
    boxes = list(layout.boxes.values())
    for place, one in enumerate(boxes):
        for other in boxes[:place]:
            assert abs(one.x - other.x) > BOX_WIDTH or one.y > other.y + other.height or other.y > one.y + one.height


@given(graphs())
@settings(max_examples=200)
def test_lines_of_two_nodes_never_lie_on_each_other(parents: dict[str, tuple[str, ...]]) -> None:
    found = pieces(placed(parents))
    for place, (up, (start, end)) in enumerate(found):
        for other, (other_start, other_end) in found[:place]:
            for along, across in ((0, 1), (1, 0)):
                is_on = start[across] == end[across] == other_start[across] == other_end[across]
                overlap = min(end[along], other_end[along]) - max(start[along], other_start[along])
                assert up == other or not is_on or overlap < 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("capture", ["capture"]),
        ("block_size=16, lr=0.003", ["block_size=16,", "lr=0.003"]),
        ("evaluate_the_draft-on_photos", ["evaluate_the_draft-", "on_photos"]),
        ("a" * 45, ["a" * 19, "a" * 19, "a" * 7]),
        ("", []),
    ],
)
def test_long_texts_go_on_in_the_next_line(text: str, expected: list[str]) -> None:
    assert expected == wrapped(text)


@given(st.text(alphabet="ab-_/, ", max_size=80))
def test_nothing_of_a_text_is_lost(text: str) -> None:
    assert text.replace(" ", "") == "".join(wrapped(text)).replace(" ", "")
    assert all(len(line) <= LETTERS for line in wrapped(text))
