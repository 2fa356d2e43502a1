"""The training step as the paper has it: one dense mask, plain softmax, all logits; slow, in any floating dtype.

It is the specification of the fast step, which is tested against it; both share the config, the blocks' tokens,
labels and weights, and the RoPE frequencies, nothing else. All samples lie in one sequence [all contexts | all blocks]:

    c_j     = norm(fc f_j)                                      context feature of token j, the same in every layer
    x_a,0   = embed[token at a];  x_a,k = embed[mask], k > 0    the block of anchor a; its slot k stands at a + k
    q       = rope(norm(Wq n_i));  k = rope(norm(Wk t_j));  v = Wv t_j      n = norm(x), t = [c | n]
    x       = x + Wo softmax(q k^T / sqrt(D)) v,  then  x + Wdown(silu(Wgate norm x) * Wup norm x)
    CE_a,k  = -log softmax(head norm(x_a,k))[token at a + k],  k > 0

Slot (a, k) sees context j of its own sample iff j < a, and every slot of its own block. In a sliding layer it sees of
these only the keys at positions j with 0 <= a + k - j < window. Weights w_a,k = exp(-(k - 1) / gamma) up to the first
slot outside the loss mask or behind the end, 0 from there on. loss = numerator / denominator, p = exp(-CE):

    dflash  sum w CE / sum w                         DFlash, arXiv 2602.06036, section 4.2
    focal   sum w (1 - p)^g CE / sum w               focal loss, arXiv 1708.02002, equation 4
    kl      sum w KL(teacher || draft) / sum w       DistillSpec, arXiv 2310.08461, with DFlash's weights; the teacher
                                                     of slot (a, k) is the target at position a + k - 1
    l1, lk, nla                                      other distances from the teacher, weighted as kl: formulas in
                                                     `reference_slot_losses`, as losses/head.py and comparison.py
                                                     compute them tile by tile
    dpace   sum v CE / (number of blocks with w > 0) D-PACE, arXiv 2605.18810, equations 7 to 9:
            v_k = sum over m >= k of prod over i <= m of ((1 - alpha) p_i + alpha), i and m over the slots with w > 0;
            no gradient goes through v

Legend: S tokens of a sample, A its anchors, T context tokens of all samples, N blocks, K block size, Q = N * K slots,
L = T + Q keys, F target features, M hidden, H query heads, G key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from dsl.errors import DataError
from ops.lib.drafts.algorithms import ReadsContext, part_of
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.rope import rope_frequencies
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.losses.kinds import LossKind, Terms, needs_teacher
from ops.lib.drafts.losses.slots import block_labels, block_tokens, block_weights, slot_weights
from ops.lib.target.embedding_and_head import logits_of
from ops.lib.target.head_settings import PLAIN, HeadSettings

# The types of the functions in an algorithm's reference.py.
Enter = Callable[[Mapping[str, Tensor], str, Tensor], tuple[Tensor, Any]]
Leave = Callable[[Mapping[str, Tensor], str, Tensor, Any], Tensor]
TokenLogits = Callable[[DraftConfig, Mapping[str, Tensor], Tensor, Tensor, Tensor], Tensor]
BlockLosses = Callable[..., tuple[Tensor, Tensor]]


@frozen(eq=False)
class Sample:
    """A training sample for the slow reference.

    features_SF: the target's features. anchors_A: int64 positions, maybe none. teacher_SM: final normed states, for KL.
    """

    features_SF: Tensor
    input_ids_S: Tensor
    loss_mask_S: Tensor
    anchors_A: Tensor
    teacher_SM: Tensor | None = None


@frozen(eq=False)
class Step:
    """The outcome of a step: loss = numerator / denominator, or a differentiable 0 where no slot has a weight.

    seen_K, int64: weighted slots by place in the block. correct_K: those whose best token is the label.
    """

    loss: Tensor
    numerator: Tensor
    denominator: float
    correct_K: Tensor
    seen_K: Tensor


def reference_step(
    weights: Mapping[str, Tensor],
    config: DraftConfig,
    embed_VM: Tensor,
    head_VM: Tensor,
    samples: Sequence[Sample],
    *,
    teacher: HeadSettings = PLAIN,
    teacher_bias_V: Tensor | None = None,
    kind: LossKind = "dflash",
    gamma: float | None = None,
    focal_gamma: float = 2.0,
    dpace_alpha: float = 0.5,
    own: Terms | None = None,
) -> Step:
    """The loss of a batch of samples by a slow reference; differentiable with respect to the weights.

    weights: the tensors of the serving contract; their dtype is that of the computation, and the softmax over the
    vocabulary is in float32 at least. teacher, with its bias: what the target's logits are made by.
    Memory: [H, Q, L] scores per layer and [Q, V] logits.
    Raises DataError for a loss that reads the teacher, and a sample without one.
    """
    dtype = weights["fc.weight"].dtype
    K = config.block_size
    hidden_NQM = reference_hidden(weights, config, embed_VM, samples)
    labels_NK = torch.cat([block_labels(sample.input_ids_S, sample.anchors_A, K) for sample in samples])
    weights_K = block_weights(K, gamma)
    weights_NK = torch.cat([slot_weights(sample.loss_mask_S, sample.anchors_A, weights_K) for sample in samples])
    valid_NK = weights_NK > 0

    precise = torch.promote_types(dtype, torch.float32)
    # Token k of a block is predicted by slot k - shift; that for the anchor has no weight, whatever it is.
    shift = config.layout().shift
    hidden_NKM = hidden_NQM[:, (torch.arange(K) - shift).clamp(min=0)]
    token_logits: TokenLogits = part_of(config.algorithm, "reference:token_logits")
    logits_NKV = token_logits(config, weights, hidden_NKM, head_VM.to(dtype), labels_NK).to(precise)
    teacher_NKV = None
    if needs_teacher(kind, own):
        teacher_NKM = torch.cat([_teacher(sample, K) for sample in samples]).to(dtype)
        product_NKV = teacher_NKM @ head_VM.to(dtype).T
        if teacher.bias and teacher_bias_V is not None:
            product_NKV = product_NKV + teacher_bias_V.to(dtype)
        teacher_NKV = logits_of(product_NKV, teacher).to(precise)
    values_NK = reference_slot_losses(kind, logits_NKV, labels_NK, teacher_NKV)

    denominator = float(weights_NK.sum(dtype=torch.float64))
    if kind == "focal":
        values_NK = (1 - torch.exp(-values_NK)) ** focal_gamma * values_NK
    elif kind == "dpace":
        weights_NK = dpace_weights(values_NK.detach(), valid_NK, dpace_alpha)
        denominator = float(valid_NK.any(1).sum())
    extra: BlockLosses = part_of(config.algorithm, "reference:block_losses")
    reads = isinstance(config.algorithm, ReadsContext)
    around = (_around(weights, config, embed_VM, samples),) if reads else ()
    given = (config, weights, hidden_NKM, labels_NK, valid_NK, head_VM.to(dtype), teacher_NKV, own)
    added_NK, right_NK = extra(*given, *around)
    values_NK = (1.0 if own is None else own.base) * values_NK + added_NK
    numerator = (weights_NK.to(precise) * values_NK)[valid_NK].sum(dtype=torch.float64)

    correct_NK = valid_NK & right_NK
    loss = numerator / denominator if denominator else numerator
    return Step(loss, numerator, denominator, correct_NK.sum(0), valid_NK.sum(0))


def _around(
    weights: Mapping[str, Tensor], config: DraftConfig, embed_VM: Tensor, samples: Sequence[Sample]
) -> BlockContext:
    """The surroundings of all blocks."""
    last, is_there = [], []
    for sample in samples:
        features_SF = sample.features_SF.to(weights["fc.weight"].dtype)
        context_SM = _norm(features_SF @ weights["fc.weight"].T, weights["hidden_norm.weight"], config.rms_norm_eps)
        for anchor in sample.anchors_A.tolist():
            last.append(context_SM[anchor - 1] if anchor else torch.zeros_like(context_SM[0]))
            is_there.append(anchor > 0)
    last_NM = torch.stack(last) if last else embed_VM.new_zeros(0, config.hidden_size)
    return BlockContext(embed_VM, last_NM, torch.tensor(is_there, dtype=torch.bool))


def reference_slot_losses(kind: LossKind, logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor | None) -> Tensor:
    """The loss of each slot before weighting, differentiable. logits_NV: with their bias, if there is one.

    teacher_NV: the target's logits, for the kinds that need them. With q the draft's probabilities and p the target's:
    kl: sum p log(p / q). l1: sum |q - p|. lk: w KL + (1 - w) l1 / 2, w = exp(-3 a), a = sum min(p, q) without gradient.
    nla: -log a. All others: the cross-entropy.
    """
    log_q_NV = logits_NV.log_softmax(-1)
    if kind not in ("kl", "l1", "lk", "nla"):
        return -log_q_NV.gather(-1, labels_N[..., None])[..., 0]
    assert teacher_NV is not None
    log_p_NV = teacher_NV.log_softmax(-1)
    q_NV, p_NV = log_q_NV.exp(), log_p_NV.exp()
    kl_N = (p_NV * (log_p_NV - log_q_NV)).sum(-1)
    l1_N = (q_NV - p_NV).abs().sum(-1)
    overlap_N = torch.minimum(p_NV, q_NV).sum(-1)
    blend_N = torch.exp(-3 * overlap_N.detach())
    losses = {"kl": kl_N, "l1": l1_N, "lk": blend_N * kl_N + (1 - blend_N) * l1_N / 2, "nla": -overlap_N.log()}
    return losses[kind]


def dpace_weights(ce_NK: Tensor, valid_NK: Tensor, alpha: float) -> Tensor:
    """D-PACE's weight of every slot, by the reference; a block ends at its first slot without a weight."""
    smoothed_NK = (1 - alpha) * torch.exp(-ce_NK) + alpha
    # Slot 0 is given: a factor of 1. Behind the last valid slot every product is 0.
    factors_NK = torch.where(valid_NK, smoothed_NK, 0)
    factors_NK[:, 0] = 1
    products_NK = factors_NK.cumprod(1)
    return products_NK.flip(1).cumsum(1).flip(1) * valid_NK


def reference_hidden(
    weights: Mapping[str, Tensor], config: DraftConfig, embed_VM: Tensor, samples: Sequence[Sample]
) -> Tensor:
    """The hidden states after the final norm of all slots of all blocks, [N, K, M]; K: slots of the layout."""
    dtype = weights["fc.weight"].dtype
    K, eps = config.layout().queries, config.rms_norm_eps
    own_reference = sys.modules[part_of(config.algorithm, "reference:__name__")]
    enter: Enter = getattr(own_reference, "enter", _enter_plain)
    leave: Leave = getattr(own_reference, "leave", _leave_plain)
    features_TF = torch.cat([sample.features_SF for sample in samples]).to(dtype)
    context_TM = _norm(features_TF @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    tokens = [block_tokens(sample.input_ids_S, sample.anchors_A, K, config.mask_token_id) for sample in samples]
    x_QM = embed_VM.to(dtype)[torch.cat(tokens)].flatten(0, 1) * config.input_embedding_scale
    context_T = torch.cat([torch.arange(len(sample.input_ids_S)) for sample in samples])
    slots_NK = torch.cat([sample.anchors_A for sample in samples])[:, None] + torch.arange(K)
    rope = _rotation(config, torch.cat((context_T, slots_NK.flatten())), dtype)
    for layer in range(config.num_hidden_layers):
        own = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items()}
        mask_QL = visible(samples, K, config.window(layer))
        normed_QM = _norm(x_QM, own["input_layernorm.weight"], eps)
        input_NKM, kept = enter(own, "attention", normed_QM.unflatten(0, (-1, K)))
        output_QM = _attention(config, own, input_NKM.flatten(0, 1), context_TM, rope, mask_QL)
        x_QM = x_QM + leave(own, "attention", output_QM.unflatten(0, (-1, K)), kept).flatten(0, 1)
        normed_QM = _norm(x_QM, own["post_attention_layernorm.weight"], eps)
        input_NKM, kept = enter(own, "mlp", normed_QM.unflatten(0, (-1, K)))
        x_QM = x_QM + leave(own, "mlp", _mlp(own, input_NKM), kept).flatten(0, 1)
    return _norm(x_QM, weights["norm.weight"], eps).unflatten(0, (len(slots_NK), K))


def _enter_plain(own: Mapping[str, Tensor], sublayer: str, x_NKM: Tensor) -> tuple[Tensor, Any]:
    """The unchanged input of a sublayer, "attention" or "mlp", without a module around it. own: the layer's tensors."""
    return x_NKM, None


def _leave_plain(own: Mapping[str, Tensor], sublayer: str, y_NKM: Tensor, kept: Any) -> Tensor:
    return y_NKM


def visible(samples: Sequence[Sample], block_size: int, window: int | None) -> Tensor:
    """A mask of the keys that each slot sees, bool [Q, L] over [all contexts | all blocks]."""
    counts = torch.tensor([len(sample.anchors_A) for sample in samples])
    lengths = torch.tensor([len(sample.input_ids_S) for sample in samples])
    sample_T = torch.arange(len(samples)).repeat_interleave(lengths)
    sample_Q = torch.arange(len(samples)).repeat_interleave(counts * block_size)
    position_T = torch.cat([torch.arange(len(sample.input_ids_S)) for sample in samples])
    anchor_Q = torch.cat([sample.anchors_A for sample in samples]).repeat_interleave(block_size)
    block_Q = torch.arange(len(anchor_Q)) // block_size
    position_Q = anchor_Q + torch.arange(len(anchor_Q)) % block_size

    context_QT = (sample_Q[:, None] == sample_T) & (position_T < anchor_Q[:, None])
    own_QQ = block_Q[:, None] == block_Q
    mask_QL = torch.cat((context_QT, own_QQ), dim=1)
    if window is not None:
        distance_QL = position_Q[:, None] - torch.cat((position_T, position_Q))
        mask_QL = mask_QL & (distance_QL >= 0) & (distance_QL < window)
    return mask_QL


def _attention(
    config: DraftConfig,
    own: Mapping[str, Tensor],
    normed_QM: Tensor,
    context_TM: Tensor,
    rope: tuple[Tensor, Tensor],
    mask_QL: Tensor,
) -> Tensor:
    H, G, D, eps = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
    tokens_LM = torch.cat((context_TM, normed_QM))
    q_QHD = _norm(_linear(own, "q_proj", normed_QM).unflatten(-1, (H, D)), own["self_attn.q_norm.weight"], eps)
    k_LGD = _norm(_linear(own, "k_proj", tokens_LM).unflatten(-1, (G, D)), own["self_attn.k_norm.weight"], eps)
    v_LGD = _linear(own, "v_proj", tokens_LM).unflatten(-1, (G, D))
    cos, sin = rope
    q_QHD = _turn(q_QHD, cos[len(context_TM) :], sin[len(context_TM) :])
    k_LHD = _turn(k_LGD, cos, sin).repeat_interleave(H // G, dim=1)
    v_LHD = v_LGD.repeat_interleave(H // G, dim=1)
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHD, k_LHD) * D**-0.5
    weights_HQL = scores_HQL.masked_fill(~mask_QL, float("-inf")).softmax(-1)
    mixed_QHD = torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD)
    return _linear(own, "o_proj", mixed_QHD.flatten(1))


def _linear(own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, own[f"self_attn.{name}.weight"], own.get(f"self_attn.{name}.bias"))


def _mlp(own: Mapping[str, Tensor], x_QM: Tensor) -> Tensor:
    gate, up = x_QM @ own["mlp.gate_proj.weight"].T, x_QM @ own["mlp.up_proj.weight"].T
    return (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rotation(config: DraftConfig, positions_L: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, [L, 1, Z / 2] for rotary size Z; the angles have at least float32."""
    frequencies, scale = rope_frequencies(config)
    precise = torch.promote_types(dtype, torch.float32)
    angles = positions_L[:, None, None].to(precise) * frequencies.to(precise)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _turn(x_LHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: each pair (x[i], x[i + Z/2]) is rotated by its angle; dimensions from Z on stay."""
    half = cos.shape[-1]
    a, b, passed = x_LHD[..., :half], x_LHD[..., half : 2 * half], x_LHD[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, passed), dim=-1)


def _teacher(sample: Sample, block_size: int) -> Tensor:
    """The target's state that predicts each slot, [A, K, M]; an arbitrary one where the slot has no weight."""
    if sample.teacher_SM is None:
        raise DataError("this loss needs the target's final hidden states of every sample")
    positions_AK = sample.anchors_A[:, None] + torch.arange(block_size) - 1
    return sample.teacher_SM[positions_AK.clamp(0, len(sample.teacher_SM) - 1)]
