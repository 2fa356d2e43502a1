"""Ingest and inject hold one sample, not all: what grows with their number are ids and digests."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import format_cases as cases
import pyarrow
import pytest
from fake_stage import FakeStage
from pyarrow import parquet

from dsl.op import Ref
from ops.artifacts import Samples
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images

FEW, MANY = 100, 1000
IMAGE_BYTES = 30_000
GROWTH = 1500  # bytes that a sample may leave behind


def rows(count: int):
    """Samples with an image each, which is no image for most of them, lest the test decode for long."""
    drawn = random.Random(0)
    turns = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]
    for place in range(count):
        content = (
            cases.png((80, 100), (place % 256, 3, place // 256)) if place % 10 == 0 else drawn.randbytes(IMAGE_BYTES)
        )
        yield {"id": f"sample-{place}", "messages": turns, "image": content}


def write_jsonl(folder: Path, count: int) -> Path:
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for row in rows(count):
            file.write(json.dumps({**row, "image": {"base64": cases.base64.b64encode(row["image"]).decode()}}) + "\n")
    return folder / "data.jsonl"


def write_parquet(folder: Path, count: int) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows(count))), folder / "data.parquet", row_group_size=50)
    return folder / "data.parquet"


def peak(call: Callable[[], None]) -> int:
    """Most bytes that Python objects take at once during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("max_samples", [None, 50])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_memory_stays_flat_while_samples_stream_through(tmp_path, write, max_samples):
    peaks = {}
    for count in (FEW, MANY):
        folder = tmp_path / str(count)
        folder.mkdir()
        source = str(write(folder, count))
        first = FakeStage(folder / "ingest")
        reading = peak(lambda: ingest(Ingest(source=source, seed=0, max_samples=max_samples), first))  # noqa: B023
        second = FakeStage(folder / "inject", {"samples": first.artifact(Samples)})
        config = InjectImages(samples=Ref("ingest"), workers=2)
        peaks[count] = reading, peak(lambda: inject_images(config, second))  # noqa: B023
    allowed = (MANY - FEW) * GROWTH
    assert allowed < MANY * IMAGE_BYTES / 20
    assert [many - few < allowed for few, many in zip(peaks[FEW], peaks[MANY], strict=True)] == [True, True], peaks
