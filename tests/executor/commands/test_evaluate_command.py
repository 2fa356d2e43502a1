"""`dflow evaluate`: the pipeline that it makes of a draft and its target, and the whole of it on a tiny pair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from draft_chain import tiny_config
from fake_stage import FakeStage
from family_checkpoints import HIDDEN, LAYERS, VOCABULARY, make_checkpoint
from safetensors.torch import save_file

from dsl.errors import PipelineError
from dsl.graph import compiled
from dsl.read_toml import checked_pipeline
from executor import cli
from executor.report.in_short import in_short
from executor.store.artifact_store import Store
from ops.ingest.run import ingest
from ops.lib.data.files import read_json, write_json, write_jsonl
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import random_draft
from ops.tools.evaluate.pipeline import evaluation_pipeline, named
from tests.support.manifests import new_record

COMMIT = "0123456789abcdef" * 2 + "01234567"
PROJECT = Path(__file__).resolve().parents[3]


def test_a_draft_and_its_target_become_a_pipeline_up_to_the_gate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.jsonl").write_text("")
    pipeline = evaluation_pipeline("draft", "target", "mine.jsonl", 5)
    nodes = compiled(checked_pipeline(pipeline, ["eval.dtype=bfloat16"])).nodes
    assert ["target", "draft", "ingest", "inject", "tokenize", "eval", "check"] == list(nodes)
    assert str(tmp_path / "draft") == nodes["draft"].config.source
    assert str(tmp_path / "mine.jsonl") == nodes["ingest"].config.source[1]
    assert (5, "bfloat16") == (nodes["eval"].config.max_prompts, nodes["eval"].config.dtype)


def test_model_ids_are_pinned_by_a_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ("owner/draft", COMMIT) == named(f"owner/draft@{COMMIT}")
    assert ("a@b/draft", None) == named("a@b/draft")
    nodes = compiled(evaluation_pipeline(f"owner/draft@{COMMIT}", f"owner/model@{COMMIT}", None, 1)).nodes
    assert ("owner/draft", COMMIT) == (nodes["draft"].config.source, nodes["draft"].config.revision)
    with pytest.raises(PipelineError, match="needs a commit as revision"):
        checked_pipeline(evaluation_pipeline("owner/draft", f"owner/model@{COMMIT}", None, 1))


def test_a_draft_that_is_not_there_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    assert 2 == cli.main(["evaluate", "nowhere", "--target", "target", "--store", str(tmp_path / "runs")])
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("own", [False, True])
def test_all_prompts_are_held_out_but_two_that_nobody_asks(own, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "n"}]} for n in range(9)
    ]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    pipeline = evaluation_pipeline("draft", "target", str(tmp_path / "mine.jsonl") if own else None, 1)
    stage = FakeStage(tmp_path)
    ingest(pipeline.nodes["ingest"].config, stage)
    assert {"train": 1, "val": 1, "test": 9 if own else 16} == read_json(stage.out_dir / "summary.json")["splits"]


def test_an_evaluation_that_did_not_finish_ends_with_what_is_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
    store = Store.open(tmp_path / "runs", write=True)
    record = new_record(store.records, compiled(evaluation_pipeline("draft", "target", None, 1)))
    record.save_all()
    lines = list(in_short(store, record))
    assert "Is it safe to serve?" in lines
    assert "  warn: not measured: it has not finished" in lines
    assert [line for line in lines if "train_dflash" in line] == []
    assert f"next: finish the run: dflow resume {record.run}" in lines


@pytest.mark.slow
def test_a_draft_is_evaluated_in_one_command_and_the_second_time_nothing_runs(tmp_path):
    make_checkpoint("qwen3", tmp_path / "target")
    config = tiny_config(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        head_dim=16,
        mask_token_id=355,
        target_layer_ids=(1, 3, 5),
        num_target_layers=LAYERS,
        max_position_embeddings=4096,
    )
    (tmp_path / "draft").mkdir()
    written = {name: value for name, value in to_serving(config).items() if name != "dflow"}
    write_json(tmp_path / "draft" / "config.json", written)
    save_file(random_draft(config, seed=1).state_dict(), tmp_path / "draft" / "model.safetensors")
    command = [sys.executable, "-m", "executor.cli", "evaluate", "draft", "--target", "target", "--max-prompts", "2"]
    command += ["-s", "eval.max_new_tokens=6", "-s", "mlflow.tracking=false", "--store", str(tmp_path / "runs")]
    environment = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin"}
    shown = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr
        shown.append(done.stdout)
    assert "nothing to do: all 7 nodes are cached" in shown[1]
    for text in shown:
        assert "Is the draft good?" in text
        assert "good: losslessness: 2 of 2 answers are those of the target alone" in text
        assert "good: gate: the serving directory meets the contract" in text
        assert "no node of train_dflash" not in text
