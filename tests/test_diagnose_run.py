"""`dflow diagnose` on real runs in which an op of the user's own makes a mistake, after the training or in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import SUPPORTS

ROOT = Path(__file__).resolve().parents[1]
OPS = f'''
import shutil
import sys

from attrs import frozen

sys.path += {[str(folder) for folder in SUPPORTS]!r}

from dsl.op import op
from lively_target import make_lively
from ops.artifacts import TargetModel, TokenShards
from ops.lib.drafts.decoding.decode import decode_plain
from ops.lib.target.model import Target
from ops.lib.data.token_shards import TokenReader
from overfit import with_answers

PROMPTS = 6
NEW_TOKENS = 23


@op(version=1, run="known_ops:liven")
@frozen(kw_only=True)
class Liven:
    """Large random weights: answers that no draft can guess, only know."""
    target: TargetModel
    output = TargetModel


def liven(config, stage):
    made = make_lively(stage.inputs["target"], stage.work_dir / "lively")
    (made.path / "manifest.json").unlink()  # the store's own
    shutil.copytree(made.path, stage.out_dir, dirs_exist_ok=True)


@op(version=1, run="known_ops:own_answers")
@frozen(kw_only=True)
class OwnAnswers:
    """A few prompts with the target's own answers, the same in every split."""
    tokens: TokenShards
    target: TargetModel
    output = TokenShards


def own_answers(config, stage):
    target, reader = Target.load(stage.inputs["target"]), TokenReader(stage.inputs["tokens"], "train")
    prompts = [reader.sample(index) for index in range(PROMPTS)]
    answers = [decode_plain(target, prompt, NEW_TOKENS) for prompt in prompts]
    made = with_answers(stage.work_dir / "own", reader.info, prompts, answers, splits=("train", "val", "test"))
    shutil.copytree(made.path, stage.out_dir, dirs_exist_ok=True)
    shutil.copytree(stage.inputs["tokens"].path / "processor", stage.out_dir / "processor")
'''
PIPELINE = """
[pipeline]
name = "retouched"
seed = 0
ops = ["known_ops.py", "mistaken_ops.py"]

[node.ingest]
op = "ingest"
source = "builtin:digits"
max_samples = 16

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
processor = "builtin"
vocab_size = 600

[node.tuned]
op = "finetune_vlm"
tokens = "@tokenize"
steps = 1
batch_size = 4
eval_samples = 2

[node.target]
op = "liven"
target = "@tuned"

[node.own]
op = "own_answers"
tokens = "@tokenize"
target = "@target"

[node.capture]
op = "capture_targets"
tokens = "@own"
target = "@target"
target_layer_ids = [3]
splits = ["train"]

[node.shard]
op = "shard_sequence"
features = "@capture"
tokens_per_step = 512
epochs = 40

[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
block_size = 6
num_layers = 1
num_anchors = 24
optimizer = "muon"
lr = 2e-2
log_every = 1

[node.export]
op = "export_draft"
draft = "@train"
target = "@target"

[node.retouch]
op = "retouch"
draft = "@export"

[node.eval]
op = "evaluate"
draft = "@retouch"
target = "@target"
tokens = "@own"
max_new_tokens = 23
bootstrap = 100

[node.check]
op = "check_export"
draft = "@retouch"
target = "@target"
tokens = "@own"
report = "@eval"
live = "off"
"""


def dflow(project: Path, *arguments: str) -> tuple[int, str]:
    """Exit code, and all that was said."""
    command = [sys.executable, "-m", "executor.cli", *arguments, "--store", str(project / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A run in which the retouched draft is still right, so that its gate passes it."""
    project = tmp_path_factory.mktemp("retouched")
    (project / "known_ops.py").write_text(OPS)
    shutil.copyfile(ROOT / "tests" / "support" / "toys" / "mistaken_ops.py", project / "mistaken_ops.py")
    (project / "pipeline.toml").write_text(PIPELINE)
    code, said = dflow(project, "run", str(project / "pipeline.toml"))
    assert 0 == code, said
    return project


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_named_of_a_draft_that_was_only_copied(project):
    code, said = dflow(project, "diagnose", "--prompts", "6")
    print(said)
    assert 0 == code, said
    assert "none of the usual causes of a low tau" in said
    assert "CAUSE" not in said
    assert "ok     length of training: train/loss fell by" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("change", "name", "right"),
    [
        ("retouch.layer_shift=1", "layer ids", "with [4]; "),
        ("retouch.mask_token_id=500", "mask token", "with 500; "),
    ],
)
def test_what_a_later_step_changed_in_the_export_is_named_and_nothing_else(project, change, name, right):
    code, said = dflow(project, "run", str(project / "pipeline.toml"), "-s", change)
    assert 1 == code, said
    assert "the draft breaks the serving contract" in said
    code, said = dflow(project, "diagnose", "--prompts", "6")
    print(said)
    assert 1 == code, said
    causes = [line for line in said.splitlines() if line.startswith("CAUSE")]
    assert [True] == [line.startswith(f"CAUSE  {name}: tau ") for line in causes]
    assert right in causes[0] and ", as trained | " in causes[0]
    assert "--from retouch" in causes[0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_training_that_placed_its_blocks_one_position_late_is_named_and_nothing_else(project):
    late = project / "late.toml"
    late.write_text(PIPELINE.replace('op = "train_dflash"', 'op = "train_late"'))
    code, said = dflow(project, "run", str(late))
    assert 0 == code, said  # of positions a draft's config says nothing, so the gate sees none of it
    code, said = dflow(project, "diagnose", "--prompts", "6")
    print(said)
    assert 1 == code, said
    causes = [line for line in said.splitlines() if line.startswith("CAUSE")]
    assert [True] == [line.startswith("CAUSE  positions: tau ") for line in causes]
    assert "slots directly after the context; " in causes[0] and "with the slots 1 later than that" in causes[0]
