"""Entries chosen at even distances: every category its number, every topic and every source its share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ops.lib.data.batching import spread_over_each

GROUPS = st.lists(st.tuples(st.sampled_from(["image", "text"]), st.sampled_from(["", "a", "b", "c"])))


@given(GROUPS, st.integers(1, 20))
def test_every_topic_of_a_category_has_its_share(groups, count):
    chosen = spread_over_each(groups, count)
    assert chosen == sorted(set(chosen))
    total, taken = (Counter(category for category, _ in each) for each in (groups, [groups[place] for place in chosen]))
    assert taken == {category: min(count, number) for category, number in total.items()}
    of_topics, found = Counter(groups), Counter(groups[place] for place in chosen)
    for (category, topic), number in of_topics.items():
        share = taken[category] * number / total[category]
        assert abs(found[category, topic] - share) < 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 30))
def test_sources_that_follow_each_other_have_their_shares(sizes, count):
    sources = [source for source, size in enumerate(sizes) for _ in range(size)]
    found = Counter(sources[place] for place in spread_over_each([("text", "")] * len(sources), count))
    for source, size in enumerate(sizes):
        assert abs(found[source] - min(count, len(sources)) * size / len(sources)) < 1


def test_no_limit_takes_all_in_order():
    groups = [("text", "b"), ("image", ""), ("text", "a")]
    assert [0, 1, 2] == spread_over_each(groups, None) == spread_over_each(groups, 2)
