"""The defaults of config classes read from their source are those that the classes have."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AutoConfig

from ops.lib.vision.config_classes import class_of, has_language_model
from ops.lib.vision.family_config import LEFT_OUT, TIED, is_tied, with_defaults

TYPES = (
    *("llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "gemma", "gemma2", "gemma3_text", "gpt_oss"),
    *("glm4", "glm4_moe", "phi", "phi3", "deepseek_v3", "olmo2", "olmo3", "cohere", "cohere2", "granite", "smollm3"),
    *("stablelm", "starcoder2", "ernie4_5", "exaone4", "seed_oss", "apertus", "minimax_m2", "nemotron", "lfm2", "opt"),
    *("gpt_neox", "gpt2", "falcon_h1", "jamba"),
)


@pytest.mark.parametrize("kind", TYPES)
def test_the_defaults_read_from_the_source_are_those_of_the_class(kind: str) -> None:
    assert has_language_model(kind)
    found, made = with_defaults({"model_type": kind}), AutoConfig.for_model(kind)
    stated = {name: found[name] for name in (*LEFT_OUT, TIED) if name in found}
    assert stated == {name: getattr(made, name) for name in stated}
    # What a class computes is no default: heads of keys from heads, and their size from the hidden size.
    computed = {"num_key_value_heads", "head_dim"}
    lacking = {name for name in LEFT_OUT if name not in found and getattr(made, name, None) is not None}
    assert lacking <= computed


def test_a_published_gemma_3_is_completed_at_both_levels() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    found = with_defaults({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    made = AutoConfig.for_model("gemma3", text_config=text).text_config
    inner = found["text_config"]
    assert (made.vocab_size, made.num_attention_heads, made.head_dim) == (262_208, 8, 256)
    assert (inner["vocab_size"], inner["num_attention_heads"], inner["head_dim"]) == (262_208, 8, 256)
    assert inner["hidden_size"] == 2560 and is_tied(found)
    assert inner["rope_theta"] == made.rope_parameters["full_attention"]["rope_theta"]


@pytest.mark.parametrize("kind", ["gemma3_text", "cohere", "smollm3", "lfm2", "starcoder2"])
def test_a_file_that_names_no_tie_has_that_of_its_class(kind: str) -> None:
    assert is_tied(with_defaults({"model_type": kind}))
    assert not is_tied(with_defaults({"model_type": kind, "tie_word_embeddings": False}))


def test_configs_of_qwen_and_of_unknown_types_stay_as_they_are() -> None:
    for config in ({"model_type": "qwen3"}, {"model_type": "word_counter"}, {"model_type": ["llama"]}, {}):
        assert config == with_defaults(config)
    assert {} == class_of("word_counter").defaults


def test_another_name_of_a_field_is_read() -> None:
    found = with_defaults({"model_type": "gpt2", "n_embd": 64, "n_layer": 3})
    assert (64, 3, 12) == (found["hidden_size"], found["num_hidden_layers"], found["num_attention_heads"])


def test_no_torch_is_loaded_for_it() -> None:
    code = (
        "import sys; from ops.lib.vision.family_config import with_defaults;"
        "with_defaults({'model_type': 'gemma2'}); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "False False" == said.strip()
