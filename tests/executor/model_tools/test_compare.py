"""`dflow doctor --backends`: what it refuses before anything is computed, what it shows, and its exit code."""

import json
from pathlib import Path

import pytest

from dsl.errors import DataError, DflowError
from dsl.read_toml import read_graph
from executor.cli import main
from executor.model_tools.measure import computed
from executor.system.output import FAILED, OK, USAGE
from ops.lib.sglang import version

PIPELINE = """
[pipeline]
name = "compared"

[node.ingest]
op = "ingest"
source = "builtin:digits"

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.tokenize]
op = "tokenize_chat"
samples = "@inject"

[node.target]
op = "finetune_vlm"
tokens = "@tokenize"
"""
CAPTURE = """
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
"""


def state(layer, kind, relative, allowed=2e-3):
    where = {"sample": "s1", "position": 7}
    row = {"layer": layer, "kind": kind, "absolute": 1e-5, "relative": relative, "allowed": allowed, **where}
    return row | {"agrees": relative <= allowed}


def result(*states, log_probs=1e-6, preprocessing=(), left_out=None):
    logs = {"largest": log_probs, "allowed": 0.02, "agrees": log_probs <= 0.02}
    differ = any(row["differences"] for row in preprocessing or ())
    return {
        "node": "capture",
        "layers": [1, 2],
        "device": "cpu",
        "backends": {"huggingface": "5.12.1", "sglang": "0.5.21"},
        "samples": [{"id": "s1", "tokens": 1200, "images": 2}],
        "dtypes": [{"dtype": "float32", "states": list(states), "log_probs": logs}],
        "left_out": left_out,
        "preprocessing": preprocessing,
        "image_bounds": {"min_pixels": 256, "max_pixels": 512} if preprocessing else {},
        "agree": all(row["agrees"] for row in [*states, logs]) and not differ,
    }


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "pipeline.toml").write_text(PIPELINE + CAPTURE)
    return tmp_path / "pipeline.toml"


@pytest.fixture
def sglang(monkeypatch):
    """As where the pinned SGLang is installed, as far as the command asks."""
    monkeypatch.setattr(version, "installed_version", lambda: version.VERSIONS[-1])


def dflow(file: Path, *arguments: str) -> int:
    return main(["doctor", str(file), "--backends", "--store", str(file.parent / "store"), *arguments])


@pytest.mark.parametrize(("found", "said"), [(None, "which is not installed"), ("0.5.20", "0.5.20 is installed")])
def test_a_missing_sglang_or_another_version_is_refused_first(file, monkeypatch, capsys, found, said):
    monkeypatch.setattr(version, "installed_version", lambda: found)
    assert dflow(file) == FAILED
    error = capsys.readouterr().err
    assert error.startswith("dflow: doctor --backends ")
    assert said in error
    assert f"sglang=={version.VERSIONS[-1]}" in error or "pip install -c constraints.txt -e '.[sglang]'" in error


def test_inputs_that_no_run_has_made_are_named_with_the_command_that_makes_them(file, sglang, capsys):
    assert dflow(file) == FAILED
    error = capsys.readouterr().err
    assert "capture reads from tokenize and target" in error
    assert f"`dflow run --store {file.parent / 'store'}` with the same file" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--node", "captur"], '"captur" is not a capture_targets node'),
        (["--node", "tokenize"], '"tokenize" is not a capture_targets node'),
        (["--samples", "0"], "--samples 0: must be 1 or more"),
    ],
)
def test_a_wrong_node_and_no_samples_are_mistakes_in_usage(file, sglang, capsys, arguments, said):
    assert dflow(file, *arguments) == USAGE
    assert said in capsys.readouterr().err


def test_a_pipeline_without_a_capture_has_nothing_to_compare(file, sglang, capsys):
    file.write_text(PIPELINE)
    assert dflow(file) == USAGE
    assert "compared has no capture_targets node" in capsys.readouterr().err


def test_a_process_that_breaks_down_is_told_with_the_end_of_its_log(file):
    with pytest.raises(DflowError, match=r"the comparison ended with exit code 1:(.|\n)*No module named"):
        computed("comparison", "ops.tools.no_such_module", read_graph(file, []), "capture", {}, samples=4)


def test_what_the_process_refuses_is_an_error_of_its_node(file, monkeypatch, tmp_path):
    (tmp_path / "refusing.py").write_text("import sys\nopen(sys.argv[2], 'w').write('{\"error\": \"no layer 99\"}')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DataError, match="capture: no layer 99"):
        computed("comparison", "refusing", read_graph(file, []), "capture", {}, samples=4)


def test_the_process_is_told_graph_node_artifacts_and_samples(file, monkeypatch, tmp_path):
    (tmp_path / "telling.py").write_text(
        "import json, sys\ntold = json.load(open(sys.argv[1]))\n"
        "said = {'nodes': [node['id'] for node in told['graph']['nodes']], **told}\n"
        "said.pop('graph')\njson.dump(said, open(sys.argv[2], 'w'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    artifacts = {"target": (Path("/store/x"), "x")}
    asked = computed("comparison", "telling", read_graph(file, []), "capture", artifacts, samples=4)
    assert asked == {
        "nodes": ["ingest", "inject", "tokenize", "target", "capture"],
        "node": "capture",
        "artifacts": {"target": ["/store/x", "x"]},
        "samples": 4,
    }


def test_agreement_is_said_plainly_layer_by_layer(monkeypatch, file, capsys):
    agreed = result(state(1, "text", 1e-6), state(1, "image", 3e-6), preprocessing=[{"id": "s1", "differences": []}])
    monkeypatch.setattr("executor.model_tools.measure.compare", lambda *_arguments: [agreed])
    assert dflow(file) == OK
    shown = capsys.readouterr().out.splitlines()
    assert (
        "capture: 1 samples, 1,200 tokens, 2 images, on the cpu; transformers 5.12.1 against SGLang 0.5.21" == shown[0]
    )
    assert ["1", "image", "1.0e-05", "3.0e-06", "2.0e-03", "s1,", "token", "7"] in [line.split() for line in shown]
    assert "preprocessing: same tokens and pixels in SGLang for 1 of 1" in shown
    assert "The backends agree: what remains is rounding." == shown[-1]
    assert "TOO FAR" not in "".join(shown)


@pytest.mark.parametrize(
    ("said", "verdict", "marked"),
    [
        (result(state(1, "text", 1e-6), state(2, "image", 0.3)), "THE BACKENDS DISAGREE", 1),
        (result(state(1, "text", 1e-6), log_probs=0.5), "THE BACKENDS DISAGREE", 1),
        (
            result(state(1, "text", 1e-6), preprocessing=[{"id": "s1", "differences": ["grids [1], SGLang's [2]"]}]),
            "THE BACKENDS AGREE, BUT SGLANG PREPROCESSES THE SAMPLES DIFFERENTLY",
            0,
        ),
    ],
)
def test_disagreement_is_marked_where_it_is_and_ends_with_exit_code_1(monkeypatch, file, capsys, said, verdict, marked):
    monkeypatch.setattr("executor.model_tools.measure.compare", lambda *_arguments: [said])
    assert dflow(file) == FAILED
    shown = capsys.readouterr().out
    assert verdict in shown.splitlines()[-1]
    assert shown.count("TOO FAR") == marked
    told = """a server needs --mm-process-config '{"image": {"min_pixels": 256, "max_pixels": 512}}'"""
    assert (told in shown) is bool(said["preprocessing"])
    assert dflow(file, "--json") == FAILED
    assert json.loads(capsys.readouterr().out) == {"nodes": [json.loads(json.dumps(said))]}


def test_tokens_whose_messages_are_gone_are_said_to_be_not_compared(monkeypatch, file, capsys):
    monkeypatch.setattr(
        "executor.model_tools.measure.compare",
        lambda *_arguments: [result(state(1, "text", 1e-6), preprocessing=None)],
    )
    assert dflow(file) == OK
    assert "preprocessing: not compared" in capsys.readouterr().out


@pytest.mark.parametrize("left_out", [None, "SGLang knows none"])
def test_a_dtype_that_was_left_out_is_told_with_the_reason(monkeypatch, file, capsys, left_out):
    said = result(state(1, "text", 1e-6), left_out=left_out)
    monkeypatch.setattr("executor.model_tools.measure.compare", lambda *_arguments: [said])
    assert dflow(file) == OK
    shown = capsys.readouterr().out.splitlines()
    assert (left_out is not None) is ("float32 is not compared: SGLang knows none" in shown)
