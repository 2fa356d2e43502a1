"""The tensors of a target's own MTP head, by the headers of its files. Loads no torch.

An MTP (multi-token prediction) head is a layer that was trained with the target to propose the tokens after the next
one. transformers drops its tensors when it loads the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ops.lib.target.quantised import UNQUANTISED
from ops.lib.target.stored_weights import StoredTensor, listed
from ops.lib.vision.family_config import MTP, QWEN35

MTP_TYPES = (*QWEN35, "qwen3_next")  # whose heads dflow computes
ENDS = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
KNOWN = re.compile(rf"layers\.0\.(?:self_attn|mlp|input_layernorm|post_attention_layernorm)\.|{'|'.join(ENDS)}$")


def mtp_mistake(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> str:
    """A text on why answers cannot be decoded with the target's own MTP head; empty if they can.

    config: content of config.json. stored: the tensors of its files, by name.
    """
    head = {name.removeprefix(MTP): tensor for name, tensor in stored.items() if name.startswith(MTP)}
    if not head:
        return "the target's files hold no MTP head: no tensor is named mtp.*; evaluate a draft instead"
    kind = config.get("model_type")
    if kind not in MTP_TYPES:
        return f"dflow computes the MTP head of {', '.join(MTP_TYPES)}, and this target is a {kind}"
    if missing := sorted(f"{MTP}{name}" for name in ENDS if name not in head):
        return f"the MTP head in the target's files is not whole: {listed(missing)} missing; copy them again"
    if quantised := sorted(tensor.name for tensor in head.values() if tensor.dtype not in UNQUANTISED):
        return f"the MTP head in the target's files is quantised ({listed(quantised)}); give the unquantised checkpoint"
    if unknown := sorted(tensor.name for name, tensor in head.items() if not KNOWN.match(name)):
        return (
            "dflow computes MTP heads of one layer with the target's embedding and head, and the target's files hold "
            f"{listed(unknown)} too"
        )
    return ""
