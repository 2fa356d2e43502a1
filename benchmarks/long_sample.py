"""Peak memory of every stage for one long sample, beside what `dflow plan` says of it.

    python benchmarks/long_sample.py                                  # 1,024 and 131,072 tokens, in 20 minutes
    python benchmarks/long_sample.py --tokens 2048 32768 --json figures.json
    python benchmarks/long_sample.py --target gpt_oss --tokens 1024 16384

A pipeline of a tiny target (hidden size 64, two layers) tokenises, captures, plans batches, trains one step over two
ranks that share the sequence (gloo), and evaluates on a prompt of that length, once for each number of tokens. A
stage's memory is the peak of one of its processes, libraries included. "grows" is what it has for the long sample
beyond that for the short one, and "plan" the plan's figures for the long one, held and a pass: it holds where the
first is not above the second and what an allocator keeps (SLACK).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from benchmarks.harness import ROOT, parser, save_figures, table, verdict
from executor.records.run_record import Record

SLACK = 64 << 20  # bytes
RESULT_WORDS = 400
MARKUP_TOKENS = 8  # of a turn, at most
WORDS = [word for name in sorted(topics) for word in topics[name].split() if "<" not in word]
TARGETS = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
PIPELINE = """\
[pipeline]
name = "long"
[mlflow]
tracking = false
[machine]
cpus = 2
[node.ingest]
op = "ingest"
source = "rows.jsonl"
[node.inject]
op = "inject_images"
samples = "@ingest"
[node.target]
op = "load_target"
checkpoint = "checkpoint"
[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
target = "@target"
contexts = "served"
max_length = {tokens}
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
target_layer_ids = [0]
[node.shard]
op = "shard_sequence"
features = "@capture"
tokens_per_step = {tokens}
pad_multiple = 2
epochs = 1
[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
num_layers = 1
max_steps = 1
select = "last"
sp_exchange = "ulysses"
launch = {{ kind = "ranks", nproc = 2, sp_degree = 2 }}
[node.export]
op = "export_draft"
draft = "@train"
target = "@target"
[node.eval]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokenize"
max_new_tokens = 8
batch_size = 1
random_draft = false
bootstrap = 10
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument(
        "--tokens", type=int, nargs=2, default=(1024, 131_072), help="of the short and the long sample"
    )
    options.add_argument("--target", choices=TARGETS, default="qwen3", help="the type of the target")
    given = options.parse_args(argv)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for tokens in given.tokens:
            place = Path(folder) / str(tokens)
            place.mkdir()
            figures[tokens] = measured(place, given.target, tokens)
            print(json.dumps(figures[tokens]), flush=True)
    print(report(*(figures[tokens] for tokens in given.tokens)))
    save_figures(given.json, figures)
    return 0


def measured(folder: Path, target: str, tokens: int) -> dict[str, dict[str, int]]:
    """The bytes of each node by plan, and its peak in a run."""
    (folder / "long.toml").write_text(PIPELINE.format(tokens=tokens))
    subprocess.run([sys.executable, "-m", "benchmarks.long_sample", folder, target, str(tokens)], cwd=ROOT, check=True)
    plan = json.loads(_dflow(folder, "plan", "long.toml", "--json"))["resources"]
    _dflow(folder, "run", "long.toml")
    record = Record.load(next((folder / "store" / "records").iterdir()))
    ranks = {"train": 2}
    return {
        node: {
            "plan": plan[node]["memory_total"] + plan[node]["pass_total"],
            "peak": record.state.nodes[node].memory // ranks.get(node, 1),
        }
        for node in plan
    }


def report(short: dict[str, Any], long: dict[str, Any]) -> str:
    rows = [["stage", "peak, MiB", "grows, MiB", "plan, MiB", ""]]
    for node in long:
        grown, planned = long[node]["peak"] - short[node]["peak"], long[node]["plan"]
        figures = (long[node]["peak"], grown, planned)
        rows.append([node, *(f"{size / 2**20:,.0f}" for size in figures), verdict(grown <= planned + SLACK)])
    return table(rows)


def _dflow(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", "import sys; from executor.cli import main; sys.exit(main())", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [*command, "--store", str(folder / "store")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def write_inputs(folder: Path, target: str, tokens: int) -> None:
    """Write rows.jsonl, with a long conversation in train and one in test, and a checkpoint with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ops.tokenize_chat.builtin import write_builtin_processor

    checkpoint = folder / "checkpoint"
    words = [{"role": "user", "content": [{"type": "text", "text": " ".join(WORDS[:20_000])}]}]
    write_builtin_processor(checkpoint, [words], 2048)
    (checkpoint / "preprocessor_config.json").unlink()
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2 * tokens}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(target, **sizes, **heads, **ids, **TARGETS[target])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = []
    for split, length in (("train", tokens), ("val", 512), ("test", tokens - 64)):
        messages, left, first = [], length - 16, 0
        words = RESULT_WORDS if length > 16 * RESULT_WORDS else 20
        while left > 0:
            pair = [" ".join(WORDS[start : start + words]) for start in (first, first + words)]
            first = (first + 2 * words) % (len(WORDS) - 2 * words)
            left -= sum(len(tokenizer(text)["input_ids"]) + MARKUP_TOKENS for text in pair)
            messages += [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
        del messages[-2:]  # what no longer fits
        rows.append({"id": split, "split": split, "messages": messages})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        write_inputs(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
        sys.exit(0)
    sys.exit(main())
