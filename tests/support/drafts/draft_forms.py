"""Draft directories as others publish them: one tiny draft in every spelling, and what cannot be imported.

A form changes the plain one of z-lab: keys of config.json (None in `LEFT_OUT` takes one away) and its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from draft_chain import HIDDEN, MASK, VOCAB
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.drafts.lilicorr.config import OLD_ENGINE, Lilicorr, stored_name

Tensors = dict[str, Tensor]
LEFT_OUT = "left out"
LAYERS = 8  # of the target
IDS = (1, 3, 5)
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}
PLAIN = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(IDS)},
    "dtype": "float32",
    "eos_token_id": 22,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": ["full_attention", "full_attention"],
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    **SIZES,
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "attention_dropout": 0.0,
        **SIZES,
    },
    "block_size": 4,
    "draft_vocab_size": VOCAB,
    "aux_hidden_state_layer_ids": [layer + 1 for layer in IDS],
    "mask_token_id": MASK,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "model_type": "speculator_model",
    "dtype": "bfloat16",
    "transformers_version": "5.12.1",
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
ALL_SLIDING = SLIDING | {"layer_types": ["sliding_attention"] * 2}
SCALED = {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def changed(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with changes; where both have a table, its members are changed one by one."""
    config = dict(plain)
    for name, value in changes.items():
        if value is LEFT_OUT:
            config.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(config.get(name), Mapping) and not name.startswith("rope"):
            config[name] = changed(config[name], value)
        else:
            config[name] = value
    return config


def zlab(**changes: Any) -> dict[str, Any]:
    return changed(PLAIN, changes)


def speculators(**changes: Any) -> dict[str, Any]:
    return changed(SPECULATORS, changes)


TOP_LEVEL = {  # DSpark as DeepSpec writes it and SGLang reads it
    "architectures": ["Qwen3DSparkModel"],
    "auto_map": LEFT_OUT,
    "block_size": 3,
    "dflash_config": LEFT_OUT,
    "mask_token_id": MASK,
    "target_layer_ids": list(IDS),
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NESTED = {  # as SpecForge writes it
    "attention_mode": "gqa",
    "projector_type": "dspark",
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "confidence_head_alpha": 1.0,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
FLAT = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 4}
DFLASH2 = {"algorithm": Dflash2(taps=2, group=4, rank=4, candidates=4)}
DSPARK = {"algorithm": Dspark(rank=4)}
MASKS_FIRST = {"algorithm": Dspark(rank=4, sample_from_anchor=False)}
WITHOUT_HEADS = {"algorithm": Dspark(rank=1, confidence_head=False)}
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"


def deepspec(**changes: Any) -> dict[str, Any]:
    """A config.json as DeepSpec writes it, without sample_from_anchor."""
    return changed(PLAIN, TOP_LEVEL | {"num_anchors": 512} | changes)


def specforge(**changes: Any) -> dict[str, Any]:
    own = {"architectures": ["DSparkDraftModel"], "block_size": 3, "dflash_config": NESTED}
    return changed(changed(PLAIN, own), changes)


def modelopt(**changes: Any) -> dict[str, Any]:
    """A config.json as ModelOpt writes it, with z-lab's class whatever the algorithm."""
    own = {"projector_type": "dspark", "shift_label": True, "markov_rank": 4, "markov_head_type": "vanilla"}
    nest = {"causal": False, "use_confidence_head": True} | own
    return changed(changed(PLAIN, {"block_size": 3, "auto_map": LEFT_OUT, "dflash_config": nest}), changes)


def speculators_of(algorithm: str, **changes: Any) -> dict[str, Any]:
    """A config.json in the format of speculators for DFlash2 or DSpark."""
    classes = {"dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
    own = {
        "architectures": [classes[algorithm]],
        "auto_map": LEFT_OUT,
        "speculators_model_type": algorithm,
        "speculators_config": {"algorithm": algorithm},
    }
    return changed(changed(SPECULATORS, own), changes)


def tensors_of(seed: int = 0, **changes: Any) -> Tensors:
    """The weights of a random draft of these sizes, whose norms are not one and whose biases are not zero."""
    shape = {
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": IDS,
        "num_target_layers": LAYERS,
    }
    model = DraftModel(DraftConfig(**SIZES | shape | changes))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1 and "norm" in name)
        for name, weight in model.state_dict().items()
    }


def prefixed(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor.clone() for name, tensor in tensors.items()}


@frozen
class Form:
    """A form in which a publisher writes a draft, and what must be read from it.

    config: config.json. shape: how the DraftConfig differs from the plain one. expected: from random tensors to those
    of the contract that must be read. tensors: from these to the files' tensors. ends: the dtype of the target's
    embedding and head beside them, none if empty. shards: the number of files. order: the layers in the order of fc's
    columns. assumed: fields that must be reported as assumed. notes: parts of notes. fields: of load_draft.
    """

    config: Mapping[str, Any]
    shape: Mapping[str, Any] = {}
    expected: Callable[[Tensors], Tensors] = dict
    tensors: Callable[[Tensors], Tensors] = dict
    ends: str = ""
    shards: int = 1
    order: tuple[int, ...] = IDS
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    publisher: str = "z-lab"
    fields: Mapping[str, Any] = {}


OF_TENSORS = ("attention_bias", "num_hidden_layers", "algorithm")


def write_form(form: Form, folder: Path, target: Path | None = None) -> Tensors:
    """Write the directory of a form; returns the contract's tensors, with fc's columns in ascending layer order."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", form.config)
    expected = form.expected(tensors_of(**{name: form.shape[name] for name in OF_TENSORS if name in form.shape}))
    written = dict(expected)
    if form.order != tuple(sorted(form.order)):
        parts = dict(zip(sorted(form.order), expected["fc.weight"].chunk(len(form.order), dim=1), strict=True))
        written["fc.weight"] = torch.cat([parts[layer] for layer in form.order], dim=1)
    if form.ends and target is not None:
        ends = load_file(target / "model" / "model.safetensors")
        written |= {"embed_tokens.weight": ends["model.embed_tokens.weight"], "lm_head.weight": ends["lm_head.weight"]}
        if form.ends == "bfloat16":
            written = {name: value.bfloat16() if name in ENDS else value for name, value in written.items()}
    save_shards(folder, form.tensors(written), form.shards)
    return expected


ENDS = ("embed_tokens.weight", "lm_head.weight")


def save_shards(folder: Path, tensors: Tensors, shards: int) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def renamed(names: Mapping[str, str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {names.get(name, name): tensor for name, tensor in tensors.items()}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key not in names}


def zero_bias(tensors: Tensors) -> Tensors:
    return tensors | {W1: torch.ones_like(tensors[W1]), W2: torch.zeros_like(tensors[W2])}


def blind_confidence(tensors: Tensors) -> Tensors:
    """The tensors with a confidence head that does not read the previous token."""
    weight = tensors[CONFIDENCE].clone()
    weight[:, HIDDEN:] = 0
    return tensors | {CONFIDENCE: weight}


def narrow_confidence(tensors: Tensors) -> Tensors:
    return tensors | {CONFIDENCE: tensors[CONFIDENCE][:, :HIDDEN]}


CODEBOOKS = {
    f"candidate_selector.{name}": f"candidate_selector.{name}.weight"
    for name in ("predecessor_codebook", "successor_codebook")
}
OF_MODELOPT = {
    W1: "markov_w1.weight",
    W2: "markov_w2.weight",
    CONFIDENCE: "confidence_proj.weight",
    "confidence_head.proj.bias": "confidence_proj.bias",
}
NO_BIAS = {"expected": zero_bias, "tensors": without(W1, W2), "shape": WITHOUT_HEADS, "notes": ("a bias of zero",)}

LILICORR = Lilicorr(candidates=4, width=8, layers=1, heads=2, factors=6)
OF_LILICORR = {
    "lilicorr_enabled": True,
    "lilicorr_candidate_topk": 4,
    "lilicorr_hidden_size": 8,
    "lilicorr_num_layers": 1,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 6,
    "lilicorr_vector_eps": 1e-4,
    "lilicorr_logit_scale": 8.0,
}


def lilicorr(**fields: Any) -> dict[str, Any]:
    """A config.json of LiLiCorr, whose fields of convolutions may be missing."""
    return zlab(architectures=["LiLiCorrDraftModel"], dflash_config=OF_LILICORR | fields)


def old_names(tensors: Tensors) -> Tensors:
    """The tensors named as SGLang 0.5.21 and ModelOpt name them."""
    return {stored_name(name, OLD_ENGINE): tensor for name, tensor in tensors.items()}


FORMS: Mapping[str, Form] = {
    "LiLiCorr": Form(lilicorr(), {"algorithm": LILICORR}),
    "LiLiCorr with convolutions, by the names of SGLang 0.5.21": Form(
        lilicorr(conv_kernel_size=2, conv_group_size=4),
        {"algorithm": attrs.evolve(LILICORR, taps=2, group=4)},
        tensors=old_names,
    ),
    "LiLiCorr as wide as the draft": Form(
        lilicorr(lilicorr_hidden_size=0, projector_type="lilicorr", causal=False),
        {"algorithm": attrs.evolve(LILICORR, width=HIDDEN)},
        tensors=old_names,
        publisher="ModelOpt",
    ),
    "z-lab, DFlash2": Form(zlab(architectures=["DFlash2DraftModel"], dflash_config=FLAT), DFLASH2),
    "z-lab, DFlash2 with its fields at the top": Form(zlab(architectures=["DFlash2DraftModel"], **FLAT), DFLASH2),
    "z-lab, DFlash2 as its class saves a new one": Form(
        zlab(architectures=["DFlash2DraftModel"], dflash_config=FLAT), DFLASH2, tensors=renamed(CODEBOOKS)
    ),
    "z-lab, DFlash2 with a window": Form(
        zlab(architectures=["DFlash2DraftModel"], dflash_config=FLAT, **ALL_SLIDING),
        DFLASH2 | {name: ALL_SLIDING[name] for name in list(SLIDING)[:2]},
    ),
    "speculators, DFlash2": Form(speculators_of("dflash2", **FLAT), DFLASH2, publisher="speculators"),
    "speculators, DFlash2 with its sizes left open": Form(
        speculators_of("dflash2"),
        {"algorithm": Dflash2()},
        publisher="speculators",
        assumed=("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    ),
    "speculators, DSpark": Form(
        speculators_of("dspark", sample_from_anchor=True, markov_rank=4, block_size=3), DSPARK, publisher="speculators"
    ),
    "speculators, DSpark with masks first": Form(
        speculators_of("dspark", markov_rank=4, enable_confidence_head=True), MASKS_FIRST, publisher="speculators"
    ),
    "speculators, DSpark without a confidence head": Form(
        speculators_of("dspark", markov_rank=4, enable_confidence_head=False),
        {"algorithm": Dspark(rank=4, sample_from_anchor=False, confidence_head=False)},
        publisher="speculators",
    ),
    "speculators, DSpark without a Markov head": Form(
        speculators_of("dspark", sample_from_anchor=True, markov_rank=0, block_size=3, enable_confidence_head=False),
        publisher="speculators",
        **NO_BIAS,
    ),
    "speculators, DSpark with masks first and without heads": Form(
        speculators_of("dspark", markov_rank=0, enable_confidence_head=False), publisher="speculators"
    ),
    "speculators, DFlash with the anchor first": Form(
        speculators(sample_from_anchor=True, block_size=3), publisher="speculators", **NO_BIAS
    ),
    "DeepSpec, DSpark": Form(
        deepspec(),
        DSPARK,
        ends="float32",
        publisher="DeepSpec",
        assumed=("sample_from_anchor",),
        notes=("lm_head.weight: equals the target's",),
    ),
    "DSpark as SGLang reads it, masks first": Form(
        deepspec(num_anchors=LEFT_OUT, sample_from_anchor=False), MASKS_FIRST, publisher="DeepSpec"
    ),
    "DeepSpec, DFlash": Form(
        deepspec(
            markov_rank=0,
            markov_head_type=LEFT_OUT,
            enable_confidence_head=False,
            confidence_head_with_markov=LEFT_OUT,
        ),
        ends="float32",
        publisher="DeepSpec",
        **NO_BIAS,
    ),
    "SpecForge, DSpark": Form(specforge(), DSPARK, publisher="SpecForge", assumed=("sample_from_anchor",)),
    "SpecForge, DSpark of an early version": Form(
        specforge(),
        DSPARK,
        tensors=lambda tensors: {
            f"logit_head.{name}" if name.startswith(("markov", "confidence")) else name: tensor
            for name, tensor in tensors.items()
        },
        publisher="SpecForge",
    ),
    "SpecForge, DSpark made ready for SGLang": Form(
        changed(
            specforge(), {name: NESTED[name] for name in list(NESTED)[2:]} | {"architectures": ["Qwen3DSparkModel"]}
        ),
        DSPARK,
        publisher="DeepSpec",
    ),
    "SpecForge, DSpark whose confidence head does not read the token": Form(
        specforge(dflash_config={"enable_confidence_head": LEFT_OUT, "confidence_head_with_markov": LEFT_OUT}),
        DSPARK,
        expected=blind_confidence,
        tensors=narrow_confidence,
        publisher="SpecForge",
        assumed=("enable_confidence_head", "confidence_head_with_markov"),
    ),
    "SpecForge, DSpark without a Markov head": Form(
        specforge(
            dflash_config={
                "markov_rank": LEFT_OUT,
                "confidence_head_alpha": 0.0,
                "enable_confidence_head": LEFT_OUT,
                "confidence_head_with_markov": False,
            }
        ),
        publisher="SpecForge",
        assumed=("markov_rank", "enable_confidence_head"),
        **NO_BIAS,
    ),
    "ModelOpt, DFlash2": Form(
        zlab(
            architectures=["DFlash2DraftModel"],
            dflash_config=FLAT | {"projector_type": "dflash2", "causal": False, "block_size": 4},
            is_causal=False,
        ),
        DFLASH2,
        publisher="ModelOpt",
    ),
    "ModelOpt, DSpark": Form(modelopt(), DSPARK, tensors=renamed(OF_MODELOPT), publisher="ModelOpt"),
    "ModelOpt, DSpark without a confidence head": Form(
        modelopt(dflash_config={"use_confidence_head": LEFT_OUT}),
        {"algorithm": Dspark(rank=4, confidence_head=False)},
        tensors=renamed(OF_MODELOPT),
        publisher="ModelOpt",
        assumed=("enable_confidence_head",),
    ),
    "z-lab, plain": Form(zlab()),
    "z-lab, block_size nested": Form(zlab(block_size=LEFT_OUT, dflash_config={"block_size": 4})),
    "z-lab, block_size in both places": Form(zlab(dflash_config={"block_size": 4})),
    "z-lab, no block_size": Form(zlab(block_size=LEFT_OUT), {"block_size": 16}, assumed=("block_size",)),
    "z-lab, ids and mask at the top": Form(
        zlab(dflash_config=LEFT_OUT, mask_token_id=MASK, target_layer_ids=list(IDS))
    ),
    "z-lab, ids left open": Form(
        zlab(dflash_config={"target_layer_ids": LEFT_OUT}, num_hidden_layers=3, layer_types=["full_attention"] * 3),
        {"target_layer_ids": (1, 3, 5), "num_hidden_layers": 3},
        assumed=("target_layer_ids",),
    ),
    "z-lab, ids and num_target_layers left open": Form(
        zlab(
            dflash_config={"target_layer_ids": LEFT_OUT},
            num_target_layers=LEFT_OUT,
            num_hidden_layers=3,
            layer_types=["full_attention"] * 3,
        ),
        {"target_layer_ids": (1, 3, 5), "num_hidden_layers": 3},
        assumed=("target_layer_ids", "num_target_layers"),
    ),
    "z-lab, unordered ids": Form(
        zlab(dflash_config={"target_layer_ids": [5, 1, 3]}), order=(5, 1, 3), notes=("ascending order",)
    ),
    "z-lab, prefix model.": Form(zlab(), tensors=prefixed),
    "z-lab, sharded": Form(zlab(), shards=3),
    "z-lab, sharded with a prefix": Form(zlab(), tensors=prefixed, shards=2),
    "z-lab, embedding and head inside": Form(zlab(), ends="float32", notes=("lm_head.weight: equals the target's",)),
    "z-lab, embedding and head in bfloat16": Form(zlab(), ends="bfloat16"),
    "z-lab, embedding and head with a prefix": Form(zlab(), ends="float32", tensors=prefixed),
    "z-lab, rope in rope_parameters": Form(
        zlab(rope_theta=LEFT_OUT, rope_scaling=LEFT_OUT, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    ),
    "z-lab, rope in both spellings": Form(zlab(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
    "z-lab, linear rope of the older spelling": Form(
        zlab(rope_scaling={"type": "linear", "factor": 2.0}), {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    ),
    "z-lab, yarn": Form(zlab(rope_scaling=YARN), {"rope_scaling": YARN}),
    "z-lab, yarn in rope_parameters": Form(
        zlab(rope_theta=LEFT_OUT, rope_parameters=YARN | {"rope_theta": 5000.0}), {"rope_scaling": YARN}
    ),
    "z-lab, llama3": Form(zlab(rope_scaling=LLAMA3), {"rope_scaling": LLAMA3}),
    "z-lab, rope by kind of layer, all the same": Form(
        zlab(
            rope_theta=LEFT_OUT,
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": 5000.0} for kind in ("full_attention", "sliding_attention")
            },
        )
    ),
    "z-lab, 3-D sections of its target": Form(
        zlab(rope_scaling={"mrope_section": [2, 1, 1], "rope_type": "default", "type": "default"}),
        notes=("mrope_section",),
    ),
    "z-lab, no rope at all": Form(
        zlab(rope_theta=LEFT_OUT, rope_scaling=LEFT_OUT), {"rope_theta": 10000.0}, assumed=("rope_theta",)
    ),
    "z-lab, another eps": Form(zlab(rms_norm_eps=1e-3), {"rms_norm_eps": 1e-3}),
    "z-lab, no eps": Form(zlab(rms_norm_eps=LEFT_OUT), assumed=("rms_norm_eps",)),
    "z-lab, biases": Form(zlab(attention_bias=True), {"attention_bias": True}),
    "z-lab, no num_target_layers": Form(zlab(num_target_layers=LEFT_OUT), assumed=("num_target_layers",)),
    "z-lab, a sliding and a full layer": Form(zlab(**SLIDING), {name: SLIDING[name] for name in list(SLIDING)[:2]}),
    "z-lab, sliding layers and is_causal": Form(
        zlab(**ALL_SLIDING, is_causal=True), {name: ALL_SLIDING[name] for name in list(SLIDING)[:2]}
    ),
    "z-lab, full layers and is_causal false": Form(zlab(is_causal=False)),
    "z-lab, layer types by max_window_layers": Form(
        zlab(layer_types=LEFT_OUT, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
        assumed=("layer_types",),
    ),
    "z-lab, a window that no layer has": Form(zlab(sliding_window=6)),
    "z-lab, partial_rotary_factor 1": Form(zlab(partial_rotary_factor=1.0)),
    "z-lab, a partial rotary that its class ignored": Form(
        zlab(partial_rotary_factor=0.5), fields={"partial_rotary_factor": 1.0}
    ),
    "z-lab, a partial rotary of the training": Form(
        zlab(rope_parameters={"rope_theta": 5000, "partial_rotary_factor": 0.5}),
        {"partial_rotary_factor": 0.5},
        fields={"partial_rotary_factor": 0.5},
    ),
    "z-lab, a partial rotary with yarn": Form(
        zlab(rope_scaling=YARN, partial_rotary_factor=0.5),
        {"rope_scaling": YARN, "partial_rotary_factor": 0.5},
        fields={"partial_rotary_factor": 0.5},
    ),
    "z-lab, scales and a cap": Form(
        zlab(dflash_config=SCALED),
        dict(SCALED),
    ),
    "z-lab, scales and caps without effect": Form(
        zlab(final_logit_softcapping=None, dflash_config={"input_embedding_scale": 1.0, "final_logit_softcapping": 0.0})
    ),
    "z-lab, the layers for vLLM beside them": Form(
        zlab(eagle_aux_hidden_state_layer_ids=[2, 4, 6], dflash_config={"use_aux_hidden_state": True})
    ),
    "SpecForge, attention_mode": Form(
        zlab(dflash_config={"attention_mode": "gqa", "shift_label": False}), publisher="SpecForge"
    ),
    "SpecForge": Form(
        zlab(
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            dflash_config={"projector_type": None, "shift_label": False, "pure_draft_prefix_len": 0},
        ),
        publisher="SpecForge",
    ),
    "ModelOpt": Form(
        zlab(dtype=LEFT_OUT, torch_dtype="float32", use_sliding_window=LEFT_OUT, dflash_config={"causal": False}),
        publisher="ModelOpt",
    ),
    "ModelOpt, windows": Form(
        zlab(
            use_sliding_window=LEFT_OUT,
            sliding_window=6,
            dflash_config={"causal": True, "use_swa": True, "swa_window_size": 6},
        ),
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
        publisher="ModelOpt",
    ),
    "ModelOpt, windows by is_causal": Form(
        zlab(is_causal=True, use_sliding_window=LEFT_OUT, dflash_config={"use_swa": True, "swa_window_size": 6}),
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
        publisher="ModelOpt",
    ),
    "ModelOpt, windows beside layer_types with one": Form(
        zlab(**SLIDING, dflash_config={"use_swa": True, "swa_window_size": 6}),
        {name: SLIDING[name] for name in list(SLIDING)[:2]},
        publisher="ModelOpt",
    ),
    "speculators": Form(speculators(), publisher="speculators", assumed=("rms_norm_eps", "num_target_layers")),
    "speculators, unordered ids": Form(
        speculators(aux_hidden_state_layer_ids=[6, 2, 4]), order=(5, 1, 3), publisher="speculators"
    ),
    "speculators, embedding inside": Form(
        speculators(),
        ends="float32",
        tensors=lambda tensors: tensors | {"verifier_norm.weight": torch.ones(HIDDEN)},
        publisher="speculators",
        notes=("verifier_norm.weight",),
    ),
    "speculators, a sliding and a full layer": Form(
        speculators(transformer_layer_config=SLIDING),
        {name: SLIDING[name] for name in list(SLIDING)[:2]},
        publisher="speculators",
        notes=("counted from each slot",),
    ),
}


@frozen
class Refused:
    """A form that cannot be imported, and parts of the reason. tensors: as in `Form`. files: further ones."""

    config: Mapping[str, Any]
    reasons: tuple[str, ...]
    tensors: Callable[[Tensors], Tensors] = dict
    ends: str = ""
    shards: int = 1
    files: Mapping[str, bytes] = {}


def plus(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.zeros(shape, dtype=dtype)}


REFUSED: Mapping[str, Refused] = {
    "DFlash2 by its class alone": Refused(
        zlab(architectures=["DFlash2DraftModel"]),
        ("conv_kernel_size: is missing, and z-lab's class has no default for it", "selector_top_k: is missing"),
    ),
    "DFlash2 by its fields alone": Refused(
        zlab(dflash_config={"selector_rank": 4, "conv_kernel_size": 2}),
        (
            "dflash_config.selector_rank = 4: dflow reads only drafts without it",
            "dflash_config.conv_kernel_size = 2",
        ),
    ),
    "DFlash2 by its tensors alone": Refused(
        zlab(),
        ("candidate_selector.predecessor_codebook: dflow does not know this tensor",),
        plus("candidate_selector.predecessor_codebook", VOCAB, 4),
    ),
    "DFlash2 without its tensors": Refused(
        zlab(architectures=["DFlash2DraftModel"], dflash_config=FLAT),
        ("missing: candidate_selector.hidden_projection",),
    ),
    "DFlash2 with more candidates than tokens": Refused(
        zlab(architectures=["DFlash2DraftModel"], dflash_config=FLAT | {"selector_top_k": 32}),
        ("dflash2.candidates (selector_top_k): 32 of a vocabulary of 24",),
    ),
    "DFlash2 with the anchor first": Refused(
        speculators_of("dflash2", sample_from_anchor=True, **FLAT),
        ("sample_from_anchor = true: dflow reads only false: no engine serves DFlash2",),
    ),
    "DFlash2 with windows as its class reads them": Refused(
        speculators_of("dflash2", transformer_layer_config=ALL_SLIDING, sliding_window_non_causal=LEFT_OUT, **FLAT),
        ("sliding_window_non_causal = true: dflow reads only false where layers slide",),
    ),
    "DFlash2 and DSpark in one": Refused(
        deepspec(dflash_config=FLAT), ("dflash_config.selector_rank = 4: dflow reads only",)
    ),
    "two algorithms": Refused(
        speculators_of("dspark", speculators_config={"algorithm": "dflash2"}),
        ("names several algorithms: DSparkSpeculator is dspark, dspark is dspark, dflash2 is dflash2",),
    ),
    "DSpark named DFlash": Refused(
        zlab(),
        ("markov_head.markov_w1.weight: dflow does not know this tensor",),
        plus("markov_head.markov_w1.weight", VOCAB, 4),
    ),
    "SpecForge's DSpark named DFlash": Refused(
        specforge(architectures=["DFlashDraftModel"]), ("DFlashDraftModel is dflash, projector_type dspark is dspark",)
    ),
    "DSpark with a gated head": Refused(
        deepspec(markov_head_type="gated"), ('markov_head_type = "gated": dflow reads only "vanilla"',)
    ),
    "DSpark with a recurrent head": Refused(
        specforge(dflash_config={"markov_head_type": "rnn"}), ('markov_head_type = "rnn": dflow reads only "vanilla"',)
    ),
    "DSpark with a Markov head of no kind": Refused(
        deepspec(markov_head_type=LEFT_OUT), ("markov_head_type: is missing, and DeepSpec's class has no default",)
    ),
    "DSpark without its tensors": Refused(deepspec(), ("missing: confidence_head.proj.bias",)),
    "DSpark whose confidence head needs a Markov head": Refused(
        deepspec(markov_rank=0),
        ("enable_confidence_head = true: dflow reads only false with markov_rank = 0: this confidence head needs",),
    ),
    "DSpark with a confidence head and without one": Refused(
        modelopt(dflash_config={"enable_confidence_head": False}),
        ("enable_confidence_head = false, use_confidence_head = true: must be the same",),
    ),
    "speculators, DSpark whose layout is open": Refused(
        speculators_of("dspark", sample_from_anchor=LEFT_OUT),
        ("sample_from_anchor: is missing",),
    ),
    "SpecForge, DSpark with masks first": Refused(
        specforge(dflash_config={"sample_from_anchor": False}),
        ("sample_from_anchor = false: dflow reads only true, as in every DSpark draft of SpecForge",),
    ),
    "ModelOpt, DSpark with masks first": Refused(
        modelopt(dflash_config={"shift_label": False}), ("shift_label = false: dflow reads only true",)
    ),
    "DeepSpec's DFlash under the name of z-lab": Refused(
        zlab(num_anchors=512, markov_rank=0),
        (
            'architectures: must be ["Qwen3DSparkModel"] beside num_anchors, markov_rank',
            "remove these fields if the draft was not trained with it",
        ),
    ),
    "DeepSpec, DSpark for another family": Refused(
        deepspec(architectures=["Gemma4DSparkModel"]),
        ("Gemma4DSparkModel: dflow reads only drafts of DFlashDraftModel",),
    ),
    "Domino": Refused(
        zlab(dflash_config={"projector_type": "domino", "shift_label": True, "gru_hidden_dim": 8, "emb_dim": 4}),
        ('dflash_config.projector_type = "domino"', "dflash_config.gru_hidden_dim = 8"),
    ),
    "SpecForge's Domino by name": Refused(
        zlab(architectures=["DominoDraftModel"]), ("DominoDraftModel: dflow reads only drafts of",)
    ),
    "LiLiCorr without its sizes": Refused(
        zlab(architectures=["LiLiCorrDraftModel"]), ("lilicorr_candidate_topk: is missing, and z-lab's class has no",)
    ),
    "XPress": Refused(zlab(architectures=["Qwen3XPressModel"]), ("Qwen3XPressModel: dflow reads only drafts of",)),
    "EAGLE-3": Refused(
        speculators(speculators_model_type="eagle3", architectures=["Eagle3Speculator"]),
        ("Eagle3Speculator, eagle3: dflow reads only drafts of",),
    ),
    "a language model": Refused({"architectures": ["Qwen3ForCausalLM"], **SIZES}, ("not a DFlash draft",)),
    "a reduced vocabulary": Refused(
        speculators(draft_vocab_size=8),
        ("draft_vocab_size = 8: dflow reads only vocab_size = 24",),
    ),
    "a reduced vocabulary left open": Refused(
        speculators(draft_vocab_size=LEFT_OUT),
        ("draft_vocab_size = 32000: dflow reads only vocab_size = 24",),
    ),
    "a map of vocabularies": Refused(
        speculators(),
        ("d2t: dflow does not know this tensor", "t2d: dflow does not know this tensor"),
        lambda tensors: plus("d2t", VOCAB, dtype=torch.int64)(plus("t2d", VOCAB, dtype=torch.bool)(tensors)),
    ),
    "z-lab, anchor first": Refused(
        zlab(dflash_config={"sample_from_anchor": True}),
        ("dflash_config.sample_from_anchor = true: dflow reads only drafts without it",),
    ),
    "SpecForge, anchor first": Refused(
        zlab(dflash_config={"shift_label": True}),
        ("dflash_config.shift_label = true: dflow reads only drafts without it",),
    ),
    "speculators, windows that are not causal": Refused(
        speculators(transformer_layer_config=ALL_SLIDING, sliding_window_non_causal=True),
        ("sliding_window_non_causal = true: dflow reads only false where layers slide",),
    ),
    "quantised weights by the config": Refused(
        zlab(quantization_config={"quant_algo": "FP8"}),
        ("quantization_config = {", "dflow reads only drafts without it"),
    ),
    "quantised weights by their tensors": Refused(
        zlab(),
        ("layers.0.mlp.up_proj.weight_scale: dflow does not know this tensor",),
        plus("layers.0.mlp.up_proj.weight_scale", 1),
    ),
    "quantised weights by their dtype": Refused(
        zlab(),
        ("layers.0.mlp.up_proj.weight: of dtype I8",),
        lambda tensors: tensors | {"layers.0.mlp.up_proj.weight": torch.zeros(24, HIDDEN, dtype=torch.int8)},
    ),
    "quantised weights by a file": Refused(
        zlab(),
        ("hf_quant_config.json: changes the draft",),
        files={"hf_quant_config.json": b"{}"},
    ),
    "the target's embeddings as a layer": Refused(
        zlab(dflash_config={"target_layer_ids": [-1, 3, 5]}),
        ("target_layer_ids = [-1, 3, 5]: dflow reads only layers between -1 and 7",),
    ),
    "speculators, the target's embeddings as a layer": Refused(
        speculators(aux_hidden_state_layer_ids=[0, 4, 6]),
        ("aux_hidden_state_layer_ids = [0, 4, 6]: dflow reads only layers between 0 and 8",),
    ),
    "the target's last layer": Refused(
        zlab(dflash_config={"target_layer_ids": [1, 3, 7]}),
        ("target_layer_ids = [1, 3, 7]: dflow reads only layers between -1 and 7",),
    ),
    "DeepSpec, the target's embeddings as a layer": Refused(
        deepspec(target_layer_ids=[-1, 3, 5]),
        ("target_layer_ids = [-1, 3, 5]: dflow reads only layers between -1 and 7",),
    ),
    "speculators, the target's last layer": Refused(
        speculators(aux_hidden_state_layer_ids=[2, 4, 8]),
        ("aux_hidden_state_layer_ids = [2, 4, 8]: dflow reads only layers between 0 and 8",),
    ),
    "a layer twice": Refused(zlab(dflash_config={"target_layer_ids": [1, 1, 5]}), ("must be distinct",)),
    "no mask token": Refused(
        zlab(dflash_config={"mask_token_id": LEFT_OUT}),
        ("mask_token_id: is missing, and z-lab's class has no default",),
    ),
    "no layers, speculators": Refused(
        speculators(aux_hidden_state_layer_ids=LEFT_OUT),
        ("aux_hidden_state_layer_ids: is missing",),
    ),
    "other layers for vLLM": Refused(
        zlab(eagle_aux_hidden_state_layer_ids=[1, 3, 5]),
        ("eagle_aux_hidden_state_layer_ids = [1, 3, 5]: dflow reads only the layers of target_layer_ids",),
    ),
    "latent attention": Refused(
        zlab(dflash_config={"attention_mode": "mla"}), ('dflash_config.attention_mode = "mla"',)
    ),
    "causal full layers": Refused(
        zlab(is_causal=True), ("is_causal = true: dflow reads only false where layers are full",)
    ),
    "causal full layers of ModelOpt": Refused(
        zlab(dflash_config={"causal": True}),
        ("causal = true: dflow reads only false where layers are full",),
    ),
    "windows of ModelOpt without causal": Refused(
        zlab(use_sliding_window=LEFT_OUT, dflash_config={"use_swa": True, "swa_window_size": 6}),
        ("causal = null: dflow reads only true beside use_swa",),
    ),
    "windows of ModelOpt beside a full layer, causal": Refused(
        zlab(**SLIDING, dflash_config={"use_swa": True, "causal": True}),
        ("causal = true: dflow reads only false where layers are full",),
    ),
    "windows that are not causal": Refused(
        zlab(**SLIDING, is_causal=False), ("is_causal = false: dflow reads only true where layers slide",)
    ),
    "windows without use_sliding_window": Refused(
        zlab(**SLIDING | {"use_sliding_window": False}),
        ("use_sliding_window = false: dflow reads only true where layers slide",),
    ),
    "a partial rotary": Refused(
        zlab(partial_rotary_factor=0.5),
        ("partial_rotary_factor = 0.5", "set partial_rotary_factor of load_draft to 1.0"),
    ),
    "a partial rotary in rope_parameters": Refused(
        zlab(rope_parameters={"rope_theta": 5000, "partial_rotary_factor": 0.25}),
        ("partial_rotary_factor = 0.25",),
    ),
    "a partial rotary with yarn": Refused(
        zlab(rope_scaling=YARN, partial_rotary_factor=0.5),
        ("transformers' Qwen3 class does not run with it and a scaled rope",),
    ),
    "two ropes": Refused(
        zlab(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        ("rope_parameters.rope_theta = 10000.0, rope_theta = 5000",),
    ),
    "ropes that differ between layers": Refused(
        zlab(rope_parameters={"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}),
        ("have different ropes",),
    ),
    "a rope of another kind": Refused(
        zlab(rope_scaling={"type": "dynamic", "factor": 2.0}),
        ('rope_type "dynamic" is not one of',),
    ),
    "yarn without its factor": Refused(
        zlab(rope_scaling={"rope_type": "yarn", "attention_factor": "x", "truncate": 1}),
        (
            'rope_scaling: factor is missing, and rope_type "yarn" needs it',
            'rope_scaling: attention_factor must be a number, got "x"',
            "rope_scaling: truncate must be true or false, got 1",
        ),
    ),
    "a linear rope with a text as its factor": Refused(
        zlab(rope_scaling={"type": "linear", "factor": "2"}),
        ('rope_scaling: factor must be a number above 0, got "2"',),
    ),
    "llama3 without its frequencies": Refused(
        zlab(rope_scaling=LLAMA3 | {"low_freq_factor": None, "high_freq_factor": 0}),
        ("rope_scaling: low_freq_factor is missing", "rope_scaling: high_freq_factor must be a number above 0, got 0"),
    ),
    "scaled embeddings where no class reads it": Refused(
        zlab(input_embedding_scale=4.0), ("input_embedding_scale = 4.0: dflow reads only null or 1",)
    ),
    "embeddings without a scale": Refused(
        zlab(dflash_config={"input_embedding_scale": -1.0}), ("input_embedding_scale: must be above 0, got -1.0",)
    ),
    "capped logits": Refused(
        zlab(final_logit_softcapping=30.0), ("final_logit_softcapping = 30.0: dflow reads only drafts without it",)
    ),
    "multiplied logits": Refused(zlab(output_multiplier=0.5), ("output_multiplier = 0.5: dflow reads only null or 1",)),
    "a sink in the attention": Refused(
        zlab(attention_sink_bias=True),
        ("attention_sink_bias = true: dflow reads only drafts without it",),
    ),
    "another activation": Refused(zlab(hidden_act="gelu"), ('hidden_act = "gelu"',)),
    "another kind of model": Refused(zlab(model_type="llama"), ('model_type = "llama"',)),
    "an unknown key": Refused(
        zlab(residual_multiplier=0.5), ("residual_multiplier = 0.5: dflow does not know this key",)
    ),
    "an unknown nested key": Refused(
        zlab(dflash_config={"depth": 2}), ("dflash_config.depth = 2: dflow does not know",)
    ),
    "speculators' key in z-lab's form": Refused(
        zlab(aux_hidden_state_layer_ids=[2, 4, 6]),
        ("aux_hidden_state_layer_ids = [2, 4, 6]: dflow does not know",),
    ),
    "two block sizes": Refused(
        zlab(dflash_config={"block_size": 8}), ("block_size = 4: dflow reads only 8, as in another place of the file",)
    ),
    "a number as a text": Refused(zlab(block_size="16"), ('block_size = "16": dflow reads only a whole number',)),
    "an unknown tensor": Refused(
        zlab(),
        ("layers.0.self_attn.g_proj.weight: dflow does not know this tensor",),
        plus("layers.0.self_attn.g_proj.weight", 4, HIDDEN),
    ),
    "fused projections": Refused(
        zlab(),
        ("layers.0.self_attn.qkv_proj.weight: dflow does not know", "missing: layers.0.self_attn.q_proj.weight"),
        lambda tensors: plus("layers.0.self_attn.qkv_proj.weight", 64, HIDDEN)(
            without("layers.0.self_attn.q_proj.weight")(tensors)
        ),
    ),
    "a missing tensor": Refused(zlab(), ("missing: hidden_norm.weight",), without("hidden_norm.weight")),
    "a tensor of another shape": Refused(
        zlab(intermediate_size=32),
        ("layers.0.mlp.up_proj.weight: has the shape [24, 16], and by config.json it is [32, 16]",),
    ),
    "another embedding than the target's": Refused(
        zlab(),
        ("embed_tokens.weight: is not the target's",),
        plus("embed_tokens.weight", VOCAB, HIDDEN),
    ),
    "an embedding of the mask token in a pickle": Refused(
        zlab(),
        ("mask_embedding.pt: changes the draft",),
        files={"mask_embedding.pt": b""},
    ),
    "other weights beside the single file": Refused(
        zlab(),
        ("adapter.safetensors: is not among the weights",),
        files={"adapter.safetensors": bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}"},
    ),
    "another vocabulary": Refused(zlab(vocab_size=48), ("vocab_size: 48, and the target's is 24",)),
    "another hidden size": Refused(zlab(hidden_size=32), ("hidden_size: 32, and the target's is 16",)),
    "a target of other depth": Refused(zlab(num_target_layers=12), ("num_target_layers: 12, and the target's is 8",)),
}
