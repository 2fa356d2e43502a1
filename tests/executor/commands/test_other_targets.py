"""`dflow init`, `plan` and `doctor --target` with checkpoints that are not Qwen's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from any_targets import any_checkpoint
from init_cases import SMALL_RUN, chat, checkpoint, nodes, write_photos
from safetensors.torch import load_file, save_file
from seeing_targets import seeing_checkpoint

from executor.cli import main
from ops.lib.data.files import read_json
from ops.lib.forecasts import read_target_config
from ops.lib.target.probed import probe_of_copy
from ops.lib.target.sizes import shapes_without_weights
from ops.tools.init.target import most_image_tokens

KINDS = ("llama", "gemma3_text", "gpt_oss", "glm4")
SMALL = SMALL_RUN | {
    "regenerate.max_new_tokens": "16",
    "regenerate.drop_repetitions": "false",  # a random target repeats itself
    "eval.max_new_tokens": "8",
    "mlflow.tracking": "false",
}


def written(project: Path, kind: str) -> None:
    """What init writes for a tiny checkpoint whose tokenizer has no mask token."""
    target = any_checkpoint(kind, project / "target")
    tokenizer = json.loads((target / "tokenizer.json").read_text().replace("<|mask|>", "<|free|>"))
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert 0 == main(["init", str(chat(project / "chat.jsonl", 30)), "--target", str(target)])


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_a_pipeline_that_plans_without_a_hand_on_it(
    project: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    written(project, kind)
    said, told = capsys.readouterr()
    said_first = "measuring a small random copy of the target, up to a minute on a busy machine: loading torch and"
    assert f"{said_first} transformers first" in told.splitlines()
    assert "algorithm: dflash, known to SGLang and vLLM" in said
    assert "target: whether SGLang serves it is read from the installed one, and none is here (docs/targets.md)" in said
    checks = 7 if kind == "gpt_oss" else 6  # its RoPE is scaled, so texts beyond its first range are looked at
    assert f"target: {kind}; all {checks} checks of a target hold, measured on a small random copy" in said
    made = nodes(project / "pipeline.toml")
    assert 360 == made["target"]["mask_token_id"]  # the first row without a token
    assert 0 == main(["plan", "pipeline.toml"])


@pytest.mark.parametrize("is_dated", [False, True])
def test_init_writes_a_line_to_take_in_for_the_day_where_the_template_writes_it(
    project: Path, capsys: pytest.CaptureFixture[str], is_dated: bool
) -> None:
    target = Path(checkpoint(project / "target", sees=False))
    template = target / "chat_template.jinja"
    dated = '{{ strftime_now("%d %b %Y") }}' if is_dated else ""
    template.write_text(dated + "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}")
    assert 0 == main(["init", str(chat(project / "chat.jsonl", 30)), "--target", str(target)])
    lines = (project / "pipeline.toml").read_text().splitlines()
    switch = [line for line in lines if line.startswith('# template_date = "2025-01-01" ')]
    assert is_dated == bool(switch) and int(is_dated) == capsys.readouterr().out.count("writes today's date")
    if is_dated:
        (project / "pipeline.toml").write_text("\n".join(lines).replace(switch[0], switch[0].removeprefix("# ")))
        assert "2025-01-01" == nodes(project / "pipeline.toml")["target"]["template_date"]


def test_another_package_called_ops_is_not_taken_for_dflows(project: Path) -> None:
    target = seeing_checkpoint("gemma3", project / "target")
    (project / "ops").mkdir()
    (project / "ops" / "__init__.py").write_text("raise ImportError('the user's own')\n")
    config = read_target_config(any_checkpoint("llama", project / "llama"))
    told: list[str] = []
    assert () == probe_of_copy(config, told.append).failed
    steps = ["making it", "layers", "head", "embedding", "padding", "speculation"]
    assert [f"measuring a small random copy of the target: {step}" for step in steps] == told
    assert "model.embed_tokens.weight" in shapes_without_weights(json.dumps(config))
    assert 4 == most_image_tokens(str(target), "pillow")


@pytest.mark.slow
def test_init_counts_images_by_the_targets_own_processor(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = seeing_checkpoint("gemma3", project / "target")
    config = read_json(target / "config.json")
    config["text_config"]["max_position_embeddings"] = 100_000  # so that the images decide the longest prompt
    (target / "config.json").write_text(json.dumps(config))
    assert 0 == main(["init", str(write_photos(project)), "--target", str(target)])
    said = " ".join(capsys.readouterr().out.split())
    assert "all 6 checks of a target hold" in said
    assert "; images are estimated, each as one of 2,048 x 1,024 pixels; of " in said
    assert "prompts examined has about " in " ".join((project / "pipeline.toml").read_text().split())
    made = nodes(project / "pipeline.toml")
    assert "max_pixels" not in made["tokenize"]
    assert 0 == main(["plan", "pipeline.toml"])
    assert 0 == main(["doctor", "--target", str(target)])
    assert 4 == most_image_tokens(str(target), "pillow")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_init_writes_runs_to_a_draft_that_changes_no_answer(project: Path, kind: str) -> None:
    written(project, kind)
    settings = [part for name, value in SMALL.items() for part in ("-s", f"{name}={value}")]
    assert 0 == main(["run", "pipeline.toml", "--store", str(project / "runs"), *settings])
    [report] = (project / "runs" / "objects").glob("*/report.json")
    assert {"errors": 0, "ties": 0} == read_json(report)["lossless"]
    [draft] = (project / "runs" / "objects").glob("*/draft/config.json")
    assert 64 == read_json(draft)["hidden_size"]


BY_HAND = """
[pipeline]
name = "by-hand"

[mlflow]
tracking = false

[node.target]
op = "load_target"
checkpoint = "target"
mask_token_id = 360
"""


def test_a_model_without_its_layers_is_refused_by_init_and_plan_and_doctor_lists_why(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = any_checkpoint("gpt2", project / "target", n_embd=64, n_layer=6, n_head=4, n_positions=512)
    assert 1 == main(["init", str(chat(project / "chat.jsonl", 30)), "--target", str(target)])
    said = " ".join(capsys.readouterr().err.split())
    assert "this gpt2 cannot be a target, measured on a small random copy: it does not hold" in said
    assert (
        '(dflow cannot find the layers of GPT2Model, which has no "layers"): no draft can be fed by it; choose' in said
    )
    assert 1 == main(["doctor", "--target", str(target)])
    measured = capsys.readouterr().out
    assert "layers       FAILS  it does not hold that the inputs of its layers are" in measured
    assert "\nso                  it cannot be a target\n" in measured
    (project / "by-hand.toml").write_text(BY_HAND)
    assert 2 == main(["plan", "by-hand.toml"])
    said = " ".join("".join(capsys.readouterr()).split())
    assert 'this gpt2 cannot be a target: its class in transformers has no "layers", by whose inputs' in said


def test_weights_that_are_no_target_are_refused_by_the_first_stage(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = any_checkpoint("llama", project / "target")
    weights = load_file(target / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])}, target / "model.safetensors")
    (project / "by-hand.toml").write_text(BY_HAND)
    assert 0 == main(["plan", "by-hand.toml"])
    assert 0 != main(["run", "by-hand.toml", "--store", str(project / "runs")])
    said = str(capsys.readouterr())
    assert "this llama cannot be a target, measured on the weights: it does not hold" in said
    assert "choose another target: docs/targets.md" in said and "setting named in the message" not in said


def test_doctor_measures_by_a_config_alone_and_notes_what_is_missing(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = any_checkpoint("llama", project / "target")
    for file in target.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert 0 == main(["doctor", "--target", str(target)])
    said = capsys.readouterr().out
    assert 6 == said.count(" holds ") and "*.safetensors" in said
    assert f"note: its config.json alone is no checkpoint: {target}" in said
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "hub"))
    assert 1 == main(["doctor", "--target", "owner/name"])
    assert "Put the model's config.json into a directory, and name that" in " ".join(capsys.readouterr().err.split())
    commit = project / "hub" / "models--owner--name" / "snapshots" / ("a" * 40)
    commit.mkdir(parents=True)
    (target / "config.json").rename(commit / "config.json")
    assert 0 == main(["doctor", "--target", "owner/name", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ("llama", []) == (found["model_type"], found["notes"])
    assert 1 == main(["doctor", "--target", str(target)])
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("has_index", [False, True])
def test_doctor_refuses_a_checkpoint_without_a_file_of_its_weights_before_it_measures(
    project: Path, capsys: pytest.CaptureFixture[str], has_index: bool
) -> None:
    target = any_checkpoint("llama", project / "target")
    weights = target / "model.safetensors"
    if has_index:
        index = {"weight_map": {"model.norm.weight": "model-00001.safetensors", "lm_head.weight": "gone.safetensors"}}
        weights.rename(target / "model-00001.safetensors")
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights.unlink()
    assert 1 == main(["doctor", "--target", str(target)])
    said, told = capsys.readouterr()
    told = " ".join(told.split())
    assert ("1 of 2 shards are missing: gone.safetensors" if has_index else "*.safetensors") in told
    assert "nothing was measured, since a run would refuse this checkpoint: correct it first" in told
    assert "measuring a small random copy" not in told and "" == said


def test_doctor_measures_the_weights_of_a_whole_checkpoint_and_they_decide(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = any_checkpoint("llama", project / "target")
    assert 0 == main(["doctor", "--target", str(target), "--json"])
    copy, weights = json.loads(capsys.readouterr().out)["probes"]
    names = ["layers", "head", "embedding", "padding", "blocks", "speculation"]
    assert [names, names] == [[check["name"] for check in probe["checks"]] for probe in (copy, weights)]
    weights = load_file(target / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])}, target / "model.safetensors")
    assert 1 == main(["doctor", "--target", str(target), "--measure-minutes", "0"])
    of_copy, of_weights = capsys.readouterr().out.split("llama, measured on the weights\n")
    assert 6 == of_copy.count(" holds ")
    first, head, embedding, verdict, note = of_weights.splitlines()
    assert ["layers", "holds"] == first.split()[:2] and ["embedding", "holds"] == embedding.split()[:2]
    assert head.startswith("head         FAILS ") and "its logits are all equal" in head
    assert "so                  it cannot be a target" == verdict
    assert note.startswith("note: of its weights only layers, head and embedding are measured")


def test_doctor_says_that_nothing_was_measured(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "config.json").write_text('{"model_type": "reformer"}')
    assert 1 == main(["doctor", "--target", str(project)])
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing was measured on a copy: no small copy of this reformer can be made: " in said
    assert "Traceback" not in said


def test_init_leaves_out_what_cannot_run_where_a_draft_is_not_verified(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"head_dim": 16, "lru_width": 64, "attention_window_size": 64}
    target = any_checkpoint("recurrent_gemma", project / "target", **sizes)
    data = chat(project / "chat.jsonl", 120, answer=" ".join(["word"] * 200))  # enough to measure val in between
    assert 0 == main(["init", str(data), "--target", str(target)])
    said = " ".join(capsys.readouterr().out.split())
    assert "target: so the file has no nodes eval and check, and its training decodes nothing" in said
    made = nodes(project / "pipeline.toml")
    assert "export" == [*made][-1]
    assert 0 < made["train"]["eval_every"] and 0 == made["train"]["eval_prompts"]
    assert 0 == main(["plan", "pipeline.toml"])
