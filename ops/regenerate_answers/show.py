"""Report sections of `regenerate_answers`: the account, how answers ended, and some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dsl.errors import shortened
from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, Table, account_sections, facts, first_rows, spread

ANSWERS_SHOWN = 12
LETTERS = 400


def report(folder: Path) -> Sequence[Section]:
    """The report sections of regenerated answers: accounts, finish reasons, lengths, first answers, server speed."""
    rows = first_rows(folder / "samples.jsonl")
    reasons = Counter(reason for row in rows for reason in row.get("finish_reasons", ()))
    lengths = [tokens for row in rows for tokens in row.get("answer_tokens", ())]
    sections = [*account_sections(folder)]
    if lengths:
        sections.append(Section("finish reasons", Table(("reason", "answers"), reasons.most_common())))
        sections.append(Section("tokens of an answer", spread(lengths)))
    answers = [
        (row["id"], row["split"], _text(row, "user"), _text(row, "assistant")) for row in islice(rows, ANSWERS_SHOWN)
    ]
    sections.append(Section("first answers", Table(("sample", "split", "asked last", "answer"), answers)))
    measured = folder / "measurements.json"
    if measured.exists():
        sections.append(Section("measured", facts(read_json(measured))))
    return sections


def _text(row: Mapping[str, Any], role: str) -> str:
    """The text of a role's last message, without images."""
    found = [message for message in row["messages"] if message["role"] == role]
    parts = found[-1]["content"] if found else ()
    return shortened("".join(part["text"] for part in parts if part["type"] == "text"), LETTERS)
