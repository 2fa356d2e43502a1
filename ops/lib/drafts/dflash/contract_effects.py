"""What SGLang 0.5.21 does with a field of config.json that is missing or wrong, as read in its sources and measured."""

from __future__ import annotations

DEFAULTS = "takes transformers' default for a Qwen3 model ({default}) without a word"

MISSING = {
    "architectures": "finds no model class and refuses to start",
    "model_type": "cannot read the config and refuses to start",
    "hidden_act": DEFAULTS.format(default='"silu"'),
    "dtype": "takes the server's --dtype, and float16 for weights in float32 where that is not given",
    "hidden_size": DEFAULTS.format(default="4096") + ", and stops at the weights' shapes",
    "num_hidden_layers": DEFAULTS.format(default="32") + ": layers without weights stay random",
    "num_attention_heads": DEFAULTS.format(default="32") + ", and stops at the weights' shapes",
    "num_key_value_heads": DEFAULTS.format(default="32") + ", and stops at the weights' shapes",
    "head_dim": DEFAULTS.format(default="128") + ", and stops at the weights' shapes where that is another size",
    "intermediate_size": DEFAULTS.format(default="22016") + ", and stops at the weights' shapes",
    "vocab_size": "does not check it",
    "max_position_embeddings": (
        DEFAULTS.format(default="32768") + ", and refuses to start where the target's context is longer (ValueError)"
    ),
    "rms_norm_eps": DEFAULTS.format(default="1e-6"),
    "rope_theta": DEFAULTS.format(default="10000") + ": other angles than in training, and fewer tokens are accepted",
    "rope_scaling": DEFAULTS.format(default="none") + ": other angles than in training where there was a scaling",
    "partial_rotary_factor": DEFAULTS.format(default="1") + ": other dimensions are turned where it was another one",
    "layer_types": DEFAULTS.format(default="full attention") + ": sliding layers see all of the context",
    "use_sliding_window": DEFAULTS.format(default="false") + ", forgets sliding_window, and refuses sliding layers",
    "sliding_window": DEFAULTS.format(default="none") + ", and refuses to start where a layer slides",
    "attention_bias": DEFAULTS.format(default="false") + ", and leaves biases out",
    "tie_word_embeddings": "does not read it: a draft has neither embedding nor head",
    "block_size": "serves blocks of 16, whatever the draft was trained with",
    "num_target_layers": "takes the number of the target that it serves, and cannot warn about another one",
    "dflash_config.mask_token_id": (
        'takes the id of the tokenizer\'s "<|MASK|>", or adds that token: another embedding than in training'
    ),
    "dflash_config.target_layer_ids": (
        "computes ids by the formula for as many layers as the draft has, which need not be those of the training"
    ),
    "dflow.format": "does not read it",
    "dflow.positions": "does not read it: its positions are always 1-D",
    "dflow.target": "does not read it, and serves the draft with any target",
    "dflow.trained": "does not read it, and serves whatever the other fields say",
    "dflow.digest": "does not read it, and serves whatever weights and fields it finds",
}

WRONG = {
    "architectures": "refuses to start (ValueError), or builds another model",
    "model_type": "refuses to start, or fills in another model's defaults",
    "hidden_act": "refuses to start (ValueError: silu alone is supported)",
    "dtype": "refuses to start, or serves in another precision",
    "hidden_size": "stops at shapes that do not fit, at the latest where the draft meets the target's embeddings",
    "num_hidden_layers": "leaves layers without weights random, or weights unread, and says nothing",
    "num_attention_heads": "stops at the weights' shapes",
    "num_key_value_heads": "stops at the weights' shapes",
    "head_dim": "stops at the weights' shapes",
    "intermediate_size": "stops at the weights' shapes",
    "vocab_size": "does not check it",
    "max_position_embeddings": (
        "refuses to start where the target's context is longer (ValueError: context_length is greater than the derived "
        "one)"
    ),
    "rms_norm_eps": "normalises with it and says nothing",
    "rope_theta": "turns by other angles than in training and says nothing: fewer tokens are accepted",
    "rope_scaling": "turns by other angles than in training and says nothing, or knows no such scaling and stops",
    "partial_rotary_factor": "turns other dimensions than in training and says nothing: fewer tokens are accepted",
    "layer_types": "masks by it and says nothing, or refuses a type that it does not know (ValueError)",
    "use_sliding_window": "forgets sliding_window where it is false, and refuses to start where a layer slides",
    "sliding_window": "masks by it and says nothing; without one it refuses sliding layers (ValueError)",
    "attention_bias": "leaves biases unread, or random, and says nothing",
    "tie_word_embeddings": "does not read it: a draft has neither embedding nor head",
    "block_size": (
        "proposes blocks of this size (below 1: ValueError), for which the draft was not trained, and says nothing"
    ),
    "num_target_layers": "warns in its log and goes on",
    "mask_token_id": "refuses an id outside the target's vocabulary (ValueError), and embeds any other without a word",
    "target_layer_ids": "captures other layers than in training and says nothing",
    "positions": "does not read it: its positions are always 1-D, and a draft trained on others is of no use",
    "format": "does not read it",
    "target": "serves the draft with any target and says nothing: about 1 token a step is accepted",
    "trained": (
        "does not read it, and serves the fields beside it, with which the draft was not trained, without a word"
    ),
    "digest": "does not read it, and serves whatever weights and fields it finds",
}

LAST_LAYER = (
    "captures inputs of the next layer, which the last one lacks: it drops the id without a word, starts, and dies at "
    "the first prefill"
)
NO_LAYERS = "refuses to start (ValueError: target_layer_ids must be non-empty)"
NO_LAYER = "refuses to start (ValueError: an id out of range)"
LAYER_ORDER = "captures in the order of the layers, each once, so that fc gets the wrong columns, or too few"
NESTED = "takes the nested one, whatever stands at the top level"
UNKNOWN = "reads more than the contract names, and much of it changes what a draft computes, without a word"
EOS_MASK = "embeds the EOS token in every slot without a word; the draft was trained with another token there"


def missing(name: str) -> str:
    """What SGLang does without a field, named as `missing_fields` names it."""
    return MISSING.get(name, "takes a default without a word")


def wrong(name: str) -> str:
    """What SGLang does with a value that breaks the contract; the name without "dflash_config." and "dflow."."""
    return WRONG.get(name, UNKNOWN)
