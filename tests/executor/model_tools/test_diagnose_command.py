"""`dflow diagnose` around the measuring: which drafts of a run, what is refused, and where the loss comes from."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import attrs
import pytest
from manifests import new_record
from serve_cases import CHECK, SECOND, later_partial_run, record_run

from executor.cli import main
from executor.model_tools import measure as measuring
from executor.model_tools.measure import loss_curve
from executor.records.events import Metric
from executor.records.run_record import Record
from executor.store.manifest import IndexLine
from executor.system.output import FAILED, OK, USAGE
from ops.tools.diagnose.judgement import judged, sorted_findings
from ops.tools.diagnose.text import diagnosis_text


def found(name, measured="", **fields):
    return {"code": name, "what": f"{measured}\nnormal: so it should be", "level": "good", **fields}


def result(*findings, tau=2.0, corrected=2.0, evaluation=None, **gains):
    measured = {"exported": tau, "low": 1.5, "high": 2.5, "corrected": corrected}
    head = {"split": "test", "prompts": 8, "dtype": "float32", "device": "cpu", "block_size": 8, "tau": measured}
    head |= {
        "evaluation": evaluation,
        "instead_of": None,
        "budget": None,
        "gains": {name.replace("_", " "): gain for name, gain in gains.items()},
    }
    return {"node": "export", "findings": list(findings), **head}


@pytest.fixture
def export(tmp_path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def process(monkeypatch):
    """Stands for the process that measures: what it is asked, and what it says."""
    asked = []

    def run(module, files, threads, show):
        show("1 of 2, decoding")
        request, answer = (Path(f"/proc/self/fd/{file}") for file in files)
        asked.append(json.loads(request.read_text()))
        answer.write_text(json.dumps(result() | {"node": asked[-1]["node"]}))
        return 0, []

    monkeypatch.setattr(measuring, "_run", run)
    return asked


def dflow(store, *arguments: str) -> int:
    """Run a command in the folder of the store, which printed commands need not name there."""
    with contextlib.chdir(store.path.parent):
        return main(["diagnose", *arguments, "--store", str(store.path)])


def test_every_draft_of_a_run_is_measured_unless_one_is_named(tmp_path, export, process, capsys):
    made = dict.fromkeys(("export", "second", "target", "tokenize"), export)
    store, run = record_run(tmp_path / "p", made, more=CHECK + SECOND)
    assert OK == dflow(store)
    assert ["export", "second"] == [request["node"] for request in process]
    kept = json.loads((store.records / run / "diagnosis.json").read_text())["drafts"]
    assert ["export", "second"] == [each["node"] for each in kept]
    assert OK == dflow(store, run, "--node", "second", "--prompts", "4")
    assert ("second", 4, 300) == tuple(process[-1][name] for name in ("node", "prompts", "budget"))
    assert made.keys() == process[-1]["artifacts"].keys()


def test_drafts_before_one_that_cannot_be_measured_are_kept_and_told(tmp_path, export, process, monkeypatch, capsys):
    store, run = record_run(
        tmp_path / "p", dict.fromkeys(("export", "second", "target", "tokenize"), export), more=SECOND
    )
    measure = measuring._run

    def second_breaks(module, files, threads, show):
        code, tail = measure(module, files, threads, show)
        return (7, ["MemoryError: no room"]) if process[-1]["node"] == "second" else (code, tail)

    monkeypatch.setattr(measuring, "_run", second_breaks)
    assert FAILED == dflow(store, "--json")
    out, err = capsys.readouterr()
    assert ["export"] == [each["node"] for each in json.loads(out)["drafts"]]
    assert "second: the diagnosis ended with exit code 7" in err
    kept = store.records / run / "diagnosis.json"
    assert ["export"] == [each["node"] for each in json.loads(kept.read_text())["drafts"]]
    assert FAILED == dflow(store, "--node", "second", "--json")
    assert "" == capsys.readouterr().out


def test_what_is_said_of_one_draft_replaces_nothing_said_of_another(tmp_path, export, process):
    store, run = record_run(
        tmp_path / "p", dict.fromkeys(("export", "second", "target", "tokenize"), export), more=SECOND
    )
    file = store.records / run / "diagnosis.json"
    assert OK == dflow(store)
    first = json.loads(file.read_text())
    for each in first["drafts"]:
        each["prompts"] = 99
    file.write_text(json.dumps(first))
    assert OK == dflow(store, "--node", "second")
    kept = json.loads(file.read_text())["drafts"]
    assert [("export", 99), ("second", 8)] == [(each["node"], each["prompts"]) for each in kept]


def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(tmp_path, export, process, capsys):
    store, run = record_run(tmp_path / "p", {}, more=CHECK)
    assert USAGE == dflow(store, "--node", "trian")
    assert '"trian" makes no draft' in capsys.readouterr().err
    assert FAILED == dflow(store)
    assert f"the store holds no draft of export; run `dflow resume {run}` first" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        dflow(store, "--prompts", "3")
    assert [] == process


def test_without_a_run_the_newest_with_a_finished_draft_is_measured_and_named(tmp_path, export, process, capsys):
    store, run = record_run(tmp_path / "p", dict.fromkeys(("export", "second", "target", "tokenize"), export))
    later = later_partial_run(store, run, "tokenize")
    assert OK == dflow(store)
    assert (store.records / run / "diagnosis.json").exists()
    assert (
        f"the latest run, {later.run} of served, has no finished draft; run {run} of served is used\n"
        "takes about 5 min 0 s at most for each draft, the loading of its target "
        "included (--budget); 4 prompts are decoded in any case\n"
        "export: 1 of 2, decoding\n" == capsys.readouterr().err
    )
    assert OK == dflow(store, "--node", "export")
    assert f'has no finished draft of "export"; run {run} of served is used' in capsys.readouterr().err
    assert USAGE == dflow(store, "--node", "trian")
    assert USAGE == dflow(store, later.run)
    assert f"run {later.run} of served makes no draft" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{} and more"])
def test_a_damaged_draft_is_measured_and_one_that_is_gone_is_refused(tmp_path, export, process, capsys, content):
    other = tmp_path / "other"
    other.mkdir()
    (other / "info.json").write_text("{}")
    store, run = record_run(tmp_path / "p", {"export": export, "target": other, "tokenize": other})
    digest = Record.load(store.records / run).state.nodes["export"].digest
    folder = store.object_path(digest)
    if content is None:
        (folder / "manifest.json").unlink()
    else:
        (folder / "config.json").write_text(content)
    assert OK == dflow(store)
    assert [str(folder), digest] == process[-1]["artifacts"]["export"]
    shutil.rmtree(folder)
    assert FAILED == dflow(store)
    assert f"the store holds no draft of export; run `dflow resume {run}` first" in capsys.readouterr().err


def test_a_process_that_breaks_down_is_told_with_its_last_lines(tmp_path, export, monkeypatch, capsys):
    store, _ = record_run(tmp_path / "p", dict.fromkeys(("export", "target", "tokenize"), export))
    monkeypatch.setattr(measuring, "_run", lambda *_: (-9, ["MemoryError: no room"]))
    assert FAILED == dflow(store)
    error = capsys.readouterr().err
    assert "export: the diagnosis was killed (signal 9)" in error
    assert "MemoryError: no room" in error


def test_a_draft_whose_target_and_tokens_are_gone_is_refused(tmp_path, export, process, capsys):
    store, run = record_run(tmp_path / "p", {"export": export})
    assert FAILED == dflow(store)
    assert f"this run lacks its target and tokens; create them: dflow resume {run}\n" in capsys.readouterr().err
    assert [] == process


def test_the_loss_comes_from_the_run_that_trained_the_draft_also_once_it_was_accepted_for_another_key(tmp_path, export):
    store, run = record_run(tmp_path / "p", {"train": export})
    trained = Record.load(store.records / run)
    trained.state.nodes["train"].key = "key-train"
    trained.save_all()
    for step in (1, 2):
        trained.event("train", Metric(step, {"train/loss": 3.0 - step, "train/lr": 0.1}))
    trained.event("eval", Metric(3, {"train/loss": 9.0}))
    again = new_record(store.records, trained.graph())
    state = again.state.nodes["train"]
    state.key, state.cache, state.source_run = "key-train", "hit", run
    assert [(1, 2.0), (2, 1.0)] == loss_curve(store, trained, "train") == loss_curve(store, again, "train")
    renamed = again.state.nodes["renamed"] = attrs.evolve(state, key="key-accepted")
    assert [] == loss_curve(store, again, "renamed")
    line = IndexLine("digest", run, 1.0, acceptance="accepted", accepted_key="key-train")
    store.accept(renamed.key, line)
    assert [(1, 2.0), (2, 1.0)] == loss_curve(store, again, "renamed")
    state.source_run = "20200101-000000-0000"
    assert [] == loss_curve(store, again, "train") == loss_curve(store, again, None)


def test_causes_are_told_with_what_to_do_and_what_was_not_measured_is_told():
    cause = found("mask token", "tau 1.02 with 5", advice="mend it", level="error")
    fine = found("layer ids", "tau 2.42")
    gone = {"code": "features", "what": "the store lost them", "level": "unknown"}
    assert (
        "export: tau 1.02 [1.50, 2.50] of at most 8, on 8 prompts of test (float32, cpu); 2.42 with corrected "
        "inputs\n"
        "CAUSE  mask token: tau 1.02 with 5 | normal: so it should be | do: mend it\n"
        "ok     layer ids: tau 2.42 | normal: so it should be\n"
        "--     features: the store lost them\n"
        "causes of a low tau, the largest first: mask token (tau +1.40)"
    ) == diagnosis_text(result(cause, fine, gone, tau=1.02, corrected=2.42, mask_token=1.4))
    unloaded = result(cause) | {"tau": {"exported": None, "low": None, "high": None, "corrected": 2.42}}
    assert diagnosis_text(unloaded).startswith(
        "export: no tau, as the export cannot be used, of at most 8, on 8 prompts of test (float32, cpu); 2.42 with "
    )
    assert diagnosis_text(result(fine, gone)).endswith("none of the usual causes of a low tau; not measured: features")


def test_a_budget_that_left_prompts_out_is_told():
    assert "; more prompts do not fit into --budget 60\n" in diagnosis_text(result(found("x")) | {"budget": 60})


def test_another_split_than_asked_for_is_told_with_the_reason():
    text = diagnosis_text(result(found("x")) | {"split": "val", "instead_of": "test"})
    assert "of at most 8, on 8 prompts of val, as test has none (float32, cpu)" in text


def test_the_split_can_be_named(tmp_path, export, process):
    store, _ = record_run(tmp_path / "p", dict.fromkeys(("export", "target", "tokenize"), export))
    assert OK == dflow(store)
    assert OK == dflow(store, "--split", "val")
    assert [None, "val"] == [request["split"] for request in process]
    with pytest.raises(SystemExit):
        dflow(store, "--split", "train")


def test_a_note_is_told_with_what_may_help_and_is_no_cause():
    note = found("categories", "tau 1.7, 7.8", advice="more texts", level="warning")
    text = diagnosis_text(result(note))
    assert "note   categories: tau 1.7, 7.8 | normal: so it should be | may help: more texts\n" in text
    assert text.endswith("none of the usual causes of a low tau")


def test_a_cause_whose_mending_measured_lower_has_its_sign_and_one_prompt_no_interval():
    single = result(found("layer ids", level="error"), layer_ids=-0.16) | {
        "tau": {"exported": 2.0, "low": None, "high": None, "corrected": 2.0}
    }
    text = diagnosis_text(single)
    assert text.startswith("export: tau 2.00 of at most 8")
    assert text.endswith("layer ids (tau -0.16)")


def test_a_cause_that_costs_nothing_is_told_apart_from_those_that_do():
    idle, costly = found("mask token", level="error"), found("weights", level="error")
    assert diagnosis_text(result(idle, mask_token=0.0)).endswith("\nwrong, without effect on tau here: mask token")
    assert diagnosis_text(result(costly, idle, mask_token=0.0, weights=1.4)).endswith(
        "the largest first: weights (tau +1.40); wrong, without effect on tau here: mask token"
    )


def test_what_was_not_judged_at_the_ceiling_of_tau_is_not_told_as_ok():
    own = found("own answers", "5%", level="info")
    text = diagnosis_text(result(own))
    assert "\n-      own answers: 5% | normal: so it should be | not judged: tau is at its ceiling\n" in text
    assert text.endswith("none of the usual causes of a low tau; not judged, as tau is at its ceiling: own answers")


def test_what_more_prompts_could_decide_is_told_with_how_to_get_them():
    few = {"code": "positions", "what": "tau 2.42", "advice": "raise test_fraction of ingest", "level": "unknown"}
    text = diagnosis_text(result(few))
    assert "\n--     positions: tau 2.42 | do: raise test_fraction of ingest\n" in text


def test_a_cause_that_another_explains_is_told_as_such():
    causes = [judged("own answers", "3 %", "all", "regenerate", is_cause=True), judged("target", "", "", is_cause=True)]
    text = diagnosis_text(result(*(each.to_json() for each in sorted_findings(causes, {}))))
    assert "| do: fix target, which explains this; if it remains, regenerate\n" in text
    assert text.endswith("the largest first: target, own answers (explained by target)")


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({}, "eval reports 3.10"),
        ({"tau": None}, "eval reports no tau"),
        (
            {"benchmark": "bench.jsonl", "temperature": 1.0, "block_size": 4},
            "eval reports 3.10 on bench.jsonl at temperature 1 in blocks of 4, and this is measured on the split, "
            "greedily, in whole blocks",
        ),
    ],
)
def test_what_the_run_s_own_evaluation_says_is_told_with_what_it_does_otherwise(evaluation, told):
    said = {"node": "eval", "tau": 3.1, "benchmark": None, "temperature": None, "block_size": None} | evaluation
    assert diagnosis_text(result(found("x"), evaluation=said)).splitlines()[0].endswith(f"(float32, cpu); {told}")
