"""The account of samples that every data op keeps: kept + dropped by reason = in."""

from __future__ import annotations

from collections import Counter

from dsl.errors import DataError
from dsl.stage import Stage
from ops.files import write_json

SPLITS = ("train", "val", "test")
NOT_TAKEN = "over max_samples"  # left out because the user asked for fewer: no fault of the sample


class Tally:
    """Counts samples; `group` names the metrics (`ingest/kept`)."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.splits: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def keep(self, split: str) -> None:
        self.splits[split] += 1

    def drop(self, reason: str, sample_id: str) -> None:
        self.dropped[reason] += 1
        self._examples.setdefault(reason, sample_id)

    def finish(self, stage: Stage, max_dropped: int | None) -> None:
        """Write summary.json and log the counts.

        Raises DataError with the reasons where nothing is left, or where more than max_dropped samples were dropped
        for their own fault.
        """
        kept, dropped = sum(self.splits.values()), sum(self.dropped.values())
        if max_dropped is not None and dropped - self.dropped[NOT_TAKEN] > max_dropped:
            raise DataError(f"more than max_dropped = {max_dropped} samples were dropped:\n{self.reasons()}")
        if not kept:
            raise DataError(f"no sample is left of {dropped}:\n{self.reasons() or '  the source is empty'}")
        summary = {
            "in": kept + dropped,
            "kept": kept,
            "dropped": dict(self.dropped),
            "splits": {split: self.splits[split] for split in SPLITS},
        }
        write_json(stage.out_dir / "summary.json", summary)
        self._tell()
        stage.log({f"{self.group}/kept": kept, f"{self.group}/dropped": dropped}, step=0)

    def _tell(self) -> None:
        """Print what a user should know before later nodes spend their time."""
        counts = ", ".join(f"{split} {self.splits[split]}" for split in SPLITS)
        print(f"dflow: kept {counts}", flush=True)
        for line in self.reasons().splitlines():
            print(f"dflow: {'left out' if NOT_TAKEN in line else 'dropped'} {line.strip()}", flush=True)
        for split in SPLITS:
            if not self.splits[split]:
                remedy = 'give samples a "split", or raise val_fraction or test_fraction of ingest'
                print(f'dflow: the split "{split}" is empty; {remedy}', flush=True)

    def reasons(self) -> str:
        """One line per reason with its count and the first sample, the most frequent reason first."""
        lines = (
            f'  {count:6d}  {reason} (first: sample "{self._examples[reason]}")'
            for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
        )
        return "\n".join(lines)
