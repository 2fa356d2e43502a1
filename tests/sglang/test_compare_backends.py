"""`dflow doctor --backends` over a real store: agreement, and disagreements made on purpose."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest
from attrs import frozen
from capture_cases import FAMILIES, calm, make_samples, make_target, processor_of, write_tokens
from colour_chats import write_data
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint, picture
from manifests import made
from PIL import Image
from sglang_on_cpu import FOLDER

from dsl.read_toml import read_graph
from executor.cli import main
from executor.planning.session import make_planner
from executor.store.artifact_store import Store
from executor.system.output import FAILED, OK
from ops.capture_targets.agreement import NARROW_TOLERANCE
from ops.tools.compare_backends import run as compare

PIPELINE = """
[pipeline]
name = "compared"

[node.ingest]
op = "ingest"
source = "data.jsonl"

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
min_loss_tokens = 1
preview_samples = 0

[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
splits = ["train"]

[node.small]
op = "tokenize_chat"
samples = "@inject"
target = "@target"
min_loss_tokens = 1
preview_samples = 0
max_pixels = 512

[node.small_capture]
op = "capture_targets"
tokens = "@small"
target = "@target"
splits = ["val"]
"""

# What a broken engine might do; put in place in the process of the comparison alone.
BROKEN = f"""
import os, sys
sys.path.insert(0, {str(FOLDER)!r})
import sglang_on_cpu
sglang_on_cpu.install(os.environ)
from import_hooks import after_import

@after_import("ops.lib.sglang.requests")
def flat_positions(module):
    import torch
    def positions(self, input_ids, image_grid_thw):
        return torch.arange(len(input_ids)).expand(3, -1).contiguous(), torch.zeros(1, 1, dtype=torch.int64)
    module.VisionTokens.positions = positions
"""


@frozen
class Project:
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.toml"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def compare_backends(self, *arguments: str) -> int:
        return main(["doctor", str(self.file), "--backends", "--store", str(self.store), *arguments])


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    """Pictures of colours and texts, tokens of them, and a Qwen3-VL, all of it in the store but the features."""
    folder = tmp_path_factory.mktemp("project")
    add_photos(write_data(folder))
    calm(make_checkpoint("qwen3_vl", folder / "checkpoint", vision=dict(FAMILIES["qwen3_vl"].vision)))
    (folder / "pipeline.toml").write_text(PIPELINE)
    made = Project(folder)
    make_artifacts(made.file, made.store, ["ingest", "inject", "target", "tokenize", "small"])
    return made


def make_artifacts(file: Path, store_folder: Path, names: list[str]) -> None:
    """What `dflow run` would make of these nodes, in this process."""
    store = Store.open(store_folder, write=True)
    graph = read_graph(file, [])
    for name in names:
        decisions = make_planner(store, graph).plan()
        node, key = graph.nodes[name], decisions[name].key
        digests = {edge: decisions[parents[0]].digest for edge, parents in node.inputs.items() if parents}
        inputs = {edge: node.op.edges[edge].type(store.object_path(digest), digest) for edge, digest in digests.items()}
        module, _, function = node.op.run.partition(":")
        with store.lease(key, "test") as lease:
            lease.acquire(print)
            lease.empty(keep_state=False)
            stage = FakeStage(store_folder / "stages" / name, dict.fromkeys(node.op.edges) | inputs)
            stage.out_dir, stage.work_dir = lease.out_dir, lease.work_dir
            getattr(importlib.import_module(module), function)(node.config, stage)
            store.commit(lease, *made(key, "test", op=node.op.name))
            lease.remove()


def compared(project: Project, capsys, *arguments: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = project.compare_backends("--json", *arguments)
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    return code, node


def test_two_right_backends_agree_in_float32_and_in_the_dtype_of_the_capture(project, capsys):
    code, node = compared(project, capsys, "--samples", "5", "--node", "capture", "-s", "capture.dtype=bfloat16")
    for part in node["dtypes"]:
        for row in part["states"]:
            print(part["dtype"], row["layer"], row["kind"], f"{row['relative']:.1e} of {row['allowed']:.1e}")
        print(part["dtype"], "log-probabilities", f"{part['log_probs']['largest']:.1e}")
    assert code == OK
    assert node["agree"] is True
    assert [part["dtype"] for part in node["dtypes"]] == ["float32", "bfloat16"]
    for part in node["dtypes"]:
        assert [(row["layer"], row["kind"]) for row in part["states"]] == [
            (layer, kind) for layer in node["layers"] for kind in ("text", "image")
        ]
    assert max(row["relative"] for row in node["dtypes"][0]["states"]) < 1e-4
    assert max(row["absolute"] for row in node["dtypes"][0]["states"]) < 5e-5
    assert sorted(sample["images"] for sample in node["samples"]) == [0, 0, 1, 1, 1]
    assert node["preprocessing"] == [{"id": sample["id"], "differences": []} for sample in node["samples"]]
    assert node["image_bounds"] == {}


@pytest.mark.slow
def test_an_engine_that_counts_positions_in_one_dimension_is_found_out(project, capsys, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    capsys.readouterr()
    code = project.compare_backends("--samples", "4", "--node", "capture")
    shown = capsys.readouterr().out
    print(shown)
    assert code == FAILED
    assert "THE BACKENDS DISAGREE" in shown.splitlines()[-1]
    rows = [line.split() for line in shown.splitlines() if "TOO FAR" in line and ", token " in line]
    assert {row[1] for row in rows} == {"text", "image"}


@pytest.mark.slow
def test_a_photo_that_sglang_does_not_turn_is_told_apart_from_other_states(project, capsys):
    """The other picture's tokens were made with fewer pixels than the target's own, as the server is then told."""
    code, node = compared(project, capsys, "--samples", "4", "--node", "small_capture")
    print(node["preprocessing"])
    assert code == FAILED
    assert node["agree"] is False
    assert all(row["agrees"] for part in node["dtypes"] for row in part["states"])
    differences = {row["id"]: " ".join(row["differences"]) for row in node["preprocessing"]}
    assert differences["upright"] == ""
    assert "grids [[1, 6, 4]], SGLang's [[1, 4, 6]]" in differences["turned"]
    assert node["image_bounds"] == {"min_pixels": 256, "max_pixels": 512}


def test_where_sglang_knows_no_float32_it_runs_in_the_dtype_of_the_capture_alone(tmp_path, monkeypatch):
    """As on a GPU for a recurrent target, whose weights fit there in float32; both backends compute on the CPU."""
    target = make_target("qwen3_5", tmp_path / "target")
    samples = list(make_samples(processor_of(target), FAMILIES["qwen3_5"]).values())
    tokens = write_tokens(tmp_path / "tokens", target, processor_of(target), samples)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "data.jsonl").touch()
    (tmp_path / "checkpoint").mkdir()
    graph = read_graph(tmp_path / "pipeline.toml", ["capture.dtype=bfloat16"])
    artifacts = {"tokenize": (tokens.path, tokens.digest), "target": (target.path, target.digest)}
    asked = {}

    def on_the_cpu(name):
        run = getattr(compare, name)

        def ran(request, samples, layer_ids, dtype, device):
            asked.setdefault(name, []).append((dtype, device))
            return run(request, samples, layer_ids, dtype, "cpu")

        return ran

    for name in ("with_transformers", "with_sglang"):
        monkeypatch.setattr(compare, name, on_the_cpu(name))
    monkeypatch.setattr(compare, "device_of", lambda _node: "cuda")
    monkeypatch.setattr(compare, "float32_fits", lambda _target, _device: True)
    monkeypatch.setattr(compare, "image_bounds", lambda _request: {})
    result = compare.compare(compare.Request(graph, graph.nodes["capture"], artifacts, 2))
    assert [("bfloat16", "cuda")] == asked["with_sglang"]
    assert [("float32", "cuda"), ("bfloat16", "cuda")] == asked["with_transformers"]
    assert ["bfloat16"] == [part["dtype"] for part in result["dtypes"]]
    assert result["left_out"].startswith(
        "SGLang's linear attention on a GPU does not support float32; only transformers' float32"
    )
    allowed = {row["allowed"] for row in result["dtypes"][0]["states"]}
    assert NARROW_TOLERANCE["bfloat16"] not in allowed
    assert len(allowed) > 1


def add_photos(data: Path) -> None:
    """Two pictures, one of which its EXIF data turn by 90 degrees."""
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, exif in (("upright", Image.Exif()), ("turned", turned)):
        picture(60, 40).save(data.parent / f"{name}.jpg", exif=exif)
        turns = [{"role": "user", "text": "What is it?"}, {"role": "assistant", "text": "It is blue."}]
        with data.open("a") as file:
            file.write(json.dumps({"id": name, "split": "val", "conversations": turns, "image": f"{name}.jpg"}) + "\n")
