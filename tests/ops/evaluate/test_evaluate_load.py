"""What follows from a curve of the speed-up under load: the best block of each batch size, and where the draft pays."""

from __future__ import annotations

from ops.evaluate.figures import load_figure
from ops.evaluate.load import LoadPoint, load_curve, load_metrics, load_text, points_of
from ops.evaluate.verdicts import _under_load


def point(batch: int, block: int, speedup: float, low: float | None, high: float | None) -> LoadPoint:
    return LoadPoint(
        batch_size=batch,
        block_size=block,
        tau=2.0,
        plain_tokens_per_second=100.0 * batch,
        tokens_per_second=100.0 * batch * speedup,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
    )


CURVE = load_curve(
    [
        point(1, 4, 1.5, 1.4, 1.6),
        point(1, 8, 2.5, 2.2, 2.8),
        point(4, 4, 1.4, 1.2, 1.6),
        point(4, 8, 1.3, 0.9, 1.7),
        point(16, 4, 1.05, 0.9, 1.2),
        point(16, 8, 0.7, 0.6, 0.8),
        point(64, 4, 0.8, 0.7, 0.9),
        point(64, 8, 0.4, 0.3, 0.5),
    ]
)


def pays(*ends: tuple[float | None, float | None]) -> tuple[int | None, int | None]:
    """pays_up_to and costs_from of one block, measured in batches of 1, 2, 3, ... with these intervals."""
    curve = load_curve([point(place, 8, 1.0, low, high) for place, (low, high) in enumerate(ends, 1)])
    return curve["pays_up_to"], curve["costs_from"]


def test_the_best_block_of_each_batch_size_is_the_one_with_the_highest_speed_up():
    assert [(1, 8, True), (4, 4, True), (16, 4, None), (64, 4, False)] == [
        (best["batch_size"], best["block_size"], best["pays"]) for best in CURVE["best"]
    ]


def test_a_draft_pays_up_to_the_batch_before_the_first_uncertain_one_and_costs_from_where_all_are_slower():
    assert (4, 64) == (CURVE["pays_up_to"], CURVE["costs_from"])
    faster, slower, open_, unknown = (1.1, 1.3), (0.7, 0.9), (0.9, 1.1), (None, None)
    assert (3, None) == pays(faster, faster, faster)
    assert (None, 1) == pays(slower, slower)
    assert (1, None) == pays(faster, open_, faster)  # not up to 3: a slower load may lie between
    assert (None, 3) == pays(slower, faster, slower)
    assert (1, None) == pays(faster, unknown)
    assert (None, None) == pays(open_, unknown)


def test_a_sentence_says_where_the_draft_pays_and_which_block_is_best():
    assert (
        "the draft pays up to batches of 4; from batches of 64 plain decoding is faster; "
        "best block by batch: 8 for 1, 4 for 4, 4 for 16, 4 for 64"
    ) == load_text(CURVE)
    one_block = load_curve([point(1, 8, 1.5, 1.4, 1.6), point(2, 8, 1.2, 1.1, 1.3)])
    assert "the draft pays up to batches of 2, the largest measured" == load_text(one_block)
    finding = _under_load(CURVE)
    assert ("warning", "serve without it from 64 concurrent requests") == (finding.level, finding.advice)


def test_metrics_name_the_batch_and_every_block_but_that_of_the_evaluation():
    found = dict(load_metrics(CURVE, own_block=8))
    assert (0.7, 1.05) == (found["eval/speedup_batch_16"], found["eval/speedup_batch_16_block_4"])
    assert (1600.0, 1600 * 1.05) == (
        found["eval/plain_tokens_per_second_batch_16"],
        found["eval/tokens_per_second_batch_16_block_4"],
    )
    assert (4, 4, 64) == (
        found["eval/best_block_batch_64"],
        found["eval/pays_up_to_batch"],
        found["eval/costs_from_batch"],
    )


def test_the_picture_has_a_line_for_plain_decoding_and_each_block():
    speeds, ratios = load_figure(points_of(CURVE)).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in speeds.get_lines()}
    assert [100, 400, 1600, 6400] == drawn["plain"]
    assert [150, 560, 1680, 5120] == [round(value) for value in drawn["blocks of 4"]]
    assert {"plain", "blocks of 4", "blocks of 8"} == {text.get_text() for text in ratios.get_legend().get_texts()}
