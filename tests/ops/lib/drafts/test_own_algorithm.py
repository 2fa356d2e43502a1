"""An algorithm of a user's own, tests/support/own_drafts/slot_bias, as docs/drafts.md shows it."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from batch_cases import family_case
from case_reader import fast_step
from draft_cases import random_case
from draft_chain import make_inputs, make_plan, train_config
from fake_stage import FakeStage
from proposal_cases import PRECISION, assert_proposes_by_its_reference, draft_with_noise, favour_few_tokens
from safetensors.torch import load_file
from step_cases import assert_equal_steps

from dsl.draft_folders import INIT, use_draft_folders
from dsl.errors import ConfigError, PipelineError
from dsl.read_toml import read_graph
from executor.keys.node_key import Sources, graph_parts
from executor.records.record_trust import Acting, untrusted_op_files
from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import algorithm_class, own_options
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.losses.loss import Loss
from ops.train_dflash.run import train_dflash

FOLDER = Path(__file__).parents[3] / "support" / "own_drafts" / "slot_bias"
PIPELINE = """
[pipeline]
name = "own"
drafts = ["slot_bias/"]

[node.ingest]
op = "ingest"
source = "builtin:digits"
max_samples = 8

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
processor = "builtin"

[node.target]
op = "finetune_vlm"
tokens = "@tokenize"

[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"

[node.shard]
op = "shard_sequence"
features = "@capture"

[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
algorithm = "slot_bias"
own = { scale = 2.0 }

[node.export]
op = "export_draft"
draft = "@train"
target = "@target"

[node.eval]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokenize"
"""


@pytest.fixture
def slot_bias():
    """The algorithm's config with another scale; no own algorithm is known before and after."""
    use_draft_folders([FOLDER / INIT])
    yield algorithm_class("slot_bias")(scale=0.5)
    forget()


@pytest.fixture
def written(tmp_path):
    """A pipeline with the algorithm beside it."""
    shutil.copytree(FOLDER, tmp_path / "slot_bias", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "own.toml").write_text(PIPELINE)
    yield tmp_path / "own.toml"
    forget()


def forget():
    use_draft_folders([])
    for name in [name for name in sys.modules if name.partition(".")[0] == "slot_bias"]:
        del sys.modules[name]
    sys.path[:] = [folder for folder in sys.path if not (Path(folder) / "slot_bias").is_dir()]


@pytest.mark.parametrize("kind", ["dflash", "dpace", "kl", "l1"])
def test_its_steps_equal_its_reference_for_every_kind_of_loss(slot_bias, kind):
    own = own_options("slot_bias")(scale=0.5, penalty=0.3)
    assert_equal_steps(random_case(3, algorithm=slot_bias), Loss(kind=kind, own=own))


def test_it_decodes_in_batches_as_in_the_slow_loop(slot_bias, tmp_path):
    target, samples = family_case("qwen3_vl", tmp_path)
    favour_few_tokens(target)
    draft = draft_with_noise(slot_bias)
    slow = [decode_speculative(target, draft, sample, 8) for sample in samples]
    fast = decode_speculative_batch(target, draft, samples, DecodeSettings(8))
    assert [one.tokens for one in slow] == [one.tokens for one in fast]
    assert [one.accepted for one in slow] == [one.accepted for one in fast]
    assert len({count for one in slow for count in one.accepted}) > 1
    assert [decode_plain(target, sample, 8).tokens for sample in samples] == [one.tokens for one in slow]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", PRECISION)
def test_every_proposed_token_has_the_references_best_score(slot_bias, rows, dtype):
    assert_proposes_by_its_reference(draft_with_noise(slot_bias), rows, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses_W": lambda each: each[:1]}, r"losses_W: float64 \[1\]; expected floating-point numbers \[\d+\]"),
        ({"correct_W": lambda each: each.double()}, r"correct_W: float64 \[\d+\]; expected bool \[\d+\]"),
        ({"added_W": lambda each: each.sum()}, r"added_W: float64 \[\]; expected"),
        ({"found": lambda _: ()}, r"found: 0 tensors; expected 1, the metrics of config.py \(bias_size\)"),
        ({"found": lambda each: each * 2}, "found: 2 tensors; expected 1"),
        ({"found": lambda each: (each[0].sum(),)}, r"found, bias_size: float64 \[\]; expected"),
        (None, r"a value of type Tensor; expected ops.lib.drafts.losses.asked.Outcome"),
    ],
)
def test_a_loss_of_another_form_is_refused_by_its_file(slot_bias, monkeypatch, change, message):
    right = importlib.import_module("slot_bias.loss").block_losses

    def wrong(*arguments):
        outcome = right(*arguments)
        if change is None:
            return outcome.losses_W
        return evolve(outcome, **{name: changed(getattr(outcome, name)) for name, changed in change.items()})

    monkeypatch.setattr("slot_bias.loss.block_losses", wrong)
    case = random_case(3, algorithm=slot_bias)
    with pytest.raises(ConfigError, match=rf"slot_bias/loss.py: block_losses returned {message}"):
        fast_step(case, Loss(own=own_options("slot_bias")()))


def test_a_proposal_of_another_form_is_refused_by_its_file(slot_bias, monkeypatch, tmp_path):
    target, samples = family_case("qwen3_vl", tmp_path)
    draft = draft_with_noise(slot_bias)
    right = importlib.import_module("slot_bias.propose").propose
    for change, message in (
        (lambda each: Proposal(each.tokens_BD[:, 1:]), r"tokens_BD: int64 \[2, 3\]; expected int64 \[2, 4\]"),
        (lambda each: Proposal(each.tokens_BD.float()), "tokens_BD: float32"),
        (lambda each: Proposal(each.tokens_BD, each.tokens_BD.float()[:, 1:]), "confidence_BD: float32"),
        (lambda each: each.tokens_BD, "a value of type Tensor; expected"),
    ):
        monkeypatch.setattr("slot_bias.propose.propose", lambda *asked, change=change: change(right(*asked)))
        with pytest.raises(ConfigError, match=f"slot_bias/propose.py: propose returned {message}"):
            decode_speculative_batch(target, draft, samples[:2], DecodeSettings(4))


def test_it_is_trained_by_the_op_and_its_config_is_read_again(slot_bias, tmp_path):
    made = make_inputs(tmp_path)
    stage = FakeStage(tmp_path / "train", made | {"batches": make_plan(tmp_path / "short", made["features"])})
    train_dflash(train_config(algorithm="slot_bias", own={"scale": 2}, lr=1e-2), stage)
    assert from_serving(read_json(stage.out_dir / "config.json")).algorithm == algorithm_class("slot_bias")(scale=2.0)
    assert load_file(stage.out_dir / "model.safetensors")["slot_bias.table"].abs().max() > 0


def test_its_code_is_part_of_the_keys_of_what_uses_it(written):
    def keys():
        parts = graph_parts(read_graph(written), Sources.now(None))
        return {name: (part.code, part.config) for name, part in parts.items()}

    before = keys()
    for file, changed in (("loss", {"train"}), ("options", {"train"}), ("propose", {"train", "eval"})):
        path = written.parent / "slot_bias" / f"{file}.py"
        text = path.read_text()
        path.write_text(text.replace("return ", "return None or ", 1))
        assert {name for name, key in keys().items() if key != before[name]} == changed
        path.write_text(text)
    config = read_graph(written, ["train.own.scale=3"]).nodes["train"].config
    assert (config.own, config.terms.scale) == ({"scale": 3}, 3.0)


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ('drafts = ["slot_bias/"]', "", "node.train.algorithm", 'there is no "slot_bias"'),
        ('drafts = ["slot_bias/"]', 'drafts = ["other/"]', "pipeline.drafts", "there is no folder"),
        ('"slot_bias/"', '"slot_bias/", "json/"', "pipeline.drafts", "would hide the installed module json"),
        ('"slot_bias/"', '"slot_bias/", "dspark/"', "pipeline.drafts", '"dspark" comes with dflow'),
        ('"slot_bias/"', '"slot_bias/", "empty/"', "pipeline.drafts", "lacks __init__.py, config.py, modules.py"),
        ("scale = 2.0", 'scale = "high"', "node.train.own", "scale"),
        ("scale = 2.0", "size = 2.0", "node.train.own", "size"),
        ("scale = 2.0", "scale = -1", "node.train.own", "scale"),
        ('"slot_bias"\n', '"dflash"\n', "node.train.own", "is the table of an algorithm of your own"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(written, old, new, place, message):
    for name in ("json", "dspark", "empty"):
        (written.parent / name).mkdir()
    written.write_text(PIPELINE.replace(old, new))
    with pytest.raises(PipelineError) as caught:
        read_graph(written)
    found = [mistake for mistake in caught.value.mistakes if (mistake.path or "").startswith(place)]
    assert len(found) == 1 and message in found[0].message, caught.value
    assert found[0].position is not None


def test_an_error_in_its_code_names_the_file(written):
    (written.parent / "slot_bias" / "config.py").write_text("class SlotBias: pass\nsize = 1 / 0\n")
    with pytest.raises(PipelineError, match=r"slot_bias/config.py: ZeroDivisionError: division by zero"):
        read_graph(written)


def test_a_folder_is_trusted_as_it_is_and_altered_no_more(written):
    file = written.parent / "slot_bias" / INIT
    Acting(written.parent / "runs", b"{}", [file], None).trust()
    assert untrusted_op_files([file]) == []
    (written.parent / "slot_bias" / "more.py").write_text("import os")
    assert untrusted_op_files([file]) == [file]


def test_an_algorithm_that_no_pipeline_names_is_not_imported():
    with pytest.raises(ConfigError, match='there is no "slot_bias"'):
        algorithm_class("slot_bias")
    with pytest.raises(ConfigError, match='there is no "os"'):
        algorithm_class("os")


def test_the_documentation_quotes_it():
    text = (Path(__file__).parents[4] / "docs" / "drafts.md").read_text()
    quoted = [block.partition("\n") for block in re.findall(r"```python\n# slot_bias/(.*?)```", text, re.DOTALL)]
    assert [file for file, _, _ in quoted] == ["modules.py", "propose.py", "loss.py"]
    for file, _, code in quoted:
        assert code.strip() in (FOLDER / file).read_text()


@pytest.mark.slow
def test_the_chain_trains_exports_and_evaluates_it(written, tmp_path):
    tiny = Path(__file__).parents[4] / "pipelines" / "tiny.toml"
    written.write_text(
        f'extends = "{tiny}"\n[pipeline]\nname = "own"\ndrafts = ["slot_bias/"]\n'
        '[mlflow]\ntracking = false\n[node.train]\nalgorithm = "slot_bias"\nown.scale = 2.0\n'
    )
    dflow = [sys.executable, "-m", "executor.cli"]
    ran = subprocess.run([*dflow, "run", str(written)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "eval/lossless_errors" in ran.stdout
    for command in (["report"], ["status"], ["resume", "--from", "eval"]):
        done = subprocess.run([*dflow, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
