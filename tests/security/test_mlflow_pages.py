"""What MLflow's pages make of texts that strangers wrote: nothing is loaded from elsewhere when they are opened."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest
from imitated_runs import run, toy_pipeline
from markdown_it import MarkdownIt

from executor.results.sweep import final_metrics, main_metrics
from executor.tracking.run_description import run_note

AWAY = "http://evil.example/x.png"
HOSTILE = (
    f"![a]({AWAY})",
    f"!![a]({AWAY}) !\\[a]({AWAY}) \\![a]({AWAY}) ![![a]({AWAY})]({AWAY})",
    f"![a][b] ![b]\n\n[b]: {AWAY}",
    f'<img src="{AWAY}"><IMG/src={AWAY}>',
    f"x | ![a]({AWAY}) |\n\n![a]({AWAY})",
    f"\\![a]({AWAY}) \\\\![a]({AWAY}) \\\\[a]({AWAY})",
    f"`\\`![a]({AWAY})`![a]({AWAY})",
    f"<svg/onload=fetch('{AWAY}')><!-- <script>fetch('{AWAY}')</script>",
)
OF_DFLOW = {"p", "strong", "a", "table", "thead", "tbody", "tr", "th", "td", "code"}


class Tags(HTMLParser):
    """The tags of a page, and where its links lead."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.links += [value for name, value in attrs if name == "href"]


def shown(note: str) -> Tags:
    """A note as MLflow renders it: Markdown with tables and HTML."""
    return Tags(MarkdownIt("commonmark").enable("table").render(note))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_description_loads_nothing_and_links_to_nothing_that_an_op_named(text, tmp_path):
    record = run(toy_pipeline(tmp_path))
    graph = record.graph()
    last = record.state.nodes[graph.result_nodes[-1]]
    last.metrics = {text: 1.0, f"{text}/tau": 2.0}
    assert main_metrics(graph, final_metrics([graph.nodes[graph.result_nodes[-1]]], record.state.nodes))
    found = shown(run_note(record, graph, "1", "2"))
    assert found.names <= OF_DFLOW
    assert found.links == ["#/experiments/1/runs/2/artifacts/report.html?workflowType=machine_learning"]


@pytest.mark.parametrize("text", HOSTILE)
def test_notes_show_links_in_place_of_images_and_html(text, tmp_path):
    record = run(toy_pipeline(tmp_path))
    graph = attrs.evolve(record.graph(), notes=f"**mine**: [a link](http://a.example)\n\n{text}")
    found = shown(run_note(record, graph, "1", "2"))
    assert found.names <= OF_DFLOW and "strong" in found.names
    assert "http://a.example" in found.links


@pytest.mark.parametrize(
    "page", ["executor/report/page.html", "ops/evaluate/prompts.html", "ops/tokenize_chat/preview.html"]
)
def test_the_pages_that_mlflow_shows_load_nothing_and_run_no_script(page):
    """MLflow's page shows them in a frame in which scripts run."""
    text = (Path(__file__).parents[2] / page).read_text()
    policy = text.partition('<meta http-equiv="Content-Security-Policy" content="')[2].partition('"')[0]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {"default-src": "'none'", "img-src": "data:", "style-src": "'unsafe-inline'"}
    assert text.index("Content-Security-Policy") < text.index("<title>")  # before anything that a stranger wrote
