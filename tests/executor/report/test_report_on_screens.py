"""The report on the screens of a phone and of a desk, in the light and in the dark, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import CHROMIUM, Browser
from counting_runs import EVIL, PIPELINE, counting, run, runs_of

from executor.report.page import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"),
]
# As long as the figures of an evaluation are; all differ between runs that keep other numbers of samples.
FIGURES = """
    for name, value in {"tau": 3.4113, "tau_image": 2.8734, "tau_text": 4.0712, "speedup": 1.3157}.items():
        value = value * config.kept / 7
        stage.log({f"eval/{name}": value, f"eval/{name}_low": value - 0.1287, f"eval/{name}_high": value + 0.1354}, 3)
    stage.log({"eval/tokens_per_second": 1234.56 * config.kept, "eval/acceptance_rate": 0.34112 * config.kept}, 3)
"""
JUDGES = """
    yield Section("judged" + text, Verdict("good", "tau" + text, "warn", "do" + text))
    yield Section("gate", Verdict("safe", "5 of 5", "good"))
"""
LONG = "a-name-without-any-place-to-break-" * 8


def rgb(colour: str) -> list[float]:
    return [float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_screen_and_texts_stand_out(tmp_path: Path, width: int, dark: bool) -> None:
    text = (EVIL + LONG).replace("'", "")
    toy = counting(tmp_path, PIPELINE.replace("kept = 7", f"kept = 7\ntext = '''{text}'''"))
    shows = tmp_path / "shows.py"
    shows.write_text(f"{shows.read_text().replace('Section, Table', 'Section, Table, Verdict')}{JUDGES}")
    run(toy)
    run(toy, "-s", "filter.kept=5")
    for runs in (runs_of(toy)[:1], runs_of(toy)):
        page = tmp_path / "page.html"
        write_report(toy.store, runs, page)
        with Browser(tmp_path / f"profile-{len(runs)}") as browser:
            browser.show(page, width, 800, dark=dark)
            assert width == browser.value("document.documentElement.scrollWidth")
            assert width == browser.value("innerWidth")
            top = browser.value("document.querySelector('main section h3').getBoundingClientRect().top")
            assert 0 < top < 400, "what comes first is on the first screen"
            assert "Is the draft good?" == browser.value("document.querySelector('main section h3').textContent")
            style = "getComputedStyle(document.body)"
            ground, ink = rgb(browser.value(f"{style}.backgroundColor")), rgb(browser.value(f"{style}.color"))
            assert dark == (sum(ground) < 3 * 128)
            assert abs(sum(ground) - sum(ink)) > 3 * 128
            assert 0 == browser.value(
                "performance.getEntriesByType('resource').filter(e => e.name.startsWith('http')).length"
            )


def test_the_results_of_two_runs_fit_a_phone(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    shows = tmp_path / "shows.py"
    shows.write_text(shows.read_text().replace("    stage.log(slots", f"{FIGURES}    stage.log(slots"))
    run(toy)
    run(toy, "-s", "filter.kept=5")
    write_report(toy.store, runs_of(toy), tmp_path / "page.html")
    with Browser(tmp_path / "profile") as browser:
        browser.show(tmp_path / "page.html", 390, 800)
        box = "document.querySelector('#results .scroll')"
        assert "-0.821" in browser.value(f"{box}.textContent")
        assert browser.value(f"{box}.scrollWidth <= {box}.clientWidth")
        name = f"[...{box}.querySelectorAll('td:first-child')].find(cell => cell.textContent == 'eval/tau_image')"
        assert browser.value(f"{name}.clientWidth") >= 90, "room for more than a word on a line"


def test_a_table_that_is_wider_than_the_screen_shows_that_it_goes_on(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    write_report(toy.store, [], tmp_path / "page.html")
    with Browser(tmp_path / "profile") as browser:
        browser.show(tmp_path / "page.html", 390, 800)
        table = "document.querySelector('#pipeline .scroll:has(table)')"
        assert browser.value(f"{table}.scrollWidth > {table}.clientWidth")
        attachments = "local, local, scroll, scroll"
        assert attachments == browser.value(f"getComputedStyle({table}).backgroundAttachment")
