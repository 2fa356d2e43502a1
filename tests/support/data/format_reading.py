"""What `ingest` and `inject_images` make of a source."""

from __future__ import annotations

import json
from pathlib import Path

from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images

TURNS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]


def read(source: Path, out: Path, **config) -> tuple[FakeStage, list[dict], dict]:
    """Run ingest on a source; returns the stage, the rows and the summary."""
    stage = FakeStage(out)
    ingest(Ingest(source=str(source), seed=0, **config), stage)
    rows = [json.loads(line) for line in (stage.out_dir / "samples.jsonl").read_text("utf-8").split("\n")[:-1]]
    return stage, rows, json.loads((stage.out_dir / "summary.json").read_text())


def inject(samples: Samples, out: Path, **config) -> ImageSamples:
    stage = FakeStage(out, {"samples": samples})
    inject_images(InjectImages(samples=Ref("ingest"), **config), stage)
    return stage.artifact(ImageSamples)
