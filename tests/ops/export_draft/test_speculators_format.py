"""The export in speculators' format: each of its traps, what it cannot express, and that it is the same draft."""

from __future__ import annotations

import shutil

import attrs
import pytest
from draft_chain import MASK, VOCAB, make_target, tiny_config
from speculators_cases import WINDOWS
from test_export_draft import export, trained  # noqa: F401 (a fixture)

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.export_draft.conflicts import conflicts
from ops.export_draft.op import ExportDraft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.speculators import Verifier, to_speculators
from ops.lib.forecasts import DraftForecast

BOTH = ("sglang", "speculators")
FULL, SLIDING = "full_attention", "sliding_attention"


def test_the_folder_is_complete_and_everything_that_others_default_to_something_else_is_written(tmp_path, trained):  # noqa: F811
    out = export(tmp_path, trained, formats=BOTH)
    assert ["README.md", "config.json", "model.safetensors", "speculators"] == sorted(
        file.name for file in out.iterdir()
    )
    assert ["config.json", "model.safetensors"] == sorted(file.name for file in (out / "speculators").iterdir())
    assert {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "dtype": "float32",
        "block_size": 4,
        "mask_token_id": MASK,
        "draft_vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": [1, 2],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_act": "silu",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "layer_types": [FULL, FULL],
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    } == read_json(out / "speculators" / "config.json")
    assert ["sglang", "speculators"] == read_json(out / "config.json")["dflow"]["formats"]


def test_both_formats_share_the_file_of_the_weights(tmp_path, trained):  # noqa: F811
    out = export(tmp_path, trained, formats=BOTH, dtype="bfloat16")
    assert (out / "model.safetensors").samefile(out / "speculators" / "model.safetensors")
    assert "bfloat16" == read_json(out / "speculators" / "config.json")["dtype"]


def test_the_serving_directory_is_as_without_the_other_format(tmp_path, trained):  # noqa: F811
    alone, both = export(tmp_path / "alone", trained), export(tmp_path / "both", trained, formats=BOTH)
    config = read_json(both / "config.json")
    del config["dflow"]["formats"]
    assert read_json(alone / "config.json") == config
    assert (alone / "model.safetensors").read_bytes() == (both / "model.safetensors").read_bytes()


def test_windows_are_causal_and_a_draft_without_them_says_the_opposite():
    """vLLM makes all layers causal, full ones too, where the flag is false."""
    plain, windows = (to_speculators(tiny_config(**shape), "float32", Verifier(None, ())) for shape in ({}, WINDOWS))
    assert (True, False) == (plain["sliding_window_non_causal"], windows["sliding_window_non_causal"])
    layers = windows["transformer_layer_config"]
    assert (True, 6, [SLIDING] * 2) == (layers["use_sliding_window"], layers["sliding_window"], layers["layer_types"])


def test_a_target_with_a_model_id_is_the_verifier(tmp_path, trained):  # noqa: F811
    made = trained["target"]
    info = read_json(made.path / "target.json")
    copy = attrs.evolve(make_target(tmp_path / "named"), digest=made.digest)
    write_json(copy.path / "target.json", info | {"model_id": "owner/target", "revision": "0" * 40})
    config = read_json(copy.path / "model" / "config.json")
    write_json(copy.path / "model" / "config.json", config | {"architectures": ["Qwen3ForCausalLM"]})
    out = export(tmp_path / "export", trained | {"target": copy}, formats=BOTH)
    expected = {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]}
    assert expected == read_json(out / "speculators" / "config.json")["speculators_config"]["verifier"]


MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 6}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (MIXED, "layer_types: full and sliding layers, and vLLM reads sliding_window_non_causal as that of all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5, and speculators' class rotates whole heads"),
    ],
)
def test_what_the_format_cannot_express_is_refused_and_the_plan_says_so(tmp_path, trained, change, why):  # noqa: F811
    folder = tmp_path / "draft"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "training.json"):
        (folder / name).write_bytes((trained["draft"].path / name).read_bytes())
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | change | {"use_sliding_window": change is MIXED})
    draft = attrs.evolve(trained["draft"], path=folder)
    with pytest.raises(DataError) as caught:
        export(tmp_path / "both", trained | {"draft": draft}, formats=BOTH)
    assert why in str(caught.value) and "leave it out of formats" in str(caught.value)
    inputs = {"draft": DraftForecast(shape=tiny_config(**change))}
    fields, forecast = {"draft": Ref("train"), "target": Ref("target")}, inputs | {"target": None}
    assert str(caught.value) == f"{folder}: {conflicts(ExportDraft(**fields, formats=BOTH), forecast)['formats']}"
    assert {} == conflicts(ExportDraft(**fields), forecast)


@pytest.mark.parametrize(
    ("formats", "message"),
    [(("speculators",), 'must contain "sglang"'), (("sglang", "sglang"), "names one twice: sglang")],
)
def test_the_contracts_own_format_is_always_written(formats, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        ExportDraft(draft=Ref("a"), target=Ref("b"), formats=formats)


def test_the_card_has_both_commands_where_both_formats_are_written(tmp_path, trained):  # noqa: F811
    alone = (export(tmp_path / "alone", trained) / "README.md").read_text()
    both = (export(tmp_path / "both", trained, formats=BOTH) / "README.md").read_text()
    assert "vllm" not in alone
    serving = both.split("## Serving")[1].split("<!--")[0]
    assert 'python -m sglang.launch_server --model-path "$TARGET"' in serving
    assert (
        'vllm serve "$TARGET" --dtype float32 --speculative-config \'{"method": "dflash", "model": "./speculators", '
        '"num_speculative_tokens": 3}\' --per-request-spec-decode-metrics summary --host 127.0.0.1 --port 8000'
    ) in serving
    assert 2 == serving.count("TARGET=/path/to/target")


def test_the_card_of_a_target_beyond_qwen_leaves_it_to_vllm_whether_it_serves_it(tmp_path, trained):  # noqa: F811
    target = shutil.copytree(trained["target"].path, tmp_path / "target")
    write_json(target / "target.json", read_json(target / "target.json") | {"model_type": "glm4_moe"})
    given = trained | {"target": attrs.evolve(trained["target"], path=target)}
    card = (export(tmp_path / "export", given, formats=BOTH) / "README.md").read_text()
    assert "Whether vLLM serves a draft for this target, it reports when it starts. If it does, with vLLM" in card
    assert 1 == card.count("--per-request-spec-decode-metrics summary --model-impl transformers --host")
