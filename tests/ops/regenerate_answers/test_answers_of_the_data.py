"""answers = "data": the one switch with which nothing is generated."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_stage import FakeStage, folder_digest
from regenerate_cases import config
from shard_workers import run_workers

from dsl.errors import DataError
from executor.cli import main
from ops.artifacts import ImageSamples, TargetModel
from ops.lib.data.files import read_json, read_jsonl, write_jsonl
from ops.regenerate_answers.plan import missing_here
from ops.regenerate_answers.run import regenerate_answers

ROOT = Path(__file__).parents[3]
GONE = TargetModel(Path("/nowhere"), "digest")


def test_the_samples_pass_as_they_are_and_no_target_is_read(parroted, tmp_path, capsys):
    stage = FakeStage(tmp_path, {"samples": parroted, "target": GONE})
    regenerate_answers(config(answers="data"), stage)
    for name in ["samples.jsonl", *(file.name for file in parroted.path.glob("images-*.bin"))]:
        assert (parroted.path / name).read_bytes() == (stage.out_dir / name).read_bytes()
    total = len(list(read_jsonl(parroted.path / "samples.jsonl")))
    summary = read_json(stage.out_dir / "summary.json")
    assert (total, total, {}) == (summary["in"], summary["kept"], summary["dropped"])
    assert (total, total) == stage.progressed[-1]
    said = capsys.readouterr().out
    assert 1 == said.count('info: answers = "data": those of the data set stay, and nothing was generated')
    assert "warning" not in said, "it is the user's own choice"


def test_workers_write_them_once(parroted, tmp_path):
    regenerate_answers(config(answers="data"), FakeStage(tmp_path / "one", {"samples": parroted, "target": GONE}))
    inputs = {"samples": parroted, "target": GONE}
    run = "ops.regenerate_answers.run:regenerate_answers"
    assert [0, 0] == run_workers(run, config(answers="data"), tmp_path / "two", inputs, 2)
    assert folder_digest(tmp_path / "one" / "out") == folder_digest(tmp_path / "two" / "out")


def test_prompts_are_counted_and_a_set_of_prompts_alone_is_refused(parroted, tmp_path, capsys):
    folder = tmp_path / "samples"
    shutil.copytree(parroted.path, folder)
    rows = list(read_jsonl(folder / "samples.jsonl"))
    stage = FakeStage(tmp_path / "stage", {"samples": ImageSamples(folder, "digest"), "target": GONE})
    prompts = [{**row, "messages": row["messages"][:-1]} for row in rows]
    write_jsonl(folder / "samples.jsonl", [prompts[0], *rows[1:]])
    regenerate_answers(config(answers="data"), stage)
    assert f"1 of {len(rows)} samples end with the user's turn" in capsys.readouterr().out
    write_jsonl(folder / "samples.jsonl", prompts)
    stage = FakeStage(tmp_path / "again", {"samples": ImageSamples(folder, "digest"), "target": GONE})
    with pytest.raises(DataError, match=f"none of the {len(rows)} samples has an answer; set answers = "):
        regenerate_answers(config(answers="data"), stage)


def test_a_plan_says_so_and_asks_for_no_memory_and_no_key(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    server = {"backend": "endpoint", "endpoint": "http://host/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
    assert ["api_key_env"] == list(missing_here(config(**server)))
    assert {} == missing_here(config(**server, answers="data"))
    plan = ["plan", str(ROOT / "pipelines" / "vlm_dflash.toml"), "--store", str(tmp_path / "store")]
    said = []
    for switch in ([], ["-s", "regenerate.answers=data"]):
        assert 0 == main([*plan, *switch])
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("regenerate")])
    assert any("GB" in line or "MB" in line for line in said[0])
    assert 'regenerate: answers = "data": the answers of the data set stay, and nothing is generated' == said[1][-1]
    assert not any("GB" in line or "MB" in line for line in said[1])
