"""Run `ingest`: read samples, give each a split, pack the images and write everything down."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

import attrs

from dsl.errors import DataError
from dsl.stage import Stage
from ops.files import json_line
from ops.ingest.digits import digit_samples
from ops.ingest.jsonl import read_jsonl
from ops.ingest.op import Ingest
from ops.ingest.prose import prose_samples
from ops.ingest.sample import DroppedSample, RawSample
from ops.tally import NOT_TAKEN, SPLITS, Tally
from ops.vision.packs import PackWriter

UNREADABLE = "image unreadable"


def ingest(config: Ingest, stage: Stage) -> None:
    """Write samples.jsonl, the image packs and summary.json.

    Drop reasons: those of ops/ingest/jsonl.py, "image unreadable" (the file is there but cannot be read), and
    "over max_samples" (which max_dropped does not count).
    Raises DataError for mistakes in the source, for more drops than max_dropped, and where no sample is left.
    """
    tally = Tally(stage, "ingest")
    samples = []
    for sample in read_source(config.source):
        if isinstance(sample, DroppedSample):
            tally.drop(sample.reason, sample.id, sample.detail)
        else:
            samples.append(attrs.evolve(sample, split=sample.split or draw_split(config, sample.id)))
    taken = take(samples, config.max_samples, config.seed or 0)
    packs = PackWriter(stage.out_dir)
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8") as file:
        for done, sample in enumerate(samples, start=1):
            if sample.id not in taken:
                tally.drop(NOT_TAKEN, sample.id)
                continue
            try:
                row = sample_row(sample, packs)
            except OSError:
                tally.drop(UNREADABLE, sample.id)
                continue
            file.write(json_line(row))
            tally.keep(row["split"])
            if done % 100 == 0 or done == len(samples):
                stage.progress(done, len(samples))
    tally.finish(config.max_dropped)


def read_source(source: str) -> list[RawSample | DroppedSample]:
    """All samples of a source, in order. Raises DataError for an unknown built-in sample and for mistakes in a file."""
    if source == "builtin:digits":
        return [*digit_samples(), *prose_samples()]
    if source == "builtin" or source.startswith("builtin:"):
        raise DataError(f'source "{source}": the only built-in sample is "builtin:digits"')
    return read_jsonl(Path(source))


def draw_split(config: Ingest, sample_id: str) -> str:
    """The split of a sample without a given one: a function of (seed, id) alone."""
    place = _hash(config.seed or 0, sample_id) / 2**64
    if place < config.test_fraction:
        return "test"
    return "val" if place < config.test_fraction + config.val_fraction else "train"


def take(samples: list[RawSample], max_samples: int | None, seed: int) -> set[str]:
    """Ids of the samples to keep: at most max_samples of each category, spread over its splits in proportion."""
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        groups["image" if sample.images else "text"][sample.split or ""].append(sample.id)
    taken: set[str] = set()
    for by_split in groups.values():
        counts = {split: len(by_split[split]) for split in SPLITS if split in by_split}
        for split, quota in quotas(counts, max_samples).items():
            taken.update(sorted(by_split[split], key=lambda sample_id: _hash(seed, sample_id))[:quota])
    return taken


def quotas(counts: dict[str, int], limit: int | None) -> dict[str, int]:
    """`limit` things dealt over groups in proportion to their sizes, by largest remainder; each gets one if it can."""
    total = sum(counts.values())
    if limit is None or limit >= total:
        return counts
    shares = {split: limit * count // total for split, count in counts.items()}
    by_remainder = sorted(counts, key=lambda split: -(limit * counts[split] % total))
    for split in by_remainder[: limit - sum(shares.values())]:
        shares[split] += 1
    for split in [split for split, share in shares.items() if not share and limit >= len(counts)]:
        shares[split] = 1
        shares[max(shares, key=shares.__getitem__)] -= 1
    return shares


def sample_row(sample: RawSample, packs: PackWriter) -> dict[str, object]:
    """A line of samples.jsonl; its images are added to the packs. Raises OSError for a file that cannot be read."""
    encoded = [image if isinstance(image, bytes) else image.read_bytes() for image in sample.images]
    references = [packs.add(image) for image in encoded]
    return {
        "id": sample.id,
        "split": sample.split,
        "category": "image" if references else "text",
        "conversations": [turn.row() for turn in sample.turns],
        "images": references,
    }


def _hash(seed: int, sample_id: str) -> int:
    """64 bits that depend on (seed, id) alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{sample_id}".encode()).digest()[:8], "big")
