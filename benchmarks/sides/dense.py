"""The dense reference: a DFlash step in the scheme of SpecForge (sgl-project/SpecForge, specforge/core/dflash.py).

Its trainer, reimplemented: one forward pass over all blocks at once; in every layer keys
and values of [context | all blocks] are projected and joined, and SDPA runs under one dense boolean mask
[A * K, S + A * K]; the loss goes over chunks of 128 anchors under activation checkpointing, with logits for every slot
of the chunk, slot 0 and slots without weight included, so that each chunk's logits are made twice; accuracy is an
argmax over the same logits. Norms are transformers' Qwen3RMSNorm in its single operations, and keys and values are
repeated for the query heads, as transformers does for SDPA with a mask.
On a GPU FlexAttention takes SDPA's place: compiled, under a block mask that an uncompiled `create_block_mask` makes
again for every step. Weights are kept and cast as on our side: float32 masters at least, cast once a step.

Legend: S context, N = A * K slots, M hidden, H query heads, G key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.sides import measured
from benchmarks.sides.problem import Problem, Sizes, slot_targets
from ops.train_dflash.engine import weights_to_compute_with

LOSS_CHUNK = 128  # anchors
EPS = 1e-6
ROPE_THETA = 10000.0


def make_step(problem: Problem, arguments: argparse.Namespace) -> measured.Step:
    """The step of the dense reference; `--chunk` has no effect."""
    dtype, device = problem.features_SF.dtype, problem.features_SF.device
    model = DenseDraft(problem.sizes).to(device, torch.promote_types(dtype, torch.float32))
    model.load_state_dict(problem.weights)
    computing = weights_to_compute_with(model, dtype)

    def run() -> tuple[Tensor, Tensor]:
        with computing():
            loss, correct = model(problem)
            loss.backward()
        return loss.detach(), correct

    def gradients() -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    return measured.Step(run, gradients, model.zero_grad)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * wide.to(x.dtype)


class DenseAttention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, width, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(sizes.head_dim), Norm(sizes.head_dim)

    def forward(
        self, x_NM: Tensor, context_SM: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | BlockMask
    ) -> Tensor:
        q_HND = self._heads(self.q_norm, self.q_proj(x_NM))
        k_GTD = self._heads(self.k_norm, torch.cat((self.k_proj(context_SM), self.k_proj(x_NM))))
        v_GTD = self._heads(nn.Identity(), torch.cat((self.v_proj(context_SM), self.v_proj(x_NM))))
        cos, sin = rope
        q_HND = _rotated(q_HND, cos[-len(x_NM) :], sin[-len(x_NM) :])
        mixed_HND = _attend(q_HND, _rotated(k_GTD, cos, sin), v_GTD, mask)
        return self.o_proj(mixed_HND.transpose(0, 1).reshape(len(x_NM), -1))

    def _heads(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x.view(len(x), -1, self.head_dim)).transpose(0, 1)


class DenseMLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DenseLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = DenseAttention(sizes), DenseMLP(sizes)
        self.input_layernorm, self.post_attention_layernorm = Norm(sizes.hidden), Norm(sizes.hidden)

    def forward(
        self, x_NM: Tensor, context_SM: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | BlockMask
    ) -> Tensor:
        x_NM = x_NM + self.self_attn(self.input_layernorm(x_NM), context_SM, rope, mask)
        return x_NM + self.mlp(self.post_attention_layernorm(x_NM))


class DenseDraft(nn.Module):
    """The dense reference's draft with its loss; parameters are named as in the serving contract."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc = nn.Linear(sizes.features, sizes.hidden, bias=False)
        self.hidden_norm, self.norm = Norm(sizes.hidden), Norm(sizes.hidden)
        self.layers = nn.ModuleList(DenseLayer(sizes) for _ in range(sizes.layers))

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """The loss sum(w * CE) / sum(w), and the number of weighted slots whose best token is the label."""
        ids_AK = problem.ids_S.new_full((len(problem.anchors_A), problem.sizes.block), problem.sizes.mask_token_id)
        ids_AK[:, 0] = problem.ids_S[problem.anchors_A]
        x_NM = F.embedding(ids_AK.flatten(), problem.embed_VM)
        context_SM = self.hidden_norm(self.fc(problem.features_SF))
        rope = _rope(problem)
        mask = block_mask(problem) if x_NM.is_cuda else dense_mask(problem)
        for layer in self.layers:
            x_NM = layer(x_NM, context_SM, rope, mask)
        return _loss(self.norm(x_NM), problem)


def dense_mask(problem: Problem) -> Tensor:
    """The mask of all blocks, bool [A * K, S + A * K]: a slot sees the context before its anchor, and its own block."""
    K, S = problem.sizes.block, problem.sizes.context
    N = len(problem.anchors_A) * K
    rows_N = torch.arange(N, device=problem.ids_S.device)[:, None]
    columns_T = torch.arange(S + N, device=problem.ids_S.device)
    before = columns_T < problem.anchors_A[rows_N // K]
    own = (columns_T >= S) & ((columns_T - S) // K == rows_N // K)
    return before | own


def block_mask(problem: Problem) -> BlockMask:
    """The mask of `dense_mask` as FlexAttention's block mask, made by the uncompiled `create_block_mask`."""
    K, S, anchors_A = problem.sizes.block, problem.sizes.context, problem.anchors_A
    N = len(anchors_A) * K

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = (query // K).clamp(max=len(anchors_A) - 1)
        before = (key < S) & (key < anchors_A[block])
        return (before | ((key >= S) & ((key - S) // K == block))) & (query < N)

    return create_block_mask(sees, B=None, H=None, Q_LEN=N, KV_LEN=S + N, device=str(anchors_A.device))


def _loss(hidden_NM: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    labels_AK, weights_AK = slot_targets(problem)
    weights_AK = weights_AK.to(torch.promote_types(hidden_NM.dtype, torch.float32))
    hidden_AKM = hidden_NM.view(*labels_AK.shape, -1)
    losses, counts = [], []
    for rows in torch.arange(len(labels_AK)).split(LOSS_CHUNK):
        chunk = slice(int(rows[0]), int(rows[-1]) + 1)
        loss, correct = checkpoint(
            _chunk_loss,
            hidden_AKM[chunk],
            problem.head_VM,
            labels_AK[chunk],
            weights_AK[chunk],
            use_reentrant=False,
        )
        losses.append(loss)
        counts.append(correct)
    return torch.stack(losses).sum() / weights_AK.sum(), torch.stack(counts).sum()


def _chunk_loss(hidden_AKM: Tensor, head_VM: Tensor, labels_AK: Tensor, weights_AK: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = F.linear(hidden_AKM.flatten(0, 1), head_VM)
    losses_N = F.cross_entropy(logits_NV, labels_AK.flatten(), reduction="none")
    with torch.no_grad():
        correct = (logits_NV.argmax(-1) == labels_AK.flatten()) & (weights_AK.flatten() > 0)
    return (losses_N * weights_AK.flatten()).sum(), correct.sum()


def _attend(q_HND: Tensor, k_GTD: Tensor, v_GTD: Tensor, mask: Tensor | BlockMask) -> Tensor:
    if isinstance(mask, BlockMask):
        return _COMPILED_FLEX(q_HND[None], k_GTD[None], v_GTD[None], block_mask=mask, enable_gqa=True)[0]
    repeats = len(q_HND) // len(k_GTD)
    k_HTD, v_HTD = k_GTD.repeat_interleave(repeats, dim=0), v_GTD.repeat_interleave(repeats, dim=0)
    return F.scaled_dot_product_attention(q_HND[None], k_HTD[None], v_HTD[None], attn_mask=mask)[0]


_COMPILED_FLEX = torch.compile(flex_attention, dynamic=False)


def _rope(problem: Problem) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin, [S + A * K, D], at the absolute positions of context and slots; the angles in float32."""
    device, D = problem.ids_S.device, problem.sizes.head_dim
    slots_K = torch.arange(problem.sizes.block, device=device)
    positions_AK = problem.anchors_A[:, None] + slots_K
    positions_T = torch.cat((torch.arange(problem.sizes.context, device=device), positions_AK.flatten()))
    frequencies = 1.0 / ROPE_THETA ** (torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    angles_TD = (positions_T[:, None].float() * frequencies).repeat(1, 2)
    return angles_TD.cos().to(problem.features_SF.dtype), angles_TD.sin().to(problem.features_SF.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


if __name__ == "__main__":
    measured.main(make_step)
