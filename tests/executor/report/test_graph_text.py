"""The picture of a graph in text: what its lines say, read back from the characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executor.report.graph_text import lanes, levels


def test_a_small_graph_is_drawn_with_a_lane_for_every_node_that_is_read_again() -> None:
    parents = {
        "ingest": (),
        "tokenize": ("ingest",),
        "target": ("tokenize",),
        "capture": ("tokenize", "target"),
        "shard": ("capture",),
        "train": ("capture", "shard", "target"),
        "lonely": (),
        "check": ("train", "tokenize"),
    }
    assert list(lanes(parents).values()) == [
        "●",
        "●",
        "├─●",
        "├─┼─●",
        "│ │ ├─●",
        "│ ●─┴─┘",
        "│ │ ●",
        "●─┘",
    ]


def test_a_line_leaves_a_gap_around_a_lane_that_it_does_not_read() -> None:
    parents = {"a": (), "b": (), "c": ("a",), "d": ("b", "a")}
    assert list(lanes(parents).values()) == ["●", "│ ●", "├─│─●", "●─┘"]


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, tuple[str, ...]]:
    size = draw(st.integers(1, 12))
    ids = [f"n{k}" for k in range(size)]
    return {
        ids[k]: tuple(draw(st.lists(st.sampled_from(ids[:k]), max_size=4, unique=True)) if k else ())
        for k in range(size)
    }


def read_back(pictures: dict[str, str]) -> dict[str, set[str]]:
    """Who reads whom, from the characters alone: lanes go down from a node as long as something is drawn in them."""
    owners: dict[int, str] = {}
    found = {}
    for node_id, picture in pictures.items():
        cells = dict(enumerate(picture[::2]))
        place = picture.index("●") // 2
        joined = {lane for lane, cell in cells.items() if cell in "├┼┤└┴┘"}
        above = {place} if place in owners else set()
        found[node_id] = {owners[lane] for lane in joined | above}
        owners = {lane: owner for lane, owner in owners.items() if cells.get(lane, " ") in "│├┼┤"}
        owners[place] = node_id
    return found


@given(graphs())
def test_the_lanes_of_any_graph_say_who_reads_whom(parents: dict[str, tuple[str, ...]]) -> None:
    pictures = lanes(parents)
    unread = set(parents).difference(*parents.values())
    drawn = read_back_without(pictures, unread)
    assert {node_id: set(ids) for node_id, ids in parents.items()} == drawn


def read_back_without(pictures: dict[str, str], unread: set[str]) -> dict[str, set[str]]:
    """A node that nothing reads has no lane, so that another one below it is not its reader."""
    return {node_id: ids - unread for node_id, ids in read_back(pictures).items()}


@given(graphs())
def test_a_level_is_the_longest_way_from_a_node_that_reads_nothing(parents: dict[str, tuple[str, ...]]) -> None:
    level = levels(parents)
    for node_id, ids in parents.items():
        assert level[node_id] == (1 + max(level[parent] for parent in ids) if ids else 0)
