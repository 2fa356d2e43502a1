"""`dflow init`, `plan` and `doctor --target` with checkpoints that are not Qwen's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from any_targets import any_checkpoint
from init_cases import chat, nodes, write_photos
from seeing_targets import seeing_checkpoint

from executor.cli import main
from ops.tools.init.target import most_image_tokens


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "glm4"])
def test_init_writes_a_pipeline_that_plans_without_a_hand_on_it(
    project: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    target = any_checkpoint(kind, project / "target")
    tokenizer = json.loads((target / "tokenizer.json").read_text().replace("<|mask|>", "<|free|>"))
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert 0 == main(["init", str(chat(project / "chat.jsonl", 30)), "--target", str(target)])
    said = capsys.readouterr().out
    assert f"target: a {kind}; all 5 checks of a target hold, measured on a small random copy" in said
    made = nodes(project / "pipeline.toml")
    assert 360 == made["target"]["mask_token_id"]  # the first row without a token
    assert 0 == main(["plan", "pipeline.toml"])


@pytest.mark.slow
def test_init_counts_images_by_the_targets_own_processor(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = seeing_checkpoint("gemma3", project / "target")
    assert 0 == main(["init", str(write_photos(project)), "--target", str(target)])
    assert "all 5 checks of a target hold" in capsys.readouterr().out
    made = nodes(project / "pipeline.toml")
    assert "max_pixels" not in made["tokenize"]
    assert 0 == main(["plan", "pipeline.toml"])
    assert 0 == main(["doctor", "--target", str(target)])
    assert 4 == most_image_tokens(str(target), "pillow")


def test_a_model_without_its_layers_is_refused_by_init_and_doctor_lists_why(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = any_checkpoint("gpt2", project / "target", n_embd=64, n_layer=6, n_head=4, n_positions=512)
    assert 1 == main(["init", str(chat(project / "chat.jsonl", 30)), "--target", str(target)])
    assert "this gpt2 cannot be a target, measured on a small random copy: it does not hold" in capsys.readouterr().err
    assert 1 == main(["doctor", "--target", str(target)])
    assert "layers       FAILS  it does not hold that the inputs of its layers are" in capsys.readouterr().out
