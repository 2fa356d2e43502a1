"""The target's own MTP head and an EAGLE-3 draft beside the trials of a search."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from eagle3_cases import eagle3_folder

from dsl.errors import PipelineError
from executor.store.artifact_store import Store
from executor.tune.decision import Ranked, Result, Rules, decide
from executor.tune.outcome import PLAIN, outcome_of
from executor.tune.preflight import search_preflight
from executor.tune.rival import Rival
from executor.tune.trials import Trials, read_trials
from ops.evaluate.rivals import RIVALS
from ops.train_dflash.answers import Answer

TINY = Path(__file__).resolve().parents[3] / "pipelines" / "tiny.toml"
TUNED = """
[node.train]
eval_every = 4
eval_prompts = 3
[tune]
rungs = [3]
[tune.space]
"""


def trials_of(folder: Path, space: str, more: str = "", table: str = "") -> Trials:
    file = folder / "tuned.toml"
    tuned = TUNED.replace("rungs", f"{table}\nrungs")
    file.write_text(f'extends = "{TINY}"\n{tuned}{space}\n{more}')
    return read_trials(file)


def test_the_head_decodes_the_prompts_of_the_training_as_the_file_evaluates(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "train.lr = [1e-5, 3e-3]", '[node.eval]\ndtype = "bfloat16"\nlaunch.cpus = 1')
    assert trials.rival_node("mtp", 0) == trials.rival_node("mtp", 1) == "tune_mtp"
    assert trials.rival_node("eagle3", 0) is None
    node = trials.graph.nodes["tune_mtp"]
    assert {"draft": (), "target": ("target",), "tokens": ("tokenize",)} == dict(node.inputs)
    training = trials.graph.nodes[trials.node(0, 3)].config
    found, launch = node.config, node.launch
    assert (True, "val", "bfloat16", 1) == (found.mtp, found.split, found.dtype, launch.cpus)
    assert (3, training.eval_new_tokens) == (found.max_prompts, found.max_new_tokens)


def test_where_trials_differ_in_their_tokens_each_has_a_node_of_its_own(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "tokenize.max_length = [400, 500]")
    assert ["tune_mtp-t01", "tune_mtp-t02"] == [trials.rival_node("mtp", trial) for trial in (0, 1)]
    assert ("tokenize-t02",) == trials.graph.nodes["tune_mtp-t02"].inputs["tokens"]


def test_a_node_of_that_name_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match='"tune_mtp" is a node of the file'):
        trials_of(tmp_path, "train.lr = [1e-5, 3e-3]", '[node.tune_mtp]\nop = "ingest"\nsource = "builtin:digits"')


def test_the_table_ends_with_the_head_and_plain_decoding_or_says_why_there_is_no_row(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "train.lr = [1e-5, 3e-3]")
    results = [
        Result(trial, 3, 1.0, (Answer("a", "text", 8 + trial, 4), Answer("b", "text", 9, 4))) for trial in (0, 1)
    ]
    decision = decide(Rules(2, (3,)), results)
    rival = Rival(Ranked(-1, 2.5, 7.0, (2.0, 3.0), 0.25, (0.1, 0.4)), 4, 1.234)
    *_, head, plain = outcome_of(trials, decision, {"mtp": rival}).rows
    assert PLAIN == plain
    assert (RIVALS["mtp"], "block_size = 4", "", "2.500", "2.000 to 3.000", "+0.250", "0.100 to 0.400", "7") == head[
        :-1
    ]
    assert "1.23 times as fast as plain decoding" in head[-1]
    *_, head, _ = outcome_of(trials, decision, {"mtp": attrs.evolve(rival, speedup=None)}).rows
    assert "its speed-up is not known" in head[-1] and head[-1].endswith("by a node of evaluate with mtp")
    *_, first, second, _ = outcome_of(trials, decision, {"mtp": rival, "eagle3": rival}).rows
    assert (RIVALS["mtp"], RIVALS["eagle3"]) == (first[0], second[0]) and second[-1].startswith("you have it already")
    without = outcome_of(trials, decision, {"mtp": "there is none"})
    assert RIVALS["mtp"] not in [row[0] for row in without.rows]
    assert f"{RIVALS['mtp']}: there is none" == without.not_tried[-1]


def test_an_eagle3_draft_is_evaluated_as_the_head_is_from_the_folder_that_the_file_names(tmp_path: Path) -> None:
    eagle3_folder(tmp_path / "eagle3")
    trials = trials_of(tmp_path, "train.lr = [1e-5, 3e-3]", table='eagle3 = "eagle3"')
    node, head = (trials.graph.nodes[trials.rival_node(rival, 1)] for rival in ("eagle3", "mtp"))
    assert str(tmp_path / "eagle3") == node.config.eagle3
    assert attrs.evolve(node.config, eagle3=None, mtp=True) == head.config


def test_a_draft_of_another_target_and_a_missing_one_are_refused_before_anything_runs(tmp_path: Path) -> None:
    eagle3_folder(tmp_path / "eagle3", hidden_size=64)
    words = {"eagle3": "its hidden_size is 64, and the target's", "another": "there is no file or folder"}
    for name, expected in words.items():
        trials = trials_of(tmp_path, "train.lr = [1e-5, 3e-3]", table=f'eagle3 = "{name}"')
        (refused,) = search_preflight(Store(tmp_path / "runs"), trials).refused
        assert "tune.eagle3" == refused.path
        assert expected in refused.what
