"""LiLiCorr slowly: tensors by their names in the serving contract, one block, one node and one pair at a time.

`enter` and `leave` are those of DFlash2, where the draft has convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.dflash2 import reference as dflash2
from ops.lib.drafts.lilicorr.config import LilicorrOptions, sizes
from ops.lib.target.embedding_and_head import logits_of

Weights = Mapping[str, Tensor]


def enter(own: Weights, sublayer: str, x_NKM: Tensor) -> tuple[Tensor, Any]:
    """The input of a sublayer, "attention" or "mlp", and what `leave` needs. own: the layer's tensors."""
    return dflash2.enter(own, sublayer, x_NKM) if f"{sublayer}_conv.base_kernel" in own else (x_NKM, None)


def leave(own: Weights, sublayer: str, y_NKM: Tensor, kept: Any) -> Tensor:
    """The addition to the residual stream: the sublayer's output, convolved where there are convolutions."""
    return y_NKM if kept is None else dflash2.leave(own, sublayer, y_NKM, kept)


def scores(
    config: DraftConfig,
    weights: Weights,
    hidden_DM: Tensor,
    head_VM: Tensor,
    before: list[int],
    context: BlockContext,
) -> Tensor:
    """The scores of a block's next token, [V]. before: the anchor, and the tokens chosen so far."""
    product_DV = hidden_DM.to(head_VM.dtype) @ head_VM.T
    wide = torch.promote_types(product_DV.dtype, torch.float32)
    log_p_DV = logits_of(product_DV.to(wide), config.head_settings).log_softmax(-1)
    best = log_p_DV.topk(sizes(config).candidates)
    nodes = lattice(config, weights, hidden_DM, best.values, best.indices, context, 0)
    slot = len(before) - 1
    found_V = torch.full_like(log_p_DV[0], float("-inf"))
    chosen = None if slot == 0 else best.indices[slot - 1].tolist().index(before[-1])
    for place, token in enumerate(best.indices[slot].tolist()):
        found_V[token] = nodes.score(slot, chosen, place)
    return found_V


def token_logits(
    config: DraftConfig, weights: Weights, hidden_NKM: Tensor, head_VM: Tensor, tokens_NK: Tensor
) -> Tensor:
    """The logits [N, K, V] from which the base loss of every token is computed."""
    return logits_of(hidden_NKM @ head_VM.T, config.head_settings)


def block_losses(
    config: DraftConfig,
    weights: Weights,
    hidden_NKM: Tensor,
    tokens_NK: Tensor,
    valid_NK: Tensor,
    head_VM: Tensor,
    teacher_NKV: Tensor | None,
    options: Any,
    context: BlockContext,
) -> tuple[Tensor, Tensor]:
    """The lattice's terms of each token, and whether the walk would take it after the true ones; both [N, K]."""
    assert isinstance(options, LilicorrOptions)
    count = sizes(config).candidates
    added_NK = torch.zeros(tokens_NK.shape, dtype=hidden_NKM.dtype)
    right_NK = torch.zeros(tokens_NK.shape, dtype=torch.bool)
    for block, tokens in enumerate(tokens_NK.tolist()):
        slots = int(valid_NK[block].sum())  # a block ends at its first token without a weight
        if not slots:
            continue
        hidden_SM = hidden_NKM[block, 1 : slots + 1]
        log_p_SV = logits_of(hidden_SM @ head_VM.T, config.head_settings).log_softmax(-1)
        lists = log_p_SV.topk(count).indices
        nodes = lattice(config, weights, hidden_SM, log_p_SV.gather(1, lists), lists, context, block)
        is_whole, before = slots == len(tokens) - 1, None
        for slot in range(slots):
            token, offered = tokens[slot + 1], lists[slot].tolist()
            if token not in offered:
                break
            true = offered.index(token)
            scores_C = torch.stack([nodes.score(slot, before, place) for place in range(count)])
            right_NK[block, slot + 1] = int(scores_C.argmax()) == true
            if is_whole:
                term = options.cross_entropy * -scores_C.log_softmax(0)[true]
                others = [scores_C[place] for place in range(count) if place != true]
                if others:
                    gap = scores_C[true] - torch.stack(others).max()
                    term = term + options.hinge * F.relu(options.margin - gap)
                if options.regret:
                    assert teacher_NKV is not None
                    taught_V = teacher_NKV[block, slot + 1].detach()
                    for place, other in enumerate(offered):
                        lost = F.relu(taught_V[token] - taught_V[other])
                        term = term + options.regret * scores_C.softmax(0)[place] * lost
                added_NK[block, slot + 1] = term
            before = true
    return added_NK, right_NK


class Lattice:
    """The vectors of all nodes of a block: `outward` and `inward` by slot and rank, and the anchor's."""

    def __init__(self, scale: float, anchor_R: Tensor, outward: list[list[Tensor]], inward: list[list[Tensor]]) -> None:
        self.scale, self.anchor_R, self.outward, self.inward = scale, anchor_R, outward, inward

    def score(self, slot: int, before: int | None, place: int) -> Tensor:
        """The score of a candidate after the candidate `before` of the slot before; after the anchor for slot 0."""
        earlier_R = self.anchor_R if before is None else self.outward[slot - 1][before]
        wide = torch.promote_types(earlier_R.dtype, torch.float32)
        return self.scale * (earlier_R @ self.inward[slot][place]).to(wide)


def lattice(
    config: DraftConfig,
    weights: Weights,
    hidden_SM: Tensor,
    log_p_SC: Tensor,
    tokens_SC: Tensor,
    context: BlockContext,
    block: int,
) -> Lattice:
    """The lattice of a block's slots. block: its number in the context."""
    own, eps = sizes(config), config.rms_norm_eps
    dtype, (S, C) = hidden_SM.dtype, tokens_SC.shape
    w = {name.removeprefix("lilicorr."): tensor for name, tensor in weights.items() if name.startswith("lilicorr.")}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def direction(vector: Tensor) -> Tensor:
        return vector / vector.norm().clamp(min=own.vector_eps)

    nodes, slot_of = [], []
    for slot in range(S):
        for rank in range(C):
            log_p = log_p_SC[slot, rank]
            share, best = rank / (C - 1) if C > 1 else 0.0, float(rank == 0)
            described = torch.stack(
                [log_p, log_p.exp(), log_p - log_p_SC[slot, 0], *log_p.new_tensor([share, best])]
            ).to(dtype)
            centred = described - described.mean()
            normed = centred / torch.sqrt((centred * centred).mean() + 1e-5)
            normed = normed * w["feature_norm.weight"] + w["feature_norm.bias"]
            embedding_M = context.embed_VM[int(tokens_SC[slot, rank])].to(dtype)
            node_H = embedding_M if "token_proj.weight" not in w else linear("token_proj", embedding_M)
            node_H = node_H + linear("pass_hidden_proj", hidden_SM[slot])
            node_H = node_H + linear("feature_mlp.down_proj", F.silu(linear("feature_mlp.up_proj", normed)))
            nodes.append(node_H + w["slot_embedding"][0, 0, slot, 0] + w["rank_embedding"][0, 0, 0, rank])
            slot_of.append(slot)
    x_LH = torch.stack(nodes)
    for layer in range(own.layers):
        x_LH = x_LH + _attended(own.heads, config.block_size, w, f"layers.{layer}.attn", slot_of, norm, x_LH)
        middle = F.silu(linear(f"layers.{layer}.mlp.up_proj", norm(f"layers.{layer}.mlp_norm", x_LH)))
        x_LH = x_LH + linear(f"layers.{layer}.mlp.down_proj", middle)
    x_LH = norm("output_norm", x_LH)
    a_H = linear("context_proj", context.last_NM[block].to(dtype))
    a_H = norm("anchor_norm", a_H if context.is_there_N[block] else torch.zeros_like(a_H))
    factors = [F.silu(linear("factor_input_proj", torch.cat((x_H, a_H, x_H * a_H)))) for x_H in x_LH]
    outward, inward = ([direction(linear(head, f_H)) for f_H in factors] for head in ("out_head", "in_head"))
    by_slot = [slice(slot * C, (slot + 1) * C) for slot in range(S)]
    anchor_R = direction(linear("anchor_out_head", a_H))
    return Lattice(own.logit_scale, anchor_R, [outward[each] for each in by_slot], [inward[each] for each in by_slot])


def _attended(
    heads: int, block_size: int, w: Weights, name: str, slot_of: list[int], norm: Any, x_LH: Tensor
) -> Tensor:
    normed_LH = norm(name.replace(".attn", ".attn_norm"), x_LH)
    q, k, v = (normed_LH @ w[f"{name}.in_proj_weight"].T + w[f"{name}.in_proj_bias"]).chunk(3, dim=-1)
    size = q.shape[1] // heads
    slot_L = torch.tensor(slot_of, device=x_LH.device)
    distance_LL = slot_L[:, None] - slot_L
    mixed = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores_LL = q[:, part] @ k[:, part].T * size**-0.5
        bias_LL = w["relative_slot_bias"][head][distance_LL + block_size - 1]
        bias_LL = bias_LL + (distance_LL == 0) * w["same_slot_bias"][head]
        mixed.append((scores_LL + bias_LL).softmax(-1) @ v[:, part])
    return torch.cat(mixed, dim=1) @ w[f"{name}.out_proj.weight"].T + w[f"{name}.out_proj.bias"]
