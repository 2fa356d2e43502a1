"""The page of a search: its best trial, tau over the rungs as a picture, and all trials."""

from __future__ import annotations

from pathlib import Path
from pkgutil import get_data

from dsl.files import output_errors, replace_file
from executor.report.pictures import Curve, curves_figure, embedded
from executor.report.templates import table
from executor.tune.outcome import COLUMNS, Outcome
from ops.lib.pages import page_text


def write_page(path: Path, name: str, outcome: Outcome, winner_file: Path) -> None:
    """Write the page of a pipeline's search. Raises StoreError where it cannot be written."""
    curves = [
        Curve(curve.trial, [(step, tau) for step, tau, _ in curve.points], [bounds for *_, bounds in curve.points])
        for curve in outcome.curves
    ]
    figure = curves_figure({"tau on val": curves})
    figure.set_size_inches(7, 4)
    text = page_text(
        get_data("executor.tune", "page.html"),
        name=name,
        outcome=outcome,
        values=table(("field", "value"), list(outcome.values.items())),
        rows=table(COLUMNS, outcome.rows),
        picture=embedded(figure, "tau on val of every trial over its training steps"),
        file=str(winner_file),
    )
    path.parent.mkdir(exist_ok=True)
    with output_errors(path):
        replace_file(path, text.encode())
