"""The pipelines for published targets: they compile, and `dflow plan` tells their disk and memory from config.json."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dsl.errors import PipelineError
from dsl.graph import Graph
from dsl.read_toml import read_graph
from dsl.shown import shown_bytes
from executor.keys.node_key import key_config
from executor.planning.planner import Decision
from executor.planning.preflight import disk_mistakes, estimate_row, graph_estimates
from executor.store.artifact_store import Store
from executor.system.resource_pool import Capacity
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.sizes import draft_parameters
from ops.lib.target.sizes import TargetSizes
from ops.train_dflash.shape import forecast_shape

ROOT = Path(__file__).parents[1]
PIPELINES = ROOT / "pipelines"
# Model, commit, git's name of the published config.json, and the parameters of the published files (on the Hub).
PUBLISHED = {
    "qwen3_8b": (
        "Qwen/Qwen3-8B",
        "b968826d9c46dd6066d109eabc6255188de91218",
        "d46195ac87f837ad233d02b2f80f148bf7c005e0",
        8_190_735_360,
    ),
    "qwen3_vl_8b": (
        "Qwen/Qwen3-VL-8B-Instruct",
        "0c351dd01ed87e9c1b53cbc748cba10e6187ff3b",
        "0e2df614c5fe1ad2b6b540c8625bebf2d7ec43ca",
        8_767_123_696,
    ),
    "qwen3_5_9b": (
        "Qwen/Qwen3.5-9B",
        "c202236235762e1c871ad0ccb60c8ee5ba337b9a",
        "273ce437e01baf96a07cd9eb3d5f48bac8d7c657",
        9_653_104_368,
    ),
}
FILES = [name + end for name in PUBLISHED for end in ("", "_8gpu")]


def config_file(name: str) -> Path:
    model, commit, *_ = PUBLISHED[name]
    return PIPELINES / "targets" / model / f"{commit}.json"


def with_data(name: str, folder: Path) -> Path:
    """A copy of the pipeline file beside a data set, away from the repository."""
    (folder / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    return Path(shutil.copy(PIPELINES / f"{name}.toml", folder))


def compiled(name: str, folder: Path, *overrides: str) -> Graph:
    return read_graph(with_data(name, folder), overrides)


def resources(name: str, folder: Path, *overrides: str, free_disk: int = 2 * 10**12) -> dict[str, dict[str, Any]]:
    """The resources that `dflow plan` shows for every node."""
    needs = graph_estimates(compiled(name, folder, *overrides), {}, free_disk).needs
    return {node_id: estimate_row(need) for node_id, need in needs.items()}


def planned(name: str, folder: Path) -> dict[str, Any]:
    """Run `dflow plan --json` in a process of its own, which must not load torch."""
    arguments = ["plan", str(with_data(name, folder)), "--json", "--store", str(folder / "store")]
    program = (
        "import sys; from executor.cli import main\n"
        f"code = main({arguments!r})\n"
        "assert not {'torch', 'transformers', 'mlflow'} & sys.modules.keys()\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    told: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (2 if told["missing_here"] else 0, "")
    return told


@pytest.mark.parametrize("name", FILES)
def test_every_pipeline_compiles_on_a_data_set_of_the_users_own(name: str, tmp_path: Path) -> None:
    graph = compiled(name, tmp_path)
    model, commit, *_ = PUBLISHED[name.removesuffix("_8gpu")]
    assert (model, commit) == (graph.nodes["target"].config.checkpoint, graph.nodes["target"].config.revision)
    train = graph.nodes["train"]
    recipe = ("block_size", "num_layers", "num_anchors", "lr", "schedule", "warmup_ratio", "grad_clip", "optimizer")
    assert [16, 5, 512, 6e-4, "cosine", 0.04, 1.0, "adamw"] == [getattr(train.config, field) for field in recipe]
    assert 6 == graph.nodes["shard"].config.epochs
    assert (8 if name.endswith("_8gpu") else 1) == train.launch.nproc
    assert ("online" if name.endswith("_8gpu") else "stored") == train.config.capture
    if name.endswith("_8gpu"):  # transformers captures while the draft trains, on every rank
        assert "capture" not in graph.nodes
        assert ("bfloat16", None) == (train.config.capture_dtype, train.launch.pool)
    else:
        assert "sglang" == graph.nodes["capture"].config.backend
    assert ["check"] == [node.id for node in graph.nodes.values() if node.op.name == "check_export"]


@pytest.mark.parametrize("name", FILES)
def test_a_pipeline_without_its_data_says_which_file_is_missing(name: str, tmp_path: Path) -> None:
    file = Path(shutil.copy(PIPELINES / f"{name}.toml", tmp_path))
    with pytest.raises(PipelineError) as error:
        read_graph(file)
    assert [f"there is no file or folder {tmp_path}/data.jsonl"] == [mistake.what for mistake in error.value.mistakes]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_enters_the_key_with_its_commit_and_by_one_node_alone(name: str, tmp_path: Path) -> None:
    model, commit, *_ = PUBLISHED[name]
    nodes = compiled(name, tmp_path).nodes.values()
    naming = {node.id for node in nodes if model in map(str, key_config(node).values())}
    assert {"target"} == naming
    target = next(node for node in nodes if node.id == "target")
    assert (model, commit) == (key_config(target)["checkpoint"], key_config(target)["revision"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_is_the_published_file_byte_for_byte(name: str) -> None:
    content = config_file(name).read_bytes()
    assert PUBLISHED[name][2] == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_model_and_of_the_published_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config_file(name).read_bytes())
    config = AutoConfig.from_pretrained(tmp_path)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    sizes = TargetSizes.of(json.loads(config_file(name).read_text()))
    assert sum(parameter.numel() for parameter in model.parameters()) == sizes.parameters
    assert PUBLISHED[name][3] == sizes.parameters + sizes.mtp
    vision = sum(parameter.numel() for key, parameter in model.named_parameters() if ".visual." in key)
    assert (vision, model.get_output_embeddings().weight.numel()) == (sizes.vision, sizes.head)


@pytest.mark.parametrize("name", PUBLISHED)
def test_draft_parameters_are_those_of_the_draft(name: str, tmp_path: Path) -> None:
    config = compiled(name, tmp_path).nodes["train"].config
    shape = forecast_shape(config, json.loads(config_file(name).read_text()), 5)
    with torch.device("meta"):
        draft = DraftModel(shape)
    assert sum(parameter.numel() for parameter in draft.parameters()) == draft_parameters(shape)


def test_the_plan_of_stored_features_is_this_arithmetic(tmp_path: Path) -> None:
    told = resources("qwen3_8b", tmp_path)
    tokens = 20_000_000
    # Five layers of 4,096 in bfloat16, and the id (int32) and the mask (uint8) of a token.
    assert told["capture"]["disk"] == {"features": tokens * (5 * 4096 * 2 + 4 + 1)}
    assert told["target"]["disk"] == {"checkpoint": 2 * 8_190_735_360}
    assert told["capture"]["memory"] == {"target": 2 * 8_190_735_360}
    # The draft: fc, and 5 layers of attention (32 query heads, 8 of keys and values, of 128) and MLP (12,288), norms.
    layer = 4096 * (2 * 32 * 128 + 2 * 8 * 128) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    draft = 5 * 4096 * 4096 + 5 * layer + 2 * 4096
    train = told["train"]["memory"]
    assert (train["draft"], train["gradients"], train["optimizer"]) == (4 * draft, 4 * draft, 8 * draft)
    assert train["embedding and head"] == 2 * 151_936 * 4096 * 2
    # The target and the draft in bfloat16, which decode the prompts of val.
    assert (train["target"], train["draft that decodes"]) == (2 * 8_190_735_360, 2 * draft)
    assert told["train"]["memory_total"] == sum(train.values())
    # Masters and two moments; the last two checkpoints, the best, and the one being written.
    assert told["train"]["disk"] == {"draft": 4 * draft, "checkpoints": 4 * 12 * draft}
    assert told["export"]["disk"] == {"draft": 2 * draft}
    assert (told["eval"]["memory"]["target"], told["eval"]["memory"]["drafts"]) == (2 * 8_190_735_360, 2 * 2 * draft)


def test_the_plan_of_eight_gpus_shards_masters_and_moments_and_tells_what_storing_would_take(tmp_path: Path) -> None:
    told = planned("qwen3_8b_8gpu", tmp_path)
    train = told["resources"]["train"]
    draft = resources("qwen3_8b", tmp_path)["train"]["memory"]["gradients"] // 4
    # FSDP2 gathers the weights once per step, in bfloat16, and keeps whole gradients until it reduces them.
    memory = train["memory"]
    assert (memory["draft"], memory["weights to compute with"]) == (4 * draft // 8, 2 * draft)
    assert (memory["gradients"], memory["optimizer"]) == (4 * draft, draft)
    assert memory["target"] == 2 * 8_190_735_360
    assert train["notes"] == [
        f"online: no features are stored; they would need 65.5 TB, and {shown_bytes(told['free_disk'])} are free"
    ]
    assert "capture" not in told["resources"]


def test_ranks_that_train_hold_no_target_where_others_capture_for_them(tmp_path: Path) -> None:
    untold = ("train.select=last", "train.eval_prompts=0")  # decoding for tau would need the target too
    alike = resources("qwen3_vl_8b_8gpu", tmp_path, *untold)["train"]["memory"]
    pool = ("train.launch.nproc=4", "train.launch.pool={ workers = 4 }")
    train = resources("qwen3_vl_8b_8gpu", tmp_path, *untold, *pool)["train"]
    apart = train["memory"]
    assert ("target" in alike, "target" in apart) == (True, False)
    assert 2 * alike["optimizer"] == apart["optimizer"]  # four ranks share it, not eight
    assert "the target's pass" not in train["pass"]
    weights, unit = shown_bytes(alike["target"]), shown_bytes(16384 * (5 * 4096 * 2 + 5))
    [_, note] = train["notes"]
    assert note.startswith(f"pool: each of 4 workers needs {weights} for the target, ")
    assert note.endswith(f"a rank receives {unit} for each")
    # Two groups of two ranks, each of which requests two micro-batches.
    idle = "pool: buffer_batches = 2 keeps at most 4 of 5 pool workers busy: set it to 5, or use fewer workers"
    more = resources("qwen3_vl_8b_8gpu", tmp_path, *untold, pool[0], "train.launch.pool={ workers = 5 }")["train"]
    assert [idle] == more["notes"][2:]


def test_a_pool_of_as_many_workers_as_ranks_needs_twice_the_gpus(tmp_path: Path) -> None:
    node = compiled("qwen3_8b_8gpu", tmp_path, "train.launch.pool={ workers = 8, memory = '1 GB', threads = 2 }").nodes[
        "train"
    ]
    machine = Capacity(cpus=64, memory=10**12, gpus=tuple(map(str, range(16))))
    alone = machine.part(evolve(node, launch=evolve(node.launch, pool=None)))
    whole = machine.part(node)
    assert (8, 16, 8 * 10**9) == (alone.gpus, whole.gpus, whole.memory - alone.memory)
    assert min(64, alone.cpus + 16) == whole.cpus
    assert machine.threads(node) == machine.threads(evolve(node, launch=evolve(node.launch, pool=None)))


def test_layers_that_the_target_does_not_have_are_told_before_anything_runs(tmp_path: Path) -> None:
    given = ("capture.num_layers=none", "capture.target_layer_ids=[1, 35]")
    assert graph_estimates(compiled("qwen3_8b", tmp_path, *given), {}, 0).refused == {
        "capture": ("target_layer_ids: 35 is the last of 36 layers, which cannot be captured; use ids from 0 to 34",)
    }


def test_the_plan_of_the_gate_is_this_arithmetic(tmp_path: Path) -> None:
    told = resources("qwen3_8b", tmp_path)
    check, draft = told["check"], told["export"]["disk"]["draft"]
    assert {"draft": draft} == check["disk"]
    # In bfloat16, as SGLang serves drafts on a GPU.
    assert {"target": 2 * 8_190_735_360, "drafts": 2 * draft} == check["memory"]
    assert ["one process: SGLang's live stage does not shard the target over GPUs"] == check["notes"]
    off = resources("qwen3_8b", tmp_path, "check.live=off")["check"]
    assert ({}, {"draft": draft}) == (off["memory"], off["disk"])


def test_features_that_do_not_fit_the_disk_are_told_with_the_remedy(tmp_path: Path) -> None:
    needs = graph_estimates(compiled("qwen3_8b", tmp_path), {}, 0).needs
    store, capture = Store.open(tmp_path / "store", write=False), {"capture": Decision("miss", "new")}
    assert [] == disk_mistakes(store, capture, needs, 820 * 10**9)
    [short] = map(str, disk_mistakes(store, capture, needs, 819 * 10**9))
    assert short.startswith(f"node.capture: needs 819.3 GB of disk (features), and 819.0 GB are free at {store.path}: ")
    assert 'fewer layers, dtype = "bfloat16", feature_dtype = "float8", or no features at all' in short
    assert short.endswith("; if there will be fewer tokens, lower expected_tokens of tokenize_chat")
    after_target = {"target": Decision("miss", "new"), **capture}
    [short] = map(str, disk_mistakes(store, after_target, needs, 820 * 10**9))
    assert f"820.0 GB are free at {store.path} (16.4 GB of that for the nodes before it)" in short
    assert ["40,965 bytes a token, 41.0 GB a million"] == list(needs["capture"].notes)
    open_count = resources("qwen3_8b", tmp_path, "tokenize.expected_tokens=none")["capture"]
    assert ({"features": 40_965_000_000}, "a million tokens") == (open_count["disk"], open_count["disk_per"])
    small = resources("qwen3_8b_8gpu", tmp_path, "tokenize.expected_tokens=1000000")["train"]
    assert small["notes"] == [
        "online: no features are stored; they would need 41.0 GB, and 2.0 TB are free; capture_targets would compute "
        "them once for all epochs"
    ]


def test_layers_that_predict_several_tokens_are_of_the_download_and_not_of_the_model(tmp_path: Path) -> None:
    hybrid = resources("qwen3_5_9b", tmp_path)
    assert (hybrid["target"]["disk"]["checkpoint"], hybrid["capture"]["memory"]["target"]) == (
        2 * 9_653_104_368,
        2 * 9_409_813_744,
    )


def test_the_table_in_the_docs_is_what_the_plan_tells(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "pipelines.md").read_text()
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `qwen")}
    assert {f"{name}.toml" for name in FILES} == rows.keys()
    for name in FILES:
        needs = resources(name, tmp_path)
        features = "none: online, 65.5 TB otherwise"
        if "capture" in needs:
            features = shown_bytes(needs["capture"]["disk_total"])
        cells = [
            f"`{name}.toml`",
            f"{compiled(name, tmp_path).nodes['tokenize'].config.expected_tokens // 10**6:,} M",
            shown_bytes(needs["target"]["disk_total"]),
            features,
            shown_bytes(needs["train"]["disk_total"]),
            shown_bytes(needs["train"]["memory_total"]),
            shown_bytes(needs["eval"]["memory_total"]),
        ]
        assert f"| {' | '.join(cells)} |" == rows[f"{name}.toml"]


def test_a_model_whose_config_is_not_here_is_said_to_be_unknown(tmp_path: Path) -> None:
    told = resources("qwen3_8b", tmp_path, "target.checkpoint=owner/name")
    commit = PUBLISHED["qwen3_8b"][1]
    assert told["target"]["notes"] == [
        f"what it needs cannot be estimated: the sizes of owner/name are unknown: put its config.json at "
        f"{tmp_path}/targets/owner/name/{commit}.json"
    ]
    assert {} == told["train"]["memory"]
    own = tmp_path / "targets" / "owner" / "name" / f"{commit}.json"
    own.parent.mkdir(parents=True)
    shutil.copy(config_file("qwen3_8b"), own)
    told = resources("qwen3_8b", tmp_path, "target.checkpoint=owner/name")
    assert told["target"]["disk"] == {"checkpoint": 2 * 8_190_735_360}
