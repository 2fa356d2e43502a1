"""What SGLang 0.5.21 and 0.5.23 do with a missing or wrong field of config.json, by their source and measurements."""

from __future__ import annotations

DEFAULTS = "silently uses transformers' default for a Qwen3 model ({default})"

MISSING = {
    "architectures": "finds no model class and refuses to start",
    "model_type": "cannot read the config and refuses to start",
    "hidden_act": DEFAULTS.format(default='"silu"'),
    "dtype": "uses the server's --dtype; default: float16 for weights in float32",
    "hidden_size": DEFAULTS.format(default="4096") + ", and stops at the weights' shapes",
    "num_hidden_layers": DEFAULTS.format(default="32") + ": layers without weights stay random",
    "num_attention_heads": DEFAULTS.format(default="32") + ", and stops at the weights' shapes",
    "num_key_value_heads": DEFAULTS.format(default="32") + ", and stops at the weights' shapes",
    "head_dim": DEFAULTS.format(default="128") + ", and stops at the weights' shapes if that differs",
    "intermediate_size": DEFAULTS.format(default="22016") + ", and stops at the weights' shapes",
    "vocab_size": "does not check it",
    "max_position_embeddings": (
        DEFAULTS.format(default="32768") + ", and refuses to start if the target's context is longer (ValueError)"
    ),
    "rms_norm_eps": DEFAULTS.format(default="1e-6"),
    "rope_theta": DEFAULTS.format(default="10000") + ": other angles than in training, and fewer tokens are accepted",
    "rope_scaling": DEFAULTS.format(default="none") + ": other angles than in training, if there was a scaling",
    "partial_rotary_factor": DEFAULTS.format(default="1") + ": other dimensions are rotated, if it was different",
    "layer_types": DEFAULTS.format(default="full attention") + ": sliding layers see all of the context",
    "use_sliding_window": DEFAULTS.format(default="false") + ", ignores sliding_window, and refuses sliding layers",
    "sliding_window": DEFAULTS.format(default="none") + ", and refuses to start if a layer slides",
    "is_causal": (
        "takes the default of its version: causal sliding layers since 0.5.21, bidirectional ones in some before it"
    ),
    "attention_bias": DEFAULTS.format(default="false") + ", and leaves biases out",
    "tie_word_embeddings": "does not read it: a draft has neither embedding nor head",
    "block_size": "serves blocks of 16, whatever the draft was trained with",
    "num_target_layers": "uses the number of the target that it serves, and cannot warn about a different one",
    "dflash_config.mask_token_id": (
        'uses the id of the tokenizer\'s "<|MASK|>", or adds that token: another embedding than in training'
    ),
    "dflash_config.target_layer_ids": (
        "computes ids by the formula for the number of draft layers, which may differ from those of the training"
    ),
    "dflow.format": "does not read it",
    "dflow.positions": "does not read it: its positions are always 1-D",
    "dflow.target": "does not read it, and serves the draft with any target",
    "dflow.trained": "does not read it, and serves the draft as the other fields describe it",
    "dflow.digest": "does not read it, and serves whatever weights and fields it finds",
}

WRONG = {
    "architectures": "refuses to start (ValueError), or builds another model",
    "model_type": "refuses to start, or uses another model's defaults",
    "hidden_act": "refuses to start (ValueError: unsupported activation), or computes another one",
    "dtype": "refuses to start, or serves in another precision",
    "hidden_size": "stops at shapes that do not fit, at the latest at the target's embeddings",
    "num_hidden_layers": "silently leaves layers random, or weights unread",
    "num_attention_heads": "stops at the weights' shapes",
    "num_key_value_heads": "stops at the weights' shapes",
    "head_dim": "stops at the weights' shapes",
    "intermediate_size": "stops at the weights' shapes",
    "vocab_size": "does not check it",
    "max_position_embeddings": (
        "refuses to start if the target's context is longer (ValueError: context_length is greater than the derived "
        "one)"
    ),
    "rms_norm_eps": "silently normalises with it",
    "rope_theta": "silently rotates by other angles than in training: fewer tokens are accepted",
    "rope_scaling": "silently rotates by other angles than in training, or stops if it does not know the scaling",
    "partial_rotary_factor": "silently rotates other dimensions than in training: fewer tokens are accepted",
    "layer_types": "silently masks by it, or refuses an unknown type (ValueError)",
    "use_sliding_window": "ignores sliding_window if it is false, and refuses to start if a layer slides",
    "sliding_window": "silently masks by it; without one it refuses sliding layers (ValueError)",
    "is_causal": "silently makes every layer causal, or none of them",
    "attention_bias": "silently leaves biases unread, or random",
    "tie_word_embeddings": "does not read it: a draft has neither embedding nor head",
    "block_size": ("silently proposes blocks of this size (below 1: ValueError), for which the draft was not trained"),
    "num_target_layers": "logs a warning and continues",
    "mask_token_id": "refuses an id outside the target's vocabulary (ValueError), and silently embeds any other",
    "target_layer_ids": "silently captures other layers than in training",
    "positions": "does not read it: its positions are always 1-D, and a draft trained on others is useless",
    "format": "does not read it",
    "target": "silently serves the draft with any target: about 1 token a step is accepted",
    "engine": "does not read it: whichever version is installed serves the draft",
    "trained": ("does not read it, and silently serves the other fields, with which the draft was not trained"),
    "digest": "does not read it, and serves whatever weights and fields it finds",
}

LAST_LAYER = (
    "captures inputs of the next layer, which does not exist: it silently drops the id, starts, and crashes at the "
    "first prefill"
)
NO_LAYERS = "refuses to start (ValueError: target_layer_ids must be non-empty)"
NO_LAYER = "refuses to start (ValueError: an id out of range)"
LAYER_ORDER = "captures each layer once, in their order, so that fc gets the wrong columns, or too few"
NESTED = "uses the nested one and ignores the top level"
UNKNOWN = "reads more fields than the contract names, and many silently change what a draft computes"
EOS_MASK = "silently embeds the EOS token in every slot; the draft was trained with another token there"


def missing(name: str) -> str:
    """What SGLang does without a field, named as `missing_fields` names it."""
    return MISSING.get(name, "silently uses a default")


def wrong(name: str) -> str:
    """What SGLang does with a value that breaks the contract; the name without "dflash_config." and "dflow."."""
    return WRONG.get(name, UNKNOWN)
