"""The DFlash draft: Qwen3-style layers whose queries come from blocks and whose keys come from [context | own block].

The context feature of a token is `hidden_norm(fc(target features))`. Every layer projects that same feature with its
own k_proj and v_proj; it is no residual stream. So the context's keys and values can be computed once, for all layers
and before any block is known. Submodules are named as in the serving contract; there is no embedding and no head. What
an algorithm adds goes around the sublayers (hooks.py), or stands beside the backbone under its own name.
Computation is in the dtype of the inputs: weights are cast when they are used, so float32 master weights serve bf16.
Source: DFlash, arXiv 2602.06036; z-lab's reference implementation.

Legend: T context tokens, F features (layers * hidden), M hidden, N blocks, K block size, X = N * K slots, W slots whose
hidden state is requested, H query heads, G key/value heads, D head size, Z rotary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ops.lib.drafts.algorithms import part_of
from ops.lib.drafts.attention.blocks import dense_attention
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn
from ops.lib.drafts.backbone.rope import rope_frequencies, rotate, rotation
from ops.lib.kernels.device import compiled, to_device
from ops.lib.sequence_parallel.context_range import ContextRange
from ops.lib.target.embedding_and_head import logits_of
from ops.lib.target.head_settings import PLAIN

STD = 0.02  # of the normal distribution from which matrices are drawn
ContextKV = list[tuple[Tensor, Tensor]]

# (q_NKHD, k_NKGD, v_NKGD, context keys, context values, window) -> mixed_NKHD
AttendBlocks = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int | None], Tensor]


class Linear(nn.Linear):
    """A linear layer, x W^T + b, computed in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RMSNorm(nn.Module):
    """A norm layer, x / rms(x) * weight over the last dimension, in the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def table_rows(table_VR: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of a trained table at some tokens, [..., R] in `dtype`.

    Its gradient sums all uses of a row in float32 at least, always in the same order, and is rounded once to the
    table's dtype. The gradient of `table_VR[tokens]` would be rounded at every addition: in bfloat16, a row read a
    thousand times in a step would be off by several percent.
    """
    rows: Tensor = _TableRows.apply(table_VR, tokens, dtype)
    return rows


class _TableRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VR: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = len(table_VR), table_VR.dtype
        return F.embedding(tokens, table_VR).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(ctx.dtype, torch.float32))
        summed_VR = torch.ops.aten.embedding_dense_backward(wide, tokens, ctx.rows, -1, False)
        return summed_VR.to(ctx.dtype), None, None


class Attention(nn.Module):
    """The projections around attention; the attention function itself is passed to `DraftModel.forward_blocks`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor) -> Tensor:
        """The queries [..., H, D], normed but not yet rotated."""
        return self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, normed and not yet rotated, and values, [..., G, D]."""
        shape = (self.kv_heads, self.head_dim)
        return self.k_norm(self.k_proj(x).unflatten(-1, shape)), self.v_proj(x).unflatten(-1, shape)


class SwiGLU(nn.Module):
    """An MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Qwen3-style decoder layer. Only the block passes input_layernorm; the context is used as it comes.

    `project_first`, `project` and `finish` compute each slot by itself, before and after the attention, and compile
    without a graph break. Slots form one dimension, so that one graph serves all of them and the few that the last
    layer computes. With `around`, a slot reads earlier slots of its block, so `project_around` and `finish_around` take
    whole blocks.

    around: modules around the attention and the MLP, by their names among the layer's tensors; empty for plain layers.
    """

    def __init__(self, config: DraftConfig, window: int | None, around: Mapping[str, Around]) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window = window
        self.around = tuple(around)
        for name, module in around.items():
            self.add_module(name, module)

    def project_first(self, distinct: Tensor, cos_X1Z: Tensor, sin_X1Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the first layer; its mask slots are equal, so that they are computed only once.

        distinct: [N + 1, M]: slot 0 of every block, then one row for all other slots.
        """
        x = self.input_layernorm(distinct)
        block_size = len(cos_X1Z) // (len(distinct) - 1)
        k, v = self.self_attn.keys_values(x)
        q, k, v = _spread(self.self_attn.queries(x), block_size), _spread(k, block_size), _spread(v, block_size)
        return rotate(q, cos_X1Z, sin_X1Z), rotate(k, cos_X1Z, sin_X1Z), v

    def project(self, x_XM: Tensor, cos_X1Z: Tensor, sin_X1Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [X, H, D] and keys [X, G, D], both rotated, and values [X, G, D]."""
        x = self.input_layernorm(x_XM)
        k, v = self.self_attn.keys_values(x)
        return rotate(self.self_attn.queries(x), cos_X1Z, sin_X1Z), rotate(k, cos_X1Z, sin_X1Z), v

    def finish(self, x_WM: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [W, M] from its input and the attention's output [W, H * D]."""
        x = x_WM + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))

    def project_around(self, x_NKM: Tensor, cos_X1Z: Tensor, sin_X1Z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of whole blocks, as `project` gives them, and the data that
        `finish_around` needs.
        """
        y_NKM, kept = self._around(0).enter(self.input_layernorm(x_NKM))
        y_XM = y_NKM.flatten(0, 1)
        k, v = self.self_attn.keys_values(y_XM)
        return rotate(self.self_attn.queries(y_XM), cos_X1Z, sin_X1Z), rotate(k, cos_X1Z, sin_X1Z), v, kept

    def project_around_first(
        self, x_NKM: Tensor, cos_X1Z: Tensor, sin_X1Z: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The results of `project_around` for the first layer, where slots that read only mask slots are equal."""
        K, reach = x_NKM.shape[1], self._around(0).reach
        if reach is None or K <= reach + 2:
            return self.project_around(x_NKM, cos_X1Z, sin_X1Z)
        J = reach + 2  # slot 0, those that read it, and one for all others
        y_NJM, kept = self._around(0).enter(self.input_layernorm(x_NKM[:, :J]))
        k, v = self.self_attn.keys_values(y_NJM)
        q, k, v, kept = (repeat_last(part, K) for part in (self.self_attn.queries(y_NJM), k, v, kept))
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        return rotate(q, cos_X1Z, sin_X1Z), rotate(k, cos_X1Z, sin_X1Z), v, kept

    def finish_around(self, x_NKM: Tensor, mixed_NKC: Tensor, kept: Tensor) -> Tensor:
        """The layer's output after the attention for whole blocks, as `finish` gives it."""
        x_NKM = x_NKM + self._around(0).leave(self.self_attn.o_proj(mixed_NKC), kept)
        y_NKM, kept = self._around(1).enter(self.post_attention_layernorm(x_NKM))
        return x_NKM + self._around(1).leave(self.mlp(y_NKM), kept)

    def _around(self, sublayer: int) -> Around:
        module = getattr(self, self.around[sublayer])
        assert isinstance(module, Around)
        return module


class DraftModel(nn.Module):
    """The draft model without embedding and head, which are the target's. Random weights until a state dict
    is loaded.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        around: Callable[[DraftConfig], dict[str, Around]] = part_of(config.algorithm, "model:around_sublayers")
        self.layers = nn.ModuleList(
            Layer(config, config.window(index), around(config)) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        heads: dict[str, Drawn] = part_of(config.algorithm, "model:heads")(config)
        for name, module in heads.items():
            self.add_module(name, module)
        # No buffer: `model.to(torch.bfloat16)` must not round the frequencies.
        self.frequencies, self.rope_scale = rope_frequencies(config)
        self._frequencies_on: dict[torch.device, Tensor] = {}

    def initialise(self, seed: int) -> None:
        """Draw every matrix from N(0, STD) with one CPU generator; norms stay one, biases become zero.

        The algorithm's own parameters are drawn last, so that the backbone is the same for every algorithm.
        """
        generator = torch.Generator().manual_seed(seed)
        added = [module for module in self.modules() if isinstance(module, Drawn)]
        drawn = {parameter for module in added for parameter in module.parameters()}
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2 and parameter not in drawn:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * STD)
            for layer in self.layers:
                for linear in layer.modules():
                    if isinstance(linear, nn.Linear) and linear.bias is not None:
                        linear.bias.zero_()
            for module in added:
                module.draw(generator, STD)

    def compile_layers(self) -> None:
        """Compile the parts of each layer that work on single slots, with dynamic sizes."""
        for layer in self.layers:
            for name in (
                ("project_around_first", "project_around", "finish_around")
                if layer.around
                else ("project_first", "project", "finish")
            ):
                setattr(layer, name, compiled(getattr(layer, name)))

    def context_kv(self, features_TF: Tensor, positions_T: Tensor) -> ContextKV:
        """The context's keys (normed, rotated) and values of each layer, each [G, T, D].

        features_TF: the target's features, layers concatenated in the order of target_layer_ids. positions_T: absolute.
        While decoding, accepted tokens are appended along dimension -2.
        """
        return self.context(features_TF, positions_T)[1]

    def context(self, features_TF: Tensor, positions_T: Tensor) -> tuple[Tensor, ContextKV]:
        """The context feature of each token, [T, M], and what `context_kv` gives."""
        x_TM = self.context_feature(features_TF)
        rope = self._rope(positions_T, x_TM.dtype)
        pairs = [layer.self_attn.keys_values(x_TM) for layer in self.layers]
        return x_TM, [(rotate(k_TGD, *rope).transpose(0, 1), v_TGD.transpose(0, 1)) for k_TGD, v_TGD in pairs]

    def context_feature(self, features_TF: Tensor) -> Tensor:
        """The context feature of each token, [T, M], of which every layer makes its keys and values."""
        feature_TM: Tensor = self.hidden_norm(self.fc(features_TF))
        return feature_TM

    def forward_blocks(
        self,
        anchor_embeds_NM: Tensor,
        mask_embed_M: Tensor,
        positions_N: Tensor,
        context_kv: ContextKV,
        attend: AttendBlocks,
        rows_W: Tensor,
        activation_checkpointing: bool = False,
        block_size: int | None = None,
    ) -> Tensor:
        """Hidden states [W, M], after the final norm, of the slots rows_W (flat: n * K + k, K the layout's queries).

        Slot 0 of a block has its anchor's embedding at position positions_N; the other slots have the mask token's.
        attend: mixes the blocks with a layer's context keys and values. block_size: tokens to verify; default: the
        config's.
        """
        slots_K = torch.arange(self.config.layout(block_size).queries, device=positions_N.device)
        rope = self._rope((positions_N[:, None] + slots_K).flatten(), anchor_embeds_NM.dtype)
        distinct = torch.cat((anchor_embeds_NM, mask_embed_M[None]))
        source_NK = torch.where(
            slots_K == 0, torch.arange(len(positions_N), device=slots_K.device)[:, None], len(positions_N)
        )
        x_XM = distinct.index_select(0, source_NK.flatten())
        for index, (layer, kv) in enumerate(zip(self.layers, context_kv, strict=True)):
            is_last = index == len(self.layers) - 1
            compute: Callable[[], Tensor]
            if layer.around:
                around = layer.project_around if index else layer.project_around_first
                compute = partial(self._layer_of_whole_blocks, layer, around, x_XM, rope, len(slots_K), *kv, attend)
            else:
                project = partial(layer.project, x_XM) if index else partial(layer.project_first, distinct)
                rows = rows_W if is_last else None
                compute = partial(self._layer, layer, project, x_XM, rope, len(slots_K), *kv, attend, rows)
            x_XM = checkpoint(compute, use_reentrant=False) if activation_checkpointing else compute()
            if layer.around and is_last:
                x_XM = x_XM.index_select(0, rows_W)
        return self.norm(x_XM)

    def embedded(self, rows: Tensor) -> Tensor:
        """What the draft takes in for rows of the target's embedding, [..., M]."""
        scale = self.config.input_embedding_scale
        return rows if scale == 1 else rows * scale

    def logits(self, product: Tensor) -> Tensor:
        """The draft's logits of the product of its states with the target's head; in float32 at least where they are
        not that product.
        """
        settings = self.config.head_settings
        if settings == PLAIN:
            return product
        return logits_of(product.to(torch.promote_types(product.dtype, torch.float32)), settings)

    def propose(
        self,
        anchor_embed_M: Tensor,
        mask_embed_M: Tensor,
        context_kv: ContextKV,
        block_size: int | None = None,
        block_offset: int = 0,
    ) -> Tensor:
        """The states after the final norm, [K - 1, M], that predict one block after the whole context.

        block_size: K; default: the config's. block_offset: added to the positions of the slots.
        """
        layout = self.config.layout(block_size)
        length = context_kv[0][0].shape[-2]
        seen = ContextRange(torch.tensor([0]), torch.tensor([length]))

        def attend(q: Tensor, k: Tensor, v: Tensor, k_GTD: Tensor, v_GTD: Tensor, window: int | None) -> Tensor:
            return dense_attention(q, k, v, k_GTD, v_GTD, seen, window)

        device = anchor_embed_M.device
        positions_N = torch.tensor([length + block_offset], device=device)
        rows_W = torch.arange(layout.first, layout.queries, device=device)
        anchors_NM = anchor_embed_M[None]
        return self.forward_blocks(
            anchors_NM, mask_embed_M, positions_N, context_kv, attend, rows_W, block_size=block_size
        )

    def _layer(
        self,
        layer: Layer,
        project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
        x_XM: Tensor,
        rope: tuple[Tensor, Tensor],
        block_size: int,
        k_GTD: Tensor,
        v_GTD: Tensor,
        attend: AttendBlocks,
        rows_W: Tensor | None,
    ) -> Tensor:
        """One layer's output. project: maps cos and sin to the queries, keys and values of x_XM.

        With rows_W only these slots continue after the attention, and the result is [W, M].
        """
        q, k, v = (part.unflatten(0, (-1, block_size)) for part in project(*rope))
        mixed = attend(q, k, v, k_GTD, v_GTD, layer.window).flatten(0, 1).flatten(1)
        if rows_W is not None:
            x_XM, mixed = x_XM.index_select(0, rows_W), mixed.index_select(0, rows_W)
        return layer.finish(x_XM, mixed)

    def _layer_of_whole_blocks(
        self,
        layer: Layer,
        project: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]],
        x_XM: Tensor,
        rope: tuple[Tensor, Tensor],
        block_size: int,
        k_GTD: Tensor,
        v_GTD: Tensor,
        attend: AttendBlocks,
    ) -> Tensor:
        """One layer's output, for a layer whose modules around the sublayers read earlier slots. project: of whole
        blocks.
        """
        x_NKM = x_XM.unflatten(0, (-1, block_size))
        *projected, kept = project(x_NKM, *rope)
        q, k, v = (part.unflatten(0, (-1, block_size)) for part in projected)
        mixed_NKC = attend(q, k, v, k_GTD, v_GTD, layer.window).flatten(2)
        return layer.finish_around(x_NKM, mixed_NKC, kept).flatten(0, 1)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary angles for positions [P], [P, 1, Z] each."""
        device = positions.device
        if device not in self._frequencies_on:
            self._frequencies_on[device] = to_device(self.frequencies, device)
        return rotation(self._frequencies_on[device], self.rope_scale, positions, dtype)


def repeat_last(part_NJ: Tensor, block_size: int) -> Tensor:
    """Blocks [N, K, ...] from their first J slots, [N, J, ...]: the last of these fills all other slots."""
    N, J = part_NJ.shape[:2]
    return torch.cat((part_NJ, part_NJ[:, -1:].expand(N, block_size - J, *part_NJ.shape[2:])), dim=1)


def _spread(distinct: Tensor, block_size: int) -> Tensor:
    """Slots [X, ...] from [N + 1, ...]: row n becomes slot 0 of block n, the last row all other slots."""
    first, others = distinct[:-1, None], distinct[-1:, None]
    return torch.cat((first, others.expand(len(first), block_size - 1, *distinct.shape[1:])), dim=1).flatten(0, 1)
