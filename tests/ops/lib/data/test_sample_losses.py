"""A node that loses more than a tenth of its samples or answers says so: on the screen and in its artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_stage import FakeStage
from hypothesis import given
from hypothesis import strategies as st

from dsl.finding import Finding
from ops.lib.data.files import read_json
from ops.lib.data.sample_account import DUPLICATE, NOT_TAKEN, Loss, Tally, losses_of
from ops.lib.report_sections import account_sections, verdict


def tallied(folder: Path, kept: int, dropped: dict[str, int], unread: int = 0, **remedies: str) -> FakeStage:
    stage = FakeStage(folder)
    tally = Tally(stage, "ingest", remedies)
    for place in range(kept + unread):
        tally.keep("train", is_read=place < kept)
    for reason, count in dropped.items():
        for place in range(count):
            tally.drop(reason, f"s{place}")
    tally.finish(None)
    return stage


def warnings_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("warning: ")]


def test_a_loss_of_more_than_a_tenth_is_a_warning_with_its_cause_and_remedy(tmp_path, capsys):
    stage = tallied(tmp_path, 448, {"long": 120, "blind": 43}, long="raise max_length", other="never said")
    text = "27% of the samples (163 of 611) are dropped: 120 long, 43 blind"
    lines = ["long: raise max_length", "dropped.csv names each with its reason"]
    remedy = "; ".join(lines)
    assert [f"warning: {text}; {remedy}"] == warnings_of(capsys.readouterr().out)
    losses = read_json(stage.out_dir / "summary.json")["losses"]
    assert [{"of": "samples", "text": text, "remedy": "\n".join(lines)}] == losses
    verdicts = [each.body for each in account_sections(stage.out_dir) if isinstance(each.body, Finding)]
    assert [verdict("limit", text, "warning", remedy)] == verdicts


def test_each_remedy_stands_behind_the_reasons_that_it_is_for(tmp_path, capsys):
    again = "set a = 1; or b"
    tallied(tmp_path, 4, {"cut": 4, "odd": 3, "failed": 2}, cut=again, failed=again)
    assert "4 cut, 3 odd, 2 failed; cut, failed: set a = 1; or b; dropped.csv" in capsys.readouterr().out


def test_of_samples_over_max_samples_as_many_may_be_at_fault(tmp_path, capsys):
    tallied(tmp_path, 16, {"fault": 10, NOT_TAKEN: 132})
    assert [] == warnings_of(capsys.readouterr().out)


def test_of_many_reasons_the_most_frequent_are_named(tmp_path, capsys):
    tallied(tmp_path, 10, {"a": 1, "b": 4, "c": 2, "d": 3, "e": 1})
    assert "(11 of 21) are dropped: 4 b, 3 d, 2 c, 2 for other reasons; dropped.csv" in capsys.readouterr().out


def test_answers_that_are_kept_and_useless_are_lost_too(tmp_path, capsys):
    stage = FakeStage(tmp_path)
    tally = Tally(stage, "regenerate")
    tally.keep("train")
    tally.spoilt(163, 611, "are tokenised otherwise", "set drop_retokenised = true")
    tally.spoilt(61, 611, "are fine", "nothing")
    tally.finish(None)
    text = "27% of the answers (163 of 611) are tokenised otherwise"
    assert [f"warning: {text}; set drop_retokenised = true"] == warnings_of(capsys.readouterr().out)
    assert [Loss("answers", text, "set drop_retokenised = true")] == losses_of(
        read_json(stage.out_dir / "summary.json")
    )


@given(kept=st.integers(1, 60), lost=st.integers(0, 20), left_out=st.integers(0, 50), unread=st.integers(0, 50))
def test_what_counts_is_the_share_of_the_samples_that_were_read(tmp_path_factory, kept, lost, left_out, unread):
    dropped = {"fault": lost, NOT_TAKEN: left_out, DUPLICATE: left_out}
    stage = tallied(tmp_path_factory.mktemp("tally"), kept, dropped, unread)
    summary = read_json(stage.out_dir / "summary.json")
    read = kept + lost + left_out
    expected = [f"({lost} of {read})"] if 10 * lost > read else []
    assert expected == [f"({loss.text.split('(')[1].split(')')[0]})" for loss in losses_of(summary)]
    assert bool(expected) == ("losses" in summary)


def test_a_summary_that_names_no_losses_is_judged_by_its_counts():
    summary = {"in": 100, "dropped": {"fault": 8, DUPLICATE: 30}}
    assert ["11% of the samples (8 of 70) are dropped: 8 fault"] == [loss.text for loss in losses_of(summary)]


@pytest.mark.parametrize("losses", [[3], [{}], [{"of": ["x"], "text": 5, "remedy": None}]])
def test_losses_of_a_stranger_are_texts_whatever_they_are(losses):
    found = losses_of({"in": 1, "dropped": {}, "losses": losses})
    assert {str} >= {type(text) for loss in found for text in (loss.of, loss.text, loss.remedy)}
