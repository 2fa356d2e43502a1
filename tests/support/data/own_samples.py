"""Own JSONL files as a test writes them, and what `ingest` makes of them."""

import json
from pathlib import Path

from fake_stage import FakeStage

from ops.ingest.op import Ingest
from ops.ingest.run import ingest

ANSWER = {"role": "assistant", "text": "A cat."}
ASK = {"role": "user", "text": "What is it?"}
GOOD = {"conversations": [ASK, ANSWER]}


def write_source(folder: Path, rows: list) -> str:
    """Write a source of rows: objects as JSON, strings as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / "data.jsonl")


def run_ingest(folder: Path, rows: list, **config) -> tuple[FakeStage, list[dict], dict]:
    """Run ingest on rows; returns the stage, the samples written and the summary."""
    stage = FakeStage(folder)
    ingest(Ingest(source=write_source(folder, rows), seed=0, **config), stage)
    lines = (stage.out_dir / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return stage, [json.loads(line) for line in lines], json.loads((stage.out_dir / "summary.json").read_text())
