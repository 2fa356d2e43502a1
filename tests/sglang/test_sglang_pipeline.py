"""pipelines/vlm_dflash_sglang.toml through the command line: SGLang captures, and the gate asks its worker.

The stages are processes of their own, patched by the sitecustomize on their PYTHONPATH. Sizes are small here; figures
of the whole pipeline are in docs/results.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.lib.sglang.version import installed_version

# Ten stages, each of which loads torch and transformers, and two of them SGLang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / "pipelines" / "vlm_dflash_sglang.toml"
SMALL = [
    "ingest.max_samples=40",
    "tokenize.vocab_size=600",
    "target.steps=120",
    "target.batch_size=8",
    "target.eval_samples=4",
    "regenerate.max_new_tokens=40",
    'regenerate.finish_reasons=["stop", "length"]',
    "retokenize.min_loss_tokens=2",
    "shard.epochs=12",
    "shard.tokens_per_step=1024",
    "train.num_layers=1",
    "eval.max_prompts=4",
    "eval.max_new_tokens=24",
    "eval.random_draft=false",
    *(f"{node}.launch.threads=1" for node in ("target", "regenerate", "capture", "train", "eval", "check")),
]


def dflow(store: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "executor.cli", *arguments, "--store", str(store)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> dict[str, dict]:
    """The nodes of a finished run, with "folder", that of the artifact."""
    store = tmp_path_factory.mktemp("sglang") / "runs"
    options = [option for value in SMALL for option in ("-s", value)]
    dflow(store, "run", str(PIPELINE), *options)
    rows = json.loads(dflow(store, "status", "--json"))["nodes"]
    return {row["id"]: row | {"folder": store / "objects" / row["digest"]} for row in rows}


def test_the_features_are_sglangs_and_the_training_says_so(nodes):
    features = json.loads((nodes["capture"]["folder"] / "features.json").read_text())
    assert ("sglang", installed_version()) == (features["backend"], features["backend_version"])
    training = json.loads((nodes["train"]["folder"] / "training.json").read_text())
    assert "sglang" == training["captured"]["backend"]


def test_the_served_tau_stands_beside_that_of_evaluate_and_equals_it(nodes):
    evaluated = {
        row["id"]: row for row in map(json.loads, (nodes["eval"]["folder"] / "prompts.jsonl").read_text().splitlines())
    }
    served = [json.loads(line) for line in (nodes["check"]["folder"] / "served.jsonl").read_text().splitlines()]
    assert {"image", "text"} == {evaluated[row["id"]]["category"] for row in served}
    assert [evaluated[row["id"]]["accepted"] for row in served] == [row["accepted"] for row in served]
    metrics = nodes["check"]["metrics"]
    assert metrics["check/tau_evaluate"] == metrics["check/tau_served"]
    # Where all steps accept alike, nothing or everything, equality would show nothing.
    assert 1 < len({accepted for row in served for accepted in row["accepted"]})
