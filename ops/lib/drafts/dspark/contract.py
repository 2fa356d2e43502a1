"""The tensors of DSpark, and what SGLang does with a draft that lacks some of it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING: Mapping[str, str] = {
    "block_size": "silently proposes 7 tokens, whatever the draft was trained with",
    "mask_token_id": "refuses to start (ValueError)",
    "target_layer_ids": "computes ids by the formula for the number of draft layers: it captures other layers than in "
    "training, or refuses to start where fc.weight is of another width",
    "markov_rank": "refuses to start (ValueError)",
    "markov_head_type": "refuses to start (ValueError)",
    "sample_from_anchor": "takes it for true, in silence: in the other layout each slot predicts another token",
    "enable_confidence_head": "does not read it: the head is built where the verification is ragged",
    "confidence_head_with_markov": "takes it for true",
    "dflow.algorithm": "does not read it",
}
WRONG: Mapping[str, str] = {
    "architectures": "stops as DSPARK (AttributeError), and as DFLASH drops both heads, in silence: fewer tokens are "
    "accepted",
    "block_size": "silently proposes another number of tokens, for which the draft was not trained",
    "markov_rank": "refuses to start (ValueError) below 1, and stops at the weights' shapes",
    "markov_head_type": "silently computes another bias, from weights that are not there",
    "sample_from_anchor": "silently shifts what each slot predicts by one: almost nothing is accepted",
    "enable_confidence_head": "does not read it: the head is built where the verification is ragged",
    "confidence_head_with_markov": "stops at the weights' shapes where the head is built",
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Its tensors beside a config.json, with their shapes; none where the sizes are missing or no numbers."""
    hidden, vocabulary, rank = config["hidden_size"], config.get("vocab_size"), config.get("markov_rank")
    if not (type(vocabulary) is int and type(rank) is int and vocabulary > 0 and rank > 0):
        return {}
    if type(config.get("enable_confidence_head")) is not bool:
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocabulary, rank),
        "markov_head.markov_w2.weight": (vocabulary, rank),
    }
    if config["enable_confidence_head"]:
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    return shapes
