"""Every figure has a metric name of its own, whatever categories are called."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ops.evaluate.benchmark_rows import CATEGORY
from ops.evaluate.figures import parts_figure
from ops.evaluate.intervals import ALL, REST, parted
from ops.evaluate.summary import metrics
from ops.train_dflash.measuring import metrics_of

WORDS = st.lists(
    st.sampled_from(
        [
            "low",
            "high",
            "unclipped",
            "random",
            "of",
            "group",
            "context",
            "turn",
            "temperature",
            "04k",
            "0",
            "math",
            "tau",
        ]
    ),
    min_size=1,
    max_size=3,
)
CATEGORIES = st.sets(WORDS.map("_".join) | st.from_regex(CATEGORY, fullmatch=True).filter(lambda name: name != ALL))
METRIC = re.compile(r"eval/tau_group(_low|_high)?/[A-Za-z0-9_. -]*[A-Za-z0-9_-][A-Za-z0-9_. -]*")
MEASURED = {
    **dict.fromkeys(("plain_seconds", "speculative_seconds", "plain_tokens", "speculative_tokens", "speedup"), 1.0),
    **dict.fromkeys(("speedup_low", "speedup_high")),
    "parts": {"speculative": {}},
}


PART = {"tau": 1.0, "low": 1.0, "high": 1.0}


def taus(categories, first):
    """A different number for every figure."""
    numbers = iter(range(first, 10**9))
    figures = ("tau", "low", "high", "unclipped")
    return {name: {figure: float(next(numbers)) for figure in figures} for name in (ALL, *sorted(categories))}


@given(CATEGORIES)
def test_no_figure_of_an_evaluation_takes_the_name_of_another(categories):
    tau, by_chance = taus(categories, 1000), taus(categories, 5000)
    contexts = taus({"00k", "04k"}, 6000)
    turns = taus({"0", "1", "10"}, 7000)
    report = {"prompts": 3, "lossless": None, "tau": tau, "tau_random": by_chance, "acceptance_by_slot": []}
    temperatures = taus({"0", "0.7"}, 8000)
    kinds = taus({"reasoning", "text", "call"}, 9000)
    report |= {"tau_by_context": contexts, "tau_by_turn": turns, "mean_of_prompts": PART}
    report |= {"tau_by_temperature": temperatures, "tau_by_kind": kinds}
    logged = sorted(value for name, value in metrics(report, MEASURED).items() if name.startswith("eval/tau"))
    rows = (
        *tau.values(),
        *by_chance.values(),
        *contexts.values(),
        *turns.values(),
        *temperatures.values(),
        *kinds.values(),
    )
    expected = [value for row in rows for key, value in row.items() if key != "unclipped"]
    assert sorted([*expected, tau[ALL]["unclipped"]]) == logged


GROUPS = st.sets(st.text(min_size=1, max_size=120) | st.from_regex(CATEGORY, fullmatch=True) | WORDS.map("_".join))


@given(CATEGORIES, GROUPS)
def test_every_group_has_a_valid_name_of_its_own(categories, groups):
    tau = taus(categories, 1000)
    report = {"prompts": 3, "lossless": None, "tau": tau, "acceptance_by_slot": [], "mean_of_prompts": PART}
    without = metrics(report, MEASURED)
    by_group = dict.fromkeys([*groups, REST], tau[ALL])
    names = metrics(report | {"tau_by_group": by_group}, MEASURED).keys() - without.keys()
    assert 3 * len(groups) == len(names)
    assert [] == [name for name in names if not METRIC.fullmatch(name)]
    own = re.compile("eval/tau_group(_low|_high)?")
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


def test_the_parts_of_tau_have_names_that_sort_by_context_and_turn():
    parts = {"tau_by_context": {"00k": PART, "04k": PART}, "tau_by_turn": {"2": PART}, "tau_by_group": {"math": PART}}
    parts |= {"tau_by_kind": {"call": PART}}
    report = {"prompts": 3, "lossless": None, "tau": {ALL: PART | {"unclipped": 1.0}}, "acceptance_by_slot": []}
    names = metrics(report | parts | {"mean_of_prompts": PART}, MEASURED)
    wanted = {
        "eval/tau_context_00k",
        "eval/tau_context_04k",
        "eval/tau_turn_2",
        "eval/tau_group/math",
        "eval/tau_kind_call",
    }
    assert wanted | {"eval/tau_context_04k_low", "eval/tau_turn_2_high", "eval/mean_of_prompts"} <= names.keys()


def test_tables_with_several_parts_are_shown_in_order_as_one_picture():
    contexts = dict.fromkeys(("64k", "00k", "08k"), PART)
    turns = dict.fromkeys(("10", "2", "0"), PART)
    report = {"tau_by_context": contexts, "tau_by_turn": turns, "tau": {ALL: PART}, "block_size": 8}
    shown = {table: list(parts) for table, parts in parted(report).items()}
    assert {"context": ["below 1k", "8k to 16k", "from 64k"], "turn": ["0", "2", "10"]} == shown
    pictured = parts_figure(report, parted(report)).axes
    assert list(shown.values()) == [[label.get_text() for label in axes.get_xticklabels()] for axes in pictured]
    assert {"turn"} == parted(report | {"tau_by_context": {"01k": PART}}).keys()
    assert {} == parted({"tau_by_context": {"01k": PART}}) == parted({})
