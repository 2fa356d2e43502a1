"""Decoding with every algorithm: lossless, in batches as one by one, drawn tokens from what the draft says."""

from __future__ import annotations

import pytest
import torch
from batch_cases import BLOCK, draft_for_family, family_case
from proposal_cases import PRECISION, assert_proposes_by_its_reference, draft_with_noise, favour_few_tokens

from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.decoding.decode import DraftContext, decode_plain, decode_speculative, propose
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.drafts.decoding.sampling import GreedyChoice, SampledChoice
from ops.lib.drafts.dflash.config import Dflash
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dflash2.model import propose as walk
from ops.lib.drafts.dflash2.reference import scores
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.drafts.lilicorr.config import Lilicorr

NEW = 12
ALGORITHMS = {
    "dflash2": Dflash2(taps=2, group=8, rank=6, candidates=8),
    "dspark": Dspark(rank=6),
    "dspark, masks first": Dspark(rank=6, sample_from_anchor=False),
    "lilicorr": Lilicorr(candidates=4, width=8, heads=2, factors=6),
    "lilicorr with convolutions": Lilicorr(candidates=8, width=16, heads=2, layers=1, factors=6, taps=2, group=8),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    target, samples = family_case("qwen3_vl", tmp_path_factory.mktemp("case"))
    return target, samples, [decode_plain(target, sample, NEW) for sample in samples]


@pytest.fixture(params=ALGORITHMS)
def draft(request):
    """A draft whose heads change many tokens."""
    return draft_with_noise((ALGORITHMS | {"dflash": Dflash()})[request.param])


@pytest.mark.parametrize("draft", [*ALGORITHMS, "dflash"], indirect=True)
def test_answers_are_the_targets_and_batches_accept_what_the_slow_loop_does(draft, tmp_path):
    target, samples = family_case("qwen3_vl", tmp_path)
    favour_few_tokens(target)
    slow = [decode_speculative(target, draft, sample, NEW) for sample in samples]
    fast = decode_speculative_batch(target, draft, samples, DecodeSettings(NEW))
    answers = [decode_plain(target, sample, NEW) for sample in samples]
    assert [answer.tokens for answer in answers] == [one.tokens for one in slow] == [one.tokens for one in fast]
    assert [one.accepted for one in slow] == [one.accepted for one in fast]
    assert len({count for one in slow for count in one.accepted}) > 1


@pytest.mark.parametrize("draft", [*ALGORITHMS, "dflash"], indirect=True)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", PRECISION)
def test_every_proposed_token_has_the_references_best_score(draft, rows, dtype):
    assert_proposes_by_its_reference(draft, rows, dtype)


def test_the_heads_change_what_is_proposed(case, draft):
    target, samples, _ = case
    plain = random_draft(draft.config.__class__(**fields_of(draft.config) | {"algorithm": Dflash()}), 0)
    plain.load_state_dict({name: tensor for name, tensor in draft.state_dict().items() if name in plain.state_dict()})
    found = []
    for each in (draft, plain):
        with torch.inference_mode(), target.capture_inputs(each.config.target_layer_ids) as captured:
            target.forward(target.prompts(samples[:1]), use_cache=False)
            context = DraftContext(each)
            context.append(captured.features()[0])
            found.append([propose(target, each, context, anchor) for anchor in range(8, 20)])
    assert all(len(proposal) == BLOCK - 1 for proposal in found[0])
    assert sum(one != other for one, other in zip(*found, strict=True)) > 6


def test_the_walk_adds_the_selectors_term_to_the_logits_in_float32_as_sglang_does():
    """In bfloat16 the sum would lose what tells candidates apart, and many blocks would differ."""
    draft = draft_for_family(algorithm=ALGORITHMS["dflash2"]).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    selector = draft.candidate_selector
    with torch.no_grad():
        for weight in selector.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    hidden_BDM = torch.randn(64, BLOCK - 1, draft.config.hidden_size, generator=generator).bfloat16()
    head_VM = torch.randn(draft.config.vocab_size, draft.config.hidden_size, generator=generator).bfloat16()
    anchors = torch.randint(len(head_VM), (64,), generator=generator)
    logits_BDV = hidden_BDM @ head_VM.T
    with torch.no_grad():
        walked = walk(draft, hidden_BDM, logits_BDV, anchors, GreedyChoice()).tokens_BD
        expected, slow = [], []
        for hidden_DM, logits_DV, anchor in zip(hidden_BDM, logits_BDV, anchors.tolist(), strict=True):
            tokens, of_reference = [anchor], [anchor]
            for hidden_M, logits_V in zip(hidden_DM, logits_DV, strict=True):
                values_C, candidates_C = logits_V.topk(8)
                wanted_R = selector.predecessor_codebook[tokens[-1]] * selector.hidden_projection(hidden_M)
                term_C = selector.successor_codebook[candidates_C] @ wanted_R
                assert torch.bfloat16 == term_C.dtype
                tokens.append(int(candidates_C[(values_C.float() + term_C).argmax()]))
                scores_V = scores(draft.config, draft.state_dict(), hidden_DM, head_VM, of_reference)
                assert torch.float32 == scores_V.dtype
                of_reference.append(int(scores_V.argmax()))
            expected.append(tokens[1:])
            slow.append(of_reference[1:])
    assert expected == walked.tolist() == slow


def fields_of(config):
    return {field.name: getattr(config, field.name) for field in config.__attrs_attrs__}


@pytest.mark.parametrize("block_size", [2, 3])
def test_smaller_blocks_than_in_training_give_the_same_answers(case, draft, block_size):
    target, samples, answers = case
    use = DraftUse.of(draft.config, block_size)
    fast = decode_speculative_batch(target, draft, samples, DecodeSettings(NEW), use)
    assert [answer.tokens for answer in answers] == [one.tokens for one in fast]
    assert max(max(one.accepted) for one in fast) < block_size


def test_drawn_tokens_are_candidates_with_the_probabilities_of_their_scores():
    count = 4000
    choice = SampledChoice.of(0.7, 3, [str(row) for row in range(count)], 4, torch.device("cpu"))
    choice.begin(torch.zeros(count, dtype=torch.int64))
    scores, candidates = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([5, 2, 9])
    tokens = choice.among(scores.expand(count, 3), candidates.expand(count, 3), 12, 0)
    shares = torch.bincount(tokens, minlength=12)[candidates] / count
    torch.testing.assert_close(shares, (scores / 0.7).softmax(0), atol=0.03, rtol=0)
    assert shares.sum() == 1
