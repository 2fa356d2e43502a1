"""Figures of a training, with what a small val split has and has not."""

import pytest
import torch

from ops.train_dflash.result import TALLY, tau_figure, window
from ops.train_dflash.tally import HEAD, TOKENS


@pytest.mark.parametrize(
    ("steps", "val_tokens", "expected"),
    [
        (66, 0, 14),  # the last fifth
        (66, 14 * 10, 14),
        (66, 14 * 10 + 1, 15),  # as many tokens as val
        (1000, 0, 50),
        (1000, 601, 61),
        (3, 10**6, 3),  # all there are
    ],
)
def test_the_mean_beside_val_is_of_the_last_fifth_at_most_50_steps_and_of_no_fewer_tokens_than_val(
    steps: int, val_tokens: int, expected: int
) -> None:
    history = torch.zeros(steps, TALLY + HEAD, dtype=torch.float64)
    history[:, TALLY + TOKENS] = 10
    assert expected == window(history, val_tokens)


def test_tau_of_one_prompt_is_drawn_without_an_interval() -> None:
    (axes,) = tau_figure([(1, {"tau": 1.5, "low": None, "high": None})], 1, 8).axes
    assert ["tau", "exported"] == [text.get_text() for text in axes.get_legend().get_texts()]


def test_tau_of_several_prompts_is_drawn_with_its_interval() -> None:
    (axes,) = tau_figure([(1, {"tau": 1.5, "low": 1.0, "high": 2.0})], 2, 8).axes
    assert ["95 % interval", "tau"] == [text.get_text() for text in axes.get_legend().get_texts()]
