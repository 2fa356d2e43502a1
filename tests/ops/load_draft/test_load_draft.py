"""Drafts of others: every form is read as its own class computes it, or refused by name; none is read otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from case_reader import hidden_of_blocks
from draft_chain import EOS, HIDDEN, MASK, TEXT, VOCAB, make_target
from draft_forms import (
    FLAT,
    FORMS,
    IDS,
    LAYERS,
    LEFT_OUT,
    NESTED,
    PLAIN,
    REFUSED,
    SIZES,
    Form,
    deepspec,
    prefixed,
    specforge,
    speculators_of,
    write_form,
    zlab,
)
from fake_stage import FakeStage, folder_digest
from safetensors.torch import load_file, save_file

from dsl.errors import ConfigError, DataError
from dsl.estimate import PlanContext
from dsl.launch import Launch
from dsl.op import Ref
from ops.artifacts import Draft, TargetModel
from ops.check_export.run import rotary_warnings
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.algorithms import algorithm_class
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.backbone.contract import REIMPORT, training_record
from ops.lib.drafts.backbone.load import load_draft as load_serving
from ops.lib.drafts.backbone.load import load_weights, random_draft, tensors_digest
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.serving_contract import check_serving
from ops.lib.drafts.backbone.sizes import draft_parameters
from ops.lib.forecasts import TargetForecast
from ops.load_draft.conflicts import conflicts
from ops.load_draft.op import LoadDraft
from ops.load_draft.plan import estimate, missing_here
from ops.load_draft.read_config import read_draft_config
from ops.load_draft.run import load_draft
from ops.load_draft.show import report

PLAIN_SHAPE = {
    "block_size": 4,
    "mask_token_id": MASK,
    "target_layer_ids": IDS,
    "num_target_layers": LAYERS,
    "rope_theta": 5000.0,
    **SIZES,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetModel:
    folder = tmp_path_factory.mktemp("target")
    made = make_target(folder / "made", text=TEXT | {"num_hidden_layers": LAYERS})
    write_json(made.path / "target.json", read_json(made.path / "target.json") | {"num_layers": LAYERS})
    return TargetModel(path=made.path, digest=folder_digest(made.path))


def load(folder: Path, source: Path, target: TargetModel, **fields) -> Draft:
    stage = FakeStage(folder, {"target": target})
    load_draft(LoadDraft(target=Ref("target"), source=str(source), **fields), stage)
    return stage.artifact(Draft)


def hidden(model: DraftModel) -> torch.Tensor:
    """Hidden states of two blocks, after contexts of 5 and 19 tokens."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(24, len(IDS) * HIDDEN, generator=generator)
    anchors, mask = torch.randn(2, HIDDEN, generator=generator), torch.randn(HIDDEN, generator=generator)
    with torch.no_grad():
        return hidden_of_blocks(model, features, anchors, mask, [5, 19])


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_as_the_draft_that_it_holds(name, target, tmp_path):
    form = FORMS[name]
    tensors = write_form(form, tmp_path / "source", target.path)
    made = load(tmp_path / "stage", tmp_path / "source", target, **form.fields)
    own = load_serving(made.path)
    expected = DraftModel(DraftConfig(**PLAIN_SHAPE | form.shape))
    assert expected.config == own.config
    expected.load_state_dict(tensors)
    assert torch.equal(hidden(expected), hidden(own))
    added = [name for name, _ in own.named_parameters() if name.startswith("lilicorr.")]
    assert all(torch.equal(own.get_parameter(name), expected.get_parameter(name)) for name in added)
    imported = read_json(made.path / "config.json")["dflow"]["imported"]
    assert form.publisher == imported["publisher"]
    assert set(form.assumed) <= imported["assumed"].keys()
    assert [note for note in form.notes if note not in "\n".join(imported["notes"])] == []
    assert {} == refused_by_a_plan(tmp_path / "source", target, **form.fields)


def refused_by_a_plan(source: Path, target: TargetModel, **fields) -> dict[str, str]:
    """The conflicts that a plan finds in a draft's files and the target's config.json."""
    config = LoadDraft(target=Ref("target"), source=str(source), **fields)
    forecast = TargetForecast.of(read_json(target.path / "model" / "config.json"))
    return missing_here(config) | conflicts(config, {"target": forecast})


LATE = ("another embedding than the target's",)  # only its content says so


@pytest.mark.parametrize("name", REFUSED)
def test_what_dflow_would_compute_otherwise_is_refused_by_name(name, target, tmp_path):
    form = REFUSED[name]
    write_form(Form(form.config, tensors=form.tensors, ends=form.ends), tmp_path / "source", target.path)
    for file, content in form.files.items():
        (tmp_path / "source" / file).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(tmp_path / "stage", tmp_path / "source", target)
    assert [reason for reason in form.reasons if reason not in str(caught.value)] == []
    assert str(tmp_path / "source") in str(caught.value)
    planned = refused_by_a_plan(tmp_path / "source", target).get("source", "")
    assert (name in LATE) == (not planned)
    assert name in LATE or [reason for reason in form.reasons if reason not in planned] == []


def test_a_refusal_lists_all_reasons(target, tmp_path):
    form = Form(zlab(is_causal=True, foo=1, dflash_config={"attention_sink_bias": 2.0, "target_layer_ids": [1, 3, 7]}))
    write_form(form, tmp_path / "source")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "stage", tmp_path / "source", target)
    assert [name for name in ("foo = 1", "attention_sink_bias = 2.0") if name not in str(caught.value)] == []


def test_a_plan_lists_sizes_of_another_target_beside_all_other_reasons(target, tmp_path):
    sizes = {"hidden_size": HIDDEN * 2, "vocab_size": VOCAB + 1, "num_target_layers": LAYERS + 3}
    write_form(Form(zlab(is_causal=True, foo=1, **sizes)), tmp_path / "source")
    planned = refused_by_a_plan(tmp_path / "source", target)["source"]
    wanted = [f"{name}: {value}, and the target's is" for name, value in sizes.items()]
    assert [text for text in (*wanted, "foo = 1", "is_causal = true") if text not in planned] == []


def test_a_plan_names_weights_that_do_not_fit_their_config(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    config = read_json(tmp_path / "source" / "config.json")
    write_json(tmp_path / "source" / "config.json", config | {"num_hidden_layers": 3, "intermediate_size": 32})
    planned = refused_by_a_plan(tmp_path / "source", target)["source"]
    assert "layer_types: 2 entries for 3 layers" in planned
    write_json(tmp_path / "source" / "config.json", config | {"intermediate_size": 32})
    planned = refused_by_a_plan(tmp_path / "source", target)["source"]
    assert "layers.0.mlp.down_proj.weight: has the shape [16, 24], and by config.json it is [16, 32]" in planned


def test_what_was_assumed_is_shown_saved_and_on_the_card(target, tmp_path, capsys):
    write_form(Form(zlab(block_size=LEFT_OUT, rope_theta=LEFT_OUT)), tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    shown = capsys.readouterr().out
    assert "warning: config.json leaves open, and these were assumed: block_size = 16, rope_theta = 10000.0" in shown
    assert {"block_size": 16, "rope_theta": 10000.0} == read_json(made.path / "config.json")["dflow"]["imported"][
        "assumed"
    ]
    card = (made.path / "README.md").read_text()
    assert "| block_size | 16 |" in card
    assert "| written by | z-lab |" in card
    (section,) = [section for section in report(made.path) if section.title.startswith("left open")]
    assert [("block_size", "16"), ("rope_theta", "10000.0")] == section.body.rows


def test_an_import_is_an_export(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    assert ["README.md", "config.json", "model.safetensors"] == sorted(file.name for file in made.path.iterdir())
    check_serving(made.path, target)
    again = load(tmp_path / "again", made.path, target)
    assert load_file(made.path / "model.safetensors").keys() == load_file(again.path / "model.safetensors").keys()
    before, after = (read_json(draft.path / "config.json") for draft in (made, again))
    assert "dflow" == after["dflow"].pop("imported")["publisher"]
    assert "z-lab" == before["dflow"].pop("imported")["publisher"]
    assert before == after


def test_the_record_of_another_target_is_kept_until_that_target_is_given(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    other = load(tmp_path / "other", made.path, evolve(target, digest="cd" * 32))
    imported = read_json(other.path / "config.json")["dflow"]["imported"]
    assert target.digest == imported["trained_for"]
    assert f"it was trained for the target {target.digest[:12]}, and this one" in imported["notes"][-1]
    for place, digest in enumerate(("ef" * 32, target.digest)):
        again = load(tmp_path / f"again-{place}", other.path, evolve(target, digest=digest))
        record = read_json(again.path / "config.json")["dflow"]["imported"]
        assert (None if digest == target.digest else target.digest) == record.get("trained_for")
        assert (digest != target.digest) == ("trained for the target" in "\n".join(record["notes"]))


def test_an_altered_export_of_dflow_is_refused_by_a_plan_already(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    config = read_json(made.path / "config.json")
    assert {} == refused_by_a_plan(made.path, target)
    altered = {"rope_theta": 1.0, "foo": 1, "dflow": config["dflow"] | {"digest": {}}}
    write_json(made.path / "config.json", config | altered)
    wrong = (
        "config.json: rope_theta is 1.0, but the draft was trained with 5000.0",
        "config.json: foo is not a field of the contract",
        "config.json: dflow.digest.tensors is missing",
    )
    with pytest.raises(DataError) as caught:
        load(tmp_path / "again", made.path, target)
    assert [] == [text for text in wrong if text not in str(caught.value)]
    planned = refused_by_a_plan(made.path, target)["source"].splitlines()
    assert [] == [text for text in wrong if not any(line.startswith(f"{made.path}: {text} (") for line in planned)]


@pytest.mark.parametrize("value", ["x", None, [], {}])
def test_a_field_of_an_export_of_dflow_that_became_of_another_kind_is_named_by_a_plan(value, target, tmp_path):
    write_form(FORMS["z-lab, DFlash2"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    config = read_json(made.path / "config.json")
    config["dflash_config"]["selector_rank"] = value
    write_json(made.path / "config.json", config)
    assert "dflash_config.selector_rank must be a number" in refused_by_a_plan(made.path, target)["source"]
    with pytest.raises(DataError, match=r"dflash_config.selector_rank must be a number"):
        load(tmp_path / "again", made.path, target)


def test_weights_of_an_export_of_dflow_in_another_dtype_are_refused_by_a_plan_already(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    tensors = load_file(made.path / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, made.path / "model.safetensors")
    assert "norm.weight: of dtype F16, and the export has F32" in refused_by_a_plan(made.path, target)["source"]
    with pytest.raises(DataError, match=r"the tensors are not those of the export"):
        load(tmp_path / "again", made.path, target)


def test_an_export_of_dflow_with_other_weights_is_refused(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    tensors = load_file(made.path / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] + 1}, made.path / "model.safetensors")
    with pytest.raises(DataError, match=r"the tensors are not those of the export") as caught:
        load(tmp_path / "again", made.path, target)
    assert str(made.path) in str(caught.value)


def test_weights_that_are_no_numbers_are_refused_with_the_source_that_was_given(target, tmp_path):
    def without_numbers(tensors):
        return tensors | {"norm.weight": tensors["norm.weight"] * float("nan")}

    write_form(Form(zlab(), tensors=without_numbers), tmp_path / "source")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "stage", tmp_path / "source", target)
    assert str(caught.value).startswith(f"{tmp_path / 'source'}: ")
    assert "norm.weight" in str(caught.value)
    assert REIMPORT in str(caught.value)
    assert [] == [text for text in (str(tmp_path / "stage"), "--from export") if text in str(caught.value)]


def test_an_import_of_an_export_keeps_its_engine_and_what_was_assumed(target, tmp_path):
    unordered = zlab(rope_theta=LEFT_OUT, dflash_config={"target_layer_ids": [5, 1, 3]})
    write_form(Form(unordered, order=(5, 1, 3)), tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    config = read_json(made.path / "config.json")
    config["dflow"]["engine"] = "sglang-0.5.21"
    write_json(made.path / "config.json", config)
    again = load(tmp_path / "again", made.path, target)
    record = read_json(again.path / "config.json")["dflow"]
    assert "sglang-0.5.21" == record["engine"]
    assert {"rope_theta": 10000.0} == record["imported"]["assumed"]
    assert config["dflow"]["imported"]["notes"] == record["imported"]["notes"]
    assert "ascending order" in "\n".join(record["imported"]["notes"])


@pytest.mark.parametrize("imported", ["z-lab", None, {"assumed": {}}, {"assumed": {}, "notes": [1]}])
def test_a_record_of_an_import_in_another_form_is_refused(imported, target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    config = read_json(made.path / "config.json")
    config["dflow"]["imported"] = imported
    write_json(made.path / "config.json", config)
    with pytest.raises(DataError, match=r"dflow.imported is no record of an import"):
        load(tmp_path / "again", made.path, target)
    assert "dflow.imported is no record of an import" in refused_by_a_plan(made.path, target)["source"]


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_an_export_of_dflow_is_read_whichever_its_algorithm(name, target, tmp_path):
    config = DraftConfig(**PLAIN_SHAPE, algorithm=algorithm_class(name)())
    tensors = random_draft(config, seed=1).state_dict()
    save_file(tensors, tmp_path / "model.safetensors")
    record = training_record(config, target.digest, tensors_digest(tmp_path / "model.safetensors"))
    serving = to_serving(config)
    serving["dflow"] |= record
    write_json(tmp_path / "config.json", serving)
    made = load(tmp_path / "stage", tmp_path, target)
    assert config == load_serving(made.path).config
    stored = load_file(made.path / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in stored.items())


def test_the_dtype_stays_and_several_become_float32(target, tmp_path):
    def halved(tensors):
        return {name: tensor.bfloat16() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}

    def all_halved(tensors):
        return {name: tensor.bfloat16() for name, tensor in tensors.items()}

    for name, change, dtype in (("mixed", halved, "float32"), ("narrow", all_halved, "bfloat16")):
        expected = change(write_form(Form(zlab(), tensors=change), tmp_path / name))
        made = load(tmp_path / f"{name}-stage", tmp_path / name, target)
        assert dtype == read_json(made.path / "config.json")["dtype"]
        stored = load_file(made.path / "model.safetensors")
        assert {dtype} == {str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()}
        assert all(torch.equal(expected[key].float(), tensor.float()) for key, tensor in stored.items())


def test_a_training_starts_from_an_imported_draft(target, tmp_path):
    expected = write_form(FORMS["z-lab, unordered ids"], tmp_path / "source")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    model = DraftModel(load_serving(made.path).config)
    load_weights(model, made.path)
    assert all(torch.equal(expected[name], weight) for name, weight in model.state_dict().items())


def test_a_partial_rotary_is_warned_of_on_the_card_and_by_the_gate(target, tmp_path):
    for share, warned in ((1.0, False), (0.5, True)):
        write_form(Form(zlab(partial_rotary_factor=0.5)), tmp_path / f"source-{share}")
        made = load(tmp_path / f"stage-{share}", tmp_path / f"source-{share}", target, partial_rotary_factor=share)
        config = read_json(made.path / "config.json")
        assert share == config["partial_rotary_factor"]
        warning = "artial_rotary_factor is 0.5: SGLang and vLLM rotate this share"
        assert warned == (warning in (made.path / "README.md").read_text())
        assert [warned] == [warning in text for text in rotary_warnings(config) or [""]]


def test_code_of_a_draft_is_not_run_and_stays_behind(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    (tmp_path / "source" / "dflash.py").write_text("raise SystemExit")
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(b"pickle")
    made = load(tmp_path / "stage", tmp_path / "source", target)
    assert ["README.md", "config.json", "model.safetensors"] == sorted(file.name for file in made.path.iterdir())
    assert "auto_map" not in read_json(made.path / "config.json")


def damage_index(folder: Path, names: dict[str, str]) -> None:
    path = folder / "model.safetensors.index.json"
    index = read_json(path)
    write_json(path, index | {"weight_map": index["weight_map"] | names})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json in this draft directory"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"\x08\0\0\0\0\0\0\0{}"), "truncated"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "shards are missing"),
        (lambda folder: damage_index(folder, {"x": "../outside.safetensors"}), "shards are missing"),
        (lambda folder: [file.unlink() for file in folder.glob("model*")], "no *.safetensors in this draft directory"),
    ],
)  # fmt: skip
def test_a_damaged_directory_is_refused_before_the_first_stage(damage, said, target, tmp_path):
    write_form(FORMS["z-lab, sharded"], tmp_path / "source")
    damage(tmp_path / "source")
    config = LoadDraft(target=Ref("target"), source=str(tmp_path / "source"))
    assert said in missing_here(config)["source"]
    with pytest.raises(DataError) as caught:
        load(tmp_path / "stage", tmp_path / "source", target)
    assert said in str(caught.value)


def test_a_config_that_is_a_link_out_of_the_directory_is_refused(target, tmp_path):
    write_form(FORMS["z-lab, plain"], tmp_path / "source")
    (tmp_path / "source" / "config.json").rename(tmp_path / "private.json")
    (tmp_path / "source" / "config.json").symlink_to(tmp_path / "private.json")
    with pytest.raises(DataError, match="a link out of the checkpoint"):
        load(tmp_path / "stage", tmp_path / "source", target)


def test_an_index_that_leads_out_of_the_directory_is_refused(target, tmp_path):
    write_form(FORMS["z-lab, sharded"], tmp_path / "source")
    write_form(FORMS["z-lab, plain"], tmp_path / "outside")
    damage_index(tmp_path / "source", {"x": "../outside/model.safetensors"})
    with pytest.raises(DataError, match=r"names \.\./outside/model.safetensors, which is no file of this directory"):
        load(tmp_path / "stage", tmp_path / "source", target)


def test_the_same_tensor_with_and_without_a_prefix_is_refused(target, tmp_path):
    write_form(Form(zlab(), tensors=lambda tensors: tensors | prefixed(tensors)), tmp_path / "source")
    with pytest.raises(DataError, match=r"fc.weight: is there twice"):
        load(tmp_path / "stage", tmp_path / "source", target)


def test_a_decision_on_partial_rotary_must_be_one_of_the_two(target):
    with pytest.raises(ConfigError, match=r"0.5 in the file, so it can be that or 1.0, not 0.75"):
        read_draft_config(zlab(partial_rotary_factor=0.5), None, 0.75)
    with pytest.raises(ConfigError, match=r"1.0 in the file, so it can be that or 1.0, not 0.5"):
        read_draft_config(zlab(), None, 0.5)


def test_the_rotary_share_of_a_draft_of_dflow_is_not_open_to_decision():
    exported = to_serving(DraftConfig(**PLAIN_SHAPE, partial_rotary_factor=0.5))
    assert 0.5 == read_draft_config(exported).config.partial_rotary_factor
    with pytest.raises(ConfigError, match=r"partial_rotary_factor: 0.5, as it was trained"):
        read_draft_config(exported, None, 1.0)


def test_a_mask_token_that_ends_answers_is_refused(target, tmp_path):
    write_form(Form(zlab(dflash_config={"mask_token_id": EOS})), tmp_path / "source")
    with pytest.raises(DataError, match=r"mask_token_id is an EOS id of the target"):
        load(tmp_path / "stage", tmp_path / "source", target)


@pytest.mark.parametrize("key", sorted(PLAIN | NESTED | FLAT | {"sample_from_anchor": True, "shift_label": True}))
def test_a_key_of_any_type_is_read_or_refused_without_another_error(key):
    plain, dspark, nested = PLAIN, deepspec(), specforge()
    second = speculators_of("dflash2", **FLAT)
    for value in (None, True, -1, 0, 0.5, "text", [], [None], {}, {"a": {"b": [1]}}):
        changes = [config | {key: value} for config in (plain, dspark, nested, second)]
        changes.append(nested | {"dflash_config": nested["dflash_config"] | {key: value}})
        for config in changes:
            try:
                read_draft_config(config)
            except ConfigError as error:
                assert str(error)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), (["x"], 2), ({}, 2)])
def test_a_plan_estimates_the_disk_for_a_dtype_of_any_type(dtype, size, tmp_path):
    write_form(Form(zlab(dtype=dtype)), tmp_path / "source")
    context = PlanContext(launch=Launch(), inputs={}, artifact=None, root=tmp_path, free_disk=0)
    found = estimate(LoadDraft(target=Ref("target"), source=str(tmp_path / "source")), context)
    assert {"draft": draft_parameters(DraftConfig(**PLAIN_SHAPE)) * size} == found.disk


def test_reading_a_config_loads_no_torch():
    exported = to_serving(DraftConfig(**PLAIN_SHAPE))
    code = (
        "import json, sys; from ops.load_draft.read_config import read_draft_config; "
        "from ops.load_draft import conflicts; "
        f"read_draft_config(json.loads({json.dumps(json.dumps(PLAIN))})); "
        f"assert conflicts.record_mistakes(json.loads({json.dumps(json.dumps(exported))})); "
        "sys.exit('torch' in sys.modules)"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
    assert VOCAB == PLAIN["vocab_size"]
