"""LiLiCorr's scores by SGLang's own head, loaded under the names of tensors that the installed version reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.lilicorr.config import Lilicorr, stored_name
from ops.lib.drafts.lilicorr.model import Correlator
from ops.lib.sglang.version import installed_version

HIDDEN, VOCABULARY, BLOCK, ROWS = 24, 64, 6, 5


@pytest.mark.parametrize(
    "own",
    [
        Lilicorr(candidates=4, width=16, heads=2, factors=12),
        Lilicorr(candidates=8, width=HIDDEN, layers=1, heads=2, factors=8),
    ],
    ids=["narrower than the draft", "as wide as the draft"],
)
def test_sglangs_head_scores_the_lattice_as_dflows_does(own):
    from sglang.srt.models.lilicorr import LiLiCorrHead, check_head_weight_coverage
    from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config

    torch.manual_seed(0)
    config = DraftConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=3,
        max_position_embeddings=64,
        algorithm=own,
    )
    ours, served = Correlator(config), SimpleNamespace(dflash_config=to_serving(config)["dflash_config"])
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.4 + (1.0 if name.endswith("norm.weight") else 0.0))
    theirs = LiLiCorrHead(
        model_hidden_size=HIDDEN,
        block_size=BLOCK,
        rms_norm_eps=config.rms_norm_eps,
        config=parse_lilicorr_draft_config(draft_hf_config=served),
    )
    engine = f"sglang-{installed_version()}"
    stored = {stored_name(f"lilicorr.{name}", engine): weight for name, weight in ours.state_dict().items()}
    check_head_weight_coverage(theirs, set(stored))
    theirs.load_state_dict({name.removeprefix("lilicorr."): weight for name, weight in stored.items()}, strict=True)
    theirs.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    hidden, embed, last = (
        torch.randn(ROWS, BLOCK - 1, HIDDEN),
        torch.randn(VOCABULARY, HIDDEN),
        torch.randn(ROWS, HIDDEN),
    )
    best = (torch.randn(ROWS, BLOCK - 1, VOCABULARY) * 2).log_softmax(-1).topk(own.candidates)
    is_there = torch.tensor([True] * (ROWS - 1) + [False])
    with torch.no_grad():
        found = theirs.score(
            token_embeddings=embed[best.indices][:, None],
            candidate_log_probs=best.values[:, None],
            pass_hidden=hidden[:, None],
            anchor_hidden=last[:, None],
            anchor_valid=is_there[:, None],
        )
        expected = theirs.log_factors(*found)
        first, pairs = ours(best.indices, best.values, hidden, BlockContext(embed, last, is_there))
    torch.testing.assert_close(first, expected[0][:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(pairs, expected[1][:, 0], rtol=0, atol=1e-5)
    assert pairs.std() > 0.5
