"""What ops say of a draft on the first screen of a report: each figure with its judgement and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsl.finding import Finding
from ops.check_export.show import report as check_export_sections
from ops.evaluate.verdicts import ITS_TARGET, SLOWER
from ops.evaluate.verdicts import verdicts as of_evaluation
from ops.finetune_vlm.show import verdicts as of_target
from ops.finetune_vlm.show import wilson
from ops.lib.data.files import read_json, write_json
from ops.lib.report_sections import Section
from ops.train_dflash.verdicts import LONGER, MORE_SAMPLES
from ops.train_dflash.verdicts import verdicts as of_training


def tau(value: float, low: float | None, high: float | None, steps: int = 9) -> dict[str, Any]:
    return {"tau": value, "low": low, "high": high, "steps": steps, "prompts": 4}


def report(**changes: Any) -> dict[str, Any]:
    known = {
        "tau": {"all": tau(2.5, 2.1, 2.9)},
        "tau_random": {"all": tau(1.1, 1.0, 1.2)},
        "block_size": 8,
        "prompts": 4,
        "lossless": {"errors": 0, "ties": 1},
    }
    return {name: value for name, value in (known | changes).items() if value != "absent"}


def measured(speedup: float, low: float | None, high: float | None, draft: float = 2.0) -> dict[str, Any]:
    parts = {"verify": 5.0, "draft": draft, "prefill": 2.0, "overhead": 1.0}
    return {
        "speedup": speedup, "speedup_low": low, "speedup_high": high, "batch_size": 8, "speculative_seconds": 10.0,
        "parts": {"speculative": parts},
    }  # fmt: skip


def verdict(sections: Any, title: str) -> Finding:
    found = {section.title: section.body for section in sections if isinstance(section.body, Finding)}[title]
    assert isinstance(found, Finding)
    return found


@pytest.mark.parametrize(
    ("chance", "judgement", "says"),
    [
        (tau(1.1, 1.0, 1.2), "good", "better than chance"),
        (tau(2.4, 2.0, 2.8), "warning", "the intervals overlap"),
        (tau(2.5, 2.1, 2.9), "error", "no better than chance"),
        (tau(1.1, None, None), "warning", "needs two prompts"),
        ("absent", "warning", "Against a random draft: not measured"),
    ],
)
def test_tau_is_compared_with_plain_decoding_and_with_chance(chance: Any, judgement: str, says: str) -> None:
    random = "absent" if chance == "absent" else {"all": chance}
    found = verdict(of_evaluation(report(tau_random=random), None), "tau")
    assert ("good", judgement) == (found.code, found.level)
    assert "2.50 (2.10 to 2.90) tokens per pass of the target, of at most 8; plain decoding has 1" in found.what
    assert says in found.what
    assert (judgement == "good") == (found.advice == "")


@pytest.mark.parametrize(
    ("of", "imported", "judgement", "says", "advised"),
    [
        (
            tau(1.04, 1.03, 1.05),
            {"publisher": "z-lab"},
            "error",
            "Likely cause: it was trained for another target",
            True,
        ),
        (
            tau(1.04, 1.03, 1.05),
            {"publisher": "dflow", "trained_for": "ab" * 32},
            "error",
            "for another target (its record names another target, abababababab)",
            True,
        ),
        (
            tau(2.5, 2.1, 2.9),
            {"publisher": "dflow", "trained_for": "ab" * 32},
            "good",
            "if that had other weights",
            True,
        ),
        (tau(2.5, 2.1, 2.9), {"publisher": "z-lab"}, "good", "It is better than chance", False),
        (tau(1.04, 1.03, 1.05), None, "warning", "above chance by less than 5%", False),
        (tau(1.04, 1.03, 1.05), {"publisher": "dflow"}, "warning", "above chance by less than 5%", False),
    ],
)
def test_a_draft_of_others_that_hardly_helps_was_likely_trained_for_another_target(
    of: dict[str, Any], imported: Any, judgement: str, says: str, advised: bool
) -> None:
    random = {"all": tau(1.0, 1.0, 1.0)}
    changes = {"tau": {"all": of}, "tau_random": random} | ({} if imported is None else {"imported": imported})
    found = verdict(of_evaluation(report(**changes), None), "tau")
    assert (judgement, advised) == (found.level, found.advice == ITS_TARGET)
    assert says in found.what


@pytest.mark.parametrize(
    ("times", "judgement", "says"),
    [
        (measured(1.5, 1.2, 1.8), "good", "1.50 (1.20 to 1.80) times as fast as plain decoding"),
        (measured(0.8, 0.7, 0.9), "error", "It is slower"),
        (measured(1.1, 0.9, 1.3), "warning", "1.10 (0.90 to 1.30) times as fast"),
        (measured(1.1, 0.9, 1.3), "warning", "No difference is certain"),
        (measured(0.43, 0.0, 3.04), "warning", "not known, somewhere in 0.00 to 3.04 times as fast"),
        (measured(1.5, 0.5, 2.01), "warning", "not known, somewhere in 0.50 to 2.01 times as fast"),
        (measured(3.0, 1.01, 9.0), "good", "3.00 (1.01 to 9.00) times as fast"),
        (measured(1.5, None, None), "warning", "no interval of one batch"),
        (None, "warning", "not measured"),
    ],
)
def test_the_speed_up_counts_only_where_its_interval_leaves_1(times: Any, judgement: str, says: str) -> None:
    sections = list(of_evaluation(report(), times))
    found = verdict(sections, "speed-up")
    assert [times is not None] == [section.is_timed for section in sections if section.title == "speed-up"]
    assert ("good", judgement) == (found.code, found.level)
    assert says in found.what


@pytest.mark.parametrize(
    ("of", "chance", "judgement"),
    [
        (tau(1.04, 1.03, 1.05), tau(1.0, 1.0, 1.0), "warning"),  # as `dflow diagnose` says "nothing was learnt"
        (tau(1.06, 1.05, 1.07), tau(1.0, 1.0, 1.0), "good"),
        (tau(2.09, 2.08, 2.10), tau(2.0, 1.99, 2.01), "warning"),
    ],
)
def test_a_tau_that_is_above_chance_by_too_little_is_not_good(
    of: dict[str, Any], chance: dict[str, Any], judgement: str
) -> None:
    found = verdict(of_evaluation(report(tau={"all": of}, tau_random={"all": chance}), None), "tau")
    assert judgement == found.level
    assert (judgement == "warning") == ("above chance by less than 5%" in found.what) == ("diagnose" in found.advice)


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (measured(0.5, 0.2, 1.2), "Whether it is faster than plain decoding cannot be told"),
        (measured(1.1, 0.9, 1.3), "Whether it is faster than plain decoding cannot be told"),
        (measured(0.43, 0.0, 3.04), "Whether it is faster than plain decoding cannot be told"),
        (measured(0.5, None, None), "Plain decoding is faster"),
        (measured(0.5, 0.4, 0.6), "Plain decoding is faster"),
    ],
)
def test_no_tau_is_good_beside_a_speed_up_that_is_not(times: dict[str, Any], says: str) -> None:
    found = verdict(of_evaluation(report(), times), "tau")
    assert "warning" == found.level and found.advice and says in found.what
    assert "good" == verdict(of_evaluation(report(), measured(1.5, 1.2, 1.8)), "tau").level


def test_a_draft_that_is_slower_than_plain_decoding_is_not_good_whatever_its_tau() -> None:
    slow = list(of_evaluation(report(), measured(0.32, 0.3, 0.35)))
    assert ("warning", SLOWER) == (verdict(slow, "tau").level, verdict(slow, "tau").advice)
    assert verdict(slow, "tau").what.endswith("It is better than chance. Plain decoding is faster")
    assert ("error", SLOWER) == (verdict(slow, "speed-up").level, verdict(slow, "speed-up").advice)
    useless = report(tau_random={"all": tau(2.5, 2.1, 2.9)})
    assert "error" == verdict(of_evaluation(useless, measured(0.32, 0.3, 0.35)), "tau").level
    open_ = list(of_evaluation(report(), measured(1.1, 0.9, 1.3)))
    assert "Whether it is faster than plain decoding cannot be told" in verdict(open_, "tau").what
    assert "cannot be told" in verdict(open_, "speed-up").advice
    assert "plain decoding is faster" not in verdict(of_evaluation(report(), measured(1.5, 1.2, 1.8)), "tau").what


def test_losslessness_is_counted_in_answers_and_unknown_where_they_were_sampled() -> None:
    found = verdict(of_evaluation(report(), None), "losslessness")
    assert ("safe", "good") == (found.code, found.level)
    assert "4 of 4 answers are those of the target alone, 1 of them up to a tie of two logits" == found.what
    sampled = verdict(of_evaluation(report(lossless=None), None), "losslessness")
    assert ("warning", "not measured: answers were sampled") == (sampled.level, sampled.what)
    assert "temperature = 0" in sampled.advice
    wrong = report(lossless={"errors": 1, "ties": 0})
    assert "error" == verdict(of_evaluation(wrong, None), "losslessness").level


def test_a_category_limits_where_it_is_certainly_far_below_another() -> None:
    def categories(image: dict[str, Any]) -> Finding:
        kinds = {"all": tau(3.0, 2.9, 3.1), "text": tau(4.0, 3.5, 4.5), "image": image}
        return verdict(of_evaluation(report(tau=kinds), None), "categories")

    assert "warning" == categories(tau(1.5, 1.2, 1.8)).level
    assert 'train on more samples of "image"' in categories(tau(1.5, 1.2, 1.8)).advice
    assert "tau: image 1.50 (1.20 to 1.80), text 4.00 (3.50 to 4.50)" in categories(tau(1.5, 1.2, 1.8)).what
    assert ("info", "") == (categories(tau(2.5, 2.0, 3.0)).level, categories(tau(2.5, 2.0, 3.0)).advice)
    assert "no difference is certain" in categories(tau(1.5, 1.0, 3.6)).what
    assert "needs two prompts" in categories(tau(1.5, None, None)).what


def test_blocks_and_a_slow_draft_limit_it() -> None:
    at_ceiling = report(tau={"all": tau(7.7, 7.5, 7.9)})
    assert "larger block_size" in verdict(of_evaluation(at_ceiling, None), "block size").advice
    assert "block size" not in [section.title for section in of_evaluation(report(), None)]
    slow = verdict(of_evaluation(report(), measured(1.5, 1.2, 1.8, draft=6.0)), "time")
    assert ("warning", True) == (slow.level, "the draft takes longer than the target" in slow.what)
    assert "info" == verdict(of_evaluation(report(), measured(1.5, 1.2, 1.8)), "time").level


def test_answers_of_one_token_have_no_tau() -> None:
    found = list(of_evaluation(report(tau={"all": tau(0.0, None, None, steps=0)}), None))
    assert "error" == verdict(found, "tau").level
    assert ["tau", "speed-up", "losslessness"] == [section.title for section in found]


def training(losses: list[tuple[int, float]], **changes: Any) -> list[Section]:
    known = {
        "steps": 100, "samples": 10, "samples_seen": 10, "tokens": 1234, "measured": [
            {"step": step, "loss": loss} for step, loss in losses
        ],
        "selected_metrics": {"train/accuracy": 0.5}, "val_metrics": {"val/accuracy": 0.4},
    }  # fmt: skip
    return list(of_training(known | changes))


@pytest.mark.parametrize(
    ("losses", "judgement", "says", "advice"),
    [
        ([(50, 3.0), (80, 2.0), (100, 1.5)], "warning", "still improving", LONGER),
        ([(50, 3.0), (80, 1.52), (100, 1.5)], "good", "it has converged", ""),
        (
            [(40, 1.0), (80, 1.3), (100, 1.5)],
            "warning",
            "lowest at step 40 of 100, 1.00, and rose to 1.50",
            MORE_SAMPLES,
        ),
    ],
)
def test_the_loss_on_val_says_whether_more_steps_would_help(
    losses: list[tuple[int, float]], judgement: str, says: str, advice: str
) -> None:
    found = verdict(training(losses), "length of training")
    assert ("limit", judgement, advice) == (found.code, found.level, found.advice)
    assert says in found.what


@pytest.mark.parametrize("losses", [[], [(100, 1.5)], [(50, 1.5)]])
def test_without_a_loss_on_val_at_both_ends_the_advice_is_to_measure_it(losses: list[tuple[int, float]]) -> None:
    found = verdict(training(losses), "length of training")
    assert found.what.startswith("not measured")
    assert "eval_every" in found.advice
    short = verdict(training(losses, steps=99), "length of training")
    assert ("not measured: 99 steps are too few to see the loss on val fall", LONGER) == (short.what, short.advice)


def test_samples_are_memorized_where_training_is_far_better_than_val() -> None:
    assert "good" == verdict(training([]), "overfitting").level
    gap = verdict(training([], selected_metrics={"train/accuracy": 0.9}), "overfitting")
    assert ("warning", MORE_SAMPLES) == (gap.level, gap.advice)
    assert "slots right: 90% in training, 40% on val" in gap.what
    named = verdict(training([], selected_steps=20), "overfitting")
    assert "slots right: 50% in the last 20 steps of training, 40% on val" in named.what
    unknown = verdict(training([], val_metrics=None), "overfitting")
    assert unknown.what.startswith("not measured")
    assert "val_fraction of ingest" in unknown.advice and "eval_every" not in unknown.advice


def test_samples_that_no_step_had_and_steps_that_were_skipped_limit_it() -> None:
    assert "1,234 tokens in 100 steps, of 10 samples" == verdict(training([]), "data").what
    fewer = verdict(training([], samples_seen=4), "data")
    assert ("warning", True) == (fewer.level, "6 more were in no step" in fewer.what)
    assert "stability" not in [section.title for section in training([])]
    assert "warning" == verdict(training([], nonfinite_steps=3), "stability").level
    assert "info" == verdict(training([], nonfinite_steps=1), "stability").level  # of 100: no more than 1 %
    without = verdict(training([], nonfinite_steps=1, skipped_steps=2), "stability")
    expected = (
        "2 of 100 steps were skipped (1 with a loss or gradient that is not finite and 1 without a token to learn"
    )
    assert ("warning", f"{expected} from)") == (without.level, without.what)
    assert "min_loss_tokens" in without.advice


def test_the_gate_says_whether_sglang_served_it(tmp_path: Path) -> None:
    live: dict[str, Any] = {"status": "skipped", "reason": "no GPU", "remedy": "dflow resume RUN --from check"}
    check = {"static": "passed", "live": live, "prompts": 8, "warnings": []}
    write_json(tmp_path / "check.json", check | {"tau": {"evaluate": {"all": 3.5}, "served": None}})
    skipped = check_export_sections(tmp_path)
    assert ("safe", "good") == (verdict(skipped, "gate").code, verdict(skipped, "gate").level)
    assert ("warning", "dflow resume RUN --from check") == (
        verdict(skipped, "served").level,
        verdict(skipped, "served").advice,
    )
    for own, contract in (({}, "DFLASH"), ({"engine": "DSPARK"}, "DSPARK")):
        write_json(tmp_path / "check.json", read_json(tmp_path / "check.json") | own)
        assert f"SGLang's {contract} worker" in verdict(check_export_sections(tmp_path), "gate").what
    live = {"status": "passed", "sglang": "0.5.21", "ties": 1}
    taus = {"evaluate": {"all": 3.5}, "served": {"all": 3.4}}
    write_json(tmp_path / "check.json", check | {"live": live, "tau": taus})
    passed = verdict(check_export_sections(tmp_path), "served")
    assert "good" == passed.level
    assert (
        "SGLang 0.5.21 served 8 prompts: tau 3.40, by evaluate 3.50; 1 answers or steps differ at a tie" == passed.what
    )


@pytest.mark.parametrize(
    ("before", "after", "samples", "judgement", "told"),
    [
        (0.3, 0.9, 100, "good", "before the training 30.0% of 100 samples (95 %: 21.9% to 39.6%). It rose"),
        (0.3, 0.4, 20, "warning", "the intervals overlap: that may be chance"),
        (0.4, 0.4, 100, "error", "It did not rise"),
        (None, 0.9, 100, "info", "random weights"),
        (0.3, 0.9, None, "warning", "of how many samples is not recorded"),
    ],
)
def test_whether_fine_tuning_raised_the_accuracy_is_judged_by_its_intervals(before, after, samples, judgement, told):
    metrics = {"accuracy": after} | ({} if before is None else {"accuracy_before": before})
    measured = {} if samples is None else {"test_samples": samples, "majority_share": None}
    (section,) = of_target(metrics, measured)
    assert ("target", judgement) == (section.body.code, section.body.level)
    assert told in section.body.what


@pytest.mark.parametrize(("share", "judgement"), [(0.5, "good"), (0.87, "warning"), (0.9, "error")])
def test_an_accuracy_no_higher_than_the_share_of_the_most_frequent_label_is_named(share, judgement):
    _, section = of_target({"accuracy": 0.9}, {"test_samples": 100, "majority_share": share})
    assert ("majority class", judgement) == (section.title, section.body.level)
    assert f"the most frequent label is that of {share:.1%} of the 100 samples" in section.body.what


def test_without_a_metric_the_target_is_not_judged():
    (section,) = of_target({"val_loss": 1.0}, {})
    assert section.body.what.startswith("not measured")


def test_wilson_s_interval_is_where_the_score_test_is_at_5_percent():
    for share, samples in ((0.0, 10), (0.3, 100), (1.0, 7)):
        for bound in wilson(share, samples):
            if 0 < bound < 1:
                assert abs(share - bound) == pytest.approx(1.959964 * (bound * (1 - bound) / samples) ** 0.5)
