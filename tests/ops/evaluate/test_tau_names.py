"""Every figure has a metric name of its own, whatever categories are called."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ops.evaluate.benchmark_rows import CATEGORY
from ops.evaluate.intervals import ALL
from ops.evaluate.summary import metrics
from ops.train_dflash.measuring import metrics_of

WORDS = st.lists(
    st.sampled_from(["low", "high", "unclipped", "random", "of", "topic", "math", "a", "tau"]), min_size=1, max_size=3
)
CATEGORIES = st.sets(WORDS.map("_".join) | st.from_regex(CATEGORY, fullmatch=True).filter(lambda name: name != ALL))
METRIC = re.compile(r"eval/tau_topic(_low|_high)?/[A-Za-z0-9_. -]*[A-Za-z0-9_-][A-Za-z0-9_. -]*")
MEASURED = {
    **dict.fromkeys(("plain_seconds", "speculative_seconds", "plain_tokens", "speculative_tokens", "speedup"), 1.0),
    **dict.fromkeys(("speedup_low", "speedup_high")),
    "parts": {"speculative": {}},
}


def taus(categories, first):
    """A different number for every figure."""
    numbers = iter(range(first, 10**9))
    figures = ("tau", "low", "high", "unclipped")
    return {name: {figure: float(next(numbers)) for figure in figures} for name in (ALL, *sorted(categories))}


@given(CATEGORIES)
def test_no_figure_of_an_evaluation_takes_the_name_of_another(categories):
    tau, by_chance = taus(categories, 1000), taus(categories, 5000)
    report = {"prompts": 3, "lossless": None, "tau": tau, "tau_random": by_chance, "acceptance_by_slot": []}
    logged = sorted(value for name, value in metrics(report, MEASURED).items() if name.startswith("eval/tau"))
    expected = [
        value for row in (*tau.values(), *by_chance.values()) for key, value in row.items() if key != "unclipped"
    ]
    assert sorted([*expected, tau[ALL]["unclipped"]]) == logged


TOPICS = st.sets(st.text(min_size=1, max_size=120) | st.from_regex(CATEGORY, fullmatch=True) | WORDS.map("_".join))


@given(CATEGORIES, TOPICS)
def test_every_topic_has_a_valid_name_of_its_own(categories, topics):
    tau = taus(categories, 1000)
    report = {"prompts": 3, "lossless": None, "tau": tau, "acceptance_by_slot": []}
    without = metrics(report, MEASURED)
    names = metrics(report | {"tau_by_topic": dict.fromkeys(topics, tau[ALL])}, MEASURED).keys() - without.keys()
    assert 3 * len(topics) == len(names)
    assert [] == [name for name in names if not METRIC.fullmatch(name)]
    own = re.compile("eval/tau_topic(_low|_high)?")
    assert [] == [name for name in without if own.fullmatch(name)]  # a folder of others is no metric


@given(CATEGORIES)
def test_no_figure_of_the_training_takes_the_name_of_another(categories):
    measured = taus(categories, 1000)
    expected = [value for row in measured.values() for key, value in row.items() if key != "unclipped"]
    assert sorted(expected) == sorted(metrics_of({"step": 1, "tau": measured}).values())


def test_the_names_of_usual_categories_are_plain():
    row = {"tau": 3.0, "low": 2.0, "high": 4.0}
    logged = metrics_of({"step": 1, "tau": {ALL: row, "image": row, "low": row}})
    assert ["val/tau", "val/tau_low", "val/tau_high"] == list(logged)[:3]
    assert ["val/tau_image", "val/tau_image_low", "val/tau_image_high"] == list(logged)[3:6]
    assert ["val/tau_of/low", "val/tau_of_low/low", "val/tau_of_high/low"] == list(logged)[6:]
