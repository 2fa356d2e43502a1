"""Who writes draft directories: how each is recognised by its config.json, its keys, and the defaults of its class; and
a config.json read by that, key by key (`Reading`). Loads no torch.

A key's rule is a type where the key is read, `IGNORED` where no value of it changes what a draft computes, or else the
values at which it changes nothing. Any other key is refused, since it may change the draft.

Read in dflash 0.1.0 (z-lab), specforge 0.2.0, speculators 0.9.0, nvidia-modelopt 0.48.0rc1, and DeepSpec's
repository. The classes of all five are built from transformers' `Qwen3Config`, whose defaults hold for what a file
does not name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field, frozen

from ops.lib.drafts.backbone.config import SCALES
from ops.lib.drafts.backbone.speculators import AUX_LAYER_IDS, LAYER_CONFIG, LAYER_OFFSET, NON_CAUSAL
from ops.lib.drafts.dflash.config import ARCHITECTURE
from ops.lib.drafts.dflash2.config import SERVED, Dflash2
from ops.lib.drafts.lilicorr.config import ENABLED, Lilicorr
from ops.lib.drafts.lilicorr.config import SERVED as OF_LILICORR

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

DFLASH, DFLASH2, DSPARK, LILICORR = "dflash", "dflash2", "dspark", "lilicorr"
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
    DFLASH2: {**dict.fromkeys(SERVED.values(), int), PROJECTOR: str},
    DSPARK: {
        RANK: int,
        HEAD_TYPE: str,
        ALPHA: float,
        PROJECTOR: str,
        **dict.fromkeys((CONFIDENCE, ALSO_CONFIDENCE, WITH_MARKOV, ANCHOR, SHIFT), bool),
    },
    LILICORR: {
        **dict.fromkeys(OF_LILICORR.values(), int),
        **{OF_LILICORR[name]: float for name in ("mlp_ratio", "vector_eps", "logit_scale")},
        ENABLED: bool,
        PROJECTOR: str,
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
    **{name: OFF if default is None else ONE for name, default in SCALES.items()},  # top level: no class reads them
    **dict.fromkeys(("logit_scale", "attention_value_scale"), ONE),
    **dict.fromkeys(("attn_logit_softcapping", "attention_sink_bias"), OFF),
    **dict.fromkeys(("mlp_bias", "gating", "quantization_config", "compression_config", "lm_head_quant"), OFF),
    **dict.fromkeys(("pure_draft_prefix_len", "gru_hidden_dim", "emb_dim", "eagle_config"), OFF),
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
    """A publisher of draft directories: what its class assumes, and what its files may hold.

    defaults: of its class, besides those of Qwen3Config. keys: additions to `KEYS`. layers_from: what layer id 0 means,
    as an offset to the output of the target's first layer. fills_layers: whether its class chooses target layers that
    the file omits.
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

OF_Z_LAB = {ARCHITECTURE, Dflash2.architecture, Lilicorr.architecture}
OF_SPECULATORS = ("speculators_model_type", "speculators_config", "speculators_version", LAYER_CONFIG)
OF_DEEPSPEC = ("num_anchors", CONFIDENCE, RANK)
DEEPSPEC_CLASS = "Qwen3DSparkModel"
OF_MODELOPT = ("causal", "use_swa", "swa_window_size")
OF_SPECFORGE = (PROJECTOR, SHIFT, "pure_draft_prefix_len")


def publisher_of(config: Mapping[str, Any]) -> Publisher | None:
    """The publisher that wrote a config.json; None if it is no draft's.

    SpecForge's files may look like z-lab's, which are read alike.
    """
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
    return Z_LAB if nest or set(architectures(config)) & OF_Z_LAB else None


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The classes that a config.json names."""
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list[int]: "a list of whole numbers",
    list[str]: "a list of texts",
}


@define
class Reading:
    """A config.json being read: its nested tables flattened, with values, assumptions, notes and mistakes."""

    publisher: Publisher
    algorithm: str
    config: Mapping[str, Any]
    values: dict[str, Any] = field(factory=dict)
    assumed: dict[str, Any] = field(factory=dict)
    notes: list[str] = field(factory=list)
    mistakes: list[str] = field(factory=list)
    is_malformed: bool = False  # a value has another type than its key

    def __attrs_post_init__(self) -> None:
        rules = {**KEYS, **self.publisher.keys, **FIELDS[self.algorithm]}
        for prefix, table in self._tables():
            for name, value in table.items():
                is_read = prefix == f"{NEST}." and name in SCALES
                self._take(prefix, name, value, float if is_read else rules.get(name))

    def _tables(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The tables of a config.json in which a publisher writes, the top level last."""
        nest = LAYER_CONFIG if self.publisher is SPECULATORS else NEST
        table = self.config.get(nest)
        if isinstance(table, Mapping):
            yield f"{nest}.", table
        elif table is not None:
            self._refuse_type(nest, table, "a table")
        passed = {nest, "speculators_model_type", "speculators_config"}
        yield "", {name: value for name, value in self.config.items() if name not in passed}

    def _take(self, prefix: str, name: str, value: Any, rule: Any) -> None:
        """Read a key by its rule; null counts as missing."""
        if rule is None:
            self.mistakes.append(
                f"{prefix}{name} = {json.dumps(value)}: dflow does not know this key, which may change what the draft "
                "computes; if it does not, remove it"
            )
        elif isinstance(rule, tuple):
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in rule):
                wanted = "drafts without it" if rule is OFF else " or ".join(map(json.dumps, rule))
                self.refuse(prefix + name, value, wanted)
        elif rule is not IGNORED and value is not None:
            if not _fits(value, rule):
                self._refuse_type(prefix + name, value, WANTED[rule])
            elif self.values.setdefault(name, value) != value:
                self.refuse(prefix + name, value, f"{json.dumps(self.values[name])}, as in another place of the file")

    def _refuse_type(self, name: str, value: Any, wanted: str) -> None:
        self.is_malformed = True
        self.refuse(name, value, wanted)

    def refuse(self, name: str, value: Any, wanted: str) -> None:
        """Note the mistake that a key's value cannot be imported."""
        self.mistakes.append(f"{name} = {json.dumps(value)}: dflow reads only {wanted}")

    def get(self, name: str) -> Any:
        """The value of a key, or else the default of the publisher's class, noted as assumed. A mistake
        without either.
        """
        if name in self.values:
            return self.values[name]
        if name not in self.publisher.defaults:
            self.mistakes.append(f"{name}: is missing, and {self.publisher.name}'s class has no default for it")
            return None
        self.assumed[name] = self.publisher.defaults[name]
        return self.assumed[name]

    @property
    def layers_key(self) -> str:
        return AUX_LAYER_IDS if self.publisher is SPECULATORS else LAYERS

    @property
    def layer_ids(self) -> list[int]:
        """The target layers in the order of the file, converted so that id 0 is the first layer's output, as in
        `DraftConfig`.
        """
        ids = self.values.get(self.layers_key) or self.assumed.get(LAYERS) or ()
        return [layer + self.publisher.layers_from for layer in ids]


def _fits(value: Any, kind: Any) -> bool:
    if kind == list[int]:
        return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    is_kind = isinstance(value, (int, float) if kind is float else kind)
    return is_kind and (kind in (bool, object) or not isinstance(value, bool))
