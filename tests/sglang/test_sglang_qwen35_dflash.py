"""A Qwen3.5 with a draft in SGLang's DFLASH worker: its recurrent states are those of the accepted tokens alone.

A verification runs a whole block through the layers of linear attention; what they keep behind the tokens that were
refused must be undone, or the next token is another one.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from capture_cases import text_alone
from dflash_cases import NEW_TOKENS, Case, make_case

from ops.evaluate.statistics import acceptance_length
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.sglang import dflash_worker
from ops.lib.sglang.dflash_worker import DflashEngine

STATES = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
TIE = 1e-4  # between the two best logits: a block and a single token round differently


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return make_case("qwen3_5", tmp_path_factory.mktemp("qwen3_5"), images=True)


@pytest.fixture(scope="module")
def expected(case) -> dict[str, list[Decoded]]:
    """dflow's own speculative decoding with two drafts; one that is always wrong would leave nothing to undo."""
    return {quality: case.reference(case.drafts[quality].path) for quality in ("trained", "noisy")}


def start(case: Case, quality: str, checkpoint: Path | None = None) -> DflashEngine:
    draft = case.drafts[quality].path
    return DflashEngine.start(checkpoint or case.checkpoint, draft, device="cpu", dtype="float32", pool_tokens=1024)


def served(case: Case, quality: str) -> list[Decoded]:
    """The answers to all prompts in one batch."""
    with start(case, quality) as engine:
        return engine.decode(case.prompts, NEW_TOKENS, case.eos)


def tau(answers: list[Decoded]) -> float:
    return acceptance_length(answers, 1, 0).tau


def wrong_from(case: Case, answers: list[Decoded]) -> list[int | None]:
    return [first_difference(plain, answer) for plain, answer in zip(case.plain, answers, strict=True)]


def first_difference(plain: Decoded, answer: Decoded) -> int | None:
    """The place of the first token that is not the target's own, nor beside it by a tie."""
    for place, (own, given) in enumerate(zip(plain.tokens, answer.tokens, strict=False)):
        if own != given:
            return None if plain.margins[place] < TIE else place
    return None if len(plain.tokens) == len(answer.tokens) else len(answer.tokens)


@pytest.mark.parametrize("quality", ["trained", "noisy"])
def test_answers_are_those_of_greedy_decoding_and_accepted_lengths_those_of_evaluate(case, expected, quality, capsys):
    with start(case, quality) as engine:
        together = engine.decode(case.prompts, NEW_TOKENS, case.eos)
        alone = [engine.decode([prompt], NEW_TOKENS, case.eos)[0] for prompt in case.prompts]
    with capsys.disabled():
        print(f"\nqwen3_5, {quality} draft: tau {tau(expected[quality]):.3f} by dflow, {tau(together):.3f} served")
    assert [None] * len(case.prompts) == wrong_from(case, together)
    assert [answer.accepted for answer in expected[quality]] == [answer.accepted for answer in together]
    assert together == alone


def test_the_drafts_differ_and_the_prompts_hold_text_and_images(case, expected):
    assert tau(expected["trained"]) > 5 > 4 > tau(expected["noisy"]) > 1.8
    assert [0, 1, 2, 1, 1] == [len(prompt.image_grid_thw) for prompt in case.prompts]


def test_the_text_model_alone_is_served_with_the_same_draft(case, expected, tmp_path):
    texts = [prompt for prompt in case.prompts if prompt.category == "text"]
    with start(case, "noisy", text_alone(case.target, tmp_path / "text")) as engine:
        (answer,) = engine.decode(texts, NEW_TOKENS, case.eos)
    assert case.plain[0].tokens == answer.tokens
    assert expected["noisy"][0].accepted == answer.accepted
    assert sum(answer.accepted) > len(answer.accepted)


def test_states_that_keep_refused_tokens_or_lose_accepted_ones_give_other_answers(case, monkeypatch, capsys):
    def keep_all(dst, src, dst_indices_raw, step_indices_raw, *others):
        last = torch.full_like(step_indices_raw, src.shape[2] - 1)
        right(dst, src, dst_indices_raw, last, *others)

    module = importlib.import_module(STATES)
    right = module.fused_mamba_state_scatter_with_mask
    for what, scatter in {"refused tokens kept": keep_all, "accepted tokens lost": lambda *_: None}.items():
        monkeypatch.setattr(module, "fused_mamba_state_scatter_with_mask", scatter)
        wrong = wrong_from(case, served(case, "noisy"))
        with capsys.disabled():
            print(f"\nqwen3_5, {what}: the first wrong token of each prompt is number {wrong}")
        assert None not in wrong


def test_convolution_states_in_sglangs_default_of_bfloat16_change_answers_in_float32(case, monkeypatch, capsys):
    monkeypatch.setattr(dflash_worker, "environment", lambda _changes: nullcontext())
    wrong = wrong_from(case, served(case, "noisy"))
    with capsys.disabled():
        print(f"\nqwen3_5, convolution states in bfloat16: the first wrong token of each prompt is number {wrong}")
    assert {None} < set(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe"])
def test_targets_with_experts_are_served_as_well(family, tmp_path, capsys):
    case = make_case(family, tmp_path / "case", images=family != "qwen3_moe", tie_word_embeddings=False)
    expected = case.reference(case.drafts["noisy"].path)
    answers = served(case, "noisy")
    with capsys.disabled():
        print(f"\n{family}, noisy draft: tau {tau(expected):.3f} by dflow, {tau(answers):.3f} served")
    assert [None] * len(case.prompts) == wrong_from(case, answers)
    assert [answer.accepted for answer in expected] == [answer.accepted for answer in answers]
