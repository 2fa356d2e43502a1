"""The report of a sweep: its combinations first, the best on top, and drawn together as several runs are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counting_runs import EVIL, PIPELINE, counting, report, run
from toy_ops import Toy

from executor.report.run_data import MOST_COLUMNS

CURVES = '<div class="scroll" tabindex="0"><img alt="tau, train/loss over steps"'
SORTED = '\n[sweep]\nsort = "eval/kept"\n'
NODES = ["source", *(f"filter-kept_{kept}-text_{text}" for kept in "57" for text in "xy")]
BY_KEPT = ["kept=7, text=x", "kept=7, text=y", "kept=5, text=x", "kept=5, text=y"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Four combinations, which share the first node and have a copy of the second each."""
    toy = counting(tmp_path_factory.mktemp("swept"), PIPELINE + SORTED)
    run(toy, "--sweep", "filter.kept=[5,7]", "--sweep", 'filter.text=["x","y"]')
    return toy


def written(toy: Toy, *arguments: str) -> str:
    path = toy.dflow("report", *arguments).stdout.strip()
    return Path(path).read_text()


def test_the_combinations_of_a_sweep_stand_first_the_best_on_top(swept: Toy) -> None:
    page = report(swept)
    assert ["runs", "combinations", "compared", "results"] == list(page.titles)[:4]
    rows = page.table("combinations", "filter.kept", "filter.text", "state", "eval/kept")
    assert [["7", "x"], ["7", "y"], ["5", "x"], ["5", "y"]] == [[cell.strip('"') for cell in row[:2]] for row in rows]
    assert [["done", "7"], ["done", "7"], ["done", "5"], ["done", "5"]] == [row[2:4] for row in rows]
    assert "4 combinations, by eval/kept." in page.text("combinations")


def test_figures_of_the_copies_of_a_node_stand_in_one_table_and_each_has_its_curves(swept: Toy) -> None:
    page = report(swept)
    results = page.tables["results"]
    assert 1 == len(results), "one table, not one for each copy"
    names = [name.replace('"', "") for name in results[0][0][1:]]
    assert BY_KEPT == names
    assert ["eval/kept", "7", "7", "5 -2", "5 -2"] in results[0]
    assert 5 == written(swept).count(CURVES), "one of the node that all share"
    assert NODES == [word for word in page.words["curves"] if word in NODES]


def test_what_combinations_share_is_shown_once_under_the_names_of_all(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE)
    run(toy, "--sweep", "filter.kept=[5,7]", "--sweep", 'source.text=["x","y"]')
    head = [name.replace('"', "") for name in report(toy).tables["results"][0][0][1:]]
    assert sorted(f"text=x, kept={kept}; text=y, kept={kept}" for kept in (5, 7)) == sorted(head)


def test_each_copy_shows_its_artifact(swept: Toy) -> None:
    page = report(swept)
    assert NODES == [word for word in page.words["artifacts"] if word in NODES]
    kept = [rows[0][1] for rows in page.tables["artifacts"] if rows[0][0] == "kept"]
    assert ["10", "5", "5", "7", "7"] == kept


def test_an_op_compares_the_artifacts_of_a_sweep_in_the_order_of_the_file(swept: Toy) -> None:
    page = report(swept)
    rows = page.table("compared", "values", "kept")
    values = [{"filter.kept": kept, "filter.text": text} for kept in "57" for text in "xy"]
    assert [(each, each["filter.kept"]) for each in values] == [(json.loads(row[0]), row[1]) for row in rows]
    assert "variants: kept=5, text=x | kept=5, text=y | kept=7" in page.text("compared")
    assert ["Compared", "filter"] == [
        word for word in page.words["compared"] if word in ("Compared", "source", "filter")
    ]


def test_of_several_runs_each_is_named_and_one_run_without_copies_compares_nothing(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE)
    first = run(toy)
    assert "compared" not in report(toy).titles
    second = run(toy, "-s", "filter.kept=6")
    labels = [name.rpartition("-")[2] for name in (first, second)]
    rows = report(toy, first, second).table("compared", "values", "kept")
    assert [[{"run": labels[0]}, "7"], [{"run": labels[1]}, "6"]] == [[json.loads(row[0]), row[1]] for row in rows]


def test_a_comparison_that_fails_is_named_with_its_reason_and_all_else_is_shown(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE)
    run(toy, "--sweep", "filter.kept=[5,13]", "-s", "filter.came_in=20")
    page = report(toy)
    assert "The comparison of filter is missing here" in page.text("compared")
    assert "an unlucky number" in page.text("compared")
    assert {"source", "filter-kept_5"} <= set(page.words["artifacts"])


def test_a_sweep_beside_another_run_keeps_the_names_of_both(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE + SORTED)
    first = run(toy, "--sweep", "filter.kept=[5,7]", "--sweep", 'filter.text=["x","y"]')
    second = run(toy)
    page = report(toy, first, second)
    label = first.rpartition("-")[2]
    found = [name.replace('"', "") for name in page.tables["results"][0][0][1:]]
    assert [*(f"{label}: {name}" for name in BY_KEPT), second.rpartition("-")[2]] == found


def test_a_sweep_whose_op_file_is_gone_is_told_copy_by_copy(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE + SORTED)
    run(toy, "--sweep", "filter.kept=[5,7]")
    (toy.folder / "shows.py").rename(toy.folder / "elsewhere.txt")
    page = report(toy)
    assert "the combinations of the sweep cannot be determined" in page.text("runs")
    assert 2 == len(page.tables["results"])


def test_of_a_large_sweep_the_first_combinations_are_compared_and_all_are_told(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE + SORTED)
    values = ",".join(map(str, range(MOST_COLUMNS + 4)))
    run(toy, "--sweep", f"filter.kept=[{values}]", "-s", "filter.came_in=30")
    page = report(toy)
    best = [str(MOST_COLUMNS + 3 - place) for place in range(MOST_COLUMNS + 4)]
    assert best == [row[0] for row in page.table("combinations", "filter.kept")]
    assert [f"kept={value}" for value in best[:MOST_COLUMNS]] == page.tables["results"][0][0][1:]
    assert f"Below, the first {MOST_COLUMNS} are compared" in page.text("combinations")


def test_values_of_a_sweep_are_never_markup(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE)
    run(toy, "--sweep", f"filter.text=['''{EVIL}''', 'plain']")
    page = report(toy)
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text("combinations")


@pytest.mark.parametrize(
    ("order", "changes"),
    [(("plain", "swept"), ["74", "76"]), (("swept", "plain", "other"), ["47", "67", "43", "63"])],
)
def test_each_copy_stands_beside_the_node_that_it_is_a_copy_of(
    tmp_path: Path, order: tuple[str, ...], changes: list[str]
) -> None:
    toy = counting(tmp_path, PIPELINE)
    ran = {
        "plain": run(toy),
        "swept": run(toy, "--sweep", "filter.kept=[4,6]"),
        "other": run(toy, "-s", "filter.kept=3"),
    }
    page = report(toy, *(ran[name] for name in order))
    told = page.text("differences")
    for kept in changes:
        assert f"filter.kept from {kept[0]} to {kept[1]}" in told
    assert "only in" not in told


def test_copies_that_two_runs_have_are_compared_by_their_ids(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE)
    sweep = ("--sweep", "filter.kept=[4,6]")
    first, second = run(toy, *sweep), run(toy, *sweep, "-s", "filter-kept_6.lost=1")
    assert "filter-kept_6.lost from 0 to 1" in report(toy, first, second).text("differences")
