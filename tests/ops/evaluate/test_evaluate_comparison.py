"""Evaluations side by side: variants over their seeds, paired by prompt."""

import itertools

import numpy as np
import pytest

from ops.evaluate.intervals import interval, resampled
from ops.evaluate.show import compare
from ops.lib.data.files import read_json, write_json, write_jsonl
from ops.lib.report_sections import Compared, variants

PROMPTS = 12
NAMES = ("plain", "better")
SEEDS = ("0", "1")


def accepted(name, seed, prompt):
    """Prompts differ much more than drafts do: one more token of each second prompt's steps."""
    base = [prompt + 1, prompt + 2 + int(seed)]
    return [count + (name == "better" and prompt % 2) for count in base]


def write_evaluation(folder, name, seed, *, prompts=range(PROMPTS)):
    folder.mkdir()
    rows, times = [], []
    for prompt in prompts:
        steps = accepted(name, seed, prompt)
        tokens = list(range(1 + sum(steps) + len(steps)))
        category = "image" if prompt < 4 else "text"
        row = {"id": f"p{prompt}", "category": category, "tokens": tokens, "speculative": None, "accepted": steps}
        rows.append(row)
        seconds = {"plain_seconds": 2.0 + prompt, "speculative_seconds": 1.0 if name == "plain" else 0.5}
        times.append({"prompts": [row["id"]], "plain_tokens": 4, "speculative_tokens": 4, **seconds})
    write_jsonl(folder / "prompts.jsonl", rows)
    write_json(folder / "measurements.json", {"times": times})
    return Compared(folder, {"for_each.algorithm": name, "train.seed": seed})


@pytest.fixture
def artifacts(tmp_path):
    return [write_evaluation(tmp_path / f"{n}{s}", n, s) for n, s in itertools.product(NAMES, SEEDS)]


def rows_of(sections, title, prompts="all"):
    (table,) = [section.body for section in sections if section.title == title]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows if row[0] == prompts]


def numbers(text):
    return [float(part) for part in text.split(" to ")]


def test_tau_is_that_of_all_seeds_and_its_difference_is_paired_by_prompt(artifacts):
    sections = compare(artifacts)
    plain, better = rows_of(sections, "tau by prompt")
    sums = {
        name: np.array(
            [[(sum(steps) + 2, 2) for p in range(PROMPTS) if (steps := accepted(name, s, p))] for s in SEEDS]
        )
        for name in NAMES
    }
    taus = {name: of.sum((0, 1))[0] / of.sum((0, 1))[1] for name, of in sums.items()}
    assert [round(taus[name], 2) for name in NAMES] == [plain["tau"], better["tau"]] == [8.25, 8.75]
    assert plain["above plain"] is None and better["above plain"] == round(taus["better"] - taus["plain"], 2)
    draws = resampled(PROMPTS, 2000, 0)
    drawn = [of.sum(0)[draws].sum(1) for of in sums.values()]
    expected = interval(
        taus["better"] - taus["plain"], drawn[1][:, 0] / drawn[1][:, 1] - drawn[0][:, 0] / drawn[0][:, 1], PROMPTS
    )
    assert numbers(better["its interval"]) == pytest.approx(expected, abs=0.006)
    assert numbers(better["its interval"])[0] > 0, "as certain as the prompts are"
    assert numbers(plain["interval"])[1] > numbers(better["interval"])[0], "though they overlap"
    each = [float(value) for value in better["each"].split(", ")]
    assert each == [round(of[:, 0].sum() / of[:, 1].sum(), 2) for of in sums["better"]]


def test_categories_have_rows_of_their_own_and_all_have_intervals(artifacts):
    sections = compare(artifacts)
    assert [4, 4] == [row["number"] for row in rows_of(sections, "tau by prompt", "image")]
    assert [8, 8] == [row["number"] for row in rows_of(sections, "tau by prompt", "text")]
    for row in rows_of(sections, "tau by prompt"):
        low, high = numbers(row["interval"])
        assert low < row["tau"] < high


def test_the_speed_up_is_compared_by_its_ratio(artifacts):
    plain, better = rows_of(compare(artifacts), "speed-up by prompt")
    assert (plain["speed-up"], better["speed-up"]) == (7.5, 15.0)
    assert better["times that of plain"] == 2.0 and better["its interval"] == "2.00 to 2.00"


def test_prompts_that_not_all_have_are_left_out_and_the_note_says_so(artifacts, tmp_path):
    fewer = write_evaluation(tmp_path / "fewer", "fewer", "0", prompts=range(2, PROMPTS))
    sections = compare([*artifacts, fewer])
    assert [10, 10, 10] == [row["number"] for row in rows_of(sections, "tau by prompt")]
    assert "8 answers to prompts that not all have" in sections[0].note
    assert "not cut into the same batches" in str(sections[-1].body.rows)


def test_without_common_prompts_or_times_the_reason_stands_there(artifacts, tmp_path):
    other = write_evaluation(tmp_path / "other", "other", "0", prompts=range(90, 99))
    assert "fewer than two prompts in common" in str(compare([artifacts[0], other])[0].body.rows)
    measured = artifacts[0].folder / "measurements.json"
    write_json(measured, {name: value for name, value in read_json(measured).items() if name != "times"})
    assert "older version" in str(compare(artifacts)[-1].body.rows)
    measured.rename(tmp_path / "away.json")
    assert "measurements.json of a run is gone" in str(compare(artifacts)[-1].body.rows)


def test_what_differs_in_a_seed_only_is_one_variant(tmp_path):
    def named(**values):
        return Compared(tmp_path, {name.replace("__", "."): value for name, value in values.items()})

    swept = [named(train__lr=lr, train__seed=seed) for lr in ("0.1", "0.2") for seed in SEEDS]
    found = variants(swept)
    assert [("0.1", ["0", "1"]), ("0.2", ["0", "1"])] == [(variant.name, list(variant.seeds)) for variant in found]
    assert ["all"] == [variant.name for variant in variants([named(train__seed=seed) for seed in SEEDS])]
    both = variants([named(train__lr="0.1", export__dtype="bfloat16", run="ab12")])
    assert ["lr=0.1, dtype=bfloat16, run=ab12"] == [variant.name for variant in both]
