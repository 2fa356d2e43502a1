"""`dflow report`: one file that tells of finished, failed, killed and running runs, whatever their texts hold."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from counting_runs import EVIL, PIPELINE, PIXEL, counting, report, run, runs_of
from report_page import Page
from toy_ops import Toy, wait_for

from executor.report.artifacts import PAGE_MOST, PICTURE_MOST
from executor.report.page import write_report

NODES = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Two runs of the toy pipeline, the second with another weight."""
    made = Toy(tmp_path_factory.mktemp("toy"))
    run(made)
    run(made, "-s", "c.weight=2.0")
    return made


def test_the_report_of_a_run_has_every_node_and_every_part_and_loads_nothing(toy: Toy) -> None:
    page = report(toy)
    parts = ["runs", "results", "pipeline", "curves", "artifacts", "configs", "environment"]
    assert parts == list(page.titles)
    rows = {row[0]: row for row in page.table("pipeline", "node", "op", "state")}
    assert {"a": "cached", "b": "cached", "c": "done", "d": "cached"} == {name: row[2] for name, row in rows.items()}
    assert f"from run {runs_of(toy)[0]}" == rows["a"][-1]
    assert "config changed: c.weight from 1.0 to 2.0" == rows["c"][-1]
    assert [address for address in page.addresses if not address.startswith(("#", "data:"))] == []
    assert not {"script", "link", "object", "embed", "base", "form"} & page.tags


def test_the_page_of_one_run_lies_beside_its_record_and_that_of_several_too_unless_a_file_is_named(toy: Toy) -> None:
    first, second = runs_of(toy)
    one = toy.dflow("report", first).stdout.strip()
    assert str(toy.store / "records" / first / "report.html") == one
    several = toy.dflow("report", first, second).stdout.strip()
    assert str(toy.store / "records" / second / "report_of_2_runs.html") == several
    assert str(toy.folder / "mine.html") == toy.dflow("report", "-o", "mine.html").stdout.strip()
    assert ["mine.html"] == [file.name for file in toy.folder.glob("*.html")]


def test_the_report_of_a_latest_run_that_failed_names_the_newest_with_results(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    run(toy)
    done = toy.state()["run"]
    assert "" == toy.dflow("report").stderr
    assert 1 == toy.dflow("run", str(toy.file), "-s", "d.steps=7", "-s", "d.fail_at=1").returncode
    failed = toy.state()["run"]
    result = toy.dflow("report")
    assert failed in result.stdout
    assert f"run {failed} is failed; the newest run with results: dflow report {done}\n" == result.stderr
    assert "" == toy.dflow("report", failed).stderr


def test_two_runs_stand_side_by_side_and_what_differs_comes_first(toy: Toy) -> None:
    first, second = runs_of(toy)
    page = report(toy, first, second)
    assert ["runs", "differences", "results"] == list(page.titles)
    labels = [run.rpartition("-")[2] for run in (first, second)]
    assert ["id", first, second] == page.table("runs", "run", *labels)[0]
    told = page.text("differences")
    assert f"{labels[1]} against {labels[0]}" in told
    text = toy.dflow("diff", first, second).stdout
    assert "c.weight from 1.0 to 2.0" in text
    assert " ".join(text.split()) in told, "as dflow diff words it"
    assert "dflow report RUN" in page.text("results"), "where all of a run is"


def test_the_same_run_named_twice_is_one_run(toy: Toy) -> None:
    first = runs_of(toy)[0]
    assert "differences" not in report(toy, first, first[-4:]).titles


def test_all_runs_that_are_not_there_are_told_at_once_with_near_ones(toy: Toy) -> None:
    first = runs_of(toy)[0]
    result = toy.dflow("report", "nothing-like-it", first, first[:-1] + "zz")
    assert 2 == result.returncode
    assert '"nothing-like-it" is no run of this store' in result.stderr
    assert f'did you mean "{first}"?' in result.stderr


def test_a_run_without_a_store_says_what_to_do(tmp_path: Path) -> None:
    result = Toy(tmp_path).dflow("report")
    assert 1 == result.returncode
    assert "the store holds no run yet" in result.stderr


def test_a_failed_run_says_what_failed_and_why_and_what_never_ran(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    run(toy, "-s", "d.fail_at=2", expected=1)
    page = report(toy)
    assert "d failed: DataError: line 3 of the data is broken" in page.text("runs")
    assert "line 3 of the data is broken" in page.text("troubles")
    states = {row[0]: row[2] for row in page.table("pipeline", "node", "op", "state")}
    assert {"a": "done", "b": "done", "c": "done", "d": "failed"} == states


def test_a_run_that_goes_on_and_then_is_killed_is_told_as_far_as_it_came(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "d.steps=6000", "-s", "d.seconds=0.1")
    wait_for(lambda: (toy.store / "records").exists() and len(toy.steps()) > 2)
    page = report(toy)
    assert "the run is still running" in page.text("runs")
    assert "running" == {row[0]: row[2] for row in page.table("pipeline", "node", "op", "state")}["d"]
    assert 'alt="steps/loss over steps"' in (toy.store / "records" / runs_of(toy)[0] / "report.html").read_text()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    page = report(toy)
    assert f"the run was killed; resume with: dflow resume {runs_of(toy)[0]}" in page.text("runs")
    assert "interrupted" == {row[0]: row[2] for row in page.table("pipeline", "node", "op", "state")}["d"]


def test_what_gc_collected_is_said_to_be_gone_and_its_figures_stay(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    for folder in (toy.store / "objects").iterdir():
        shutil.rmtree(folder)
    page = report(toy)
    assert "the store no longer holds 2 of the artifacts (source, filter)" in page.text("runs")
    assert ["eval/tau", "2 [1.5, 2.5]"] == page.table("results", "figure", "value")[0]
    assert ["gone", "gone"] == [
        row[5] for row in page.table("pipeline", "node", "op", "state", "time", "memory", "disk")
    ]
    assert "samples" not in page.titles


def test_a_damaged_record_is_told_and_does_not_stop_the_report(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    name = run(toy)
    (toy.store / "records" / name / "graph.json").write_text("{")
    with (toy.store / "records" / name / "events.jsonl").open("ab") as log:
        log.write(b"\xff\x00 nothing\n")
    page = report(toy)
    assert f"the record of run {name} is damaged" in page.text("runs")
    assert ["source", "filter"] == [row[0] for row in page.table("pipeline", "node", "op", "state")]


@pytest.mark.parametrize("file", ["graph.json", "plan.json"])
def test_a_damaged_record_among_others_is_named_and_they_are_compared(tmp_path: Path, file: str) -> None:
    toy = counting(tmp_path)
    first, broken, third = run(toy), run(toy, "-s", "filter.kept=6"), run(toy, "-s", "filter.kept=5")
    (toy.store / "records" / broken / file).write_text("{")
    page = report(toy, first, broken, third)
    told = page.text("differences")
    assert 1 == told.count("cannot be compared with")
    assert f"the record of run {broken} is damaged" in told
    assert "filter.kept from 7 to 5" in told
    told = report(toy, broken, first, third).text("differences")
    assert 1 == told.count(f"the record of run {broken} is damaged")
    assert "filter.kept from 7 to 5" in told


def test_a_run_that_is_there_but_cannot_be_read_is_not_told_as_a_slip_of_its_name(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    broken, whole = run(toy), run(toy, "-s", "filter.kept=6")
    (toy.store / "records" / broken / "events.jsonl").write_text("[]\n{")
    said = toy.dflow("report", broken, whole)
    assert 1 == said.returncode
    assert "did you mean" not in said.stderr
    assert broken in said.stderr


def test_texts_of_unknown_origin_are_never_markup(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE.replace("kept = 7", f"kept = 7\ntext = '''{EVIL}'''"))
    first = run(toy)
    second = run(toy, "-s", f"filter.fails=raises{EVIL}")
    page, several = report(toy), report(toy, first, second)
    assert not {"script"} & (page.tags | several.tags)
    for part in ("configs", "troubles", "samples", "artifacts"):
        assert EVIL in page.text(part)
    assert "<script>alert(1)</script>" in several.text("differences")


def test_the_samples_are_accounted_for_and_the_counts_of_all_nodes_add_up(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    rows = report(toy).table("samples", "node", "in", "dropped", "kept", "train", "adds up")
    assert [["source", "12", "2", "10", "10", "yes"], ["filter", "10", "3", "7", "7", "yes"]] == [
        row[:6] for row in rows
    ]
    assert ["2 too long", "3 too long"] == [row[-1] for row in rows]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("filter.lost=2", "10 came in, but 7 kept and 1 dropped make 8"),
        ("filter.came_in=9", "9 came in, but the nodes above kept 10"),
    ],
)
def test_samples_that_nobody_counted_are_told(tmp_path: Path, override: str, problem: str) -> None:
    toy = counting(tmp_path)
    run(toy, "-s", override)
    rows = report(toy).table("samples", "node", "in", "dropped", "kept", "train", "adds up")
    assert ["yes", problem] == [row[5] for row in rows]


def test_ops_whose_functions_fail_are_named_with_the_reason_and_all_others_are_shown(tmp_path: Path) -> None:
    reasons = {
        "raises": "KeyError: 'no such thing as '",
        "exits": "it ended with exit code 3",
        "kills": "it was killed (signal 9); perhaps this machine ran out of memory",
        "number": 'TypeError: section "odd": a body is one of Table, Html, Picture, Account, Finding, not int',
        "list": "TypeError: expected a list of ops.lib.report_sections.Section, got str in it",
    }
    failing = "".join(f'\n[node.{fails}]\nop = "keep"\nfails = "{fails}"\n' for fails in reasons)
    toy = counting(tmp_path, PIPELINE + failing)
    run(toy)
    page = report(toy)
    for fails, why in reasons.items():
        assert f"{fails} The sections of op keep are missing here: {why}" in page.text("artifacts")
    assert ["<p>page of 10</p>", "<p>page of 7</p>"] == page.frames
    assert [["kept", "7"], ["of", "10"]] in page.tables["artifacts"]


def test_an_op_file_that_is_gone_is_told_too(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    (toy.folder / "shows.py").rename(toy.folder / "elsewhere.txt")
    assert "missing here: there is no file" in report(toy).text("artifacts")


def test_pages_and_pictures_are_in_the_file_below_a_limit_and_named_above_it(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    page = report(toy)
    assert ["<p>page of 10</p>", "<p>page of 7</p>"] == page.frames
    data = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    assert 2 == page.addresses.count(data)
    large = counting(tmp_path, pad=PAGE_MOST)
    page = report(large)
    assert [] == page.frames
    assert "too large to be shown here; it is in" in page.text("artifacts")
    digest = toy.state()["nodes"]["filter"]["digest"]
    picture = toy.store / "objects" / digest / "pixel.png"
    picture.chmod(0o644)
    picture.write_bytes(
        PIXEL + b"\0" * PICTURE_MOST
    )  # its size no longer fits the manifest: the artifact counts as gone
    assert "no longer holds 1 of the artifacts (filter)" in report(toy).text("runs")


def test_runs_that_share_an_artifact_have_one_column_and_others_stand_side_by_side(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    runs = [run(toy), run(toy, "-s", "filter.kept=5"), run(toy, "-s", "filter.lost=0")]
    labels = [name.rpartition("-")[2] for name in runs]
    head, *rows = report(toy, *runs).tables["results"][0]
    assert ["figure", f"{labels[0]}; {labels[2]}", labels[1]] == head
    assert ["eval/kept", "7", "5 -2"] in rows


def test_numbered_figures_are_one_row_as_in_the_terminal(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    page = report(toy)
    assert ["eval/slot_01..03", "1 .. 0.3333"] in page.table("results", "figure", "value")
    assert "All metrics over their steps" in page.text("curves") and "dflow ui" in page.text("curves")


HOOK = """
    @staticmethod
    def report(folder):
        return kept(folder)
"""


def test_showing_is_not_computing(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    file = toy.folder / "shows.py"
    file.write_text(file.read_text().replace(HOOK, ""))
    assert HOOK not in file.read_text()
    assert {"hit"} == {row["cache"] for row in _plan(toy)}
    assert "samples" not in report(toy).titles


def _plan(toy: Toy) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(toy.dflow("plan", str(toy.file), "--json").stdout)["nodes"]
    return rows


def test_secrets_stay_the_names_that_the_record_holds(tmp_path: Path) -> None:
    toy = counting(tmp_path, PIPELINE.replace("kept = 7", 'kept = 7\ntext = "${secret:HUSH}"'))
    result = toy.dflow("run", str(toy.file), HUSH="swordfish-42")
    assert 0 == result.returncode, result.stderr
    page = report(toy)
    assert "${secret:HUSH}" in page.text("configs")
    told = [path.name for path in (toy.store / "records").glob("*/*.html") if "swordfish-42" in path.read_text()]
    assert ["report.html"] == told, "the op itself wrote the secret into its artifact, and showed it"


def test_write_report_leaves_no_half_written_page(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_report(toy.store, runs_of(toy), path)
    assert [path] == list(tmp_path.iterdir())
    Page.read(path)


def test_a_page_that_cannot_be_written_says_what_to_do(toy: Toy) -> None:
    told = toy.dflow("report", "-o", "none/page.html")
    assert (1, "") == (told.returncode, told.stdout)
    assert told.stderr.endswith(f": there is no folder {toy.folder / 'none'}; create it, or give another file\n")
    told = toy.dflow("report", "-o", ".")
    assert f"dflow: {toy.folder}: is a folder; give a file\n" == told.stderr


def test_a_graph_of_many_nodes_is_told_by_its_table(tmp_path: Path) -> None:
    nodes = "".join(f'\n[node.n{place}]\nop = "make"\ntext = "{place}"\n' for place in range(200))
    toy = Toy(tmp_path, '[pipeline]\nname = "many"\nops = ["toy.py"]\n' + nodes)
    process = toy.start("run", str(toy.file))
    wait_for(lambda: bool(list(toy.store.glob("records/*/events.jsonl"))), 60)
    process.terminate()
    process.communicate()
    page = report(toy)
    assert "200 nodes are too many for a picture" in page.text("pipeline")
    assert 200 == len(page.table("pipeline", "node", "op", "state"))


def test_the_report_needs_neither_torch_nor_mlflow(toy: Toy) -> None:
    heavy = "{'torch', 'mlflow', 'transformers', 'networkx', 'rich', 'pandas'}"
    program = f"import sys, executor.cli; executor.cli.main(); print(sorted({heavy} & sys.modules.keys()))"
    process: subprocess.Popen[str] = toy.start("report", program=program)
    out, errors = process.communicate(timeout=300)
    assert 0 == process.returncode, errors
    assert "[]" == out.splitlines()[-1]
