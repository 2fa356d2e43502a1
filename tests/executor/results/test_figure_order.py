"""What a result is judged by stands first among its figures, and MLflow's description holds the main ones alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsl.read_toml import read_graph
from executor.records.run_record import NodeState, Record
from executor.results.run_table import figures_in_order, print_figures, result_rows
from executor.tracking.run_description import run_note

TINY = Path(__file__).resolve().parents[3] / "pipelines" / "tiny.toml"
BASELINE = {"eval/tau_random": 1.0, "eval/tau_random_text": 1.0, "eval/tau_unclipped": 3.1}
TAU = {"eval/tau": 3.0, "eval/tau_low": 2.5, "eval/tau_high": 3.5, "eval/tau_image": 7.0, "eval/tau_of/low": 2.0}
SPEEDUP = {"eval/speedup": 0.8, "eval/speedup_low": 0.6, "eval/speedup_high": 1.1}
EVAL = {"eval/draft_share": 0.3, "eval/acceptance_slot_01": 0.5, **SPEEDUP, **BASELINE, **TAU}
EVAL |= {"eval/lossless_errors": 0.0, "eval/plain_seconds": 4.0}
CHECK = {"check/live_skipped": 1.0, "check/prompts": 16.0, "check/static_passed": 1.0}


def measured(folder: Path) -> Record:
    graph = read_graph(TINY)
    nodes = {node_id: NodeState(state="done") for node_id in graph.nodes}
    nodes["eval"].metrics, nodes["check"].metrics = EVAL, CHECK
    return Record.prepare(folder, graph, nodes=nodes)


def test_the_table_of_what_is_judged_stands_above_all_others_and_begins_with_tau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, state = read_graph(TINY), measured(tmp_path).state
    for known in (graph, None):
        print_figures(state, ["eval", "check"], graph=known)
        lines = capsys.readouterr().out.splitlines()
        assert ["results of eval", "results of check"] == [line for line in lines if line.startswith("results")]
        names = [
            line.split()[0] for line in lines[lines.index("results of eval") + 2 : lines.index("results of check")]
        ]
        taus = ["eval/tau", "eval/tau_image", "eval/tau_of/low", *BASELINE]
        others = ["eval/acceptance_slot_01", "eval/draft_share", "eval/lossless_errors", "eval/plain_seconds"]
        assert [*taus, "eval/speedup", *others] == names


def test_the_description_in_mlflow_begins_with_tau_and_holds_the_main_figures_alone(tmp_path: Path) -> None:
    note = run_note(measured(tmp_path), read_graph(TINY), "1", "2")
    table = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", note, re.MULTILINE)
    assert [
        ("metric", "value", "interval"),
        ("---", "---", "---"),
        ("eval/tau", "3", "[2.5, 3.5]"),
        ("eval/tau_image", "7", ""),
        ("eval/tau_of/low", "2", ""),
        ("eval/speedup", "0.8", "[0.6, 1.1]"),
        ("check/live_skipped", "1", ""),
        ("eval/lossless_errors", "0", ""),
    ] == table


def test_figures_of_two_evaluations_are_in_order_behind_their_nodes() -> None:
    names = ["a/eval/speedup", "a/eval/tau_image", "b/eval/tau", "a/eval/tau", "train/loss"]
    assert ["a/eval/tau", "b/eval/tau", "a/eval/tau_image", "a/eval/speedup", "train/loss"] == figures_in_order(names)
    assert ["train/loss", "train/loss_text", "a/eval/speedup"] == figures_in_order(
        ["a/eval/speedup", "train/loss_text", "train/loss"], {"train/loss"}
    )


def test_a_speed_up_whose_interval_says_nothing_is_not_known() -> None:
    wide = {"eval/speedup": 0.43, "eval/speedup_low": 0.0, "eval/speedup_high": 3.04}
    assert [("eval/speedup", "not known", "[0, 3.04]")] == result_rows(wide)
    narrow = {"eval/speedup": 1.5, "eval/speedup_low": 0.9, "eval/speedup_high": 2.1}
    assert [("eval/speedup", "1.5", "[0.9, 2.1]")] == result_rows(narrow)
    assert [("eval/tau", "0.43", "[0, 3.04]")] == result_rows(
        {name.replace("speedup", "tau"): wide[name] for name in wide}
    )
    assert [("eval/speedup", "0.43", "")] == result_rows({"eval/speedup": 0.43})
