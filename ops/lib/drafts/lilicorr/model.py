"""The transformer over the lattice of candidates, and the walk through its scores.

N blocks, S slots that predict, C candidates of a slot, L = S * C nodes, M hidden size, H width, E attention heads,
R factors, B rows, D proposals, V vocabulary

    node    = token_proj(embedding) + pass_hidden_proj(h) + feature_mlp(norm(features)) + slot + rank
    x       = output_norm(layers(nodes)), every node sees every other, with a bias by the distance of their slots
    a       = anchor_norm(context_proj(context feature of the last token before the anchor))
    f       = silu(factor_input_proj([x, a, x * a]))
    score   = logit_scale * <out(predecessor), in(candidate)>, of vectors of length 1; the anchor's out is made of a

A candidate's features are its log-probability over the whole vocabulary, its probability, the log-probability less
that of the slot's best, its rank from 0 to 1, and whether it is the best. The logits decide nothing beside them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn
from ops.lib.drafts.backbone.model import DraftModel, Linear, RMSNorm
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from ops.lib.drafts.dflash2.model import Convolution
from ops.lib.drafts.lilicorr.config import FEATURES, Lilicorr, sizes

# No maps of hidden states: a table, what reads five numbers, and queries, keys and values stacked in one matrix.
NO_HIDDEN = ("relative_slot_bias", "feature_mlp.up_proj.weight", "in_proj_weight")
UNSEEN = -1e9  # added to the scores of nodes that are no part of the lattice: finite, as a lattice may have no node


class LayerNorm(nn.LayerNorm):
    """A norm layer with a bias, computed in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class UpDown(nn.Module):
    """An MLP: down(silu(up(x))), with biases."""

    def __init__(self, inner: int, middle: int, outer: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = Linear(inner, middle), Linear(middle, outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Attention of every node to every node. The tensors are named as those of nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = Linear(width, width)

    def forward(self, x_NLH: Tensor, bias_NELL: Tensor) -> Tensor:
        """bias_NELL: added to the scores; N or E may be 1."""
        packed = F.linear(x_NLH, self.in_proj_weight.to(x_NLH.dtype), self.in_proj_bias.to(x_NLH.dtype))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        return self.out_proj(self._mixed(q, k, v, bias_NELL).transpose(1, 2).flatten(2))

    def _mixed(self, q_NELD: Tensor, k_NELD: Tensor, v_NELD: Tensor, bias_NELL: Tensor) -> Tensor:
        if q_NELD.is_cuda:
            bias_NELL = bias_NELL.expand(len(q_NELD), self.heads, -1, -1)
            return F.scaled_dot_product_attention(q_NELD, k_NELD, v_NELD, attn_mask=bias_NELL)
        # torch has no fused kernel here for a bias with a gradient, and the plain one looks for rows without a node.
        scores_NELL = (q_NELD * q_NELD.shape[-1] ** -0.5) @ k_NELD.mT
        return (scores_NELL + bias_NELL).softmax(dim=-1) @ v_NELD


class LatticeLayer(nn.Module):
    """A pre-norm layer over all nodes."""

    def __init__(self, own: Lilicorr, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(own.width, eps), RMSNorm(own.width, eps)
        self.attn = LatticeAttention(own.width, own.heads)
        self.mlp = UpDown(own.width, own.mlp_width, own.width)

    def forward(self, x_NLH: Tensor, bias_NELL: Tensor) -> Tensor:
        x_NLH = x_NLH + self.attn(self.attn_norm(x_NLH), bias_NELL)
        return x_NLH + self.mlp(self.mlp_norm(x_NLH))


class Correlator(Drawn):
    """The scores of all transitions between candidates of neighbouring slots.

    All linear layers begin as N(0, std), with biases, embeddings and distance biases of zero. Were the heads of the
    vectors zero, no gradient would ever reach them: a score is their product.
    """

    undecayed = ("slot_embedding", "rank_embedding", "relative_slot_bias")

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        own, M, K = sizes(config), config.hidden_size, config.block_size
        H, R = own.width, own.factors
        self.block_size, self.logit_scale, self.vector_eps = K, own.logit_scale, own.vector_eps
        self.token_proj: nn.Module = nn.Identity() if H == M else Linear(M, H)
        self.pass_hidden_proj = Linear(M, H)
        self.feature_norm = LayerNorm(FEATURES)
        self.feature_mlp = UpDown(FEATURES, H, H)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, K - 1, 1, H))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, own.candidates, H))
        self.relative_slot_bias = nn.Parameter(torch.zeros(own.heads, 2 * K - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(own.heads))
        self.context_proj = Linear(M, H)
        self.layers = nn.ModuleList(LatticeLayer(own, config.rms_norm_eps) for _ in range(own.layers))
        self.output_norm, self.anchor_norm = RMSNorm(H, config.rms_norm_eps), RMSNorm(H, config.rms_norm_eps)
        self.factor_input_proj = Linear(3 * H, H)
        self.out_head, self.in_head, self.anchor_out_head = Linear(H, R), Linear(H, R), Linear(H, R)
        self.hidden_matrices = tuple(
            name for name, parameter in self.named_parameters() if parameter.ndim == 2 and not name.endswith(NO_HIDDEN)
        )

    def draw(self, generator: torch.Generator, std: float) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and name != "relative_slot_bias":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def forward(
        self,
        tokens_NSC: Tensor,
        log_p_NSC: Tensor,
        hidden_NSM: Tensor,
        context: BlockContext,
    ) -> tuple[Tensor, Tensor]:
        """The scores of the first slot's candidates, [N, C], and of those of each later slot after each before it,
        [N, S - 1, C, C]; in float32 at least.

        tokens_NSC: each slot's best tokens, best first. S may be less than in training: a shorter block.
        """
        f_NSCH, anchor_NR = self._read(tokens_NSC, log_p_NSC, hidden_NSM, context, None)
        in_NSCR = self._direction(self.in_head(f_NSCH))
        out_NSCR = self._direction(self.out_head(f_NSCH[:, :-1]))
        return self._scaled(in_NSCR[:, 0] @ anchor_NR[..., None])[..., 0], self._scaled(out_NSCR @ in_NSCR[:, 1:].mT)

    def after(
        self,
        places_NS: Tensor,
        tokens_NSC: Tensor,
        log_p_NSC: Tensor,
        hidden_NSM: Tensor,
        context: BlockContext,
        has_slot_NS: Tensor,
    ) -> Tensor:
        """The scores of each slot's candidates after one candidate of the slot before, [N, S, C]; in float32 at least.

        places_NS: which of its slot's candidates; the last slot's is not read. Others as in `forward`. has_slot_NS: the
        slots that are part of the lattice; the scores of others mean nothing.
        """
        f_NSCH, anchor_NR = self._read(tokens_NSC, log_p_NSC, hidden_NSM, context, has_slot_NS)
        at_NS1H = places_NS[:, :-1, None, None].expand(-1, -1, 1, f_NSCH.shape[-1])
        out_NSR = self._direction(self.out_head(f_NSCH[:, :-1].gather(2, at_NS1H)[:, :, 0]))
        before_NSR = torch.cat((anchor_NR[:, None], out_NSR), dim=1)
        return self._scaled(self._direction(self.in_head(f_NSCH)) @ before_NSR[..., None])[..., 0]

    def _read(
        self,
        tokens_NSC: Tensor,
        log_p_NSC: Tensor,
        hidden_NSM: Tensor,
        context: BlockContext,
        has_slot_NS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What the vectors of all nodes are made of, [N, S, C, H], and the anchor's vector, [N, R]."""
        S, C = tokens_NSC.shape[1:]
        dtype = hidden_NSM.dtype
        x_NSCH = self.token_proj(F.embedding(tokens_NSC, context.embed_VM).to(dtype))
        x_NSCH = x_NSCH + self.pass_hidden_proj(hidden_NSM)[:, :, None]
        x_NSCH = x_NSCH + self.feature_mlp(self.feature_norm(features(log_p_NSC).to(dtype)))
        x_NSCH = x_NSCH + self.slot_embedding[0, :, :S].to(dtype) + self.rank_embedding[0].to(dtype)
        x_NLH, bias_NELL = x_NSCH.flatten(1, 2), self._bias(S, C, has_slot_NS).to(dtype)
        for layer in self.layers:
            x_NLH = layer(x_NLH, bias_NELL)
        x_NSCH = self.output_norm(x_NLH).unflatten(1, (S, C))
        # Without a token before the anchor there is not even the projection's bias.
        a_NH = self.anchor_norm(self.context_proj(context.last_NM.to(dtype)) * context.is_there_N[:, None].to(dtype))
        return F.silu(self._factor_input(x_NSCH, a_NH)), self._direction(self.anchor_out_head(a_NH))

    def _bias(self, slots: int, candidates: int, has_slot_NS: Tensor | None) -> Tensor:
        """The bias of every node's attention to every node, [N or 1, E, L, L]."""
        slot_S = torch.arange(slots, device=self.same_slot_bias.device)
        distance_SS = slot_S[:, None] - slot_S
        bias_ESS = self.relative_slot_bias[:, distance_SS + self.block_size - 1]
        bias_ESS = bias_ESS + self.same_slot_bias[:, None, None] * (distance_SS == 0)
        bias_ELL = bias_ESS[:, :, None, :, None].expand(-1, -1, candidates, -1, candidates).flatten(3).flatten(1, 2)
        if has_slot_NS is None:
            return bias_ELL[None]
        is_node_NL = has_slot_NS.repeat_interleave(candidates, dim=1)
        return torch.where(is_node_NL[:, None, None], bias_ELL, UNSEEN)

    def _factor_input(self, x_NSCH: Tensor, a_NH: Tensor) -> Tensor:
        """factor_input_proj([x, a, x * a]), without repeating a for every node."""
        own_HH, anchor_HH, product_HH = self.factor_input_proj.weight.to(x_NSCH.dtype).chunk(3, dim=1)
        a_N11H = a_NH[:, None, None]
        found_NSCH = F.linear(x_NSCH, own_HH, self.factor_input_proj.bias.to(x_NSCH.dtype))
        return found_NSCH + F.linear(a_N11H, anchor_HH) + F.linear(x_NSCH * a_N11H, product_HH)

    def _direction(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1, eps=self.vector_eps)

    def _scaled(self, cosines: Tensor) -> Tensor:
        return self.logit_scale * cosines.to(torch.promote_types(cosines.dtype, torch.float32))


def features(log_p_NSC: Tensor) -> Tensor:
    """What describes each candidate beside its token, [N, S, C, 5]. log_p_NSC: of candidates, best first."""
    C = log_p_NSC.shape[-1]
    rank_C = torch.arange(C, device=log_p_NSC.device, dtype=log_p_NSC.dtype)
    share_NSC = (rank_C / max(1, C - 1)).expand_as(log_p_NSC)
    is_best_NSC = (rank_C == 0).to(log_p_NSC.dtype).expand_as(log_p_NSC)
    gap_NSC = log_p_NSC - log_p_NSC.amax(dim=-1, keepdim=True)
    return torch.stack((log_p_NSC, log_p_NSC.exp(), gap_NSC, share_NSC, is_best_NSC), dim=-1)


def around_sublayers(config: DraftConfig) -> dict[str, Around]:
    own = sizes(config)
    if not own.taps:
        return {}
    return {name: Convolution(config.hidden_size, own.taps, own.group) for name in ("attention_conv", "mlp_conv")}


def heads(config: DraftConfig) -> dict[str, Drawn]:
    return {"lilicorr": Correlator(config)}


def correlator_of(draft: nn.Module) -> Correlator:
    correlator = draft.lilicorr
    assert isinstance(correlator, Correlator)
    return correlator


def propose(
    draft: DraftModel,
    hidden_BDM: Tensor,
    logits_BDV: Tensor,
    anchors_B: Tensor,
    choice: Choice,
    context: BlockContext,
) -> Proposal:
    """Choose tokens from left to right, at each slot among its candidates by their scores after the chosen one.

    When tokens are drawn, only candidates have a probability, and their logits none beside the scores.
    """
    best = logits_BDV.topk(sizes(draft.config).candidates, dim=-1)
    wide = torch.promote_types(logits_BDV.dtype, torch.float32)
    log_p_BDC = best.values.to(wide) - logits_BDV.to(wide).logsumexp(dim=-1, keepdim=True)
    scores_BC, pairs_BDCC = correlator_of(draft)(best.indices, log_p_BDC, hidden_BDM, context)
    row_B = torch.arange(len(anchors_B), device=anchors_B.device)
    tokens: list[Tensor] = []
    for place in range(hidden_BDM.shape[1]):
        candidates_BC = best.indices[:, place]
        if tokens:
            chosen_B = (best.indices[:, place - 1] == tokens[-1][:, None]).long().argmax(dim=1)
            scores_BC = pairs_BDCC[row_B, place - 1, chosen_B]
        tokens.append(choice.among(scores_BC, candidates_BC, logits_BDV.shape[-1], place))
    return Proposal(torch.stack(tokens, dim=1))
