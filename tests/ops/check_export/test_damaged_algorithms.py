"""Exports of DFlash2 and DSpark, each damaged in a way that SGLang serves in silence, or that other projects write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from damaged_cases import RANDOM, REWRITE, edit_config, edit_tensors, mistakes
from gate_cases import ALGORITHMS, check, with_algorithm

NESTED = "many silently change what a draft computes"
CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
SELECTOR = ("selector_rank", "selector_top_k")
OF_DSPARK = (
    *("markov_rank", "markov_head_type", "sample_from_anchor"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
CODEBOOKS = ("predecessor_codebook", "successor_codebook")


def drop(*names: str, nest: str | None = None):
    def change(config: dict[str, Any]) -> None:
        for name in names:
            del (config[nest] if nest else config)[name]

    return change


def put(nest: str | None = None, **fields: Any):
    return lambda config: (config[nest] if nest else config).update(fields)


def drop_tensors(part: str):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def rename_tensors(old: str, new: str):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def flat(config: dict[str, Any]) -> None:
    """As speculators writes DFlash2."""
    for name in (*CONVOLUTIONS, *SELECTOR):
        config[name] = config["dflash_config"].pop(name)


def nested(config: dict[str, Any]) -> None:
    """As SpecForge writes DSpark."""
    names = ("block_size", "mask_token_id", "target_layer_ids", *OF_DSPARK)
    config["dflash_config"] = {name: config.pop(name) for name in names}


CONFIGS = {
    "dflash2, named as plain": ("dflash2", put(architectures=["DFlashDraftModel"]), {}),
}


@pytest.mark.parametrize("label", CONFIGS)
def test_print(tmp_path, gate_inputs, label):
    pass


def test_all(tmp_path, gate_inputs):
    cases = {
    "dflash2 arch": ("dflash2", put(architectures=["DFlashDraftModel"]), None),
    "dflash2 as plain": ("dflash2", lambda c: (put(architectures=["DFlashDraftModel"])(c), c["dflow"].pop("algorithm")), None),
    "dflash2 no conv": ("dflash2", drop(*CONVOLUTIONS, nest="dflash_config"), None),
    "dflash2 no sel": ("dflash2", drop(*SELECTOR, nest="dflash_config"), None),
    "dflash2 flat": ("dflash2", flat, None),
    "dflash2 others": ("dflash2", put("dflash_config", output_multiplier=0.5, final_logit_softcapping=3.0, input_embedding_scale=2.0), None),
    "dflash2 topk": ("dflash2", put("dflash_config", selector_top_k=3), None),
    "dflash2 rank": ("dflash2", put("dflash_config", selector_rank=3), None),
    "dflash2 proj": ("dflash2", None, drop_tensors("kernel_projection")),
    "dflash2 base": ("dflash2", None, drop_tensors("base_kernel")),
    "dflash2 codebooks": ("dflash2", None, drop_tensors("codebook")),
    "dflash2 codebook.weight": ("dflash2", None, rename_tensors("codebook", "codebook.weight")),
    "unknown alg": ("dflash2", put("dflow", algorithm="domino"), None),
    "number alg": ("dflash2", put("dflow", algorithm=3), None),
    "dspark arch": ("dspark", put(architectures=["DFlashDraftModel"]), None),
    "dspark as plain": ("dspark", lambda c: (put(architectures=["DFlashDraftModel"])(c), c["dflow"].pop("algorithm")), None),
    "dspark layout": ("dspark", put(sample_from_anchor=False), None),
    "dspark nested": ("dspark", nested, None),
    "dspark nested too": ("dspark", lambda c: c.update(dflash_config={"block_size": 3}), None),
    "dspark block+1": ("dspark", lambda c: c.update(block_size=c["block_size"]+1), None),
    "dspark no prefix": ("dspark", None, rename_tensors("markov_head.", "")),
    "dspark no conf": ("dspark", None, drop_tensors("confidence_head")),
    "dspark layer+1": ("dspark", lambda c: c.update(target_layer_ids=[k+1 for k in c["target_layer_ids"]]), None),
    "dspark gated": ("dspark", put(markov_head_type="gated"), None),
    "dspark conf off": ("dspark", put(enable_confidence_head=False), None),
    "dspark rank0": ("dspark", put(markov_rank=0), None),
    "dspark is_causal": ("dspark", put(is_causal=False), None),
    "dspark windows": ("dspark", put(layer_types=["sliding_attention"]*2, sliding_window=8, use_sliding_window=True, is_causal=False), None),
    **{f"dspark no {f}": ("dspark", drop(f), None) for f in ("block_size", "mask_token_id", "target_layer_ids", *OF_DSPARK)},
    }
    for i, (label, (name, c, t)) in enumerate(cases.items()):
        inputs = with_algorithm(tmp_path / str(i), gate_inputs, ALGORITHMS[name])
        if c: edit_config(inputs, c)
        if t: edit_tensors(inputs, t)
        try:
            found = mistakes(tmp_path / str(i) / "gate", inputs)
            print("##", label)
            for f in found: print("   ", f[0], "|", f[1])
        except BaseException as e:
            print("##", label, "RAISED", type(e), e)
