"""LiLiCorr's terms as the training of ModelOpt computes them, by its own code; skipped where that is not installed.

B samples, N blocks of each, T tokens of a sample, K tokens of a block, C candidates, M hidden size, V vocabulary
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from class_comparison import Widened
from draft_cases import random_case
from published_drafts import package
from torch import nn
from transformers import Qwen3Config

from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.lilicorr.config import NEST, OLD_ENGINE, Lilicorr, LilicorrOptions, stored_name
from ops.lib.drafts.lilicorr.reference import block_losses

B, N, K = 3, 5, 4
T = N * K - 1  # so the last block has no place for its last token
CASES = {
    "the recipe `base`": (
        Lilicorr(candidates=4, width=6, layers=2, heads=2, factors=5, logit_scale=3.0),
        LilicorrOptions(),
    ),
    "the recipe `margin`": (
        Lilicorr(candidates=8, width=8, layers=1, heads=4, factors=3, mlp_ratio=1.5),
        LilicorrOptions(cross_entropy=0.125, hinge=0.125),
    ),
    "no regret": (
        Lilicorr(candidates=2, width=4, layers=1, heads=1, factors=2, vector_eps=0.3),
        LilicorrOptions(cross_entropy=1.0, hinge=0.5, margin=0.7, regret=0.0),
    ),
}


def modelopts_module(case) -> nn.Module:
    """ModelOpt's draft with the case's context projection and lattice."""
    package("modelopt.torch.speculative.plugins.modeling_lilicorr")
    from modelopt.torch.speculative.plugins.modeling_lilicorr import LiLiCorrModule

    serving = to_serving(case.config)
    sizes = {name: size for name, size in serving[NEST].items() if size != 0}  # it takes 0 taps for convolutions
    module = LiLiCorrModule(Qwen3Config(**serving | sizes)).double()
    own = {
        stored_name(name, OLD_ENGINE): weight
        for name, weight in case.weights.items()
        if name.split(".")[0] in ("lilicorr", "fc", "hidden_norm")
    }
    missing, unexpected = module.load_state_dict(own, strict=False)
    assert not unexpected and {name.split(".")[0] for name in missing} <= {"layers", "norm"}
    return module


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_modelopts_training_in_float64(name):
    algorithm, options = CASES[name]
    case = random_case(3, algorithm=algorithm, block_size=K, num_hidden_layers=1, attention_bias=False)
    module = modelopts_module(case)
    from modelopt.torch.speculative.plugins.hf_lilicorr import HFLiLiCorrModel

    generator = torch.Generator().manual_seed(1)
    M, V = case.config.hidden_size, case.config.vocab_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden_BNKM, features_BTF, teacher_BTV = random(B, N, K, M), random(B, T, 2 * M), random(B, T, V)
    lists_BNKC = (hidden_BNKM @ case.head_VM.T).topk(algorithm.candidates).indices
    places = torch.randint(algorithm.candidates, (B, N, K, 1), generator=generator)
    others = torch.randint(V, (B, N, K), generator=generator)
    is_other = torch.rand(B, N, K, generator=generator) < 0.1
    tokens_BNK = torch.where(is_other, others, lists_BNKC.gather(3, places)[..., 0])
    ids_BT = tokens_BNK.flatten(1)[:, :T]
    mask_BT = torch.ones(B, T, dtype=torch.long)
    mask_BT[1, 6:] = 0  # a sample whose answer ends inside a block
    anchors_BN = (torch.arange(N) * K).expand(B, N)

    names = [name for name in case.weights if name.startswith("lilicorr.")]

    theirs = SimpleNamespace(
        dflash_module=module,
        dflash_block_size=K,
        dflash_lilicorr_w_ce=options.cross_entropy,
        dflash_lilicorr_w_margin=options.hinge,
        dflash_lilicorr_w_pen=options.regret,
        dflash_lilicorr_w_cal=0.0,
        dflash_lilicorr_margin=options.margin,
        _base_model_embeddings=nn.Embedding.from_pretrained(case.embed_VM),
    )
    terms = ("_compute_lilicorr_loss", "_distractor_penalty", "_candidate_target_logits", "_lattice_metrics")
    for method in ("_block_targets", *terms):
        setattr(theirs, method, getattr(HFLiLiCorrModel, method).__get__(theirs))
    leaves = [hidden_BNKM.clone().requires_grad_(), features_BTF.clone().requires_grad_()]
    own = dict(module.named_parameters())
    with Widened():
        targets = theirs._block_targets(ids_BT, anchors_BN, torch.ones(B, N), mask_BT)
        expected, _, _ = theirs._compute_lilicorr_loss(
            logits=(leaves[0] @ case.head_VM.T).flatten(1, 2),
            target_ids=targets[0],
            slot_mask=targets[1],
            anchor_positions=anchors_BN,
            draft_hidden=leaves[0].flatten(1, 2),
            target_hidden=leaves[1],
            target_logits=teacher_BTV,
        )
        their_names = [stored_name(name, OLD_ENGINE) for name in names]
        expected_gradients = torch.autograd.grad(expected, [*leaves, *(own[name] for name in their_names)])

    weights = {name: weight.clone().requires_grad_(name in names) for name, weight in case.weights.items()}
    leaves = [hidden_BNKM.clone().requires_grad_(), features_BTF.clone().requires_grad_()]
    projected_BTM = leaves[1] @ case.weights["fc.weight"].T
    context_BTM = F.rms_norm(projected_BTM, (M,), case.weights["hidden_norm.weight"], case.config.rms_norm_eps)
    last_NM = F.pad(context_BTM, (0, 0, 1, 0))[:, :-1].gather(1, anchors_BN[..., None].expand(-1, -1, M)).flatten(0, 1)
    inside = F.pad(mask_BT, (0, N * K - T)).view(B * N, K).bool()
    inside[:, 0] = False
    inside[:, 1:] = inside[:, 1:].long().cumprod(1).bool()
    taught_NKV = F.pad(teacher_BTV, (0, 0, 1, N * K - T))[:, : N * K].reshape(B * N, K, V)
    terms_NK, _ = block_losses(
        case.config,
        weights,
        leaves[0].flatten(0, 1),
        tokens_BNK.flatten(0, 1),
        inside,
        case.head_VM,
        taught_NKV,
        options,
        BlockContext(case.embed_VM, last_NM, (anchors_BN > 0).flatten()),
    )
    counted = terms_NK != 0
    assert 0.2 < counted[:, 1:].double().mean() < 0.8
    found = terms_NK.sum() / counted.sum()  # ModelOpt's mean is over the slots that count
    gradients = torch.autograd.grad(found, [*leaves, *(weights[name] for name in names)])

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for each, one, other in zip(["hidden", "features", *names], gradients, expected_gradients, strict=True):
        assert one.abs().max() > 0, each
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=lambda text, each=each: f"{each}: {text}")
