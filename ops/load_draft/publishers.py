"""Who writes draft directories: how each is recognised by its config.json, its keys, and the defaults of its class.

A key's rule is a type where the key is read, `IGNORED` where no value of it changes what a draft computes, or else the
values at which it changes nothing. Any other key is refused, since it may change the draft.

Read in dflash 0.1.0 (z-lab), specforge 0.2.0, speculators 0.9.0, nvidia-modelopt 0.47.0, and DeepSpec's repository. The
classes of all five are built from transformers' `Qwen3Config`, whose defaults hold for what a file does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from ops.lib.drafts.backbone.speculators import AUX_LAYER_IDS, LAYER_CONFIG, LAYER_OFFSET, NON_CAUSAL
from ops.lib.drafts.dflash.config import ARCHITECTURE
from ops.lib.drafts.dflash2.config import SERVED, Dflash2

QWEN3 = {  # transformers' Qwen3Config
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
WINDOW = 4096  # of Qwen3Config, where use_sliding_window is true and no window is given

DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
LAYERS = "target_layer_ids"
OF_ENGINES = "eagle_aux_hidden_state_layer_ids"  # the same layers for vLLM, counted from 1
ANCHOR, SHIFT, PROJECTOR = "sample_from_anchor", "shift_label", "projector_type"
RANK, HEAD_TYPE, ALPHA = "markov_rank", "markov_head_type", "confidence_head_alpha"
CONFIDENCE, ALSO_CONFIDENCE, WITH_MARKOV = (
    "enable_confidence_head",
    "use_confidence_head",
    "confidence_head_with_markov",
)
ANCHOR_FIRST = {ANCHOR: True}  # a DSpark class with no other layout

NEST = "dflash_config"  # where most publishers keep the fields of the algorithm
OF_DFLOW = "dflow"

IGNORED = "ignored"
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
ONE = (None, 1)
# Of transformers, of a training, or of generation.
_WORDS = """
architectures auto_map dtype torch_dtype transformers_version speculators_version _name_or_path name_or_path
attn_implementation _attn_implementation _attn_implementation_autoset gradient_checkpointing torchscript use_bfloat16
attention_dropout dropout initializer_range use_cache is_decoder is_encoder_decoder chunk_size_feed_forward
bos_token_id eos_token_id pad_token_id mask_token output_attentions output_hidden_states return_dict use_return_dict
id2label label2id num_labels problem_type pruned_heads task_specific_params tie_word_embeddings
num_anchors max_anchors loss_decay_gamma has_embed_tokens has_lm_head
"""
FIELDS: Mapping[str, Mapping[str, Any]] = {  # of each algorithm, in whichever table they stand
    DFLASH: {},
    DFLASH2: dict.fromkeys(SERVED.values(), int),
    DSPARK: {
        RANK: int,
        HEAD_TYPE: str,
        ALPHA: float,
        PROJECTOR: str,
        **dict.fromkeys((CONFIDENCE, ALSO_CONFIDENCE, WITH_MARKOV, ANCHOR, SHIFT), bool),
    },
}
KEYS: Mapping[str, Any] = {
    **dict.fromkeys(_WORDS.split(), IGNORED),
    **{name: OFF for fields in FIELDS.values() for name in fields},  # those of another algorithm
    PROJECTOR: (None, "", DFLASH),
    "model_type": (None, "qwen3", "speculator_model"),
    "hidden_act": (None, "silu"),
    "attention_mode": (None, "gqa", "mha"),
    "use_aux_hidden_state": (None, True),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier", "logit_scale", "attention_value_scale"), ONE),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "attention_sink_bias"), OFF),
    **dict.fromkeys(("mlp_bias", "gating", "quantization_config", "compression_config", "lm_head_quant"), OFF),
    **dict.fromkeys(("pure_draft_prefix_len", "gru_hidden_dim", "emb_dim", "lilicorr_enabled", "eagle_config"), OFF),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"), object),
    **dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), int
    ),
    **dict.fromkeys(("intermediate_size", "vocab_size", "max_position_embeddings", "block_size", "mask_token_id"), int),
    **dict.fromkeys(("num_target_layers", "target_hidden_size", "draft_vocab_size"), int),
    **dict.fromkeys(("sliding_window", "max_window_layers"), int),
    **dict.fromkeys(("attention_bias", "use_sliding_window", "is_causal"), bool),
    "rms_norm_eps": float,
    "layer_types": list[str],
    OF_ENGINES: list[int],
}
NESTED = {LAYERS: list[int], "causal": bool, "use_swa": bool, "swa_window_size": int}


@frozen(kw_only=True)
class Publisher:
    """defaults: of its class, beside those of Qwen3Config. keys: what it adds to `KEYS`. layers_from: what an id of 0
    names, as an offset to the output of the target's first layer. fills_layers: whether its class chooses target
    layers that the file leaves open.
    """

    name: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, Any] = NESTED
    layers_from: int = 0
    fills_layers: bool = False


DFLOW = Publisher(name="dflow", defaults={})
Z_LAB = Publisher(name="z-lab", defaults=QWEN3 | {"block_size": 16}, fills_layers=True)
SPECFORGE = Publisher(
    name="SpecForge",
    defaults=QWEN3 | ANCHOR_FIRST | {RANK: 0, HEAD_TYPE: "vanilla", WITH_MARKOV: False},
    fills_layers=True,
)
MODELOPT = Publisher(
    name="ModelOpt",
    defaults=QWEN3 | ANCHOR_FIRST | {HEAD_TYPE: "vanilla", CONFIDENCE: False, WITH_MARKOV: True},
)
DEEPSPEC = Publisher(name="DeepSpec", defaults=QWEN3 | ANCHOR_FIRST)
SPECULATORS = Publisher(
    name="speculators",
    defaults=QWEN3
    | {"block_size": 8, "draft_vocab_size": 32000}
    | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    | {RANK: 256, HEAD_TYPE: "vanilla", CONFIDENCE: True, WITH_MARKOV: True},
    keys={AUX_LAYER_IDS: list[int], NON_CAUSAL: bool, ANCHOR: bool},
    layers_from=-LAYER_OFFSET,
)

OF_SPECULATORS = ("speculators_model_type", "speculators_config", "speculators_version", LAYER_CONFIG)
OF_DEEPSPEC = ("num_anchors", CONFIDENCE, RANK)
DEEPSPEC_CLASS = "Qwen3DSparkModel"
OF_MODELOPT = ("causal", "use_swa", "swa_window_size")
OF_SPECFORGE = (PROJECTOR, SHIFT, "pure_draft_prefix_len")


def publisher_of(config: Mapping[str, Any]) -> Publisher | None:
    """Who wrote a config.json; None if it is no draft's. SpecForge's files may look like z-lab's, which read alike."""
    nested = config.get(NEST)
    nest = nested if isinstance(nested, Mapping) else {}
    if OF_DFLOW in config:
        return DFLOW
    if any(key in config for key in OF_SPECULATORS):
        return SPECULATORS
    if DEEPSPEC_CLASS in architectures(config) or any(key in config for key in OF_DEEPSPEC):
        return DEEPSPEC
    if any(key in nest for key in OF_MODELOPT):
        return MODELOPT
    if any(key in nest for key in OF_SPECFORGE):
        return SPECFORGE
    return Z_LAB if nest or set(architectures(config)) & {ARCHITECTURE, Dflash2.architecture} else None


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The classes that a config.json names."""
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []
