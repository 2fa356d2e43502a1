"""The keys and tensors of drafts of others: those without effect, and those that `load_draft` does not reproduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from ops.lib.drafts.backbone.config import ROPE_NUMBERS

# Of transformers, of a training, or of generation: none of them changes the hidden states or the logits of a draft.
_WORDS = """
architectures auto_map dtype torch_dtype transformers_version speculators_version _name_or_path name_or_path
attn_implementation _attn_implementation _attn_implementation_autoset gradient_checkpointing torchscript use_bfloat16
attention_dropout dropout initializer_range use_cache is_decoder is_encoder_decoder chunk_size_feed_forward
bos_token_id eos_token_id pad_token_id mask_token output_attentions output_hidden_states return_dict use_return_dict
id2label label2id num_labels problem_type pruned_heads task_specific_params tie_word_embeddings
num_anchors max_anchors loss_decay_gamma has_embed_tokens has_lm_head
"""
HARMLESS = frozenset(_WORDS.split())

# Parameters of a rope that transformers' functions read, by what `DraftConfig.rope_scaling` holds.
OF_ROPE = frozenset({"rope_type", *ROPE_NUMBERS, "truncate"})
# Of a target's 3-D positions. The classes of all publishers rotate by 1-D positions, and do not read them.
OF_MROPE = frozenset({"mrope_section", "mrope_interleaved"})


@frozen
class Neutral:
    """A key that changes the draft except at some values: at those it is left out, at others the draft is refused."""

    is_neutral: Callable[[Any], bool]
    why: str


def _off(value: Any) -> bool:
    """Absent, false, zero, or empty."""
    return not value


def _one(value: Any) -> bool:
    return value is None or (not isinstance(value, bool) and value == 1)


def _algorithm(name: str) -> Neutral:
    return Neutral(_off, f"is of the algorithm {name}, which load_draft does not read")


def _another(name: str) -> Neutral:
    return Neutral(_off, f"is of the algorithm {name}, and the file names another")


UNQUANTISED = "quantised weights; import the draft as it was before quantisation"
QUANTISED = Neutral(_off, UNQUANTISED)
LOGITS = "changes the draft's logits, and dflow uses the target's head as it is"
NEUTRAL: Mapping[str, Neutral] = {
    "hidden_act": Neutral(lambda value: value in (None, "silu"), 'only "silu" is supported'),
    "mlp_bias": Neutral(_off, "dflow's MLP has no biases"),
    "input_embedding_scale": Neutral(_one, "scales the embeddings, and dflow uses the target's as they are"),
    "output_multiplier": Neutral(_one, LOGITS),
    "logit_scale": Neutral(_one, LOGITS),
    "final_logit_softcapping": Neutral(_off, LOGITS),
    "attn_logit_softcapping": Neutral(_off, "caps the attention, which dflow does not"),
    "attention_sink_bias": Neutral(_off, "a sink in the attention, which dflow does not have"),
    "attention_value_scale": Neutral(_one, "scales the attention's values, which dflow does not"),
    "gating": Neutral(_off, "gates the attention, which dflow does not"),
    "quantization_config": QUANTISED,
    "compression_config": QUANTISED,
    "lm_head_quant": QUANTISED,
    "sample_from_anchor": Neutral(
        _off,
        "slot 0 would predict a token, and the classes that the file names have no such layout; if the draft was "
        'trained with it, name the class of DSpark with markov_rank = 0 (architectures = ["Qwen3DSparkModel"])',
    ),
    "shift_label": Neutral(
        _off,
        "slot 0 would predict a token, and SpecForge reads this for Domino only: remove it if the draft was trained as "
        "plain DFlash; if slot 0 predicts a token, name the class of DSpark with markov_rank = 0 "
        '(architectures = ["Qwen3DSparkModel"])',
    ),
    "projector_type": Neutral(
        lambda value: value in (None, "", "dflash"), "names an algorithm that load_draft does not read"
    ),
    "pure_draft_prefix_len": _algorithm("Domino"),
    "gru_hidden_dim": _algorithm("Domino"),
    "emb_dim": _algorithm("Domino"),
    "conv_kernel_size": _another("DFlash2"),
    "conv_group_size": _another("DFlash2"),
    "selector_rank": _another("DFlash2"),
    "selector_top_k": _another("DFlash2"),
    "markov_rank": _another("DSpark"),
    "markov_head_type": _another("DSpark"),
    "enable_confidence_head": _another("DSpark"),
    "use_confidence_head": _another("DSpark"),
    "confidence_head_with_markov": _another("DSpark"),
    "confidence_head_alpha": _another("DSpark"),
    "lilicorr_enabled": _algorithm("LiLiCorr"),
    "eagle_config": _algorithm("EAGLE-3"),
    "use_aux_hidden_state": Neutral(
        lambda value: value in (None, True), "without features of the target it is no DFlash draft"
    ),
    "attention_mode": Neutral(
        lambda value: value in (None, "gqa", "mha"), "dflow's attention has one projection for keys and one for values"
    ),
}

# Algorithms that are not read, as lower-case parts of the names of classes; the first that fits.
ALGORITHMS = {
    "domino": "Domino",
    "lilicorr": "LiLiCorr",
    "xpress": "XPress",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "peagle": "P-EAGLE",
    "mtp": "MTP",
}

# Parts of the names of tensors, by what they belong to; the first that fits.
REDUCED = "a reduced vocabulary: the draft proposes other ids than the target's"
TENSORS = {
    "d2t": REDUCED,
    "t2d": REDUCED,
    **{
        part: f"of the algorithm {name}, which load_draft does not read"
        for part, name in (
            ("prefix_gru.", "Domino"),
            ("embed_proj.", "Domino"),
            ("lilicorr.", "LiLiCorr"),
            ("xpress", "XPress"),
        )
    },
    **{
        part: f"of {name}, which config.json does not name"
        for part, name in (
            ("candidate_selector.", "the algorithm DFlash2"),
            ("attention_conv.", "the algorithm DFlash2"),
            ("mlp_conv.", "the algorithm DFlash2"),
            ("markov", "DSpark's Markov head"),
            ("confidence", "DSpark's confidence head"),
        )
    },
    "attention_sink_bias": "a sink in the attention, which dflow does not have",
    **dict.fromkeys(("weight_scale", "input_scale", "qweight", "qzeros", "weight_packed"), UNQUANTISED),
}
