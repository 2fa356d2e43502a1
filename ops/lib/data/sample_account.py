"""Counts of samples in every data op: kept + dropped by reason = in; and what is said of a node that loses many."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, frozen

from dsl.errors import DataError, on_one_line, shortened
from dsl.stage import Stage
from ops.lib.data.files import read_object, write_json

SPLITS = ("train", "val", "test")
NOT_TAKEN = "over max_samples"  # left out because of the user's limit, not because of the sample
DUPLICATE = "same content as an earlier sample"  # which is used, and they are left out because the user asks for it
NO_LOSS = (NOT_TAKEN, DUPLICATE)
MOST_LOST = 0.1  # of a node's samples or answers without a warning, whatever the reason
REASONS_SHOWN = 3
SHOWN = 10
ID_SHOWN, DETAIL_SHOWN = 200, 1000  # characters
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a formula begins for a spreadsheet


@frozen
class Loss:
    """A loss of more than the share MOST_LOST of a node's samples or answers. of: what was lost. text: how much and
    why. remedy: one line, or one for each reason.
    """

    of: Literal["samples", "answers"]
    text: str
    remedy: str

    @property
    def warning(self) -> str:
        """On one line, as all warnings are."""
        return f"{self.text}; {self.remedy_on_a_line}"

    @property
    def remedy_on_a_line(self) -> str:
        return self.remedy.replace("\n", "; ")


def losses_of(summary: Mapping[str, Any]) -> list[Loss]:
    """The losses that a summary.json names; for an older one, those that follow from its counts."""
    named = summary.get("losses")
    if isinstance(named, list):
        texts = [[str(each.get(key)) for key in ("text", "remedy")] for each in named if isinstance(each, Mapping)]
        kinds = [each.get("of") for each in named if isinstance(each, Mapping)]
        return [
            Loss("answers" if kind == "answers" else "samples", *text) for kind, text in zip(kinds, texts, strict=True)
        ]
    dropped = Counter(summary["dropped"])
    return dropped_samples(dropped, summary["in"], {})


def dropped_samples(
    dropped: Counter[str],
    total: int,
    remedies: Mapping[str, str],
    where: str = "dropped.csv names each with its reason",
) -> list[Loss]:
    """The loss of samples dropped for their own faults, out of `total` samples read; empty for a small loss.

    Samples over max_samples were read too, and would have been dropped for a fault. where: what names each of them.
    """
    total -= dropped[DUPLICATE]
    reasons = [(reason, count) for reason, count in dropped.items() if reason not in NO_LOSS]
    lost = sum(count for _, count in reasons)
    if lost <= MOST_LOST * total:
        return []
    first = sorted(reasons, key=lambda item: (-item[1], item[0]))[:REASONS_SHOWN]
    shown = ", ".join(f"{count:,} {reason}" for reason, count in first)
    more = f", {lost - sum(count for _, count in first):,} for other reasons" if len(reasons) > len(first) else ""
    known: dict[str, list[str]] = {}
    for reason, _ in first:
        if reason in remedies:
            known.setdefault(remedies[reason], []).append(reason)
    return [
        Loss(
            "samples",
            f"{lost / total:.0%} of the samples ({lost:,} of {total:,}) are dropped: {shown}{more}",
            "\n".join([*(f"{', '.join(names)}: {remedy}" for remedy, names in known.items()), where]),
        )
    ]


class Unusable(Exception):
    """An error: a sample has to be dropped. reason: one of a small set. detail: specific to this sample."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@contextmanager
def of_sample(sample_id: str) -> Iterator[None]:
    """Open a context that adds the sample's id to a DataError raised inside."""
    try:
        yield
    except DataError as error:
        raise DataError(f'sample "{shown_id(sample_id)}": {error}') from error


def shown_id(sample_id: str) -> str:
    return shortened(on_one_line(sample_id), ID_SHOWN)


def summary_splits(artifact: Path) -> dict[str, int] | None:
    """The number of samples in each split, as a Tally wrote it; None for an artifact without such a summary."""
    file = artifact / "summary.json"
    splits = read_object(file).get("splits") if file.is_file() else None
    return splits if isinstance(splits, dict) else None


def source_splits(artifact: Path) -> dict[str, int] | None:
    """The samples of the whole source by split, as `ingest` counts them with max_samples; None without that count."""
    file = artifact / "source.json"
    if not file.is_file():
        return None
    total: Counter[str] = Counter()
    for by_split in read_object(file).values():
        total.update(by_split)
    return dict(total)


class Tally:
    """Counts samples, and writes each dropped one to dropped.csv at once: id, reason, detail.

    A text that a spreadsheet would read as a formula gets a leading apostrophe. The file always exists, with its
    header. group: prefix of the metrics (`ingest/kept`). remedies: what to do about samples dropped for a reason.
    """

    def __init__(self, stage: Stage, group: str, remedies: Mapping[str, str] | None = None) -> None:
        self.group = group
        self._remedies = remedies or {}
        self._losses: list[Loss] = []
        self._unread = 0
        self._kept = 0
        self.splits: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._stage = stage
        self._first: dict[str, str] = {}
        self._shown: list[str] = []
        self._table = stage.out_dir / "dropped.csv"
        self._table.write_text("id,reason,detail\n", encoding="utf-8")

    def keep(self, split: str, *, is_read: bool = True, samples: int = 1) -> None:
        """Count what is kept of a split. is_read: False for a sample that only passes through. samples: how many it
        became, which the count of the split has.
        """
        self._kept += 1
        self.splits[split] += samples
        self._unread += not is_read

    def spoilt(self, answers: int, total: int, why: str, remedy: str) -> None:
        """Count answers as lost that are kept, but are of little use. why: follows "27% of the answers (...)"."""
        if answers > MOST_LOST * total:
            self._losses.append(
                Loss("answers", f"{answers / total:.0%} of the answers ({answers:,} of {total:,}) {why}", remedy)
            )

    def drop(self, reason: str, sample_id: str, detail: str = "") -> None:
        """Count a dropped sample, and write it to dropped.csv.

        reason: counted, so use few different ones. detail: describes this sample.
        """
        self.dropped[reason] += 1
        shown = shown_id(sample_id)
        self._first.setdefault(reason, shown)
        with self._table.open("a", encoding="utf-8", errors="backslashreplace", newline="") as table:
            csv.writer(table, lineterminator="\n").writerow(map(_cell, (sample_id, reason, detail)))
        if reason != NOT_TAKEN and len(self._shown) < SHOWN:
            why = f" ({shortened(on_one_line(detail), DETAIL_SHOWN)})" if detail else ""
            self._shown.append(f'  sample "{shown}": {reason}{why}')

    def finish(self, max_dropped: int | None) -> list[Loss]:
        """Write summary.json and log the counts; warn if more than the share MOST_LOST is lost, and return what is.

        Raises DataError with the reasons if no sample is left, or more than max_dropped were dropped for their own
        fault.
        """
        kept, dropped = self._kept, sum(self.dropped.values())
        at_fault = dropped - self.dropped[NOT_TAKEN]
        if max_dropped is not None and at_fault > max_dropped:
            raise DataError(f"more than max_dropped = {max_dropped} samples were dropped:\n{self.account()}")
        if not kept:
            raise DataError(f"no sample is left of {dropped}:\n{self.account() or '  the source is empty'}")
        read = kept + dropped - self._unread
        losses = [*dropped_samples(self.dropped, read, self._remedies), *self._losses]
        summary = {
            "in": kept + dropped,
            "kept": kept,
            "dropped": dict(self.dropped),
            "splits": {split: self.splits[split] for split in SPLITS},
            **({"losses": [asdict(loss) for loss in losses]} if losses else {}),
        }
        write_json(self._stage.out_dir / "summary.json", summary)
        self._report()
        for loss in losses:
            self._stage.warn(loss.warning)
        figures = {f"{self.group}/kept": kept, f"{self.group}/dropped": at_fault}
        if self.dropped[NOT_TAKEN]:
            figures[f"{self.group}/left_out"] = self.dropped[NOT_TAKEN]
        self._stage.log(figures, step=0)
        return losses

    def _report(self) -> None:
        """Log the facts that a user should know before later nodes run."""
        counts = ", ".join(f"{split} {self.splits[split]}" for split in SPLITS)
        self._stage.info(f"kept {counts}")
        for line in self.reasons().splitlines():
            self._stage.info(f"{'left out' if NOT_TAKEN in line else 'dropped'} {line.strip()}")
        for line in self._shown:
            self._stage.info(line.strip())
        if sum(self.dropped.values()) > self.dropped[NOT_TAKEN] + len(self._shown):
            self._stage.info("all of them are in dropped.csv")
        for split in SPLITS:
            if not self.splits[split]:
                why = "no sample of it is left; dropped.csv has the reasons"
                if self.group == "ingest":
                    why = 'give samples a "split", or raise val_fraction or test_fraction'
                self._stage.info(f'the split "{split}" is empty; {why}')

    def account(self) -> str:
        """The account of dropped samples as text: reasons, first samples with details, and the file that lists all."""
        if not self.dropped:
            return ""
        return "\n".join([self.reasons(), "the first of them:", *self._shown, f"all of them: {self._table}"])

    def reasons(self) -> str:
        """The reasons for dropped samples, one a line with its count and first sample, the most frequent first."""
        lines = (
            f'  {count:6d}  {reason} (first: sample "{self._first[reason]}")'
            for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
        )
        return "\n".join(lines)


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA) else text
