"""Figures of a training, with what a small val split has and has not."""

from ops.train_dflash.result import tau_figure


def test_tau_of_one_prompt_is_drawn_without_an_interval() -> None:
    (axes,) = tau_figure([(1, {"tau": 1.5, "low": None, "high": None})], 1, 8).axes
    assert ["tau", "exported"] == [text.get_text() for text in axes.get_legend().get_texts()]


def test_tau_of_several_prompts_is_drawn_with_its_interval() -> None:
    (axes,) = tau_figure([(1, {"tau": 1.5, "low": 1.0, "high": 2.0})], 2, 8).axes
    assert ["95 % interval", "tau"] == [text.get_text() for text in axes.get_legend().get_texts()]
