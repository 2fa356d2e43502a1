"""A damaged folder in speculators' format fails at the gate, with what vLLM would do and the remedy."""

from __future__ import annotations

import shutil

import attrs
import pytest
import torch
from fake_stage import FakeStage
from gate_cases import check
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from dsl.op import Ref
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.data.files import read_json, write_json


@pytest.fixture
def both(gate_inputs, tmp_path):
    """The gate's inputs with a draft in both formats, which a test may damage."""
    stage = FakeStage(tmp_path / "export", {"draft": gate_inputs["trained"], "target": gate_inputs["target"]})
    export_draft(ExportDraft(draft=Ref("a"), target=Ref("b"), formats=("sglang", "speculators")), stage)
    return gate_inputs | {"draft": attrs.evolve(gate_inputs["draft"], path=stage.out_dir)}


def mistakes(folder, inputs):
    """The mistakes that the gate reports, as (what, what vLLM does, remedy)."""
    with pytest.raises(DataError) as caught:
        check(folder / "gate", inputs)
    lines = str(caught.value).splitlines()[1:]
    return [tuple(line.strip() for line in lines[start : start + 3]) for start in range(0, len(lines), 3)]


def test_a_draft_in_both_formats_passes_and_both_are_shipped(tmp_path, both):
    stage = check(tmp_path / "gate", both)
    shipped = stage.out_dir / "draft"
    for name in ("config.json", "model.safetensors"):
        source = both["draft"].path / "speculators" / name
        assert source.read_bytes() == (shipped / "speculators" / name).read_bytes()
    assert "vllm serve" in (shipped / "README.md").read_text()


LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("name", "value", "what", "vllm"),
    [
        ("aux_hidden_state_layer_ids", [1, 2, 3, 4, 5], "must be [2, 3, 4, 5, 6], got [1, 2, 3, 4, 5]", "other layers"),
        ("sliding_window_non_causal", False, "must be true, got false", "silently makes all layers causal"),
        ("sample_from_anchor", True, "must be false, got true", "refuses to start if it is true"),
        ("mask_token_id", 3, "got 3", "silently embeds any other token"),
        ("block_size", 8, "must be 4, got 8", "speculators trains on with blocks of this size"),
        ("draft_vocab_size", 300, "must be 600, got 300", "a reduced vocabulary"),
        (f"{LAYER}.rope_parameters.rope_theta", 5.0, "must be 10000.0, got 5.0", "silently computes another draft"),
        (f"{LAYER}.rms_norm_eps", 1e-5, "must be 1e-06, got 1e-05", "silently computes another draft"),
        ("speculators_model_type", "eagle3", 'must be "dflash", got "eagle3"', "refuses to start"),
        ("speculators_config.verifier.name_or_path", "a/b", 'must be null, got "a/b"', "serves this target"),
    ],
)
def test_every_altered_field_is_named(tmp_path, both, name, value, what, vllm):
    path = both["draft"].path / "speculators" / "config.json"
    config = read_json(path)
    *parents, last = name.split(".")
    table = config
    for parent in parents:
        table = table[parent]
    table[last] = value
    write_json(path, config)
    [(found, effect, remedy)] = mistakes(tmp_path, both)
    assert found.startswith(f"speculators/config.json: {name} ") and what in found
    assert effect.startswith("vLLM: ") and vllm in effect
    assert "write the export again" in remedy


def test_fields_that_are_missing_or_too_many_are_named_at_once(tmp_path, both):
    path = both["draft"].path / "speculators" / "config.json"
    config = read_json(path)
    del config["sample_from_anchor"], config["speculators_config"]["proposal_methods"]
    config[LAYER]["final_logit_softcapping"] = 30.0
    write_json(path, config | {"model_type": "qwen3"})
    assert [
        "speculators/config.json: speculators_config.proposal_methods is missing",
        "speculators/config.json: sample_from_anchor is missing",
        "speculators/config.json: model_type is not a field of the export",
        f"speculators/config.json: {LAYER}.final_logit_softcapping is not a field of the export",
    ] == [what for what, _, _ in mistakes(tmp_path, both)]


def own_weights(folder):
    """The tensors of the folder, in a file of its own from now on."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    return tensors, file


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensors: tensors["norm.weight"][:1].mul_(1.5), "the tensors are not those of the export"),
        (lambda tensors: tensors.pop("fc.weight"), "fc.weight is missing"),
        (lambda tensors: tensors.update(lm_head=torch.zeros(2)), "lm_head does not belong here"),
        (
            lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].half()}),
            "norm.weight must be F32 [128], got F16 [128]",
        ),
    ],
)
def test_other_tensors_than_those_of_the_serving_directory_are_named(tmp_path, both, change, what):
    tensors, file = own_weights(both["draft"].path / "speculators")
    change(tensors)
    save_file(tensors, file)
    [(found, effect, _)] = mistakes(tmp_path, both)
    assert f"speculators/model.safetensors: {what}" == found
    assert effect.startswith("vLLM: silently leaves a missing tensor")


def test_a_copy_of_the_weights_is_as_good_as_the_same_file(tmp_path, both):
    tensors, file = own_weights(both["draft"].path / "speculators")
    save_file(tensors, file)
    check(tmp_path / "gate", both)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: holds no object"),
        (lambda folder: (folder / "mask_embedding.pt").touch(), "mask_embedding.pt: does not belong here"),
        (lambda folder: as_link(folder / "config.json"), "config.json: is not a regular file"),
        (lambda folder: shutil.rmtree(folder), "is missing"),
    ],
)
def test_files_that_are_missing_too_many_or_no_files_are_named(tmp_path, both, damage, what):
    damage(both["draft"].path / "speculators")
    [(found, effect, _)] = mistakes(tmp_path, both)
    assert found.startswith("speculators") and what in found
    assert effect.startswith("vLLM: ")


def as_link(file):
    file.rename(file.parent.parent.parent / "elsewhere")
    file.symlink_to("../../elsewhere")


def test_a_folder_that_the_export_does_not_name_is_a_stray(tmp_path, both):
    path = both["draft"].path / "config.json"
    config = read_json(path)
    del config["dflow"]["formats"]
    write_json(path, config)
    [(found, _, _)] = mistakes(tmp_path, both)
    assert "speculators: does not belong here" == found


def test_what_follows_from_a_wrong_serving_directory_is_not_reported_again(tmp_path, both):
    for folder, name in (("", "rope_theta"), ("speculators", "mask_token_id")):
        path = both["draft"].path / folder / "config.json"
        write_json(path, read_json(path) | {name: 3})
    [(found, _, _)] = mistakes(tmp_path, both)
    assert "rope_theta is 3, but the draft was trained with" in found
