"""LiLiCorr's terms by a second reference, made of torch's own attention, norms and losses for all blocks at once.

It was written from the formulas of the paper and of ModelOpt's training, apart from `lilicorr/reference.py`, which goes
by single nodes and pairs. N blocks, S slots, C candidates, L = S * C nodes, M hidden size, H width, E heads
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from draft_cases import random_case
from torch import Tensor

from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.lilicorr.config import Lilicorr, LilicorrOptions
from ops.lib.drafts.lilicorr.reference import block_losses

BLOCKS, BLOCK = 12, 5
CASES = {
    "all terms": (
        Lilicorr(candidates=4, width=6, layers=2, heads=2, factors=5, logit_scale=3.0),
        LilicorrOptions(cross_entropy=0.6, hinge=0.4, margin=1.0, regret=0.3),
    ),
    "as wide as the draft": (
        Lilicorr(candidates=8, width=8, layers=1, heads=4, factors=3, mlp_ratio=1.5),
        LilicorrOptions(),
    ),
}


def scores_by_formulas(config, weights, hidden_NSM, head_VM, context) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates [N, S, C], the scores of the first slot's, and those of each pair of neighbouring slots."""
    own, w = config.algorithm, {name.removeprefix("lilicorr."): each for name, each in weights.items()}
    (N, S, M), C, H = hidden_NSM.shape, own.candidates, own.width
    log_p_NSC, tokens_NSC = (hidden_NSM @ head_VM.T).log_softmax(-1).topk(C)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def mlp(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.down_proj", F.silu(linear(f"{name}.up_proj", x)))

    def rms(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (H,), w[f"{name}.weight"], config.rms_norm_eps)

    rank_C = torch.linspace(0, 1, C, dtype=torch.float64).expand(N, S, C)
    described = [log_p_NSC, log_p_NSC.exp(), log_p_NSC - log_p_NSC[..., :1], rank_C, (rank_C == 0).double()]
    normed = F.layer_norm(torch.stack(described, -1), (5,), w["feature_norm.weight"], w["feature_norm.bias"])
    tokens_NSCM = context.embed_VM[tokens_NSC]
    x_NSCH = tokens_NSCM if M == H else linear("token_proj", tokens_NSCM)
    x_NSCH = x_NSCH + linear("pass_hidden_proj", hidden_NSM).unsqueeze(2) + mlp("feature_mlp", normed)
    x_LNH = (x_NSCH + w["slot_embedding"][0] + w["rank_embedding"][0]).reshape(N, S * C, H).transpose(0, 1)
    slot_L = torch.arange(S).repeat_interleave(C)
    apart_LL = slot_L.unsqueeze(1) - slot_L.unsqueeze(0)
    bias_ELL = w["relative_slot_bias"][:, apart_LL + config.block_size - 1]
    bias_ELL = torch.where(apart_LL == 0, bias_ELL + w["same_slot_bias"].view(-1, 1, 1), bias_ELL)
    for layer in range(own.layers):
        part = f"layers.{layer}"
        y_LNH = rms(f"{part}.attn_norm", x_LNH)
        packed = (w[f"{part}.attn.in_proj_weight"], w[f"{part}.attn.in_proj_bias"], None, None, False, 0.0)
        out = (w[f"{part}.attn.out_proj.weight"], w[f"{part}.attn.out_proj.bias"])
        mask = bias_ELL.repeat(N, 1, 1)
        x_LNH = (
            x_LNH
            + F.multi_head_attention_forward(
                *(y_LNH, y_LNH, y_LNH, H, own.heads), *packed, *out, need_weights=False, attn_mask=mask
            )[0]
        )
        x_LNH = x_LNH + mlp(f"{part}.mlp", rms(f"{part}.mlp_norm", x_LNH))
    x_NSCH = rms("output_norm", x_LNH).transpose(0, 1).reshape(N, S, C, H)
    a_NH = rms("anchor_norm", linear("context_proj", context.last_NM) * context.is_there_N.unsqueeze(1))
    a_NSCH = a_NH.view(N, 1, 1, H).expand_as(x_NSCH)
    f_NSCH = F.silu(linear("factor_input_proj", torch.cat((x_NSCH, a_NSCH, x_NSCH * a_NSCH), -1)))
    before, after, start = (
        F.normalize(linear(name, x), dim=-1, eps=own.vector_eps)
        for name, x in (("out_head", f_NSCH), ("in_head", f_NSCH), ("anchor_out_head", a_NH))
    )
    first_NC = torch.einsum("nr,ncr->nc", start, after[:, 0])
    pairs = torch.einsum("nsbr,nscr->nsbc", before[:, :-1], after[:, 1:])
    return tokens_NSC, own.logit_scale * first_NC, own.logit_scale * pairs


def terms_by_formulas(options, candidates_NSC, first_NC, pairs, tokens_NS, is_whole_N, taught_NSV) -> Tensor:
    """The terms of every slot, [N, S]: 0 but in whole blocks, from the first slot to the last whose list and all before
    have the true token.
    """
    terms = torch.zeros(tokens_NS.shape, dtype=torch.float64)
    for n in is_whole_N.nonzero().flatten().tolist():
        scores_C = first_NC[n]
        for s, token in enumerate(tokens_NS[n]):
            true_C = candidates_NSC[n, s] == token
            if not true_C.any():
                break
            place = true_C.nonzero()[0]
            terms[n, s] = options.cross_entropy * F.cross_entropy(scores_C[None], place)
            gap = scores_C[true_C] - scores_C[~true_C].max()
            terms[n, s] += options.hinge * F.relu(options.margin - gap)[0]
            taught_V = taught_NSV[n, s]
            lost_C = F.relu(taught_V[token] - taught_V[candidates_NSC[n, s]])
            terms[n, s] += options.regret * scores_C.softmax(0) @ lost_C
            if s + 1 < tokens_NS.shape[1]:
                scores_C = pairs[n, s, place[0]]
    return terms


@pytest.mark.parametrize("name", CASES)
def test_both_references_give_the_same_terms_and_gradients_in_float64(name):
    algorithm, options = CASES[name]
    case = random_case(3, algorithm=algorithm, block_size=BLOCK)
    generator = torch.Generator().manual_seed(1)
    M, V, S = case.config.hidden_size, case.config.vocab_size, BLOCK - 1
    hidden_NKM, teacher_NKV = (
        torch.randn(BLOCKS, BLOCK, size, generator=generator, dtype=torch.float64) for size in (M, V)
    )
    last_NM = torch.randn(BLOCKS, M, generator=generator, dtype=torch.float64)
    lists_NKC = (hidden_NKM @ case.head_VM.T).topk(algorithm.candidates).indices
    places_NK = torch.randint(algorithm.candidates, (BLOCKS, BLOCK), generator=generator)
    tokens_NK = lists_NKC.gather(2, places_NK[..., None])[..., 0]
    chance_NK = torch.rand(BLOCKS, BLOCK, generator=generator)
    tokens_NK = torch.where(chance_NK < 0.1, torch.randint(V, tokens_NK.shape, generator=generator), tokens_NK)
    valid_NK = torch.ones(BLOCKS, BLOCK, dtype=torch.bool)
    valid_NK[:, 0] = False
    valid_NK[::4, 3:] = False  # blocks that end at the mask
    leaves = {name: each for name, each in case.weights.items() if name.startswith("lilicorr.")}
    leaves |= {"hidden": hidden_NKM, "last": last_NM}
    found = []
    for by_formulas in (False, True):
        own = {name: each.clone().requires_grad_() for name, each in leaves.items()}
        context = BlockContext(case.embed_VM, own["last"], torch.arange(BLOCKS) % 5 != 1)
        if by_formulas:
            given = (case.config, {name: each for name, each in own.items() if "lilicorr" in name})
            scored = scores_by_formulas(*given, own["hidden"][:, 1:], case.head_VM, context)
            is_whole_N, true = valid_NK[:, 1:].all(1), (tokens_NK[:, 1:], teacher_NKV[:, 1:])
            terms_NS = terms_by_formulas(options, *scored, true[0], is_whole_N, true[1])
        else:
            given = (case.config, own, own["hidden"], tokens_NK, valid_NK, case.head_VM, teacher_NKV)
            terms_NS = block_losses(*given, options, context)[0][:, 1:]
        weight_NS = torch.arange(1.0, BLOCKS * S + 1, dtype=torch.float64).view(BLOCKS, S)
        gradients = torch.autograd.grad((terms_NS * weight_NS).sum(), list(own.values()))
        found.append((terms_NS.detach(), dict(zip(own, gradients, strict=True))))
    (first, of_first), (second, of_second) = found
    assert 0.3 < (first > 0).double().mean() < 0.9
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-13)
    scale = max(float(each.abs().max()) for each in of_first.values())
    for each, gradient in of_first.items():
        assert gradient.abs().max() > 0, each
        torch.testing.assert_close(gradient, of_second[each], rtol=1e-12, atol=1e-13 * scale, msg=each)
