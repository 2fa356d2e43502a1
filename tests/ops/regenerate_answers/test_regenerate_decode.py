"""Answers of a batch of prompts: against transformers' generate, and how their tokens are drawn."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from family_checkpoints import FAMILIES, make_checkpoint
from regenerate_cases import make_target

from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.sampling import choose, uniform_draws
from ops.lib.target.model import Target
from ops.regenerate_answers.decode import generate
from ops.regenerate_answers.sampling import Sampling


@pytest.mark.filterwarnings("ignore:.*fast path is not available")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_prompts_of_different_lengths_gives_the_tokens_of_generate_one_by_one(family, tmp_path):
    loaded = Target.load(make_target(tmp_path / "target", make_checkpoint(family, tmp_path / "checkpoint")))
    generator = torch.Generator().manual_seed(0)
    prompts = [random_prompt(length, [], generator) for length in (9, 30, 17)]
    if FAMILIES[family].vision:
        prompts += [random_prompt(24, [(4, 4)], generator), random_prompt(50, [(8, 4), (4, 4)], generator)]
    draws = torch.zeros(len(prompts), 20, dtype=torch.float64)
    first = generate(loaded, prompts, draws, Sampling())
    loaded.info = {**loaded.info, "eos_token_ids": [first[0][4], first[2][11]]}  # so that answers end in the middle
    answers = generate(loaded, prompts, draws, Sampling())
    expected = []
    for prompt in prompts:
        generated = loaded.model.generate(
            **loaded.model_arguments(loaded.inputs([prompt])),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=sorted(loaded.eos_token_ids),
            pad_token_id=0,
        )
        expected.append(generated[0, prompt.prompt_tokens :].tolist())
    assert expected == answers
    assert len({len(answer) for answer in answers}) > 1


def random_prompt(length, grids, generator):
    """Random tokens behind the images, whose sides are given in patches of 4 x 4 pixels."""
    input_ids = torch.randint(20, 350, (length,), generator=generator)
    place = 1
    for height, width in grids:
        count = height * width // 4
        input_ids[place : place + count + 2] = torch.tensor([3, *[5] * count, 4])
        place += count + 2
    rows = sum(height * width for height, width in grids)
    return TokenSample(
        id="random",
        category="image" if grids else "text",
        input_ids=input_ids,
        loss_mask=torch.zeros(length, dtype=torch.bool),
        pixel_values=torch.randn(rows, 96, generator=generator),
        image_grid_thw=torch.tensor([[1, *grid] for grid in grids], dtype=torch.int64).reshape(-1, 3),
        prompt_tokens=length,
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_tokens_follow_the_softmax_at_the_temperature(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -math.inf, 1.1])
    count = 20_000
    draws = torch.cat([uniform_draws(7, f"sample {index}", 0, 4) for index in range(count // 4)])
    tokens = choose(logits.expand(count, -1), draws, temperature)
    seen = torch.bincount(tokens, minlength=6) / count
    expected = torch.tensor([math.exp(value / temperature) for value in logits.tolist()])
    expected = expected / expected.sum()
    assert 0.5 * float((seen - expected).abs().sum()) < 0.01  # total variation; chance alone gives about 0.006
    assert seen[4] == 0


def test_top_p_takes_only_the_likeliest_tokens_that_reach_it():
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    draws = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    tokens = choose(probabilities.log().expand(1000, -1), draws, 1.0, top_p=0.6)
    counts = Counter(tokens.tolist())
    assert {1, 3} == set(counts)
    assert abs(counts[1] - 1000 * 4 / 7) <= 1
    assert {1} == set(choose(probabilities.log().expand(1000, -1), draws, 1.0, top_p=0.01).tolist())
