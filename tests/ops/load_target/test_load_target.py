"""Targets from checkpoint directories, whole and damaged."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest
import torch
from any_targets import any_checkpoint
from attrs import evolve
from fake_stage import FakeStage
from family_checkpoints import FAMILIES, HIDDEN, VOCABULARY, make_checkpoint, picture, token_sample
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from rounding import assert_equal_within_rounding
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3Config, Qwen3ForCausalLM, dynamic_module_utils

from dsl.errors import DataError
from dsl.estimate import PlanContext
from dsl.launch import Launch
from ops.artifacts import TargetModel
from ops.lib.data.files import write_json
from ops.lib.target import fetch
from ops.lib.target.checkpoint_files import PROCESSOR, copy_files
from ops.lib.target.embedding_and_head import frozen_ends
from ops.lib.target.model import Target, describe_target, target_info, text_config
from ops.lib.target.probed import COPY, WEIGHTS, kept_probes
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.plan import estimate, missing_here
from ops.load_target.run import load_target

REFUSAL = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetModel:
    """A tiny Qwen3-VL."""
    folder = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("family") / "checkpoint")
    return load(folder, tmp_path_factory.mktemp("target"))


@pytest.fixture
def checkpoint(target, tmp_path):
    """A copy of its checkpoint directory, to be damaged."""
    return shutil.copytree(target.path / "model", tmp_path / "checkpoint")


def load(checkpoint, tmp_path, **changes) -> TargetModel:
    stage = FakeStage(tmp_path / "stage")
    load_target(LoadTarget(checkpoint=str(checkpoint), **changes), stage)
    return stage.artifact(TargetModel)


def edit_config(checkpoint, **changes):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_checkpoint_directory_becomes_the_same_target(target, checkpoint, tmp_path):
    loaded = load(checkpoint, tmp_path)
    assert target_info(target) == target_info(loaded)
    assert text_config(target) == text_config(loaded)
    before, after = Target.load(target).model.state_dict(), Target.load(loaded).model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_code_and_pickles_in_a_checkpoint_stay_behind(checkpoint, tmp_path):
    (checkpoint / "modeling_custom.py").write_text("raise SystemExit")
    (checkpoint / "pytorch_model.bin").write_bytes(b"pickle")
    loaded = load(checkpoint, tmp_path)
    assert [file.name for file in (loaded.path / "model").iterdir() if file.suffix in (".py", ".bin")] == []


def test_a_text_only_qwen3_is_a_target_with_an_untied_head(target, tmp_path):
    config = Qwen3Config(
        vocab_size=600,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "qwen3")
    copy_files(target.path / "model", tmp_path / "qwen3", ("tokenizer*", "chat_template*"))
    loaded = load(tmp_path / "qwen3", tmp_path, mask_token_id=7)
    info = target_info(loaded)
    assert (
        info["model_type"],
        info["vision"],
        info["embed_key"],
        info["lm_head_key"],
        info["tied"],
        info["mask_token_id"],
        info["eos_token_ids"],
    ) == ("qwen3", False, "model.embed_tokens.weight", "lm_head.weight", False, 7, [2])
    embed, head = frozen_ends(loaded)
    assert torch.equal(model.model.embed_tokens.weight, embed)
    assert torch.equal(model.lm_head.weight, head.weight_VM)
    assert len(Target.load(loaded).decoder_layers) == 4


def logits(target: TargetModel, sample) -> torch.Tensor:
    loaded = Target.load(target)
    with torch.no_grad():
        return loaded.forward(loaded.inputs([sample])).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_with_a_head_of_its_own_and_with_a_tied_one(name, tmp_path):
    for tied in (True, False):
        folder = make_checkpoint(name, tmp_path / f"checkpoint-{tied}", tie_word_embeddings=tied)
        loaded = load(folder, tmp_path / f"stage-{tied}")
        info = target_info(loaded)
        assert (name, FAMILIES[name].vision, VOCABULARY, HIDDEN, 8) == tuple(
            info[key] for key in ("model_type", "vision", "vocab_size", "hidden_size", "num_layers")
        )
        assert (tied, tied) == (info["tied"], info["embed_key"] == info["lm_head_key"])
        embed, head = frozen_ends(loaded)
        model = Target.load(loaded)
        assert torch.equal(model.embed_weight, embed)
        assert torch.equal(model.head_weight, head.weight_VM)
        assert tied == torch.equal(embed, head.weight_VM)


def test_tied_embeddings_may_be_named_in_the_text_config_alone(target, checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    (checkpoint / "config.json").write_text(json.dumps(config))
    loaded = load(checkpoint, tmp_path)
    assert target_info(target) == target_info(loaded)
    sample = token_sample(load_processor(str(checkpoint)), "What is it?", images=[picture(24, 16)])
    assert torch.equal(logits(target, sample), logits(loaded, sample))


def test_an_older_qwen2_5_vl_whose_text_config_is_flat_is_the_same_target(tmp_path):
    folder = make_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    before = load(folder, tmp_path / "nested")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    text = {name: value for name, value in text.items() if name not in ("model_type", "rope_parameters")}
    rope = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    (folder / "config.json").write_text(json.dumps(text | rope | config))
    after = load(folder, tmp_path / "flat")
    assert target_info(before) == target_info(after)
    assert text_config(after)["num_hidden_layers"] == 8
    sample = token_sample(load_processor(str(folder)), "What is it?", images=[picture(24, 16)])
    assert torch.equal(logits(before, sample), logits(after, sample))


def test_a_text_only_qwen3_5_is_a_target(tmp_path):
    folder = make_checkpoint("qwen3_5", tmp_path / "vlm")
    vlm = Target.load(load(folder, tmp_path / "stage-vlm"))
    text = Qwen3_5ForCausalLM(vlm.model.config.text_config)
    text.model.load_state_dict(vlm.model.model.language_model.state_dict())
    text.lm_head.load_state_dict(vlm.model.lm_head.state_dict())
    text.save_pretrained(tmp_path / "text")
    copy_files(folder, tmp_path / "text", [name for name in PROCESSOR if "processor" not in name])
    loaded = load(tmp_path / "text", tmp_path / "stage-text", lm_head_key=None)
    assert ("qwen3_5_text", False) == tuple(target_info(loaded)[key] for key in ("model_type", "vision"))
    target = Target.load(loaded)
    assert target.has_linear_attention
    sample = token_sample(load_processor(str(tmp_path / "text")), "What is it?")
    as_vlm = evolve(sample, pixel_values=torch.empty(0, 96))
    with torch.no_grad():
        expected = vlm.forward(vlm.inputs([as_vlm])).logits
        assert_equal_within_rounding(expected, target.forward(target.inputs([sample])).logits)


def test_weights_that_the_files_lack_are_not_made_up(checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.language_model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"the files lack model.language_model.layers.3.mlp.up_proj.weight"):
        Target.load(load(checkpoint, tmp_path))


OWN_MODEL = """
from transformers import Qwen3ForCausalLM

class OwnModel(Qwen3ForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 1000
        return output
"""


def test_a_vision_language_checkpoint_without_its_image_processor_is_refused(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=r"without an image processor \(preprocessor_config.json\); copy that file"):
        load_target(LoadTarget(checkpoint=str(folder)), FakeStage(tmp_path))


def test_a_checkpoint_with_code_of_its_own_is_refused_unless_trusted_and_its_code_travels_along_then(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = make_checkpoint("qwen3", tmp_path / "checkpoint")
    plain = load(folder, tmp_path / "plain")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"})
    (folder / "modeling_own.py").write_text(OWN_MODEL)
    with pytest.raises(DataError, match=r"auto_map names code .*AutoModelForCausalLM.*trust_remote_code = true"):
        load(folder, tmp_path / "refused")
    trusted = load(folder, tmp_path / "trusted", trust_remote_code=True)
    assert (False, True) == tuple(target_info(loaded)["trust_remote_code"] for loaded in (plain, trusted))
    assert (trusted.path / "model" / "modeling_own.py").read_text() == OWN_MODEL
    sample = token_sample(load_processor(str(folder), trust_remote_code=True), "What is it?")
    assert torch.equal(logits(plain, sample) + 1000, logits(trusted, sample))


def test_code_of_another_repository_is_refused_even_where_code_is_trusted(tmp_path):
    folder = make_checkpoint("qwen3", tmp_path / "checkpoint")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "someone/else--modeling_own.OwnModel"})
    with pytest.raises(DataError, match=r"another repository \(someone/else--modeling_own.OwnModel\)"):
        load(folder, tmp_path, trust_remote_code=True)


def test_a_directory_without_config_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: this directory is empty"):
        load(tmp_path / "empty", tmp_path)


def test_a_broken_config_names_line_and_column(checkpoint, tmp_path):
    (checkpoint / "config.json").write_text('{"a": 1,\n "b": }')
    with pytest.raises(DataError, match=r"config\.json:2:7: not valid JSON"):
        load(checkpoint, tmp_path)


def test_a_family_that_is_not_supported_is_refused(checkpoint, tmp_path):
    edit_config(checkpoint, model_type="word_counter")
    with pytest.raises(
        DataError, match=r"checkpoint: model_type 'word_counter': the installed transformers has no language model"
    ):
        load(checkpoint, tmp_path)


def test_a_file_is_no_checkpoint(checkpoint, tmp_path):
    with pytest.raises(DataError, match="is a file; a checkpoint is the directory"):
        load(checkpoint / "config.json", tmp_path)


def test_damaged_weights_name_the_file(checkpoint, tmp_path):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        DataError, match=r"checkpoint/model\.safetensors: truncated, .* bytes; copy or download it again"
    ):
        load(checkpoint, tmp_path)


def test_a_directory_without_safetensors_is_refused(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"no \*\.safetensors"):
        load(checkpoint, tmp_path)


def test_a_missing_head_of_an_untied_model_is_refused(checkpoint, tmp_path):
    edit_config(checkpoint, tie_word_embeddings=False)
    message = r"none of the tensors end in lm_head\.weight, and config.json does not set tie_word_embeddings; set it to"
    with pytest.raises(DataError, match=message):
        load(checkpoint, tmp_path)


def add_tensor(checkpoint, name, tensor):
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors | {name: tensor}, checkpoint / "model.safetensors", {"format": "pt"})


def test_several_embeddings_are_listed(checkpoint, tmp_path):
    add_tensor(checkpoint, "other.embed_tokens.weight", torch.zeros(VOCABULARY, HIDDEN))
    message = r"2 of the tensors end in embed_tokens.*are: model.*embed_tokens.weight, other.*name one of them as embed"
    with pytest.raises(DataError, match=message):
        load(checkpoint, tmp_path)


def test_embeddings_of_another_shape_or_part_are_no_candidates(checkpoint, target, tmp_path):
    add_tensor(checkpoint, "other.embed_tokens.weight", torch.zeros(2, 2))
    add_tensor(checkpoint, "model.visual.embed_tokens.weight", torch.zeros(VOCABULARY, HIDDEN))
    add_tensor(checkpoint, "mtp.embed_tokens.weight", torch.zeros(VOCABULARY, HIDDEN))
    assert target_info(target) == target_info(load(checkpoint, tmp_path))


def test_the_keys_of_the_ends_can_be_given(tmp_path):
    folder = make_checkpoint("qwen3", tmp_path / "untied", tie_word_embeddings=False)
    add_tensor(folder, "other.lm_head.weight", torch.ones(VOCABULARY, HIDDEN))
    with pytest.raises(
        DataError,
        match=r"2 of the tensors end in lm_head.weight or embed_out.weight; .*name one of them as lm_head_key",
    ):
        load(folder, tmp_path)
    loaded = load(folder, tmp_path, lm_head_key="lm_head.weight", embed_key="model.embed_tokens.weight")
    info = target_info(loaded)
    assert ("model.embed_tokens.weight", "lm_head.weight") == (info["embed_key"], info["lm_head_key"])
    embed, head = frozen_ends(loaded)
    model = Target.load(loaded)
    assert torch.equal(model.embed_weight, embed)
    assert torch.equal(model.head_weight, head.weight_VM)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"embed_key": "no.such"}, r'embed_key = "no.such" is not one of .*embed_tokens.weight'),
        (
            {"embed_key": "model.language_model.norm.weight"},
            r"the tensors of shape \[400, 32\] are: model.language_model",
        ),
        ({"lm_head_key": "lm_head.weight"}, r'lm_head_key = "lm_head.weight", but the config has tie_word_embeddings'),
    ],
)
def test_a_wrong_key_is_refused_with_the_candidates(checkpoint, tmp_path, keys, message):
    with pytest.raises(DataError, match=message):
        load(checkpoint, tmp_path, **keys)


def test_a_tied_target_may_hold_its_head_a_second_time(target, checkpoint, tmp_path):
    add_tensor(checkpoint, "lm_head.weight", frozen_ends(target)[0])
    loaded = load(checkpoint, tmp_path)
    assert target_info(target) == target_info(loaded)
    assert torch.equal(frozen_ends(target)[1].weight_VM, frozen_ends(loaded)[1].weight_VM)
    assert torch.equal(Target.load(loaded).head_weight, frozen_ends(loaded)[1].weight_VM)


def test_a_target_without_a_mask_token_is_refused(target):
    with pytest.raises(DataError, match="no mask token is known"):
        describe_target(target.path / "model", None, [2])


def test_a_mask_token_outside_the_vocabulary_is_refused(target):
    with pytest.raises(DataError, match="mask_token_id 400 is outside the vocabulary of 400"):
        describe_target(target.path / "model", VOCABULARY, [2])


def test_a_mask_token_that_texts_give_is_warned_of(checkpoint, tmp_path, capsys):
    vocabulary = load_processor(str(checkpoint)).tokenizer.get_vocab()
    load(checkpoint, tmp_path / "first", mask_token_id=vocabulary["a"])
    assert f"warning: mask_token_id {vocabulary['a']} is the id that the tokenizer gives to the text 'a'" in (
        capsys.readouterr().out
    )
    load(checkpoint, tmp_path / "second")
    said = capsys.readouterr().out.splitlines()
    assert "info: measuring a small random copy of the target, up to a minute on a busy machine" == said[0]
    assert said[1].startswith("info: measuring the weights of the target, ") and 2 == len(said)
    assert said[1].endswith(" in float32, less than a minute")


def test_ids_beyond_the_vocabulary_are_refused(checkpoint, tmp_path):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCABULARY}))
    with pytest.raises(DataError, match=f"outside the model's vocabulary of {VOCABULARY}: eos_token_id {VOCABULARY}"):
        load(checkpoint, tmp_path)


def test_a_dtype_that_is_no_name_is_refused_before_the_first_stage(checkpoint):
    edit_config(checkpoint, dtype=["x"])
    assert (
        'dtype must be the name of a dtype, such as "bfloat16", got ["x"]'
        in (missing_here(LoadTarget(checkpoint=str(checkpoint)))["checkpoint"])
    )


def test_a_name_that_is_neither_a_directory_nor_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="neither a local directory nor a model"):
        load("nobody/no-such-model", tmp_path)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (httpx.ConnectError("Name or service not known"), "the Hub cannot be reached"),
        (LocalEntryNotFoundError("not cached"), "the Hub cannot be reached"),
        (RepositoryNotFoundError("404", response=REFUSAL), "the Hub has no such model, or it is private"),
        (GatedRepoError("403", response=REFUSAL), "its page asks for agreement"),
        (RevisionNotFoundError("404", response=REFUSAL), "the Hub has no such commit of it"),
    ],
)
def test_a_download_that_fails_says_why_and_what_to_do(error, told, monkeypatch):
    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(fetch, "snapshot_download", fail)
    with pytest.raises(DataError) as caught:
        fetch.fetch("owner/name", "0a" * 20, ())
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"owner/name@{'0a' * 20} is neither a local directory nor a model that can be downloaded: ")
    assert told in line


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint, tmp_path):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load(checkpoint, tmp_path)


LARGE_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("fields", "free", "expected"),
    [
        ({}, 80e9, "on a small random copy and on its weights, 32.1 GB in float32, about 13 minutes (docs/targets.md)"),
        (
            {},
            64e9,
            "on a small random copy and on its weights, 32.1 GB in float32, where half of the free memory holds them: "
            "here it does not (docs/targets.md)",
        ),
        (
            {"auto_map": {"AutoModel": "own.Own"}},
            80e9,
            "on its weights, 32.1 GB in float32, about 13 minutes (docs/targets.md)",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, 80e9, None),
        ({"num_hidden_layers": 1, "vocab_size": 400}, 80e9, None),
    ],
)
def test_a_plan_says_what_is_loaded_to_measure_a_large_target(tmp_path, monkeypatch, fields, free, expected):
    file = tmp_path / "targets" / "owner" / "name" / f"{40 * 'a'}.json"
    file.parent.mkdir(parents=True)
    write_json(file, LARGE_LLAMA | fields)
    monkeypatch.setattr("ops.load_target.plan.free_memory", lambda: free)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0, 1})
    context = PlanContext(launch=Launch(), inputs={}, artifact=None, root=tmp_path, free_disk=0)
    found = estimate(LoadTarget(checkpoint="owner/name", revision=40 * "a"), context)
    measuring = [note for note in found.notes if "measures" in note]
    assert ([] if expected is None else [f"measures what holds of the target {expected}"]) == measuring
    is_loaded = free == 80e9 and "quantization_config" not in fields
    assert (["weights to measure"] if is_loaded else []) == [*found.memory]
    if is_loaded and expected:
        assert 32.1e9 == pytest.approx(found.memory["weights to measure"], rel=1e-3)


def test_the_stage_measures_the_weights_exactly_where_a_plan_says_so(tmp_path, monkeypatch):
    folder = any_checkpoint("llama", tmp_path / "checkpoint")
    context = PlanContext(launch=Launch(), inputs={}, artifact=None, root=tmp_path, free_disk=0)
    [size] = estimate(LoadTarget(checkpoint=str(folder)), context).memory.values()
    for free, measured in ((2 * size, [COPY]), (2 * size + 1, [COPY, WEIGHTS])):
        for place in ("ops.load_target.plan", "ops.lib.target.measure"):
            monkeypatch.setattr(f"{place}.free_memory", lambda free=free: free)
        assert len(measured) - 1 == len(estimate(LoadTarget(checkpoint=str(folder)), context).memory)
        stage = FakeStage(tmp_path / str(free))
        load_target(LoadTarget(checkpoint=str(folder)), stage)
        assert measured == [probe.on for probe in kept_probes(stage.out_dir)]
