"""The report's first screen as text, for the end of a command."""

from __future__ import annotations

from collections.abc import Iterator

from executor.records.run_record import Record
from executor.report.answers import QUESTIONS, lines_of, next_steps
from executor.report.artifacts import sections_of
from executor.report.run_data import columns_of, read_runs
from executor.store.artifact_store import Store


def in_short(store: Store, record: Record) -> Iterator[str]:
    """A line for each question, its verdicts below it, and what to do next."""
    runs = read_runs(store, [record])
    shown = sections_of(runs)
    for column in columns_of(runs):
        lines = lines_of(column, shown)
        for question, text in QUESTIONS.items():
            asked = [line for line in lines if line.verdict.code == question]
            if asked:
                yield text
            for line in asked:
                yield f"  {line.verdict.level}: {line.title}: {line.verdict.what}"
        steps = next_steps(column, lines) if lines else []
        yield from (f"next: {step}" for step in steps)
