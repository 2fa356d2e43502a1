"""The first screen of a report: what ops answer, what nobody measured, and what to do next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from report_page import Page
from serve_cases import record_run
from toy_ops import Toy

from executor.model_tools.measure import RESULT, kept
from executor.records.run_record import find_record
from executor.report.first_screen import Line, lines_of, next_steps
from executor.report.run_data import read_runs
from executor.results.op_hooks import Shown
from ops.lib.report_sections import Section, verdict
from ops.tools.diagnose import judgement

OPS = """
from attrs import frozen
from dsl.op import Artifact, field, op
from ops.lib.report_sections import Section, verdict


@frozen
class Judged(Artifact):
    '''tau.txt'''


@op(version=1, run="judges:judge")
@frozen(kw_only=True)
class Judge:
    '''Judges.'''
    above: Judged | None = None
    tau: float = field(default=2.5, help="what it measures")
    fails: bool = field(default=False, help="whether it fails")
    output = Judged
    answers = ("good", "limit")

    @staticmethod
    def report(folder):
        tau = float((folder / "tau.txt").read_text())
        level = "good" if tau > 2 else "error"
        yield Section("tau", verdict("good", f"tau is {tau}", level, "" if tau > 2 else "see dflow logs RUN"))
        yield Section("data", verdict("limit", "few samples <b>", "warning", "more samples"))
        yield Section("time", verdict("limit", "too slow", "error", "a faster one"))


@op(version=1, run="judges:judge")
@frozen(kw_only=True)
class Silent:
    '''Judges, and says nothing.'''
    above: Judged
    tau: float = field(default=1.0, help="what it measures")
    fails: bool = field(default=False, help="whether it fails")
    output = Judged
    answers = ("safe",)


def judge(config, stage):
    if config.fails:
        raise ValueError("no room")
    stage.warn("careful: " + "tremendously " * 30 + "long")
    stage.warn("skipped: dflow resume RUN --from eval")
    (stage.out_dir / "tau.txt").write_text(str(config.tau))
"""
PIPELINE = """
[pipeline]
name = "judged"
ops = ["judges.py"]

[node.eval]
op = "judge"

[node.gate]
op = "silent"
above = "@eval"
"""


def judged(folder: Path) -> Toy:
    (folder / "judges.py").write_text(OPS)
    return Toy(folder, PIPELINE)


def page(toy: Toy, *runs: str) -> Page:
    result = toy.dflow("report", *runs)
    assert 0 == result.returncode, result.stderr
    return Page.read(Path(result.stdout.strip()))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    made = judged(tmp_path_factory.mktemp("judged"))
    assert 0 == made.dflow("run", str(made.file)).returncode
    assert 0 == made.dflow("run", str(made.file), "-s", "eval.tau=1.5").returncode
    return made


def runs_of(toy: Toy) -> list[str]:
    return sorted(folder.name for folder in (toy.store / "records").iterdir())


def test_the_first_part_answers_what_ops_judge_and_names_what_nobody_did(toy: Toy) -> None:
    first = runs_of(toy)[0]
    found = page(toy, first)
    assert "answers" == next(iter(found.titles))
    text = found.text("answers")
    assert "Is the draft good? tau tau is 2.5 (eval)" in text
    assert "Is it safe to serve? not measured its report has no verdict on this (gate)" in text
    assert "What limits it? time too slow (eval) data few samples <b> (eval)" in text, "the worst first"
    assert text.index("a faster one") < text.index("more samples"), "the worst first"
    shown = text.split("warning careful: ")[1].split(" (")[0].split()
    assert {"tremendously", "...", "long"} == {*shown} and 6 < len(shown) < 15  # words are whole
    assert text.endswith("4 warnings")
    again = f"skipped: dflow resume {first} --from eval"
    assert again in text and again in found.text("troubles"), "a command to copy"
    assert again in toy.dflow("status", first).stdout
    assert "train_dflash" not in text, "the pipeline answers by its own ops alone"


def test_advice_names_the_run_and_that_of_what_is_bad_comes_first(toy: Toy) -> None:
    second = runs_of(toy)[1]
    text = page(toy, second).text("answers")
    assert f"What to do next see dflow logs {second} a faster one" in text


def test_several_runs_answer_side_by_side(toy: Toy) -> None:
    assert 0 == toy.dflow("run", str(toy.file), "-s", "eval.tau=3.5").returncode
    found = page(toy, *runs_of(toy))
    assert ["answers", "runs", "differences"] == list(found.titles)[:3]
    text = found.text("answers")
    labels = [run.rpartition("-")[2] for run in runs_of(toy)]
    assert text.index(labels[0]) < text.index("tau is 2.5") < text.index(labels[1]) < text.index("tau is 1.5")
    assert text.index(labels[2]) < text.index("tau is 3.5"), "folded, but there"


def test_a_pipeline_with_a_draft_is_told_which_op_measures_what_nobody_did(tmp_path: Path) -> None:
    store, run = record_run(tmp_path, {}, more="", states={"eval": {"state": "pending", "reason": "not run: x failed"}})
    (facts,) = read_runs(store, [find_record(store.records, run)])
    lines = {(line.node, line.title): line.verdict for line in lines_of(facts, {})}
    missing = lines["", "check_export"]
    assert ("safe", "not measured: the pipeline has no node of check_export") == (missing.code, missing.what)
    assert 'add a node with op = "check_export": check a serving directory against the contract' in missing.advice
    assert "not run: x failed" == lines["eval", "not measured"].what
    assert ("", "evaluate") not in lines
    (step, *_) = next_steps(facts, lines_of(facts, {}))
    assert not step.startswith("serve it")


def test_a_draft_about_which_nothing_is_open_is_to_be_served(tmp_path: Path) -> None:
    store, run = record_run(tmp_path, {}, more="")
    (facts,) = read_runs(store, [find_record(store.records, run)])
    good = [
        Line("eval", "tau", verdict("good", "tau is 3", "good")),
        Line("", "x", verdict("limit", "", "error", "more")),
    ]
    assert [f"serve it: dflow serve {run}", "more"] == next_steps(facts, good)


@pytest.mark.parametrize(
    ("status", "steps"), [("running", ["wait for the run, which goes on", "more"]), ("killed", ["more"])]
)
def test_a_draft_of_a_run_that_has_not_ended_is_not_to_be_served(tmp_path: Path, status: str, steps: list[str]) -> None:
    store, run = record_run(tmp_path, {}, more="")
    (facts,) = read_runs(store, [find_record(store.records, run)])
    good = [
        Line("eval", "tau", verdict("good", "tau is 3", "good")),
        Line("", "x", verdict("limit", "", "error", "more")),
    ]
    assert steps == next_steps(evolve(facts, status=status), good)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"cache": "miss", "started": 5.0, "ended": 15.0}, "; measured beside check"),
        ({"cache": "miss", "started": 12.0, "ended": None, "state": "running"}, "; measured beside check"),
        ({"cache": "miss", "started": 20.0, "ended": 30.0}, ""),
        ({"cache": "hit", "started": 5.0, "ended": 15.0}, ""),
        ({}, ""),
    ],
)
def test_a_measured_time_names_the_nodes_that_ran_beside_it(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    states = {"eval": {"cache": "miss", "started": 10.0, "ended": 20.0}, "check": other}
    store, run = record_run(tmp_path, {}, states=states)
    (facts,) = read_runs(store, [find_record(store.records, run)])
    timed = Section("speed-up", verdict("good", "2 times as fast", "good"), is_timed=True)
    shown = {(run, "eval"): Shown([timed, Section("tau", verdict("good", "3", "good"))])}
    lines = {line.title: line.verdict.what for line in lines_of(facts, shown) if line.node == "eval"}
    assert (f"2 times as fast{says}", "3") == (lines["speed-up"], lines["tau"])


def test_a_warning_that_a_verdict_of_the_node_says_again_is_there_once(tmp_path: Path) -> None:
    lost = "27% of the samples (163 of 611) are dropped: 163 image missing"
    warnings = [f"{lost}; set image_root", "another"]
    store, run = record_run(tmp_path, {}, states={"eval": {"warnings": warnings}})
    (facts,) = read_runs(store, [find_record(store.records, run)])
    shown = {(run, "eval"): Shown([Section("lost samples", verdict("limit", lost, "warning", "set image_root"))])}
    lines = [(line.title, line.verdict.what) for line in lines_of(facts, shown) if line.node == "eval"]
    assert [("lost samples", lost), ("warning", "another")] == [
        line for line in lines if line[0] in ("warning", "lost samples")
    ]


def test_that_a_draft_should_not_be_served_comes_before_what_limits_it(tmp_path: Path) -> None:
    store, run = record_run(tmp_path, {}, more="")
    (facts,) = read_runs(store, [find_record(store.records, run)])
    lines = [
        Line("train", "stability", verdict("limit", "", "error", "lower lr")),
        Line("gate", "served", verdict("safe", "", "error", "correct it")),
        Line("eval", "tau", verdict("good", "", "warning", "do not serve it")),
        Line("eval", "speed-up", verdict("good", "", "error", "do not serve it")),
    ]
    assert ["do not serve it", "correct it", "lower lr"] == next_steps(facts, lines)


def test_a_node_that_failed_has_answered_nothing_and_the_run_is_to_be_resumed(tmp_path: Path) -> None:
    toy = judged(tmp_path)
    assert 1 == toy.dflow("run", str(toy.file), "-s", "eval.fails=true").returncode
    text, run = page(toy).text("answers"), runs_of(toy)[0]
    assert "not measured it failed: ValueError: no room (eval)" in text
    assert "correct what made eval fail (" in text and f"see the traceback); then dflow resume {run}" in text
    assert f"finish the run: dflow resume {run}" in text


def test_what_diagnose_found_is_shown_for_the_draft_that_it_judged_alone(toy: Toy) -> None:
    record = find_record(toy.store / "records", runs_of(toy)[0])
    cause = judgement.judged("mask", "7 of 9", "9", "mask again", is_cause=True)
    drafts = [{"node": "eval", "digest": record.state.nodes["eval"].digest, "findings": [cause.to_json()]}]
    file = record.folder / RESULT
    file.write_text(json.dumps({"drafts": drafts}))
    text = page(toy, record.run).text("answers")
    assert "mask 7 of 9; normal: 9 (eval)" in text
    assert "mask: mask again" in text
    other = [{**drafts[0], "digest": "0" * 64}]
    for content in ({"drafts": other}, {"drafts": [{"node": 3}]}, {"drafts": [{**drafts[0], "findings": ["x"]}]}, []):
        file.write_text(json.dumps(content))
        assert {} == kept(record), content
    assert f"dflow diagnose {record.run}" in page(toy, record.run).text("answers")
    file.unlink()


PART = {"tau": 2.0, "low": 1.5, "high": 2.5, "prompts": 8, "share": 0.5, "learnt": 0.0}
OF_KINDS = {"context": [PART | {"label": "below 1k"}], "kind": [PART | {"label": name} for name in ("text", "call")]}


def test_where_tau_is_lost_is_shown_as_one_picture_of_the_tables_with_several_parts(toy: Toy) -> None:
    record = find_record(toy.store / "records", runs_of(toy)[0])
    draft = {"node": "eval", "digest": record.state.nodes["eval"].digest, "findings": [], "parts": OF_KINDS}
    file = record.folder / RESULT
    file.write_text(json.dumps({"drafts": [draft]}))
    assert ["text", "call"] == [part.label for part in kept(record)["eval"].parts["kind"]]
    assert "Where tau is lost" in page(toy, record.run).text()
    written = Path(toy.dflow("report", record.run).stdout.strip()).read_text("utf-8")
    assert 1 == written.count("tau of eval by part of its prompts")
    for parts in ({}, {"context": OF_KINDS["context"]}):
        file.write_text(json.dumps({"drafts": [draft | {"parts": parts}]}))
        assert "Where tau is lost" not in page(toy, record.run).text()
    for wrong in ({"tau": "high"}, {"label": 3}, {"more": 1}):
        file.write_text(json.dumps({"drafts": [draft | {"parts": {"kind": [PART | {"label": "text"} | wrong]}}]}))
        assert {} == kept(record), wrong
    file.unlink()


def test_a_pipeline_that_only_trains_a_target_is_asked_nothing_about_a_draft(tmp_path: Path) -> None:
    toy = judged(tmp_path)
    ops = (
        OPS.replace('answers = ("good", "limit")', "")
        .replace('"limit"', '"target"')
        .replace('"good", f"', '"target", f"')
    )
    (tmp_path / "judges.py").write_text(ops)
    toy.file.write_text(PIPELINE.partition("[node.gate]")[0])
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    text = page(toy).text("answers")
    assert "Is the trained target better? tau tau is 2.5 (eval)" in text
    assert "more samples" in text.partition("What to do next")[2]
    assert not any(each in text for each in ("not measured", "the draft", "serve it", "diagnose"))
