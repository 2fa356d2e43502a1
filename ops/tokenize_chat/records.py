"""Which samples of a token artifact are of one conversation, by their records in samples.jsonl. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def conversation_of(sample_id: str) -> str:
    """The id of the row of which a sample "ID@K" is a context."""
    return sample_id.rpartition("@")[0]


def conversation_of_record(record: Mapping[str, Any]) -> str:
    """The id of a sample's row: ID of "ID@K", where it learns the answers from the K-th on; else its own."""
    name = str(record["id"])
    conversation = conversation_of(name)
    is_learnt = "answers" in record and record["loss_tokens"]
    return conversation if is_learnt and name == f"{conversation}@{record['answers'][0][1] + 1}" else name


def last_of_each(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of the records that ask for the last answer of each conversation, in order."""
    return sorted({conversation_of_record(record): place for place, record in enumerate(records)}.values())
