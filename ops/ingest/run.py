"""Run `ingest`: read samples, give each a split, pack the images and write them, one sample at a time."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from dsl.errors import DataError
from dsl.op import is_builtin
from dsl.stage import Stage
from ops.ingest.digits import digit_samples
from ops.ingest.image_values import encoded_image
from ops.ingest.op import GROUP, Ingest
from ops.ingest.prose import prose_samples
from ops.ingest.read import Read, images_without_row, read_samples, unread_captions
from ops.ingest.remedies import REMEDIES, advised
from ops.ingest.rows import SETTING
from ops.ingest.sample import LAST, DroppedSample, RawSample
from ops.ingest.source import check_builtin
from ops.ingest.splits import hash_of, kept_of, split_of
from ops.lib.data.files import json_line, write_json
from ops.lib.data.image_packs import MAX_IMAGE_BYTES, PackWriter
from ops.lib.data.sample_account import DUPLICATE, NOT_TAKEN, SPLITS, Tally, Unusable

Group = tuple[str, str]  # category, split


def ingest(config: Ingest, stage: Stage) -> None:
    """Write samples.jsonl, the image packs, summary.json, dropped.csv and, with max_samples, source.json.

    One sample, the ids of all, and the digests of their contents and of the images are in memory. With max_samples the
    source is read twice.
    Drop reasons: those of ops/ingest/rows.py and image_values.py, "same content as an earlier sample" (with
    duplicates = "drop"), and "over max_samples" (which max_dropped does not count).
    Raises DataError for mistakes in the source, for more drops than max_dropped, and if no sample is left.
    """
    last_kept = None
    if config.max_samples is not None:
        counts, last_kept = last_hashes(config, config.max_samples)
        write_json(stage.out_dir / "source.json", counts)
    tally = Tally(stage, "ingest", REMEDIES)
    packs = PackWriter(stage.out_dir)
    contents = Contents()
    done = grouped = thinking = calling = 0
    noted: Counter[str] = Counter()
    settings: Counter[str] = Counter()
    values: defaultdict[str, set[str]] = defaultdict(set)  # of a setting, up to 2
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8") as file:
        for done, (share, sample) in enumerate(read_source(config), start=1):
            if done % 100 == 0:
                stage.progress(done, max(done, round(done / share)))  # the total is estimated until the end
            if isinstance(sample, DroppedSample):
                tally.drop(sample.reason, sample.id, advised(sample.reason, sample.detail))
                continue
            split = split_of(config, sample)
            if last_kept is not None and hash_of(config.seed or 0, sample.id) > last_kept[category(sample), split]:
                tally.drop(NOT_TAKEN, sample.id)
                continue
            try:
                row = sample_row(sample, split, packs)
            except Unusable as fault:
                tally.drop(fault.reason, sample.id, advised(fault.reason, fault.detail))
                continue
            content = content_of(row)
            if config.duplicates == "drop" and content in contents:
                tally.drop(DUPLICATE, sample.id)
                continue
            contents.add(content, split)
            if sample.learns_last or (config.learnt_in_requests == "last" and sample.opening is not None):
                row["learnt"] = LAST
            file.write(json_line(row))
            tally.keep(split)
            grouped += sample.topic is not None
            thinking += any(turn.reasoning_content for turn in sample.turns)
            calling += any(turn.tool_calls for turn in sample.turns)
            noted.update(sample.noted)
            for key, value in sample.settings:
                settings[key] += 1
                if len(values[key]) < 2:
                    values[key].add(value)
    stage.progress(done, done)
    tally.finish(config.max_dropped)
    if config.group != GROUP and not grouped:
        raise DataError(
            f'group = "{config.group}": no sample has a text or an integer in such a field; correct the name, or leave '
            "group out"
        )
    if not is_builtin(config.source):
        for captions in unread_captions(config.reading()):
            stage.warn(
                f'{captions}: its captions are not read with format = "image-folder"; leave out format to read them'
            )
        for left_out in images_without_row(config.reading()):
            stage.warn(f"{left_out}; add rows for them, or move them elsewhere")
    for warning in contents.warnings():
        stage.warn(warning)
    if thinking:
        stage.info(f"{thinking} samples carry reasoning_content, which only some chat templates show")
    if calling:
        stage.info(f"{calling} samples call tools")
    for key, count in settings.items():
        without = sum(tally.splits.values()) - count
        differ = "; their values differ" if len(values[key]) > 1 else ""
        others = f"; {without} samples have none" if without else ""
        stage.info(f"{count} samples have {SETTING.format(key)}{differ}{others}")
    for what, count in noted.items():
        stage.info(f"{count} samples have {what}")


def read_source(config: Ingest) -> Iterator[Read]:
    """Pairs of the share of the source read so far and a sample, in order.

    Raises DataError for an unknown built-in sample, and for mistakes in a file.
    """
    if isinstance(config.source, str) and is_builtin(config.source):
        check_builtin(config.source)
        samples = builtin_samples()
        return ((done / len(samples), sample) for done, sample in enumerate(samples, start=1))
    return read_samples(config.reading())


@cache
def builtin_samples() -> tuple[RawSample, ...]:
    """All samples of the built-in data set."""
    return (*digit_samples(), *prose_samples())


def category(sample: RawSample) -> str:
    return "image" if sample.images else "text"


def last_hashes(config: Ingest, max_samples: int) -> tuple[dict[str, dict[str, int]], dict[Group, int]]:
    """The number of samples in the source by category and split, and the last hash to keep in every group (-1 for
    none).

    Up to max_samples of each category are kept, distributed over its splits.
    """
    smallest: dict[Group, list[int]] = defaultdict(list)  # heaps of negative hashes: the largest hash on top
    counts: Counter[Group] = Counter()
    for _, sample in read_source(config):
        if isinstance(sample, DroppedSample):
            continue
        group = category(sample), split_of(config, sample)
        counts[group] += 1
        heapq.heappush(smallest[group], -hash_of(config.seed or 0, sample.id))
        if len(smallest[group]) > max_samples:
            heapq.heappop(smallest[group])
    in_source = {
        name: {split: counts[name, split] for split in SPLITS if counts[name, split]} for name in ("image", "text")
    }
    last: dict[Group, int] = {}
    for name, of_category in in_source.items():
        for split, quota in kept_of(config, of_category).items():
            last[name, split] = sorted(-negative for negative in smallest[name, split])[quota - 1] if quota else -1
    return in_source, last


def sample_row(sample: RawSample, split: str, packs: PackWriter) -> dict[str, Any]:
    """A line of samples.jsonl; adds its images to the packs.

    Raises Unusable for an unreadable file, and for images of more than MAX_IMAGE_BYTES together: a row may name one
    large file many times.
    """
    encoded: list[bytes] = []
    for image in sample.images:
        encoded.append(encoded_image(image, MAX_IMAGE_BYTES - sum(map(len, encoded))))
    return {
        "id": sample.id,
        "split": split,
        "category": category(sample),
        "conversations": [turn.row() for turn in sample.turns],
        "images": [packs.add(image) for image in encoded],
        **({} if sample.label is None else {"label": sample.label}),
        **({} if sample.topic is None else {"topic": sample.topic}),
        **({"tools": list(sample.tools)} if sample.tools else {}),
        **({"documents": list(sample.documents)} if sample.documents else {}),
    }


TRAINED = "train"
HELD_OUT = tuple(split for split in SPLITS if split != TRAINED)


def content_of(row: dict[str, Any]) -> bytes:
    """A hash of 16 bytes over the turns, images, tools and documents of a line of samples.jsonl, and nothing else."""
    images = [image["sha256"] for image in row["images"]]
    tools = [row["tools"]] if "tools" in row else []
    documents = [{"documents": row["documents"]}] if "documents" in row else []
    content = json_line([row["conversations"], images, *tools, *documents])
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


class Contents:
    """The content hashes of all samples so far, by split."""

    def __init__(self) -> None:
        self._trained: set[bytes] = set()
        self._held_out: dict[str, Counter[bytes]] = {split: Counter() for split in HELD_OUT}

    def __contains__(self, content: bytes) -> bool:
        return content in self._trained or any(content in counts for counts in self._held_out.values())

    def add(self, content: bytes, split: str) -> None:
        if split == TRAINED:
            self._trained.add(content)
        else:
            self._held_out[split][content] += 1

    def warnings(self) -> Iterator[str]:
        """A warning for each split that shares samples with the train split."""
        for split, counts in self._held_out.items():
            same = sum(count for content, count in counts.items() if content in self._trained)
            if same:
                yield (
                    f"{same} of {counts.total()} samples of {split} have the same turns and images as a sample of "
                    f"{TRAINED}: what is measured on them, such as tau, is not that of unseen prompts; "
                    'duplicates = "drop" keeps the first of identical samples'
                )
