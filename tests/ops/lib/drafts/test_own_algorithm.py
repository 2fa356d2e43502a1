"""An algorithm of a user's own, tests/support/drafts/own_drafts/slot_bias, as docs/drafts.md shows it."""

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
from own_algorithm import FOLDER, forget, known_slot_bias
from proposal_cases import draft_with_noise
from safetensors.torch import load_file

from dsl.errors import ConfigError, PipelineError
from dsl.op_table import INIT, own_algorithms
from dsl.read_toml import read_graph
from executor.keys.node_key import Sources, graph_parts
from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import algorithm_class, own_options
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.losses.loss import Loss
from ops.lib.drafts.own_config import LOGGED, LOGGED_OF_SLOTS
from ops.lib.drafts.own_trial import Training, mistake_of
from ops.train_dflash.plan import missing_here
from ops.train_dflash.run import train_dflash

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
    with known_slot_bias() as algorithm:
        yield algorithm


@pytest.fixture
def written(tmp_path):
    """A pipeline with the algorithm beside it."""
    shutil.copytree(FOLDER, tmp_path / "slot_bias", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "own.toml").write_text(PIPELINE)
    yield tmp_path / "own.toml"
    forget()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses_W": lambda each: each[:1]}, r"losses_W: float64 \[1\]; expected floating-point numbers \[\d+\]"),
        ({"correct_W": lambda each: each.double()}, r"correct_W: float64 \[\d+\]; expected bool \[\d+\]"),
        ({"added_W": lambda each: each.sum()}, r"added_W: float64 \[\]; expected"),
        ({"found": lambda _: ()}, r"found: 0 tensors; expected 1, the metrics of config.py \(bias_size\)"),
        ({"found": lambda each: each * 2}, "found: 2 tensors; expected 1"),
        ({"found": lambda each: (each[0].sum(),)}, r"found, bias_size: float64 \[\]; expected"),
        (None, r"a value of type Tensor; expected ops.lib.drafts.losses.loss_request.Outcome"),
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
    right = importlib.import_module("slot_bias.model").propose
    for change, message in (
        (lambda each: Proposal(each.tokens_BD[:, 1:]), r"tokens_BD: int64 \[2, 3\]; expected int64 \[2, 4\]"),
        (lambda each: Proposal(each.tokens_BD.float()), "tokens_BD: float32"),
        (lambda each: Proposal(each.tokens_BD, each.tokens_BD.float()[:, 1:]), "confidence_BD: float32"),
        (lambda each: each.tokens_BD, "a value of type Tensor; expected"),
    ):
        monkeypatch.setattr("slot_bias.model.propose", lambda *asked, change=change: change(right(*asked)))
        with pytest.raises(ConfigError, match=f"slot_bias/model.py: propose returned {message}"):
            decode_speculative_batch(target, draft, samples[:2], DecodeSettings(4))


def test_it_is_trained_by_the_op_and_its_config_is_read_again(slot_bias, tmp_path):
    made = make_inputs(tmp_path)
    stage = FakeStage(tmp_path / "train", made | {"batches": make_plan(tmp_path / "short", made["features"])})
    train_dflash(train_config(algorithm="slot_bias", own={"scale": 2}, lr=1e-2), stage)
    assert from_serving(read_json(stage.out_dir / "config.json")).algorithm == algorithm_class("slot_bias")(scale=2.0)
    names = {name.partition("/")[2] for metrics, _ in stage.logged for name in metrics}
    logged = {name for name in names if not name.startswith("bias_size")}
    assert {name for name in logged if not name.startswith(LOGGED_OF_SLOTS)} <= {*LOGGED}
    assert load_file(stage.out_dir / "model.safetensors")["slot_bias.table"].abs().max() > 0


def test_its_code_is_part_of_the_keys_of_what_uses_it(written):
    def keys():
        parts = graph_parts(read_graph(written), Sources.now(None))
        return {name: (part.code, part.config) for name, part in parts.items()}

    before = keys()
    for file, line, changed in (
        ("loss", "return Outcome", {"train"}),
        ("config", 'return {"scale"', {"train", "export", "eval"}),  # its fields, and its table of options
        ("model", "return Proposal", {"train", "eval"}),
    ):
        path = written.parent / "slot_bias" / f"{file}.py"
        text = path.read_text()
        assert line in text
        path.write_text(text.replace(line, line.replace("return ", "return None or "), 1))
        assert {name for name, key in keys().items() if key != before[name]} == changed
        path.write_text(text)
    config = read_graph(written, ["train.own.scale=3"]).nodes["train"].config
    assert (config.own, config.terms.scale) == ({"scale": 3}, 3.0)


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        ('drafts = ["slot_bias/"]', "", "node.train.algorithm", 'there is no algorithm "slot_bias"'),
        ('drafts = ["slot_bias/"]', 'drafts = ["other/"]', "pipeline.drafts", "there is no folder"),
        ('"slot_bias/"', '"slot_bias/", "json/"', "pipeline.drafts", "would hide Python's own module json"),
        ('"slot_bias/"', '"slot_bias/", "dspark/"', "pipeline.drafts", '"dspark" comes with dflow'),
        ('"slot_bias/"', '"slot_bias/", "empty/"', "pipeline.drafts", "lacks __init__.py, config.py, model.py"),
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
    assert len(found) == 1 and message in found[0].what, caught.value
    assert found[0].position is not None
    assert place != "pipeline.drafts" or own_algorithms() == {}  # nothing is imported from folders that are refused


def test_a_pipeline_in_python_names_folders_from_its_own_folder(written, monkeypatch, tmp_path_factory):
    file = written.with_suffix(".py")
    file.write_text(
        "from dsl.pipeline import Pipeline\nfrom ops.lib.drafts.algorithms import algorithm_class\n"
        "from ops.ingest.op import Ingest\n\n\ndef pipeline():\n"
        "    p = Pipeline('own', drafts=('slot_bias',))\n    algorithm_class('slot_bias')\n"
        "    p.node('ingest', Ingest(source='builtin:digits'))\n    return p\n"
    )
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert read_graph(file).op_files == (written.parent / "slot_bias" / INIT,)
    file.write_text(file.read_text().replace("('slot_bias',)", "('other',)"))
    with pytest.raises(PipelineError, match=f"there is no folder {written.parent / 'other'}"):
        read_graph(file)


def test_an_error_in_its_code_names_the_file(written):
    (written.parent / "slot_bias" / "config.py").write_text("class SlotBias: pass\nsize = 1 / 0\n")
    with pytest.raises(PipelineError, match=r"slot_bias/config.py:2: ZeroDivisionError: division by zero"):
        read_graph(written)


def edited(folder, **edits):
    """Replace text in the files of a folder, by their names."""
    for name, (old, new) in edits.items():
        file = folder / f"{name}.py"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class SlotBias:", "class Slotbias:", "config.py has no class SlotBias: it is named like the folder"),
        ("@frozen(kw_only=True)\nclass SlotBias:", "class SlotBias:", "config.py: SlotBias is no attrs class"),
        ("scale: float = 1.0", "scale: float", "missing 1 required keyword-only argument: 'scale'"),
        ('= "slot_bias"', '= "bias"', 'name: it is "bias"; expected the name of the folder'),
        ("engine: ", "server: ", "has no attribute 'engine'"),
        ("source: ", "origin: ", "has no attribute 'source'"),
        ("def metrics", "def values", "has no attribute 'metrics'"),
        ('("bias_size",)', '["bias_size"]', "returned ['bias_size']; expected a tuple of strings"),
        ('"bias_size"', '"accuracy"', "metrics: accuracy: of every training: rename it"),
        ("def slot_flops", "def flops", "has no attribute 'slot_flops'"),
        ("def layout(self, block_size: int)", "def layout(self)", "layout() takes 1 positional argument but 2 were"),
        ("masks_first(block_size)", "block_size", "layout returned 8; expected a Layout"),
        ("masks_first(block_size)", "masks_first(3)", "layout(8) has 2; expected 7 slots that predict"),
        ("scale=data[SCALE]", "scale=2.0", "from_serving makes SlotBias(scale=2.0) of what to_serving"),
        ('config["vocab_size"]', 'config["vocabulary"]', "config.py:54: KeyError: 'vocabulary'"),
        ("WRONG:", "BAD:", "has no attribute 'WRONG'"),
        ("    base:", "    weight:", "SlotBiasOptions has no base"),
        ("def needs_teacher", "def teacher", "SlotBiasOptions has no needs_teacher"),
        ('{"scale":', '{"size":', "SlotBiasOptions.sizes: TypeError"),
    ],
)
def test_a_config_that_breaks_the_protocol_is_found_where_the_pipeline_is_read(written, old, new, message):
    edited(written.parent / "slot_bias", config=(old, new))
    with pytest.raises(PipelineError) as caught:
        read_graph(written)
    (found,) = caught.value.mistakes
    assert str(written.parent / "slot_bias" / "config.py") in found.what
    assert message in found.what and found.path.startswith("node.train.")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("loss", "loss_request import", "loss_reqest import", "loss.py:14: ModuleNotFoundError"),
        ("loss", "def block_losses", "def losses", "'slot_bias.loss' has no attribute 'block_losses'"),
        ("loss", "def block_losses", "def block_losses(:", "loss.py:19: SyntaxError: invalid syntax"),
        ("reference", "def scores", "def scored", "'slot_bias.reference' has no attribute 'scores'"),
        ("model", "return {}", "return None", "TypeError: 'NoneType' object is not iterable"),
        (
            "model",
            '{"slot_bias": Bias',
            '{"norm": Bias',
            "shapes says None of the tensor norm.table, model.py makes (32000, 4)",
        ),
        ("model", "    return {}", '    return {"slow": Bias(1, 1)}', "the tensor layers.0.slow.table, model.py makes"),
        ("model", "return {}", "return {}[0]", "model.py:29: KeyError: 0"),
        ("model", "config.vocab_size, ", "1, ", "shapes says (32000, 4) of the tensor slot_bias.table, model.py makes"),
        ("model", ", choice: Choice)", ")", "propose() takes 4 positional arguments but 5 were given"),
        ("config", "slot_bias.table", "table", "shapes says None of the tensor slot_bias.table, model.py"),
        (
            "loss",
            "found.correct_W, options",
            "found.values_W, options",
            "loss.py: block_losses returned correct_W: float",
        ),
        (
            "loss",
            "square_W, (",
            "square_W[:1], (",
            "block_losses returned added_W: float32 [1]; expected floating-point",
        ),
        ("loss", "one_hot(slot_W, block_size", "one_hot(slot, block_size", "NameError: name 'slot' is not defined"),
        ("model", "return Proposal(", "return (", "model.py: propose returned a value of type Tensor; expected"),
        ("model", "logits_BDV + bias_DV", "logits_BDV[:, 1:]", "propose returned tokens_BD: int64 [2, 3]; expected"),
    ],
)
def test_what_only_torch_finds_names_the_file(written, file, old, new, message):
    folder = written.parent / "slot_bias"
    edited(folder, **{file: (old, new)})
    found = mistake_of(folder, 5, 1, Training(fields={"scale": 2.0}))
    assert message in found and str(folder) in found


@pytest.mark.parametrize("fails", ["ALWAYS", "FIRST"])
def test_what_is_raised_on_the_cpu_is_a_mistake_unless_the_gpu_does_it(written, fails, monkeypatch):
    """A second try on the CPU stands for the one on a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("ops.lib.drafts.own_trial.GPU", "cpu")
    monkeypatch.setattr("torch.tries", iter([True, fails == "ALWAYS"]), raising=False)
    folder = written.parent / "slot_bias"
    kernel = '    import torch as own\n    if next(own.tries):\n        raise RuntimeError("no kernel")\n'
    edited(folder, model=("    return Proposal(", f"{kernel}    return Proposal("))
    found = mistake_of(folder, 5, 1, Training(fields={"scale": 2.0}))
    line = 1 + (folder / "model.py").read_text().splitlines().index('        raise RuntimeError("no kernel")')
    assert ("" if fails == "FIRST" else f"{folder / 'model.py'}:{line}: RuntimeError: no kernel") == found


AROUND = """    class Shift(Around):
        def draw(self, generator, std):
            pass

        def enter(self, x_NKM):
            return x_NKM, x_NKM

        def leave(self, y_NKM, kept):
            return y_NKM

    return {"attention_shift": Shift(), "mlp_shift": Shift()}
"""
PAIR = """def enter(own, sublayer, x_NKM):
    return x_NKM, x_NKM


def leave(own, sublayer, y_NKM, kept):
    return y_NKM


def scores"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "return x_NKM, x_NKM",
            "return x_NKM",
            'enter of "attention_shift" returned a value of type Tensor; expected the',
        ),
        (
            "return x_NKM, x_NKM",
            "return x_NKM[:, 1:], None",
            "returned the sublayer's input: float32 [2, 4, 2048]; exp",
        ),
        (
            "return y_NKM",
            "return y_NKM.sum(-1)",
            'leave of "attention_shift" returned what is added: float32 [2, 5]; ex',
        ),
        ("return y_NKM", "return y_NKM + kept[:, 1:]", "RuntimeError: The size of tensor a"),
        (
            "def enter(self, x_NKM):\n            return x_NKM, x_NKM",
            "reach = 1\n\n        def enter(self, x_NKM):\n            return x_NKM.cumsum(1), x_NKM",
            '"attention_shift": enter reads more than the `reach` slots before',
        ),
    ],
)
def test_what_goes_around_sublayers_is_called_once_at_plan(written, old, new, message):
    folder = written.parent / "slot_bias"
    edited(folder, model=("    return {}\n", AROUND))
    assert "'slot_bias.reference' has no attribute 'enter'" in mistake_of(folder, 5, 1, Training())
    forget()
    edited(folder, reference=("def scores", PAIR))
    assert mistake_of(folder, 5, 1, Training()) == ""
    forget()
    edited(folder, model=(old, new))
    assert message in mistake_of(folder, 5, 1, Training())


def test_the_functions_are_called_with_the_loss_and_the_options_of_the_training(written):
    folder = written.parent / "slot_bias"
    edited(folder, loss=("    options, table_VD", "    assert asked.teacher_WM is None\n    options, table_VD"))
    assert mistake_of(folder, 5, 1, Training(own={"penalty": 0.5})) == ""
    assert "loss.py:21: AssertionError" in mistake_of(folder, 5, 1, Training(loss="kl"))


def test_the_modules_are_tried_by_another_process_before_the_first_stage(written):
    config = read_graph(written).nodes["train"].config
    assert missing_here(config) == {}
    edited(written.parent / "slot_bias", model=("return {}", "return {}[0]"))
    found = missing_here(evolve(config, num_layers=1))["algorithm"]
    assert found == f"{written.parent / 'slot_bias' / 'model.py'}:29: KeyError: 0"


def test_an_algorithm_that_no_pipeline_names_is_not_imported():
    with pytest.raises(ConfigError, match='there is no algorithm "slot_bias"'):
        algorithm_class("slot_bias")
    with pytest.raises(ConfigError, match='there is no algorithm "os"'):
        algorithm_class("os")


def test_the_documentation_quotes_it():
    text = (Path(__file__).parents[4] / "docs" / "drafts.md").read_text()
    quoted = [block.partition("\n") for block in re.findall(r"```python\n# slot_bias/(.*?)```", text, re.DOTALL)]
    assert [file for file, _, _ in quoted] == ["model.py", "model.py", "loss.py"]
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
