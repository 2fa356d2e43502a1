"""Pieces of the work that workers share: runs of consecutive rows of a split, tokenised into one file each.

Shards of the artifact depend on which rows were kept before, so the worker that writes it reads the pieces in their
order. A piece file is a token shard of the samples, with the outcome of every row in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen
from safetensors import safe_open

from ops.lib.data.files import read_jsonl
from ops.lib.data.sample_account import SPLITS, Unusable
from ops.lib.data.shared_shards import partial_path, publish
from ops.lib.data.token_shards import TokenSample, stored_offsets, stored_sample, write_token_shard

PIECE_ROWS, PIECE_IMAGES = 256, 16  # whatever the number of workers; images so that a piece fits into memory
PORTION_ROWS, PORTION_IMAGES = 16, 2  # of one task of a thread: enough to outweigh its overhead, little memory
SUFFIX = ".safetensors"

Row = dict[str, Any]


@frozen
class Figures:
    """Counts of a conversation, beside its samples: answers of each kind.

    empty_thoughts, without_reasoning: as in `Served`. left_out: contexts of which no answer fits into max_length.
    shortened: samples that end behind an earlier answer than the last, the first that does not fit. generated: answers
    that the target generated in ids that are known. retokenised: those of them that are learnt in other ids.
    """

    empty_thoughts: int = 0
    without_reasoning: int = 0
    left_out: int = 0
    shortened: int = 0
    generated: int = 0
    retokenised: int = 0


@frozen(eq=False)
class Tokenized:
    """The samples of a conversation. turns: the message of the last answer of each, None where it has none."""

    samples: tuple[TokenSample, ...]
    turns: tuple[int | None, ...]
    figures: Figures = Figures()


Outcome = Tokenized | Unusable


def portions(
    rows: Iterator[Row], most_rows: int = PORTION_ROWS, most_images: int = PORTION_IMAGES
) -> Iterator[list[Row]]:
    """The rows in groups for one thread each; groups with images are smaller."""
    portion: list[Row] = []
    images = 0
    for row in rows:
        portion.append(row)
        images += len(row["images"])
        if len(portion) == most_rows or images >= most_images:
            yield portion
            portion, images = [], 0
    if portion:
        yield portion


def split_rows(file: Path, split: str) -> Iterator[Row]:
    """The rows of a split, never more than one in memory."""
    return (row for row in read_jsonl(file) if row["split"] == split)


@frozen(eq=False)
class Piece:
    """Consecutive rows of a split. path: the file of their outcomes, which exists once all are known."""

    path: Path
    rows: list[Row]

    def write(self, outcomes: Sequence[Outcome], patch_dim: int, worker: int) -> None:
        """Write the outcome of each row to the piece's file."""
        samples = [sample for each in outcomes if isinstance(each, Tokenized) for sample in each.samples]
        heads = [
            {"reason": each.reason, "detail": each.detail}
            if isinstance(each, Unusable)
            else {
                "samples": [
                    {
                        "id": sample.id,
                        "category": sample.category,
                        "prompt_tokens": sample.prompt_tokens,
                        "answers": sample.answers,
                    }
                    for sample in each.samples
                ],
                "turns": each.turns,
                "figures": asdict(each.figures),
            }
            for each in outcomes
        ]
        partial = partial_path(self.path, worker)
        write_token_shard(partial, samples, patch_dim, {"outcomes": json.dumps(heads)})
        publish(partial, self.path)

    def read(self) -> Iterator[tuple[Row, Outcome]]:
        """Each row with its outcome, which is read from the file only when requested."""
        with safe_open(self.path, framework="pt") as tensors:
            offsets, place = stored_offsets(tensors), 0
            for row, head in zip(self.rows, json.loads(tensors.metadata()["outcomes"]), strict=True):
                if "reason" in head:
                    yield row, Unusable(**head)
                    continue
                found = [
                    stored_sample(tensors, offsets, place + number, **named)
                    for number, named in enumerate(head["samples"])
                ]
                place += len(found)
                yield row, Tokenized(tuple(found), tuple(head["turns"]), Figures(**head["figures"]))


def split_pieces(file: Path, folder: Path, split: str) -> Iterator[Piece]:
    """The pieces of a split in order; their files are in `folder`."""
    start = 0
    for rows in portions(split_rows(file, split), PIECE_ROWS, PIECE_IMAGES):
        yield Piece(folder / f"{split}-{start:08d}-{start + len(rows):08d}{SUFFIX}", rows)
        start += len(rows)


def all_pieces(file: Path, folder: Path) -> Iterator[Piece]:
    """The pieces of all splits in a file."""
    for split in SPLITS:
        yield from split_pieces(file, folder, split)
