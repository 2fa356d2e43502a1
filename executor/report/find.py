"""The records of the runs that a report is asked of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsl.errors import StoreError, did_you_mean
from executor.records.run_record import Record, find_record
from executor.records.run_tags import tags_of
from executor.store.names import RUN_ID


def find_records(records: Path, runs: Sequence[str]) -> list[Record]:
    """Each once, in the order given; the newest for none. Raises StoreError with all that cannot be found or read."""
    found: dict[str, Record] = {}
    problems = []
    for run in runs or (None,):
        try:
            record = find_record(records, run)
            found.setdefault(record.run, record)
        except StoreError as error:
            names = _names(records)
            near = did_you_mean(run, names) if run is not None and run not in names else ""
            problems.append(f"{error} ({near})" if near else str(error))
    if problems:
        raise StoreError("\n".join(problems))
    return list(found.values())


def _names(records: Path) -> list[str]:
    """The ids and the tags of all runs."""
    folders = [folder for folder in records.iterdir() if RUN_ID.fullmatch(folder.name)] if records.is_dir() else []
    return [name for folder in folders for name in (folder.name, *tags_of(folder))]
