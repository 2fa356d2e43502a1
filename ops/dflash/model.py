"""The DFlash draft: Qwen3-style layers whose queries come from blocks and whose keys come from [context | own block].

The context feature of a token is `hidden_norm(fc(target features))`. Every layer projects that same feature with its
own k_proj and v_proj; it is no residual stream. So the context's keys and values can be computed once, for all layers
and before any block is known. Submodules are named as in the serving contract; there is no embedding and no head.
Source: DFlash, arXiv 2602.06036; z-lab's reference implementation.

Legend: T packed context tokens of all samples, S context tokens of one sample, F features (layers * hidden),
M hidden, N blocks, K block size, H query heads, G key/value heads, R = H / G, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from ops.dflash.config import DraftConfig
from ops.dflash.mask import visible_context
from ops.dflash.rope import rope_frequencies, rotate, rotation

ContextKV = list[tuple[Tensor, Tensor]]


@frozen
class Packing:
    """How samples lie one after the other in packed tensors: context tokens and blocks of each.

    visible: per sample, bool [N, <= S], which of the first context tokens each block sees; None: all of the context.
    """

    lengths: tuple[int, ...]
    blocks: tuple[int, ...]
    visible: tuple[Tensor | None, ...]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Attention of blocks over [context | own block], bidirectional inside the block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normed and rotated) and values, [..., G, D], of tokens x [..., M]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        return rotate(self.k_norm(self.k_proj(x).view(shape)), *rope), self.v_proj(x).view(shape)

    def forward(
        self, x_NKM: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], packing: Packing
    ) -> Tensor:
        shape = (*x_NKM.shape[:-1], self.heads, self.head_dim)
        q_NKHD = rotate(self.q_norm(self.q_proj(x_NKM).view(shape)), *rope)
        k_NKGD, v_NKGD = self.keys_values(x_NKM, rope)
        # `split` and not slices: the gradient of a slice is a tensor of zeros as large as the whole, for every sample.
        blocks = (x.split(packing.blocks) for x in (q_NKHD, k_NKGD, v_NKGD))
        contexts = (x.split(packing.lengths, dim=1) for x in context)
        mixed = [attend(*parts) for parts in zip(*blocks, *contexts, packing.visible, strict=True)]
        mixed_NKHD = torch.cat(mixed) if len(mixed) > 1 else mixed[0]
        return self.o_proj(mixed_NKHD.flatten(-2))


def attend(
    q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor, k_GSD: Tensor, v_GSD: Tensor, visible_NS: Tensor | None
) -> Tensor:
    """Softmax attention of N blocks of one sample over its context and over each block itself, [N, K, H, D].

    One softmax spans the context scores [G, N, K * R, S] and the own scores [G, N, K * R, K]; the square of
    all blocks by all blocks is never made. Cost: 4 N K H D (S + K) operations.
    """
    if visible_NS is not None:
        k_GSD, v_GSD = k_GSD[:, : visible_NS.shape[1]], v_GSD[:, : visible_NS.shape[1]]
    N, K, H, D = q_NKHD.shape
    G, S, _ = k_GSD.shape
    X = K * (H // G)  # the queries that share one block and one key/value head
    q_GNXD = (q_NKHD * D**-0.5).view(N, K, G, H // G, D).permute(2, 0, 1, 3, 4).reshape(G, N, X, D)
    context_GNXS = (q_GNXD.view(G, N * X, D) @ k_GSD.transpose(1, 2)).view(G, N, X, S)
    if visible_NS is not None:
        context_GNXS = context_GNXS.masked_fill(~visible_NS[None, :, None, :], float("-inf"))
    own_GNXK = q_GNXD @ k_NKGD.permute(2, 0, 3, 1)
    weights = torch.cat((context_GNXS, own_GNXK), dim=-1).softmax(dim=-1)
    from_context = (weights[..., :S].view(G, N * X, S) @ v_GSD).view(G, N, X, D)
    mixed_GNXD = from_context + weights[..., S:] @ v_NKGD.permute(2, 0, 1, 3)
    return mixed_GNXD.view(G, N, K, H // G, D).permute(1, 2, 0, 3, 4).reshape(N, K, H, D)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Qwen3-style decoder layer; only the block is normed by input_layernorm, the context comes as it is."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_NKM: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], packing: Packing
    ) -> Tensor:
        x_NKM = x_NKM + self.self_attn(self.input_layernorm(x_NKM), rope, context, packing)
        return x_NKM + self.mlp(self.post_attention_layernorm(x_NKM))


class DraftModel(nn.Module):
    """The draft without embedding and head, which are the target's. Random weights until a state dict is loaded."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # No buffer: `model.to(torch.bfloat16)` must not round the frequencies.
        self.frequencies, self.rope_scale = rope_frequencies(config)

    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Draw every matrix from N(0, std), by one generator on the CPU; norms stay at one, biases become zero."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            for module in self.modules():
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    def context_features(self, features_SF: Tensor) -> Tensor:
        """[S, M] from the target's features [S, F], the layers concatenated in the order of target_layer_ids."""
        return self.hidden_norm(self.fc(features_SF))

    def context_kv(self, x_SM: Tensor, positions_S: Tensor) -> ContextKV:
        """Per layer the context's keys (normed, rotated) and values, each [G, S, D].

        A decoder appends to them along dimension -2 as tokens are accepted. positions_S are absolute.
        """
        rope = self._rope(positions_S, x_SM.dtype)
        pairs = [layer.self_attn.keys_values(x_SM, rope) for layer in self.layers]
        return [(k_SGD.transpose(0, 1), v_SGD.transpose(0, 1)) for k_SGD, v_SGD in pairs]

    def forward_blocks(
        self, features_TF: Tensor, lengths: Sequence[int], embeds_NKM: Tensor, anchors: Sequence[Tensor]
    ) -> Tensor:
        """Hidden states after the final norm, [N, K, M], of all blocks of several samples.

        features_TF and embeds_NKM hold the samples one after the other: lengths[i] context tokens and the blocks of
        anchors[i], int64 positions within sample i. No sample is without an anchor.
        """
        device = features_TF.device
        positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        context = self.context_kv(self.context_features(features_TF), positions_T)
        anchors_N = torch.cat(list(anchors)).to(device)
        positions_NK = anchors_N[:, None] + torch.arange(embeds_NKM.shape[1], device=device)
        rope = self._rope(positions_NK, embeds_NKM.dtype)
        return self._blocks(embeds_NKM, rope, context, _packing(lengths, anchors, device))

    def propose(self, embeds_KM: Tensor, positions_K: Tensor, context_kv: ContextKV) -> Tensor:
        """Hidden states after the final norm, [K, M], of one block; context_kv is everything before its anchor."""
        rope = self._rope(positions_K[None], embeds_KM.dtype)
        packing = Packing((context_kv[0][0].shape[-2],), (1,), (None,))
        return self._blocks(embeds_KM[None], rope, context_kv, packing)[0]

    def _blocks(self, x_NKM: Tensor, rope: tuple[Tensor, Tensor], context_kv: ContextKV, packing: Packing) -> Tensor:
        for layer, context in zip(self.layers, context_kv, strict=True):
            x_NKM = layer(x_NKM, rope, context, packing)
        return self.norm(x_NKM)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotation(self.frequencies.to(positions.device), self.rope_scale, positions, dtype)


def _packing(lengths: Sequence[int], anchors: Sequence[Tensor], device: torch.device) -> Packing:
    """The context behind a sample's last anchor is left out of the attention, since no block sees it."""
    visible = [visible_context(anchors_N.to(device), int(anchors_N.max())) for anchors_N in anchors]
    return Packing(tuple(lengths), tuple(len(anchors_N) for anchors_N in anchors), tuple(visible))
