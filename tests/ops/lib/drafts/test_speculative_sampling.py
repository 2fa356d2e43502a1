"""Sampled speculative decoding keeps the target's distribution, and the test of that finds wrong rules.

The counts of many draws are compared with the exact probabilities by Pearson's chi-square; what is seldom expected is
counted together.
"""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from attrs import frozen
from scipy.stats import chi2
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.decoding import sampling
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.drafts.decoding.sampling import accept_greedy, accept_sampled, token_at, uniform_draws
from ops.lib.target.model import Target

RIGHT, WRONG = 1e-3, 1e-6  # of the p-value; every draw is seeded, so a right rule that passes once passes always
VOCABULARY, EOS, BLOCK, MASK = 5, 4, 3, 3
PROMPT = (0, 2, 1)
TEMPERATURE = 1.2


def accepting_always(proposal, target, draft, accept_draws, token_draws):
    return accept_sampled(proposal, target, draft, torch.zeros_like(accept_draws) - 1.0, token_draws)


def without_a_residual(proposal, target, draft, accept_draws, token_draws):
    count, _ = accept_sampled(proposal, target, draft, accept_draws, token_draws)
    row = torch.arange(len(count))
    return count, token_at(target[row, count], token_draws[row, count])


def with_the_draft_of_another_slot(proposal, target, draft, accept_draws, token_draws):
    return accept_sampled(proposal, target, draft.roll(1, dims=1), accept_draws, token_draws)


def accepting_greedily(proposal, target, draft, accept_draws, token_draws):
    count, _ = accept_greedy(proposal, target.argmax(-1))
    row, last = torch.arange(len(count)), proposal.shape[1]
    residual = (target[row, count] - draft[row, count.clamp(max=last - 1)]).clamp(min=0)
    weights = torch.where((count == last)[:, None], target[row, count], residual)
    return count, token_at(weights, token_draws[row, count])


def with_one_draw_for_both(proposal, target, draft, accept_draws, token_draws):
    return accept_sampled(proposal, target, draft, accept_draws, accept_draws[:, [*range(accept_draws.shape[1]), -1]])


WRONG_RULES = [
    accepting_always,
    without_a_residual,
    with_the_draft_of_another_slot,
    accepting_greedily,
    with_one_draw_for_both,
]


def chi_square_p(counts, probabilities) -> float:
    """The p-value of counts [C] under probabilities [C]; 0 where something was seen that cannot be."""
    expected = probabilities.double() * counts.sum()
    seldom = expected < 5
    if counts[expected == 0].sum():
        return 0.0
    counts = torch.cat([counts[~seldom].double(), counts[seldom].sum()[None].double()])
    expected = torch.cat([expected[~seldom], expected[seldom].sum()[None]])
    used = expected > 0
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    return float(chi2.sf(statistic, int(used.sum()) - 1))


def p_of_the_rule(rule, draws: int) -> float:
    """The least p-value of the tokens that stand behind 0, 1 and 2 accepted ones, of three and one more tests."""
    generator = torch.Generator().manual_seed(0)
    target_KV = (torch.randn(BLOCK, 6, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)
    draft_DV = (torch.randn(BLOCK - 1, 6, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)
    target, draft = target_KV.expand(draws, -1, -1), draft_DV.expand(draws, -1, -1)

    def uniform(count):
        return torch.rand(draws, count, generator=generator, dtype=torch.float64)

    proposal = token_at(draft, uniform(BLOCK - 1))
    count, token = rule(proposal, target, draft, uniform(BLOCK - 1), uniform(BLOCK))
    found = []
    for place in range(BLOCK):
        there = count >= place
        tokens = token if place == BLOCK - 1 else torch.where(count > place, proposal[:, place], token)
        found.append(chi_square_p(torch.bincount(tokens[there], minlength=6), target_KV[place]))
    # The overlap of p and q is the share that a right rule accepts.
    overlap = torch.minimum(target_KV[0], draft_DV[0]).sum()
    accepted = torch.stack([(count == 0).sum(), (count > 0).sum()])
    return min(*found, chi_square_p(accepted, torch.stack([1 - overlap, overlap])))


def test_the_rule_keeps_the_targets_distribution():
    assert p_of_the_rule(accept_sampled, 100_000) > RIGHT


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_the_test_finds_a_wrong_rule(rule):
    assert p_of_the_rule(rule, 100_000) < WRONG


def test_every_sample_and_seed_has_a_row_of_draws_of_its_own():
    """With 32 bits to tell rows apart, ten of these would be those of another."""
    samples = 300_000
    rows = {uniform_draws(0, f"s{number}", "token", 1).item() for number in range(samples)}
    assert samples == len(rows)
    assert 3 == len({uniform_draws(seed, "s", "token", 1).item() for seed in (0, 2**32, 2**64)})


def test_draws_are_uniform_in_a_row_and_over_rows():
    long = uniform_draws(0, "s", "token", 100_000)
    many = torch.stack([uniform_draws(0, f"s{number}", "token", 2) for number in range(20_000)])
    for found in (long, *many.T, (many[:, 0] - many[:, 1]) % 1, (long[1:] - long[:-1]) % 1):
        assert torch.float64 == found.dtype
        assert found.min() >= 0
        assert found.max() < 1
        counts = torch.histc(found, bins=50, min=0, max=1)
        assert chi_square_p(counts, torch.full((50,), 1 / 50)) > RIGHT


def test_a_draft_that_is_the_target_is_accepted_whole():
    generator = torch.Generator().manual_seed(1)
    target = torch.rand(50, BLOCK, 9, generator=generator, dtype=torch.float64).softmax(-1)
    draft = target[:, : BLOCK - 1]
    draws = torch.rand(50, 3 * BLOCK, generator=generator, dtype=torch.float64)
    proposal = token_at(draft, draws[:, : BLOCK - 1])
    count, _ = accept_sampled(proposal, target, draft, draws[:, BLOCK : 2 * BLOCK - 1], draws[:, -BLOCK:])
    assert [BLOCK - 1] * 50 == count.tolist()


@frozen
class Tiny:
    """A target with few tokens, a draft that is often wrong, and the exact probability of every answer."""

    target: Target
    draft: object
    probabilities: dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def tiny():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                tie_word_embeddings=False,
            )
        ).eval()
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=1.2 * weight.shape[1] ** -0.5)
    info = {"eos_token_ids": [EOS], "hidden_size": 16, "num_layers": 4}
    target = Target(model.requires_grad_(False), info, torch.device("cpu"))
    config = DraftConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=(0, 1),
        num_target_layers=4,
        max_position_embeddings=64,
    )
    draft = random_draft(config, 0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # sharp attention and a small mask embedding: the slots of a block differ widely
        target.embed_weight[MASK] *= 0.05
        for name, weight in draft.named_parameters():
            if weight.ndim == 2:
                weight.normal_(generator=generator, std=3.6 * weight.shape[1] ** -0.5)
            elif "q_norm" in name:
                weight.mul_(8)
    return Tiny(target, draft, answer_probabilities(target, 4))


# What the target's logits are made by, and the fields of the draft's config beside it.
OTHER_ENDS = {
    "gemma2": (
        {"final_logit_softcapping": 2.0, "head_dim": 8, "query_pre_attn_scalar": 8},
        {"final_logit_softcapping": 2.0, "input_embedding_scale": 4.0},
    ),
    "gemma3_text": ({"head_dim": 8, "query_pre_attn_scalar": 8}, {"input_embedding_scale": 4.0}),
    "cohere": ({"logit_scale": 0.5}, {"output_multiplier": 0.5}),
    "granite": (
        {"logits_scaling": 0.8, "embedding_multiplier": 3.0},
        {"output_multiplier": 1.25, "input_embedding_scale": 3.0},
    ),
    "phi": ({}, {}),
}


@pytest.fixture(scope="module", params=OTHER_ENDS)
def other_ends(request, tiny):
    """The draft beside a target with another head."""
    fields, of_draft = OTHER_ENDS[request.param]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "pad_token_id": MASK,
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **{**sizes, **fields})).eval()
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=1.2 * weight.shape[1] ** -0.5)
            elif name == "lm_head.bias":
                torch.nn.init.normal_(weight)
    info = {"eos_token_ids": [EOS], "hidden_size": 16, "num_layers": 4}
    target = Target(model.requires_grad_(False), info, torch.device("cpu"))
    draft = random_draft(attrs.evolve(tiny.draft.config, **of_draft), 0)
    draft.load_state_dict(tiny.draft.state_dict())
    return Tiny(target, draft, answer_probabilities(target, 4))


def answer_probabilities(target, length):
    """The probability of every answer of `length` tokens, or fewer with EOS at the end, by one pass over all of
    them.
    """
    tails = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(tails), -1), tails], dim=1)
    with torch.no_grad():
        logits = target.model(input_ids=ids, use_cache=False).logits
    steps = (logits[:, len(PROMPT) - 1 : -1].double() / TEMPERATURE).softmax(-1).gather(-1, tails[..., None])[..., 0]
    found = {}
    for tail, chances in zip(tails.tolist(), steps, strict=True):
        end = tail.index(EOS) + 1 if EOS in tail else length
        found[tuple(tail[:end])] = float(chances[:end].prod())
    assert sum(found.values()) == pytest.approx(1.0)
    return found


def sample_of(name, prompt_S):
    """A prompt without images."""
    return TokenSample(
        id=name,
        category="text",
        input_ids=prompt_S,
        loss_mask=torch.zeros(len(prompt_S), dtype=torch.bool),
        pixel_values=torch.empty(0, 8),
        image_grid_thw=torch.empty(0, 3, dtype=torch.int64),
        prompt_tokens=len(prompt_S),
    )


def p_of_decoding(tiny, decode, draws: int, batch: int = 1000) -> float:
    """The p-value of whole answers, drawn for many samples that differ in their ids alone."""
    settings = DecodeSettings(3, TEMPERATURE, seed=1)
    counts = dict.fromkeys(tiny.probabilities, 0)
    for start in range(0, draws, batch):
        samples = [sample_of(f"s{number}", torch.tensor(PROMPT)) for number in range(start, start + batch)]
        for answer in decode(samples, settings):
            counts[answer.tokens] += 1
    return chi_square_p(torch.tensor(list(counts.values())), torch.tensor(list(tiny.probabilities.values())))


def speculative(tiny):
    return lambda samples, settings: decode_speculative_batch(tiny.target, tiny.draft, samples, settings)


def test_answers_follow_the_targets_distribution_plain_and_speculative(tiny):
    assert (
        p_of_decoding(tiny, lambda samples, settings: decode_plain_batch(tiny.target, samples, settings), 4000) > RIGHT
    )
    assert p_of_decoding(tiny, speculative(tiny), 4000) > RIGHT


def test_answers_of_other_heads_follow_their_targets_distribution(other_ends):
    assert p_of_decoding(other_ends, speculative(other_ends), 2000) > RIGHT


def test_greedy_answers_of_other_heads_are_the_targets_own(other_ends):
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCABULARY, (24, 6), generator=draw)
    samples = [sample_of(f"s{number}", ids_S) for number, ids_S in enumerate(ids)]
    settings = DecodeSettings(8)
    plain = [each.tokens for each in decode_plain_batch(other_ends.target, samples, settings)]
    assert plain == [each.tokens for each in speculative(other_ends)(samples, settings)]
    assert len(set(plain)) > 1


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_wrong_rules_are_found_in_the_answers(tiny, monkeypatch, rule):
    monkeypatch.setattr(sampling, "accept_sampled", rule)
    assert p_of_decoding(tiny, speculative(tiny), 4000) < WRONG


@pytest.mark.slow
def test_very_many_answers_follow_the_targets_distribution(tiny):
    assert p_of_decoding(tiny, speculative(tiny), 200_000) > RIGHT
