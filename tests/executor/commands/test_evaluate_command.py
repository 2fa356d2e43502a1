"""`dflow evaluate`: the pipeline that it makes of a draft and its target, and the whole of it on a tiny pair."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from draft_chain import tiny_config
from fake_stage import FakeStage
from family_checkpoints import HIDDEN, LAYERS, VOCABULARY, make_checkpoint
from manifests import new_record
from safetensors.torch import save_file

from dsl.compile import compile_pipeline
from dsl.errors import ConfigError, DataError, PipelineError
from dsl.op_table import INIT, own_algorithms, use_draft_folders
from executor import cli
from executor.commands.evaluate import add_arguments, checked_graph
from executor.records.run_record import Record
from executor.report.first_screen import by_field, in_short
from executor.store.artifact_store import Store
from executor.system.output import FAILED
from ops.evaluate.verdicts import MORE_PROMPTS, OF_PROMPTS, verdicts
from ops.ingest.run import ingest
from ops.lib.data.files import read_jsonl, write_json, write_jsonl
from ops.lib.drafts.algorithms import algorithm_class
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.report_sections import verdict
from ops.tools.evaluate.argument_names import advised, source_mistakes
from ops.tools.evaluate.pipeline import draft_mask, evaluation_pipeline

COMMIT = "0123456789abcdef" * 2 + "01234567"
PROJECT = Path(__file__).resolve().parents[3]


def test_a_draft_and_its_target_become_a_pipeline_up_to_the_gate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.jsonl").write_text("")
    pipeline = evaluation_pipeline("draft", "target", "mine.jsonl", 5)
    nodes = compile_pipeline(pipeline, ["eval.dtype=bfloat16"]).nodes
    assert ["target", "draft", "ingest", "inject", "tokenize", "eval", "check"] == list(nodes)
    assert str(tmp_path / "draft") == nodes["draft"].config.source
    assert str(tmp_path / "mine.jsonl") == nodes["ingest"].config.source
    assert (5, "bfloat16") == (nodes["eval"].config.max_prompts, nodes["eval"].config.dtype)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (f"owner/draft@{COMMIT}", ""),
        ("here", ""),
        ("owner/draft", "the model id needs its commit, 40 hex digits: owner/draft@COMMIT"),
        ("owner/draft@main", '"main" is no commit of 40 hex digits'),
        (f"owner/draft@{COMMIT[:9]}", f'"{COMMIT[:9]}" is no commit of 40 hex digits'),
        (f"here@{COMMIT}", "here is a directory, which has no commit: leave out @01234567"),
        ("nowhere", "there is no directory "),
        ("nowhere@main", "there is no directory "),
    ],
)
def test_a_draft_and_a_target_are_directories_or_model_ids_with_a_commit(text, wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    mistakes = source_mistakes(text, text)
    assert (["DRAFT", "--target"] if wrong else []) == [mistake.path for mistake in mistakes]
    if wrong:
        assert wrong in mistakes[0].what
        command = ["evaluate", text, "--target", text, "-s", "eval.max_new_tokens=0", "--store", str(tmp_path / "runs")]
        assert 2 == cli.main(command)
        told = capsys.readouterr().err.splitlines()
        assert [f"DRAFT: {mistakes[0].what}", f"--target: {mistakes[0].what}"] == told[:2]
        assert ["-s eval.max_new_tokens=0: must be >= 1, got 0"] == told[2:]


def test_a_commit_for_a_directory_is_refused_and_not_ignored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    command = ["evaluate", "here", "--target", "here", "-s", f"draft.revision={COMMIT}"]
    assert 2 == cli.main([*command, "--store", str(tmp_path / "runs")])
    assert "a commit belongs to a model id, and here is a path; leave it out" in capsys.readouterr().err


def evaluated(tmp_path, *arguments):
    """Run `dflow evaluate` on a draft and a target that are only directories, up to its nodes."""
    for name in ("draft", "target"):
        (tmp_path / name).mkdir(exist_ok=True)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return checked_graph(parser.parse_args([str(tmp_path / "draft"), "--target", str(tmp_path / "target"), *arguments]))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("eval.temperature=0.5", "eval.temperature = 0.5"),
        ("eval.block_size=4", "eval.block_size = 4"),
        ("eval.benchmark=bench.jsonl", "/bench.jsonl\n"),
    ],
)
def test_an_evaluation_that_no_server_repeats_is_made_without_the_gate(override, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.jsonl").write_text("")
    assert "check" not in evaluated(tmp_path, "-s", override).nodes
    assert named in capsys.readouterr().out
    assert "check" in evaluated(tmp_path, "-s", "eval.temperature=0").nodes
    assert "" == capsys.readouterr().out
    with pytest.raises(PipelineError, match=r'-s eval.split=val: has no samples: ingest puts all of them into "test"'):
        evaluated(tmp_path, "-s", "eval.split=val")


def test_what_an_evaluation_advises_is_said_in_arguments_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = {"lossless": None, "tau": {"all": {"steps": 0, "prompts": 1}}, "prompts": 1}
    lossless = next(section.body for section in verdicts(report, None) if section.title == "losslessness")
    answers = "check the answers too, by an evaluation with temperature = 0"
    assert f"{answers} (-s eval.temperature)" == advised("eval", "losslessness", lossless).advice
    assert f"{answers} (temperature of eval)" == by_field("eval", "losslessness", lossless).advice
    few = verdict("good", "", "warning", MORE_PROMPTS, OF_PROMPTS)
    assert "evaluate more prompts (--prompts with more)" == advised("eval", "tau", few).advice
    store = Store.open(tmp_path / "runs", write=True)
    record = new_record(store.records, evaluated(tmp_path, "-s", "eval.temperature=0.5"))
    record.save_all()
    lines = list(in_short(store, record, advised))
    assert "  warning: check_export: not measured: the gate was left out" in lines
    assert "next: have it checked by the gate: evaluate without the -s that left it out" in lines


def test_the_folder_of_an_own_algorithm_is_given_by_an_option(tmp_path, monkeypatch, capsys):
    folder = PROJECT / "tests" / "support" / "drafts" / "own_drafts" / "slot_bias"
    monkeypatch.setattr(sys, "path", [*sys.path])
    graph = evaluated(tmp_path, "--drafts", str(folder))
    assert (folder / INIT,) == graph.op_files
    assert {"slot_bias": folder} == own_algorithms()
    use_draft_folders([])
    with pytest.raises(ConfigError, match="--drafts of dflow evaluate"):
        algorithm_class("slot_bias")
    with pytest.raises(PipelineError, match=f"--drafts: there is no folder {tmp_path / 'none'}"):
        evaluated(tmp_path, "--drafts", str(tmp_path / "none"))


def test_a_gate_that_is_asked_for_is_refused_where_it_could_compare_nothing(tmp_path):
    with pytest.raises(PipelineError) as error:
        evaluated(tmp_path, "-s", "eval.temperature=0.5", "-s", "check.live=off")
    (mistake,) = error.value.mistakes
    assert "-s check.report" == mistake.path
    assert "this evaluation has temperature = 0.5, and a served draft is compared with" in mistake.what


def test_a_draft_that_is_not_there_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    command = ["evaluate", "nowhere", "--target", "target", "--prompts", "none.jsonl"]
    assert 2 == cli.main([*command, "--store", str(tmp_path / "runs")])
    told = capsys.readouterr().err.splitlines()
    assert ["DRAFT", "--prompts"] == [line.partition(": ")[0] for line in told]
    assert f"there is no file or folder {tmp_path / 'none.jsonl'}" in told[1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], ["mine.jsonl is empty; write one JSON object per line"]),
        (['{"prompt": "a"', "{}"], ["mine.jsonl:1: ", "mine.jsonl:2: "]),
        (["no JSON"], ["mine.jsonl:1: "]),
        (
            ['{"prompt": " "}', '{"id": "b", "messages": [{"role": "assistant", "content": "a"}]}'],
            ["mine.jsonl has no usable prompt", 'sample "1": empty text', 'sample "b": starts with the assistant'],
        ),
    ],
)
def test_a_file_without_prompts_is_refused_before_anything_runs_with_its_name(lines, told, tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        evaluated(tmp_path, "--prompts", str(tmp_path / "mine.jsonl"))
    assert str(error.value).startswith("--prompts: ")
    assert [] == [text for text in told if text not in str(error.value)]


def test_a_file_of_an_unknown_format_is_refused_with_the_argument_that_names_one(tmp_path):
    (tmp_path / "mine.txt").write_text("hello")
    with pytest.raises(DataError, match=r"mine.txt: neither JSON, Parquet nor CSV; say which: -s ingest.format=json"):
        evaluated(tmp_path, "--prompts", str(tmp_path / "mine.txt"))


def asked(tmp_path, prompts=None):
    """The rows that ingest makes of the prompts."""
    pipeline = evaluation_pipeline("draft", "target", prompts, None)
    stage = FakeStage(tmp_path)
    ingest(pipeline.nodes["ingest"].config, stage)
    return list(read_jsonl(stage.out_dir / "samples.jsonl"))


def test_all_prompts_of_a_file_are_asked_whatever_their_split_and_with_or_without_an_answer(tmp_path):
    answer = {"role": "assistant", "content": "n"}
    rows = [
        {"id": "a", "prompt": "1?"},
        {"id": "a", "prompt": "2?"},
        {"split": "train", "messages": [{"role": "user", "content": "3?"}, answer]},
        {"split": "val", "messages": [{"role": "user", "content": "4?"}, answer, {"role": "user", "content": "5?"}]},
        {"question": "6?", "answer": "n"},
    ]
    write_jsonl(tmp_path / "train.jsonl", rows)
    found = asked(tmp_path / "own", str(tmp_path / "train.jsonl"))
    assert [("a", "test"), ("a#2", "test"), ("3", "test"), ("4", "test"), ("5", "test")] == [
        (row["id"], row["split"]) for row in found
    ]
    assert 16 == len(asked(tmp_path / "default"))


def make_pair(folder, **changes):
    """A tiny target, and a draft of it with other values in config.json."""
    make_checkpoint("qwen3", folder / "target")
    config = tiny_config(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        head_dim=16,
        mask_token_id=355,
        target_layer_ids=(1, 3, 5),
        num_target_layers=LAYERS,
        max_position_embeddings=4096,
    )
    (folder / "draft").mkdir()
    written = {name: value for name, value in to_serving(config).items() if name != "dflow"}
    write_json(folder / "draft" / "config.json", written | changes)
    save_file(random_draft(config, seed=1).state_dict(), folder / "draft" / "model.safetensors")


def test_a_draft_of_another_target_is_refused_before_anything_runs_with_all_that_differs(tmp_path, monkeypatch, capsys):
    make_pair(tmp_path, vocab_size=VOCABULARY + 1, num_target_layers=LAYERS + 2)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert 2 == cli.main(["evaluate", "draft", "--target", "target", "--store", str(tmp_path / "runs")])
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if not line.startswith("DRAFT: ")] == []
    assert f"vocab_size: {VOCABULARY + 1}, and the target's is {VOCABULARY}; give the target" in told[1]
    assert f"num_target_layers: {LAYERS + 2}, and the target's is {LAYERS}; give the target" in told[2]
    assert [] == list((tmp_path / "runs" / "records").iterdir())


def test_the_record_of_an_evaluation_says_which_command_started_it(tmp_path, monkeypatch):
    make_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(
        "executor.commands.evaluate.run_and_report", lambda session: started.append(session.record) or FAILED
    )
    command = ["evaluate", "draft", "--target", "target", "-s", "mlflow.tracking=false"]
    assert FAILED == cli.main([*command, "--store", str(tmp_path / "runs")])
    assert ["evaluate"] == [Record.load(record.folder).state.started_by for record in started]


def test_an_evaluation_that_did_not_finish_ends_with_what_is_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
    store = Store.open(tmp_path / "runs", write=True)
    record = new_record(store.records, compile_pipeline(evaluation_pipeline("draft", "target", None, 1)))
    record.save_all()
    lines = list(in_short(store, record))
    assert "Is it safe to serve?" in lines
    assert "  warning: not measured: it has not finished" in lines
    assert [line for line in lines if "train_dflash" in line] == []
    assert f"next: finish the run: dflow resume {record.run}" in lines


@pytest.mark.slow
def test_a_draft_is_evaluated_in_one_command_and_the_second_time_nothing_runs(tmp_path):
    make_pair(tmp_path)
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


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        ({"dflash_config": {"mask_token_id": 5}}, ["a", "b"], 5),
        ({"mask_token_id": 6}, ["a", "b"], 6),  # as speculators writes it
        ({"mask_token_id": 6}, ["a", "<|MASK|>"], None),  # the tokenizer's own counts
        ({"mask_token_id": "6"}, ["a", "b"], None),
        ({}, ["a", "b"], None),
    ],
)
def test_a_target_without_a_mask_token_takes_that_of_the_draft(tmp_path, config, tokens, expected):
    draft, target = tmp_path / "draft", tmp_path / "target"
    draft.mkdir()
    target.mkdir()
    (draft / "config.json").write_text(json.dumps(config))
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8}))
    vocab = {token: number for number, token in enumerate(tokens)}
    (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    nodes = evaluation_pipeline(str(draft), str(target), None, None).nodes
    assert expected == nodes["target"].config.mask_token_id


def test_a_model_id_without_a_mask_token_takes_that_of_the_draft_before_and_after_its_download(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    draft, commit = tmp_path / "draft", "a" * 40
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"mask_token_id": 6}))

    def mask() -> int | None:
        return evaluation_pipeline(str(draft), f"owner/name@{commit}", None, None).nodes["target"].config.mask_token_id

    assert 6 == mask()
    target = tmp_path / "hub" / "models--owner--name" / "snapshots" / commit
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8}))
    for tokens, expected in (({"a": 0}, 6), ({"a": 0, "<|MASK|>": 1}, None)):
        (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
        assert expected == mask()


def test_the_mask_token_of_what_cannot_be_read_is_left_to_the_nodes(tmp_path):
    (tmp_path / "config.json").write_text("[")
    assert draft_mask(tmp_path, tmp_path) is None
    assert draft_mask(tmp_path / "none", tmp_path / "none") is None
