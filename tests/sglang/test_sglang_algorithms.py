"""SGLang's own worker and draft classes beside dflow's decoding, for the algorithms that change the proposal."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import torch
from algorithm_cases import grown
from dflash_cases import BLOCK, NEW_TOKENS, Case, make_case
from other_targets import other_checkpoint

from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.algorithms import part_of
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.decoding.decode import Decoded, decode_speculative
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.drafts.decoding.sampling import GreedyChoice
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.drafts.dspark.model import confidence_head
from ops.lib.drafts.lilicorr.config import Lilicorr
from ops.lib.sglang.dflash_worker import DflashEngine, DraftRefused
from ops.lib.sglang.draft_forward import compare_forward, context_lengths
from ops.lib.sglang.version import installed_version

CPU = {"device": "cpu", "dtype": "float32"}
MASKS_FIRST = {  # on a backbone that was trained as plain DFlash
    "dflash2": Dflash2(taps=2, group=8, rank=8, candidates=8),
    "dspark, masks first": Dspark(rank=8, sample_from_anchor=False),
    "dspark, masks first, no confidence": Dspark(rank=8, sample_from_anchor=False, confidence_head=False),
    "lilicorr": Lilicorr(candidates=4, width=16, heads=2, factors=12),
    "lilicorr with convolutions": Lilicorr(candidates=8, width=24, layers=1, heads=2, factors=8, taps=2, group=8),
}
ENGINE = f"sglang-{installed_version()}"
CASES = ("text_case", "vision_case")


def decoded(case: Case, draft: Path, heads: bool = True, block_size: int | None = None) -> list[Decoded]:
    """dflow's own decoding; heads: with what the algorithm adds beside the layers. block_size: None for the draft's."""
    model = load_draft(draft)
    if not heads:
        with torch.no_grad():
            for head in part_of(model.config.algorithm, "model:heads")(model.config):
                for weight in getattr(model, head).parameters():
                    weight.zero_()
    use = DraftUse.of(model.config, block_size)
    return [decode_speculative(case.loaded, model, prompt, NEW_TOKENS, use) for prompt in case.prompts]


def lengths(answers: list[Decoded]) -> list[tuple[int, ...]]:
    return [answer.accepted for answer in answers]


def is_served_as_evaluated(case: Case, draft: Path) -> None:
    """SGLang's worker gives the target's own answers and dflow's accepted lengths of each step, by means of the heads;
    its draft class gives dflow's hidden states.
    """
    model, expected = load_draft(draft), decoded(case, draft)
    with DflashEngine.start(case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        served = engine.decode(case.prompts, NEW_TOKENS, case.eos)
        contexts = context_lengths(model.config, longest=200)
        assert 1e-5 > max(one.difference for one in compare_forward(engine, model, contexts))
    assert [answer.tokens for answer in case.plain] == [answer.tokens for answer in served]
    assert lengths(expected) == lengths(served)
    assert len({length for accepted in lengths(served) for length in accepted}) > 2
    assert lengths(decoded(case, draft, heads=False)) != lengths(served)


@pytest.mark.parametrize("name", MASKS_FIRST)
@pytest.mark.parametrize("case_name", CASES)
def test_served_answers_are_the_targets_own_and_accepted_lengths_are_those_of_evaluate(
    request, tmp_path, case_name, name
):
    case = request.getfixturevalue(case_name)
    is_served_as_evaluated(case, grown(case.drafts["trained"].path, tmp_path / "draft", MASKS_FIRST[name], ENGINE))


def test_lilicorr_is_served_so_for_a_llama_target_too(tmp_path):
    case = make_case("llama", tmp_path / "case", images=False, make=other_checkpoint)
    draft = grown(case.drafts["trained"].path, tmp_path / "draft", MASKS_FIRST["lilicorr with convolutions"], ENGINE)
    is_served_as_evaluated(case, draft)


def test_so_is_lilicorr_with_a_lattice_that_was_trained(text_case, trained_lilicorr):
    is_served_as_evaluated(text_case, trained_lilicorr.path)
    trained, without = (
        sum(map(len, lengths(decoded(text_case, trained_lilicorr.path, heads)))) for heads in (True, False)
    )
    assert trained < without


def test_in_a_shorter_block_lilicorr_is_served_as_evaluated_in_one(text_case, trained_lilicorr):
    short = {"speculative_num_draft_tokens": BLOCK - 2}
    expected = decoded(text_case, trained_lilicorr.path, block_size=BLOCK - 2)
    with DflashEngine.start(
        text_case.checkpoint, trained_lilicorr.path, **CPU, pool_tokens=1024, server_args=short
    ) as engine:
        assert BLOCK - 2 == engine.block_size
        served = engine.decode(text_case.prompts, NEW_TOKENS, text_case.eos)
    assert [answer.tokens for answer in text_case.plain] == [answer.tokens for answer in served]
    assert lengths(expected) == lengths(served)
    assert {0, BLOCK - 3} <= {length for accepted in lengths(served) for length in accepted}


@pytest.mark.parametrize("case_name", CASES)
def test_sglangs_selector_proposes_at_every_step_what_dflows_does_of_the_same_states(
    request, tmp_path, monkeypatch, case_name
):
    case = request.getfixturevalue(case_name)
    draft = grown(case.drafts["trained"].path, tmp_path / "draft", MASKS_FIRST["dflash2"])
    model, head_VM, steps = load_draft(draft), case.loaded.head_weight, []
    with DflashEngine.start(case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        worker = engine.worker.own
        sglangs = worker._propose_selector_block

        def recorded(**given):
            tokens_BD = sglangs(**given)
            hidden_BKM = given["draft_logits_output"].hidden_states.view(given["bs"], model.config.block_size, -1)
            steps.append((hidden_BKM[:, 1:].clone(), given["anchor_token_ids"].clone(), tokens_BD.clone()))
            return tokens_BD

        monkeypatch.setattr(worker, "_propose_selector_block", recorded)
        served = engine.decode(case.prompts, NEW_TOKENS, case.eos)
    assert len(steps) >= max(answer.steps for answer in served)
    by_logits = []
    for hidden_BDM, anchors_B, tokens_BD in steps:
        logits_BDV = hidden_BDM @ head_VM.T
        ours = part_of(model.config.algorithm, "model:propose")(
            model, hidden_BDM, logits_BDV, anchors_B, GreedyChoice()
        )
        assert ours.tokens_BD.tolist() == tokens_BD.tolist()
        by_logits.append(logits_BDV.argmax(-1).tolist() == tokens_BD.tolist())
    assert not all(by_logits)


@pytest.mark.parametrize("name", ["lilicorr", "lilicorr with convolutions"])
def test_sglangs_lattice_proposes_at_every_step_what_dflows_does_of_the_same_states(
    text_case, tmp_path, monkeypatch, name
):
    """In a batch, too, where SGLang's eager path makes a block without the ends of contexts when a request leaves."""
    from sglang.srt.speculative import dflash_worker_v2

    draft = grown(text_case.drafts["trained"].path, tmp_path / "draft", MASKS_FIRST[name], ENGINE)
    model, target, steps = load_draft(draft), text_case.loaded, []
    sglangs = dflash_worker_v2.propose_lilicorr_block

    def recorded(*, draft_hidden, anchor, **others):
        found = sglangs(draft_hidden=draft_hidden, anchor=anchor, **others)
        is_kept = anchor is not None and len(anchor) == len(draft_hidden)
        steps.append((draft_hidden[:, 1:].clone(), anchor.clone() if is_kept else None, found[0].clone()))
        return found

    monkeypatch.setattr(dflash_worker_v2, "propose_lilicorr_block", recorded)
    with DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        engine.max_requests = len(text_case.prompts)
        served = engine.decode(text_case.prompts, NEW_TOKENS, text_case.eos)
    assert [answer.tokens for answer in text_case.plain] == [answer.tokens for answer in served]
    by_logits = []
    for hidden_BDM, last_BM, tokens_BD in steps:
        rows = len(hidden_BDM)
        is_there_B = torch.full((rows,), last_BM is not None)
        last_BM = hidden_BDM.new_zeros(rows, hidden_BDM.shape[2]) if last_BM is None else last_BM
        logits_BDV, anchors_B = hidden_BDM @ target.head_weight.T, torch.zeros(rows, dtype=torch.int64)
        given = (model, hidden_BDM, logits_BDV, anchors_B, GreedyChoice())
        around = BlockContext(target.embed_weight, last_BM, is_there_B)
        ours = part_of(model.config.algorithm, "model:propose")(*given, around)
        assert ours.tokens_BD.tolist() == tokens_BD.tolist()
        by_logits.append(logits_BDV.argmax(-1).tolist() == tokens_BD.tolist())
    assert len(by_logits) > 5 and not all(by_logits)


@pytest.mark.parametrize("case_name", CASES)
def test_so_they_are_in_the_layout_whose_first_slot_predicts(anchor_first, case_name):
    case, draft = anchor_first(case_name)
    is_served_as_evaluated(case, draft.path)
    trained, without = (sum(map(len, lengths(decoded(case, draft.path, heads)))) for heads in (True, False))
    assert trained < without


@pytest.mark.parametrize("mode", ["cap-accept", "compact"])
def test_where_verification_is_ragged_the_confidence_is_that_of_dflows_head(anchor_first, monkeypatch, mode):
    """SGLang cuts blocks by it only where it knows the speed of its GPU."""
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", mode)
    case, draft = anchor_first("text_case")
    model = load_draft(draft.path)
    seen = []
    with DflashEngine.start(case.checkpoint, draft.path, **CPU, pool_tokens=1024) as engine:
        engine.worker.own.draft_model.confidence_head.register_forward_hook(
            lambda _head, given, found: seen.append((*given, found))
        )
        served = engine.decode(case.prompts, NEW_TOKENS, case.eos)
    assert lengths(decoded(case, draft.path)) == lengths(served)
    assert len(seen) >= max(answer.steps for answer in served)
    for hidden, latent, confidence in seen:
        torch.testing.assert_close(confidence_head(model)(hidden, latent), confidence)
    assert len({round(float(value), 3) for *_, confidence in seen for value in confidence.flatten()}) > 10


def test_where_verification_is_ragged_a_draft_without_a_confidence_head_is_refused(text_case, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "cap-accept")
    without = MASKS_FIRST["dspark, masks first, no confidence"]
    draft = grown(text_case.drafts["trained"].path, tmp_path / "draft", without)
    with pytest.raises(DraftRefused, match="confidence head is enabled but the checkpoint is missing"):
        DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024)


def test_sglang_serves_dspark_with_a_bias_of_zero(text_case, tmp_path):
    """As load_draft writes plain drafts whose slot 0 predicts a token; without a Markov head SGLang does not start."""
    from sglang.srt.models.dspark import build_markov_head
    from sglang.srt.speculative.dspark_components.dspark_config import (
        get_dspark_sample_from_anchor,
        parse_dspark_draft_config,
    )

    algorithm = Dspark(rank=1, confidence_head=False)
    draft = grown(text_case.drafts["trained"].path, tmp_path / "draft", algorithm)
    config = read_json(draft / "config.json")
    read = parse_dspark_draft_config(draft_hf_config=config)
    assert (load_draft(draft).config.block_size - 1, True) == (read.gamma, read.require_markov())
    assert get_dspark_sample_from_anchor(config)
    head = build_markov_head(argparse.Namespace(**config))
    torch.nn.init.ones_(head.markov_w1.weight)
    torch.nn.init.zeros_(head.markov_w2.weight)
    assert not head.project_bias(head.get_prev_embeddings(torch.tensor([3]))).any()
    with pytest.raises(ValueError, match="markov_rank > 0"):
        build_markov_head(argparse.Namespace(**config | {"markov_rank": 0}))


@pytest.mark.parametrize(("layer", "said"), [(-1, "out-of-range layer id"), ("last", "feature dim mismatch")])
def test_sglang_does_not_capture_the_embeddings_or_the_last_layer(text_case, tmp_path, layer, said):
    """Which load_draft refuses."""
    draft = tmp_path / "draft"
    shutil.copytree(text_case.drafts["trained"].path, draft)
    config = read_json(draft / "config.json")
    ids = config["dflash_config"]["target_layer_ids"]
    ids[0 if layer == -1 else -1] = layer if layer == -1 else config["num_target_layers"] - 1
    write_json(draft / "config.json", config)
    with (
        pytest.raises((DraftRefused, ValueError), match=said),
        DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024) as engine,
    ):
        engine.decode(text_case.prompts, NEW_TOKENS, text_case.eos)
