"""Who writes draft directories, how each is recognised by its config.json, and the defaults of its class.

Read in dflash 0.1.0 (z-lab), specforge 0.2.0, speculators 0.9.0, nvidia-modelopt 0.47.0, and DeepSpec's repository. The
classes of all five are built from transformers' `Qwen3Config`, whose defaults hold for what a file does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from ops.lib.drafts.backbone.speculators_format import LAYER_CONFIG, LAYER_OFFSET
from ops.lib.drafts.dflash.config import ARCHITECTURE
from ops.lib.drafts.dflash2.config import Dflash2

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

CONFIDENCE, WITH_MARKOV = "enable_confidence_head", "confidence_head_with_markov"
ANCHOR_FIRST = {"sample_from_anchor": True}  # a DSpark class with no other layout

NEST = "dflash_config"  # where most publishers keep the fields of the algorithm
OF_DFLOW = "dflow"


@frozen(kw_only=True)
class Publisher:
    """defaults: of its class, beside those of Qwen3Config. layers_from: what an id of 0 names, as an offset to the
    output of the target's first layer. fills_layers: whether its class chooses target layers that the file leaves open.
    """

    name: str
    defaults: Mapping[str, Any]
    layers_from: int = 0
    fills_layers: bool = False


DFLOW = Publisher(name="dflow", defaults={})
Z_LAB = Publisher(name="z-lab", defaults=QWEN3 | {"block_size": 16}, fills_layers=True)
SPECFORGE = Publisher(
    name="SpecForge",
    defaults=QWEN3 | ANCHOR_FIRST | {"markov_rank": 0, "markov_head_type": "vanilla", WITH_MARKOV: False},
    fills_layers=True,
)
MODELOPT = Publisher(
    name="ModelOpt",
    defaults=QWEN3 | ANCHOR_FIRST | {"markov_head_type": "vanilla", CONFIDENCE: False, WITH_MARKOV: True},
)
DEEPSPEC = Publisher(name="DeepSpec", defaults=QWEN3 | ANCHOR_FIRST)
SPECULATORS = Publisher(
    name="speculators",
    defaults=QWEN3
    | {"block_size": 8, "draft_vocab_size": 32000}
    | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    | {"markov_rank": 256, "markov_head_type": "vanilla", CONFIDENCE: True, WITH_MARKOV: True},
    layers_from=-LAYER_OFFSET,
)

OF_SPECULATORS = ("speculators_model_type", "speculators_config", "speculators_version", LAYER_CONFIG)
OF_DEEPSPEC = ("num_anchors", CONFIDENCE, "markov_rank")
DEEPSPEC_CLASS = "Qwen3DSparkModel"
OF_MODELOPT = ("causal", "use_swa", "swa_window_size")
OF_SPECFORGE = ("projector_type", "shift_label", "pure_draft_prefix_len")


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
