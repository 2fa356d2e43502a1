"""The trainings of pipelines/qwen3_8b.toml for a dense and for a sparse target, as the cost model gets them."""

from __future__ import annotations

import json
from pathlib import Path

from import_graph import ROOT

from dsl.estimate import CaptureWork, TrainingWork
from dsl.read_toml import read_graph
from executor.planning.preflight import graph_estimates

LENGTH, SAMPLES = 3072, 512  # tokens of every sample, and samples of a step
VALUES = (f"tokenize.expected_tokens={800_000 * LENGTH}", f"shard.tokens_per_step={SAMPLES * LENGTH}")
COMMIT = "b968826d9c46dd6066d109eabc6255188de91218"
DENSE = json.loads((ROOT / "pipelines" / "targets" / "Qwen" / "Qwen3-8B" / f"{COMMIT}.json").read_text())
SPARSE = DENSE | {  # the sizes of Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
TARGETS = {"dense": DENSE, "sparse": SPARSE}


def written(folder: Path, target: str) -> Path:
    """Write a pipeline file with the config.json of one of TARGETS beside it."""
    kept = folder / "targets" / "of" / target / f"{COMMIT}.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(TARGETS[target]))
    file = folder / f"{target}.toml"
    file.write_text((ROOT / "pipelines" / "qwen3_8b.toml").read_text().replace("Qwen/Qwen3-8B", f"of/{target}"))
    return file


def works(file: Path, *values: str) -> tuple[CaptureWork, TrainingWork]:
    """What the nodes `capture` and `train` of a pipeline file compute."""
    needs = graph_estimates(read_graph(file, [*VALUES, *values], [], {}), {}, 0).needs
    capture, train = needs["capture"].work, needs["train"].work
    assert isinstance(capture, CaptureWork)
    assert isinstance(train, TrainingWork)
    return capture, train
