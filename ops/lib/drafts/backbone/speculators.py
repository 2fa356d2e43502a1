"""The draft's config.json in the format of speculators, as speculators 0.9.0 and vLLM 0.33 read it. Loads no torch.

The tensors are those of the serving contract, under the same names: the embedding and the head are the target's. What
others read in silence as another draft is written in the one way that all of them read alike:

- Ids of layers are one more than in the contract: feature k is the input of the target's layer k. vLLM subtracts it.
- `sliding_window_non_causal`: vLLM makes *all* layers causal where it is false, full ones too, and speculators reads it
  for sliding layers only. So it is true without windows, and false where all layers slide; both kinds together cannot
  be written.
- `sample_from_anchor` has other defaults elsewhere, so it is always written.
- `block_size` counts the slots of a block, `speculative_tokens` those that predict; the layout says how many they are.
- There is no `model_type` at the top: vLLM would look for a model of that name.
- Everything of the transformer is written, since vLLM applies no defaults of Qwen3 to it.

An export in this format holds the same draft as the serving directory in which it lies, so everything follows from that
one's config.json and the target: any other field or value is a mistake, named with what vLLM would do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from dsl.finding import Finding
from ops.lib.drafts.algorithms import InSpeculators
from ops.lib.drafts.backbone.config import FULL_ATTENTION, SIZES, DraftConfig
from ops.lib.drafts.backbone.contract import REWRITE, mistake
from ops.lib.target.head_settings import PLAIN

SPECULATORS_VERSION = "0.9.0"
FOLDER = "speculators"  # of a draft's artifact
LAYER_CONFIG = "transformer_layer_config"
AUX_LAYER_IDS = "aux_hidden_state_layer_ids"
LAYER_OFFSET = 1  # an id of this format less that of the contract, of the same layer
NON_CAUSAL = "sliding_window_non_causal"
ENGINE = "vLLM"

REFUSES = "refuses to start"
OTHER_DRAFT = "silently computes another draft than the one that was trained: fewer tokens are accepted"
UNKNOWN = "may read it: its classes read more fields than the export writes"
EFFECTS = {  # of a field that is missing, or has another value; the longest name that begins a field's
    "speculators_model_type": REFUSES,
    "speculators_config": "refuses to start, or serves another target or block, where it is given this directory alone",
    "speculators_config.verifier": "serves this target where it is given this directory alone",
    "speculators_version": "does not read it",
    "architectures": "does not read it; speculators' class does not load the draft",
    "dtype": "does not read it: the draft gets the dtype of the target",
    "block_size": "does not read it; speculators trains on with blocks of this size",
    "mask_token_id": "refuses to start without it, and silently embeds any other token in all slots",
    "draft_vocab_size": "expects a head and a map of a reduced vocabulary, which are not there",
    AUX_LAYER_IDS: "refuses to start without it, and silently captures other layers than in training",
    "sample_from_anchor": "refuses to start if it is true for DFlash, silently accepts almost nothing in the wrong "
    "layout of DSpark, and assumes false without it; others assume true",
    NON_CAUSAL: "silently makes all layers causal, full ones too, if it is false; without it, none",
    LAYER_CONFIG: OTHER_DRAFT,
}
NOT_THIS = 'leave "speculators" out of formats of export_draft, and write the export again'


@frozen
class Verifier:
    """The target as the format speculators names it. name_or_path: None without a model id, as a path is of one
    machine.
    """

    name_or_path: str | None
    architectures: tuple[str, ...]

    @classmethod
    def of(cls, info: Mapping[str, Any], config: Mapping[str, Any]) -> Verifier:
        """Make it from the target's target.json and config.json."""
        return cls(info.get("model_id"), tuple(config.get("architectures") or ()))


def to_speculators(config: DraftConfig, dtype: str, verifier: Verifier) -> dict[str, Any]:
    """A draft's config.json in the format of speculators.

    dtype: of the draft's weights. verifier: the target. Not for drafts for which `unwritable` gives a reason.
    """
    scaling, layout, algorithm = dict(config.rope_scaling or {}), config.layout(), config.algorithm
    assert isinstance(algorithm, InSpeculators)
    return {
        "architectures": [algorithm.speculators_architecture],
        "speculators_model_type": algorithm.speculators_type,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm.speculators_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": layout.proposals}],
            "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
        },
        "dtype": dtype,
        "block_size": layout.queries,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        AUX_LAYER_IDS: [layer + LAYER_OFFSET for layer in config.target_layer_ids],
        "sample_from_anchor": layout.first == 0,
        NON_CAUSAL: not config.slides,
        **algorithm.to_speculators(),
        LAYER_CONFIG: {
            "model_type": "qwen3",
            "hidden_act": "silu",
            **{name: getattr(config, name) for name in SIZES},
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **scaling},
            "layer_types": list(config.layer_types),
            "use_sliding_window": config.slides,
            "sliding_window": config.sliding_window if config.slides else None,
            "attention_bias": config.attention_bias,
            "tie_word_embeddings": False,
        },
    }


def unwritable(config: DraftConfig) -> Iterator[str]:
    """The reasons why the format of speculators cannot express a draft; empty if it can."""
    if not isinstance(config.algorithm, InSpeculators):
        yield f"algorithm: {config.algorithm.name}, which speculators does not have"
    if config.slides and FULL_ATTENTION in config.layer_types:
        yield (
            f"layer_types: full and sliding layers, and vLLM reads {NON_CAUSAL} as that of all layers: either the full "
            "ones would be causal or the sliding ones not"
        )
    if config.input_embedding_scale != 1:
        yield (
            f"input_embedding_scale: {config.input_embedding_scale:g}, which the format has no field for: speculators "
            "gives a draft the rows of the target's embedding as they are"
        )
    if config.head_settings != PLAIN and config.algorithm.name == "dflash2":
        yield (
            "output_multiplier and final_logit_softcapping: the format has neither, and a selector's scores are added "
            "to the logits"
        )
    if config.partial_rotary_factor != 1:
        yield (
            f"partial_rotary_factor: {config.partial_rotary_factor:g}, and speculators' class rotates whole heads "
            "whatever it is"
        )


def speculators_mistakes(
    written: Mapping[str, Any], config: DraftConfig, dtype: str, verifier: Verifier
) -> Iterator[Finding]:
    """Mistakes in a config.json in the format of speculators. config, dtype: of the serving directory."""
    unfit = list(unwritable(config))
    if unfit:
        yield from (_mistake(f"cannot hold this draft: {why}", OTHER_DRAFT, NOT_THIS) for why in unfit)
        return
    expected, got = _flat(to_speculators(config, dtype, verifier)), _flat(written)
    for name, value in expected.items():
        if name not in got:
            yield _mistake("is missing", _effect(name), part=name)
        elif json.dumps(got[name]) != json.dumps(value):
            yield _mistake(f"must be {json.dumps(value)}, got {json.dumps(got[name])}", _effect(name), part=name)
    for name in sorted(got.keys() - expected.keys()):
        yield _mistake("is not a field of the export", UNKNOWN, f"remove {name}", name)


def _mistake(wrong: str, effect: str, remedy: str = REWRITE, part: str = "") -> Finding:
    return mistake(f"{FOLDER}/config.json", wrong, effect, remedy, part=part, engine=ENGINE)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted names; a list is one value."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _effect(name: str) -> str:
    parts = name.split(".")
    starts = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((EFFECTS[start] for start in starts if start in EFFECTS), OTHER_DRAFT)
