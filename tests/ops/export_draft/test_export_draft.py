"""The exported draft: its files, the contract, and its forward pass beside the training model's."""

import hashlib
import json
import shutil

import attrs
import pytest
import torch
from case_reader import hidden_of_blocks
from draft_chain import EOS, HIDDEN, MASK, VOCAB, make_inputs, make_target, tiny_config, train_config
from fake_stage import FakeStage, folder_digest
from reference_draft import reference_block
from safetensors.torch import load_file, save_file

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.artifacts import DraftCheckpoint
from ops.check_export.run import engine_warnings, server_arg_warnings
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import SCALES, from_serving, to_serving
from ops.lib.drafts.backbone.load import random_draft, tensors_digest
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.serving_contract import check_serving
from ops.lib.drafts.backbone.sizes import expected_shapes
from ops.lib.drafts.dspark.config import Dspark
from ops.train_dflash.run import train_dflash


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    stage = FakeStage(tmp_path_factory.mktemp("train"), inputs)
    train_dflash(train_config(num_layers=2, num_heads=4, num_kv_heads=2, lr=1e-2), stage)
    return {"draft": stage.artifact(DraftCheckpoint), "target": inputs["target"]}


def export(folder, trained, **changes):
    stage = FakeStage(folder, trained)
    export_draft(ExportDraft(draft=Ref("train"), target=Ref("target"), **changes), stage)
    return stage.out_dir


def test_an_export_is_exactly_the_three_files_of_the_contract(tmp_path, trained):
    out = export(tmp_path / "a", trained)
    assert sorted(file.name for file in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = read_json(out / "config.json")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    assert (config["block_size"], config["num_target_layers"], config["vocab_size"]) == (4, 4, VOCAB)
    shape = from_serving(read_json(trained["draft"].path / "config.json"))
    trained_fields = config["dflow"].pop("trained")
    assert trained_fields == attrs.asdict(shape, filter=lambda field, _: field.name not in ("algorithm", *SCALES)) | {
        "target_layer_ids": [0, 1],
        "layer_types": ["full_attention", "full_attention"],
    }
    assert config["dflow"].pop("digest") == {
        "trained": hashlib.sha256(json.dumps(trained_fields, sort_keys=True).encode()).hexdigest(),
        "tensors": tensors_digest(out / "model.safetensors"),
    }
    assert config["dflow"] == {"format": 1, "positions": "sequential", "target": trained["target"].digest}
    assert folder_digest(out) == folder_digest(export(tmp_path / "b", trained))


def test_the_card_links_the_algorithm_and_shows_its_table_as_a_pipeline_has_it(tmp_path, trained):
    checkpoint = shutil.copytree(trained["draft"].path, tmp_path / "checkpoint")
    recipe = {"dspark": {"rank": 4, "sample_from_anchor": True, "base": 0.1}, "sliding_layers": [1], "own": None}
    training = read_json(checkpoint / "training.json")
    write_json(checkpoint / "training.json", training | {"recipe": recipe})
    shape = attrs.evolve(from_serving(read_json(checkpoint / "config.json")), algorithm=Dspark(rank=4))
    model = random_draft(shape, 0)
    write_json(checkpoint / "config.json", to_serving(shape))
    save_file(model.state_dict(), checkpoint / "model.safetensors")
    given = trained | {"draft": attrs.evolve(trained["draft"], path=checkpoint)}
    card = (export(tmp_path / "export", given) / "README.md").read_text()
    assert "| dspark | base = 0.1, rank = 4, sample_from_anchor = true |" in card.splitlines()
    assert "| sliding_layers | 1 |" in card.splitlines()
    extended = "extended by [dspark](https://arxiv.org/abs/2607.05147)"
    assert f"([DFlash](https://arxiv.org/abs/2602.06036), {extended})" in card
    plain = (export(tmp_path / "plain", trained) / "README.md").read_text()
    assert "([DFlash](https://arxiv.org/abs/2602.06036)): it" in plain


def test_the_card_says_of_which_steps_its_loss_is_the_mean(tmp_path, trained):
    training = read_json(trained["draft"].path / "training.json")
    expected = f"| mean loss of the last {training['final_steps']} steps | {training['final_loss']:.4g} |"
    assert expected in (export(tmp_path, trained) / "README.md").read_text().splitlines()


def test_the_tensors_are_those_of_the_contract(tmp_path, trained):
    layer = [
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    names = ["fc", "hidden_norm", "norm", *(f"layers.{index}.{name}" for index in (0, 1) for name in layer)]
    out = export(tmp_path, trained)
    assert sorted(load_file(out / "model.safetensors")) == sorted(f"{name}.weight" for name in names)


@pytest.mark.parametrize("bias", [False, True])
def test_the_model_has_the_shapes_of_the_contract(bias):
    config = attrs.evolve(tiny_config(), attention_bias=bias)
    shapes = {name: tuple(tensor.shape) for name, tensor in DraftModel(config).state_dict().items()}
    assert expected_shapes(to_serving(config)) == shapes


def test_the_exported_forward_equals_the_training_models(tmp_path, trained):
    out = export(tmp_path, trained)
    config, weights = read_json(out / "config.json"), load_file(out / "model.safetensors")
    model = DraftModel(from_serving(read_json(trained["draft"].path / "config.json")))
    model.load_state_dict(load_file(trained["draft"].path / "model.safetensors"))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(14, 2 * HIDDEN, generator=generator)
    anchors, mask = torch.randn(2, HIDDEN, generator=generator), torch.randn(HIDDEN, generator=generator)
    with torch.no_grad():
        hidden = hidden_of_blocks(model, features, anchors, mask, [6, 13])
    for block, anchor in enumerate((6, 13)):
        exact = reference_block(
            config,
            {name: weight.double() for name, weight in weights.items()},
            features.double(),
            torch.stack([anchors[block], mask, mask, mask]).double(),
            anchor,
        )
        torch.testing.assert_close(hidden[block].double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_export_says_so_and_is_rounded(tmp_path, trained, dtype):
    out = export(tmp_path, trained, dtype=dtype)
    weights = load_file(out / "model.safetensors")
    exact = load_file(trained["draft"].path / "model.safetensors")
    assert read_json(out / "config.json")["dtype"] == dtype
    for name, weight in weights.items():
        assert torch.equal(weight, exact[name].to(getattr(torch, dtype)))


def test_what_sglang_was_given_for_the_capture_is_in_the_config_the_card_and_the_gates_warning(tmp_path, trained):
    """Only what changes numbers is repeated in the command; the record keeps all of it."""
    given = {"kv_cache_dtype": "fp8_e5m2", "mem_fraction_static": 0.5}
    copy = shutil.copytree(trained["draft"].path, tmp_path / "draft")
    training = read_json(copy / "training.json")
    training["captured"] |= {"backend": "sglang", "backend_version": "0.5.21", "server_args": given}
    write_json(copy / "training.json", training)
    out = export(tmp_path / "export", trained | {"draft": attrs.evolve(trained["draft"], path=copy)})
    config, card = read_json(out / "config.json"), (out / "README.md").read_text()
    assert given == config["dflow"]["server_args"]
    assert 2 == card.count("--kv-cache-dtype fp8_e5m2")
    assert "mem" not in card.split("## Serving")[1].split("##")[0]
    (warning,) = server_arg_warnings(config)
    assert "captured by SGLang with --kv-cache-dtype fp8_e5m2, which the live stage and evaluate do not use" in warning
    assert [] == server_arg_warnings(read_json(export(tmp_path / "plain", trained) / "config.json"))


UNLIKE = {"sglang-0.5.21": ["writes keys in another order"], "vllm-0.33.0": ['adds "description": null']}
TOLD = "he chat template gets tools in another form from these engines than in the training ("


@pytest.mark.parametrize(
    ("tools_as", "changes", "named"),
    [
        ({}, {}, "sglang-0.5.21 writes keys in another order"),
        ({}, {"formats": ("sglang", "speculators")}, 'order; vllm-0.33.0 adds "description": null'),
        ({}, {"engine": "sglang-0.5.23"}, None),
        ({"tools_as": "sglang-0.5.23"}, {}, None),
        ({"tools_as": "sglang-0.5.23"}, {"engine": "sglang-0.5.21"}, "sglang-0.5.21 writes keys in another order"),
        ({"tools_as": "vllm-0.33.0"}, {"formats": ("sglang", "speculators")}, None),
    ],
)
def test_the_card_and_the_gate_say_which_engines_show_tools_otherwise(tmp_path, trained, tools_as, changes, named):
    copy = shutil.copytree(trained["draft"].path, tmp_path / "draft")
    training, of_tokens = read_json(copy / "training.json"), {"tools_unlike": UNLIKE, **tools_as}
    training["captured"] |= of_tokens
    write_json(copy / "training.json", training)
    out = export(tmp_path / "export", trained | {"draft": attrs.evolve(trained["draft"], path=copy)}, **changes)
    card, warnings = (out / "README.md").read_text(), engine_warnings(of_tokens, read_json(out / "config.json"))
    assert (named is not None) == (TOLD in card) == bool(warnings)
    if named is not None:
        assert f"{named}): set tools_as of tokenize_chat" in card
        assert f"{named}): set tools_as of tokenize_chat" in warnings[0]
    assert TOLD not in (export(tmp_path / "plain", trained) / "README.md").read_text()


@pytest.mark.parametrize(
    ("key", "changes", "named"),
    [
        ("thinking", {"engine": "sglang-0.5.23"}, "(sglang-0.5.23)"),
        ("reasoning", {"formats": ("sglang", "speculators")}, "(sglang-0.5.21, sglang-0.5.23)"),
        ("thinking", {"formats": ("sglang", "speculators")}, "(sglang-0.5.21, sglang-0.5.23, vllm-0.33.0)"),
        (None, {}, None),
    ],
)
def test_the_card_and_the_gate_say_which_engines_show_no_earlier_reasoning(tmp_path, trained, key, changes, named):
    copy = shutil.copytree(trained["draft"].path, tmp_path / "draft")
    training, of_tokens = read_json(copy / "training.json"), {} if key is None else {"reasoning_key": key}
    training["captured"] |= of_tokens
    write_json(copy / "training.json", training)
    out = export(tmp_path / "export", trained | {"draft": attrs.evolve(trained["draft"], path=copy)}, **changes)
    card, warnings = (out / "README.md").read_text(), engine_warnings(of_tokens, read_json(out / "config.json"))
    told = (
        f'the chat template shows the reasoning of earlier answers from "{key}", which these engines do not give it '
        f'{named}: their prompts lack what the training had; set history_reasoning = "dropped" of tokenize_chat and '
        "regenerate_answers"
    )
    assert ([told] if named else []) == warnings
    assert (named is not None) == (told[1:] in card)


def test_an_export_for_one_version_of_sglang_says_so_in_the_config_and_the_card(tmp_path, trained):
    for engine, said in (("sglang-0.5.23", "With SGLang 0.5.23, in"), (None, "With SGLang 0.5.21 or 0.5.23, in")):
        out = export(tmp_path / str(engine), trained, engine=engine)
        assert engine == read_json(out / "config.json")["dflow"].get("engine")
        assert said in (out / "README.md").read_text()
    with pytest.raises(ConfigError, match=r'engine.*"sglang-0.5.21", "sglang-0.5.23"'):
        export(tmp_path / "other", trained, engine="sglang-0.5.22")


def test_a_draft_trained_for_another_target_is_refused(tmp_path, trained):
    other = make_target(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match="was trained for the target"):
        export(tmp_path / "export", trained | {"target": other})


def damaged(tmp_path, trained, config=None, tensors=None):
    """The mistakes that the contract check reports after changes of an export's config or tensors."""
    out = export(tmp_path, trained)
    if config:
        data = read_json(out / "config.json")
        config(data)
        write_json(out / "config.json", data)
    if tensors:
        weights = load_file(out / "model.safetensors")
        tensors(weights)
        save_file(weights, out / "model.safetensors")
    with pytest.raises(DataError) as caught:
        check_serving(out, trained["target"])
    return [line[2:] for line in str(caught.value).splitlines()[1:] if not line.startswith("   ")]


def test_all_mistakes_of_an_export_are_listed_at_once(tmp_path, trained):
    def config(data):
        del data["rope_scaling"]
        data["vocab_size"] = 25
        data["architectures"] = ["Qwen3Model"]

    def tensors(weights):
        del weights["layers.1.self_attn.k_norm.weight"]
        weights["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
        weights["fc.weight"] = torch.zeros(HIDDEN, HIDDEN)
        weights["norm.weight"] = weights["norm.weight"].half()

    assert damaged(tmp_path, trained, config, tensors) == [
        "config.json: rope_scaling is missing",
        'config.json: architectures must be ["DFlashDraftModel"], got ["Qwen3Model"]',
        "config.json: vocab_size must be 24, got 25",
        "model.safetensors: fc.weight must be [16, 32], got [16, 16]",
        "model.safetensors: layers.1.self_attn.k_norm.weight is missing",
        "model.safetensors: lm_head.weight does not belong here",
        "model.safetensors: norm.weight must be of dtype F32, got F16",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"target_layer_ids": [1, 1]}, "target_layer_ids: must be distinct and ascending, got [1, 1]"),
        ({"target_layer_ids": [1, 0]}, "target_layer_ids: must be distinct and ascending, got [1, 0]"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids: [3] outside 0..2"),
        ({"mask_token_id": 24}, "mask_token_id: 24 is no id below vocab_size = 24"),
        ({"mask_token_id": EOS}, "dflash_config.mask_token_id is an EOS id of the target"),
        ({"target_layer_ids": [0]}, "fc.weight must be [16, 16], got [16, 32]"),
    ],
)
def test_a_wrong_dflash_config_is_found(tmp_path, trained, change, expected):
    mistakes = damaged(tmp_path, trained, lambda data: data["dflash_config"].update(change))
    assert any(expected in line for line in mistakes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"block_size": 1}, "block_size: must be at least 2"),
        ({"num_target_layers": 5}, "num_target_layers must be 4, got 5"),
        ({"dtype": "int8"}, 'dtype must be one of float32, bfloat16, float16, got "int8"'),
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu", got "gelu"'),
        ({"dflow": {"format": 2, "positions": "mrope"}}, "dflow.format must be 1, got 2"),
        ({"dflow": {"format": 1, "positions": "mrope"}}, 'positions: must be "sequential", got "mrope"'),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window: layers of sliding_attention need one"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8},
            "use_sliding_window: must be true with these layer_types",
        ),
    ],
)
def test_a_wrong_config_is_found(tmp_path, trained, change, expected):
    mistakes = damaged(tmp_path, trained, lambda data: data.update(change))
    assert any(expected in line for line in mistakes)


def test_files_that_are_missing_or_too_many_are_named(tmp_path, trained):
    out = export(tmp_path, trained)
    (out / "config.json").rename(out / "mask_embedding.pt")
    with pytest.raises(DataError, match=r"(?s)config\.json: is missing\n.*mask_embedding\.pt: does not belong here"):
        check_serving(out, trained["target"])
