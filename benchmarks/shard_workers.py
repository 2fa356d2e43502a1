"""Workers that share a capture against one process: shards per second after their start, on one thread each.

    python benchmarks/shard_workers.py [--workers 2] [--shards 64] [--rounds 5] [--json FILE]

The target is tiny and every sample makes a shard. A round captures once with each side, by `dflow run` in a copy of a
store that holds everything else, so both start with the same cache. The speed is that of the last three quarters of the
shards, by the times at which their files were written: all workers have started by then.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Rounds, in_rounds, parser, run_dflow, save_figures, table, verdict
from ops.lib.data.files import write_jsonl

GOAL = 1.7  # of two workers
WORDS = [
    "the",
    "of",
    "a",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
]
PIPELINE = """
[pipeline]
name = "shard_workers"
seed = 0
[mlflow]
tracking = false
[node.ingest]
op = "ingest"
source = "samples.jsonl"
[node.inject]
op = "inject_images"
samples = "@ingest"
[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
vocab_size = 600
max_length = 8192
[node.target]
op = "finetune_vlm"
tokens = "@tokenize"
steps = 1
batch_size = 1
eval_samples = 1
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
splits = ["train"]
shard_tokens = 1
launch = { LAUNCH }
"""


def captured(workers: int, folder: Path) -> dict[str, float]:
    """Shards per second of one capture. Raises RuntimeError if the run fails."""
    shared = f"shard_workers = {workers}, " if workers > 1 else ""
    text = PIPELINE.replace("LAUNCH", f'{shared}threads = 1, device = "cpu"')
    (folder / "pipeline.toml").write_text(text)
    with tempfile.TemporaryDirectory(dir=folder) as copy:
        store = shutil.copytree(folder / "store", Path(copy) / "store", symlinks=True)
        run_dflow(ROOT, "run", str(folder / "pipeline.toml"), "--store", str(store), cwd=folder)
        [info] = store.glob("objects/*/features.json")
        written = sorted(file.stat().st_mtime for file in info.parent.glob("*.safetensors"))
    first = len(written) // 4
    return {"shards": len(written), "shards_per_second": (len(written) - 1 - first) / (written[-1] - written[first])}


def prepare(folder: Path, shards: int) -> None:
    """Samples, and a store with all nodes but the capture."""
    draw = random.Random(0)
    turns = (("user", 20), ("assistant", 2000))
    rows = [
        {
            "id": str(number),
            "split": "train" if number < shards else "val",
            "messages": [{"role": role, "content": " ".join(draw.choices(WORDS, k=words))} for role, words in turns],
        }
        for number in range(shards + 1)
    ]
    write_jsonl(folder / "samples.jsonl", rows)
    (folder / "pipeline.toml").write_text(PIPELINE.replace("LAUNCH", ""))
    run_dflow(
        ROOT, "run", str(folder / "pipeline.toml"), "--to", "target", "--store", str(folder / "store"), cwd=folder
    )


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--shards", type=int, default=64)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.shards)
        many = f"{arguments.workers} workers"
        sides = {"1 worker": partial(captured, 1, folder), many: partial(captured, arguments.workers, folder)}
        rounds = Rounds(
            in_rounds(sides, arguments.rounds, "{shards} shards, {shards_per_second:.2f} a second".format_map)
        )
    rows = [["", "shards a second"]]
    rows += [[side, f"{rounds.median(side, 'shards_per_second'):.2f}"] for side in sides]
    ratio = rounds.ratio(many, "1 worker", "shards_per_second")
    goal = f", goal {GOAL}: {verdict(ratio >= GOAL)}" if arguments.workers == 2 else ""
    rows.append([f"{many} / 1 worker", f"{ratio:.2f}{goal}"])
    print(table(rows))
    save_figures(arguments.json, rounds.figures)


if __name__ == "__main__":
    main()
