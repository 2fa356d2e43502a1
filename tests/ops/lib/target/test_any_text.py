"""What is read of a text checkpoint that is not Qwen's, before and after it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from any_targets import any_checkpoint, tiny_config
from transformers import AutoConfig

from dsl.op import Ref
from ops.lib.target.checkpoint_check import checkpoint_mistakes, ends_mistakes, sizes_in
from ops.lib.target.head_settings import HeadSettings, embedding_scale, head_settings
from ops.lib.target.model import Target, complete_config, describe_target, read_config
from ops.lib.target.sizes import BY_CONFIG, TargetSizes
from ops.lib.target.token_ids import Vocabulary
from ops.lib.vision.family_config import QWEN, with_defaults
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.shape import forecast_shape

ONE_OF_EACH_END = {  # head settings, scale of the embedding, attention
    "llama": (HeadSettings(), 1.0, "sdpa"),
    "gemma2": (HeadSettings(soft_cap=30.0), 8.0, "eager"),
    "cohere": (HeadSettings(scale=0.0625), 1.0, "sdpa"),
    "granite": (HeadSettings(scale=0.25), 3.0, "sdpa"),
    "phi": (HeadSettings(bias=True), 1.0, "sdpa"),
    "gpt_oss": (HeadSettings(), 1.0, "eager"),
}


@pytest.mark.parametrize(("kind", "expected"), ONE_OF_EACH_END.items())
def test_a_checkpoint_is_described_counted_and_loaded(tmp_path: Path, kind: str, expected: tuple[Any, ...]) -> None:
    folder = any_checkpoint(kind, tmp_path / "target")
    assert [] == checkpoint_mistakes(folder)
    assert {} == ends_mistakes(folder, None, None)
    config = read_config(folder)
    target = Target.from_directory(folder, describe_target(folder, 7, [2]))
    assert sum(weight.numel() for weight in target.model.parameters()) == sizes_in(folder, config).parameters
    settings, scale, attention = expected
    assert (settings, scale) == (head_settings(config), embedding_scale(config))
    assert attention == target.model.config._attn_implementation
    bias = target.model.get_output_embeddings().bias
    assert settings.bias == (bias is not None)
    inputs = torch.randint(10, 300, (1, 9))
    with torch.inference_mode():
        states = target.model(input_ids=inputs, output_hidden_states=True)
        x = torch.nn.functional.linear(states.hidden_states[-1], target.head_weight, bias) * settings.scale
        logits = settings.soft_cap * torch.tanh(x / settings.soft_cap) if settings.soft_cap else x
        rows = torch.nn.functional.embedding(inputs, target.embed_weight) * scale
    torch.testing.assert_close(states.logits, logits)
    torch.testing.assert_close(states.hidden_states[0], rows)


def test_a_config_that_leaves_fields_to_its_class_is_written_whole(tmp_path: Path) -> None:
    folder = any_checkpoint(
        "gemma3_text", tmp_path / "target", num_attention_heads=8, num_key_value_heads=4, head_dim=256
    )
    file = folder / "config.json"
    published = json.loads(file.read_text())
    left = ("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_parameters")
    for name in left:
        del published[name]
    file.write_text(json.dumps(published))
    assert [] == checkpoint_mistakes(folder)
    complete_config(folder)
    complete = json.loads(file.read_text())
    assert published == {name: complete[name] for name in published}
    assert (8, 4, 256, True) == tuple(complete[name] for name in left[:4])
    assert 1e6 == complete["rope_parameters"]["full_attention"]["rope_theta"]
    assert AutoConfig.for_model(**published).to_dict() == AutoConfig.for_model(**complete).to_dict()
    complete_config(folder)
    assert complete == json.loads(file.read_text())


def test_a_type_that_the_formulas_do_not_know_is_counted_by_a_model_without_weights() -> None:
    config = tiny_config("opt", ffn_dim=96, word_embed_proj_dim=64).to_dict()
    assert "opt" not in (*BY_CONFIG, *QWEN)
    count = TargetSizes.of(with_defaults(config)).parameters
    # By hand: both embeddings, and in each of 6 layers 4 projections, 2 of the MLP, their biases, and 2 norms.
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 96 + 96 + 64 + 4 * 64
    assert 400 * 64 + (512 + 2) * 64 + 6 * layer + 2 * 64 == count


def tokens(folder: Path, special: list[str], template: str = "{{ messages }}", ordinary: int = 390) -> Vocabulary:
    vocab = {f"w{number}": number for number in range(len(special), ordinary)}
    added = [{"id": number, "content": text, "special": True} for number, text in enumerate(special)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 390}))
    found = Vocabulary.of(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("special", "number"),
    [
        (["<s>", "<|reserved_special_token_0|>", "<tool>"], 1),
        (["<bos>", "<unused0>", "<tool>"], 1),
        (["<|endoftext|>", "<first>", "<second>", "<in_template>"], 2),
        (["<|endoftext|>", "<in_template>"], 389),
    ],
)
def test_the_mask_token_is_one_that_no_text_gives(tmp_path: Path, special: list[str], number: int) -> None:
    found = tokens(tmp_path, special, "<in_template>{{ messages }}")
    assert found.known_mask_id is None
    assert number == next(found.possible_mask_ids())[0]


def test_a_row_without_a_token_comes_first(tmp_path: Path) -> None:
    assert 380 == next(tokens(tmp_path, ["<|reserved_special_token_0|>"], ordinary=380).possible_mask_ids())[0]


def test_special_tokens_with_a_meaning_are_no_masks(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"unk_token": "<what>", "bos_token": {"content": "<x>"}})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert 0 == next(tokens(tmp_path, ["<free>", "<what>", "<y>", "<z>", "<x>"]).possible_mask_ids())[0]


def test_tokens_of_roles_that_a_template_puts_together_are_no_masks(tmp_path: Path) -> None:
    found = tokens(tmp_path, ["<|free|>", "<|user|>", "<|assistant|>", "<|system|>"], "<|{{ m['role'] }}|>")
    assert (0, "the special token <|free|>, which the chat template does not have") == next(found.possible_mask_ids())


def shape(**text: Any) -> Any:
    config = {"model_type": "llama", "hidden_size": 64, "vocab_size": 400, "num_hidden_layers": 8} | text
    given = {"num_attention_heads": 4, "intermediate_size": 96} | config
    fields = TrainDflash(features=Ref("f"), batches=Ref("b"), target=Ref("t"), tokens=Ref("k"))
    return forecast_shape(fields, with_defaults(given), 3)


def test_the_draft_takes_epsilon_rope_and_heads_that_it_can_have() -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    both = shape(model_type="gemma3_text", rope_parameters=ropes)
    assert (1e6, None, 256) == (both.rope_theta, both.rope_scaling, both.head_dim)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
    assert (5e5, None) == (shape(rope_parameters=yarn).rope_theta, shape(rope_parameters=yarn).rope_scaling)
    assert "yarn" == shape(model_type="qwen3", rope_parameters=yarn, head_dim=16).rope_scaling["rope_type"]
    assert 1e-5 == shape(model_type="lfm2", num_key_value_heads=2).rms_norm_eps
    assert (
        1e-6
        == shape(model_type="starcoder2", num_key_value_heads=2, layer_norm_eps=None, norm_epsilon=1e-5).rms_norm_eps
    )
    latent = shape(model_type="deepseek_v3", kv_lora_rank=16, qk_rope_head_dim=32, num_key_value_heads=4)
    assert (32, 4) == (latent.head_dim, latent.num_key_value_heads)
