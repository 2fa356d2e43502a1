"""A report is written soon and stays small, whatever ops do and however large a run is."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_ops import is_alive
from report_page import Page
from test_report import PIPELINE, counting, run
from toy_ops import wait_for

from executor import send_results
from executor.report import artifacts, write_report


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"TIME_S": 3.0}, "it took longer than 3 s"),
        ({"TOTAL_S": 5.0}, "all ops together took longer than 5 s"),
    ],
)
def test_an_op_that_takes_too_long_ends_with_all_that_it_started_and_the_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: dict[str, float], why: str
) -> None:
    for name, seconds in times.items():
        monkeypatch.setattr(artifacts, name, seconds)
    toy = counting(tmp_path, PIPELINE.replace("kept = 7", 'kept = 7\nfails = "hangs"'))
    run(toy)
    write_report(toy.store, [], tmp_path / "page.html")
    page = Page.read(tmp_path / "page.html")
    assert f"filter What the op keep shows of its artifact is missing here: {why}" in page.text("artifacts")
    assert ["<p>page of 10</p>"] == page.frames
    child = int((toy.store / "child").read_text())
    wait_for(lambda: not is_alive(child), 30)


def test_a_report_is_written_before_whoever_sends_it_to_mlflow_gives_up() -> None:
    assert artifacts.TIME_S < artifacts.TOTAL_S < send_results.REPORT_WITHIN_S
