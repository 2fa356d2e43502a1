"""What ops foresee against what they make: bytes on the disk exactly, parameters exactly, memory within a factor.

Memory is measured as the tensors that live at the same time, on a CPU; estimates add up what the code keeps, and are to
be within FACTOR of that, above and below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from fake_stage import FakeStage
from family_checkpoints import FAMILIES, make_checkpoint
from safetensors import safe_open

from dsl.errors import ConfigError, DataError
from dsl.estimate import Estimate, PlanContext
from dsl.op import Ref
from dsl.op_class import hook
from dsl.pipeline import Launch
from ops.artifacts import TargetFeatures
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.sizes import (
    draft_parameters,
)
from ops.lib.forecasts import (
    FeaturesForecast,
    TargetForecast,
    TokensForecast,
    length_misfit,
    length_note,
    read_config,
)
from ops.lib.target.model import Target
from ops.lib.target.sizes import TargetSizes
from ops.load_target.op import LoadTarget
from ops.load_target.plan import dtype_of
from ops.tokenize_chat.op import TokenizeChat
from ops.train_dflash.inputs import draft_config
from ops.train_dflash.op import TrainDflash

FACTOR = 1.3
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
HEADS = {"qwen3": {"head_dim": 16}, "qwen3_vl": {"head_dim": 16}, "qwen3_5": {"head_dim": 32}, "qwen2_5_vl": {}}
DELTA_RULE = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def foresee(config: Any, **context: Any) -> Estimate:
    """The estimate of an op's own hook."""
    defaults = {"launch": Launch(device="cpu"), "artifact": None, "root": Path("/"), "free_disk": 10**12}
    estimate = hook(type(config).__op__, "estimate")
    assert estimate is not None
    edges = dict.fromkeys(type(config).__op__.edges)
    given = {**defaults, **context}
    found = estimate(config, PlanContext(**{**given, "inputs": {**edges, **given.get("inputs", {})}}))
    assert isinstance(found, Estimate)
    return found


def checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    linear = DELTA_RULE if family == "qwen3_5" else {}
    vision = {"hidden_size": 64, "intermediate_size": 192, "num_heads": 4}
    return make_checkpoint(family, folder, vision=vision, **{**TEXT, **HEADS[family], **linear, **changes})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_family_are_those_of_the_model(family: str, tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / family, tie_word_embeddings=tied)
    model = Target.from_directory(folder, {"eos_token_ids": []}).model
    sizes = TargetSizes.of(read_config(folder / "config.json"))
    assert sum(parameter.numel() for parameter in model.parameters()) == sizes.parameters
    assert sizes.head == (0 if tied else model.get_output_embeddings().weight.numel())


def target_sizes(folder: Path) -> TargetSizes:
    return TargetSizes.of(read_config(folder / "config.json"))


@pytest.mark.parametrize(("dtype", "final_hidden"), [("float32", False), ("bfloat16", True)])
def test_the_disk_of_features_is_forecast_to_the_byte(
    tokens: Any, target: Any, tmp_path: Path, dtype: str, final_hidden: bool
) -> None:
    config = CaptureTargets(tokens=Ref("t"), target=Ref("m"), num_layers=2, dtype=dtype, final_hidden=final_hidden)
    counted = foresee_tokens(tokens.path)
    sizes = TargetForecast.of(read_config(target.path / "model" / "config.json"))
    needed = foresee(config, inputs={"tokens": counted, "target": sizes})
    stage = FakeStage(tmp_path / "capture", {"tokens": tokens, "target": target})
    capture_targets(config, stage)
    stored = 0
    for file in stage.artifact(TargetFeatures).path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            stored += sum(tensors.get_tensor(key).nbytes for key in tensors.keys() if key != "token_offsets")  # noqa: SIM118
    assert ({"features": stored}, "") == (needed.disk, needed.disk_per)


def foresee_tokens(path: Path) -> TokensForecast:
    """The forecast of tokens that exist: counted by split."""
    forecast: TokensForecast = foresee(TokenizeChat(samples=Ref("s"), vocab_size=600), artifact=path).forecast
    return forecast


def test_the_longest_sample_is_that_of_the_tokens_once_they_are_made(tokens: Any) -> None:
    reader = TokenReader(tokens)
    lengths = [len(reader.sample(index).input_ids) for index in range(len(reader))]
    assert len({*lengths}) > 1
    assert max(lengths) == foresee_tokens(tokens.path).longest


def test_a_note_on_long_samples_reads_no_lengths_where_a_conflict_reads_them(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "target", max_position_embeddings=64)
    bounded = TargetForecast.of(read_config(tmp_path / "target" / "config.json"))
    unbounded = evolve(bounded, config={**bounded.config, "rope_theta": None, "rope_parameters": None})
    kept = TokensForecast(by_split={"train": 70}, expected=None, longest=70, vocab_size=600, folder=tmp_path)
    rows = tmp_path / "samples.jsonl"
    rows.write_text(json.dumps({"id": "long", "split": "train", "tokens": 70}) + "\n")
    assert "sample long: 70 tokens" in length_misfit(kept, bounded, ["train"])
    assert ("", True) == (length_misfit(kept, unbounded, ["train"]), "long" in length_note(kept, unbounded, ["train"]))
    rows.unlink()
    assert "" == length_note(kept, bounded, ["train"])
    with pytest.raises(FileNotFoundError):
        length_misfit(kept, bounded, ["train"])


def test_the_built_in_target_and_a_draft_for_it_are_forecast_before_they_are_made(tokens: Any, target: Any) -> None:
    counted = foresee_tokens(tokens.path)
    before = foresee(FinetuneVlm(tokens=Ref("t"), steps=2), inputs={"tokens": counted})
    after = foresee(FinetuneVlm(tokens=Ref("t"), steps=2), artifact=target.path)
    assert after.forecast.sizes.parameters == before.forecast.sizes.parameters
    config = TrainDflash(features=Ref("f"), batches=Ref("b"), target=Ref("m"), num_layers=2, head_dim=16)
    inputs = {"target": before.forecast, "features": FeaturesForecast(num_layers=3, dtype="float32", tokens=counted)}
    shape = foresee(config, inputs=inputs).forecast.shape
    captured = {"mask_token_id": 5, "target_layer_ids": [1, 3, 5], "num_target_layers": 8, "positions": "sequential"}
    drafted = draft_config(config, target, captured)
    assert evolve(drafted, mask_token_id=0, max_position_embeddings=1) == evolve(shape, max_position_embeddings=1)


def test_training_a_target_of_8_billion_parameters_is_said_to_need_its_whole_state(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_vl", tmp_path / "small")
    config = read_config(folder / "config.json")
    config["text_config"] |= {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "head_dim": 128}
    config["text_config"] |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151_936}
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    training = FinetuneVlm(tokens=Ref("t"), init=str(folder), dtype="bfloat16", micro_batch_tokens=1)
    alone, shared = (foresee(training, launch=launch) for launch in (Launch(), Launch(kind="ranks", nproc=8)))
    state = [sum(each.memory[part] for part in ("weights", "gradients", "optimizer")) for each in (alone, shared)]
    assert [131, 45] == [round(size / 1e9) for size in state]  # float32 weights, gradients and two moments
    held = "rank 0 keeps 98.3 GB of weights and moments in host memory while a checkpoint is written"
    assert (held,) == alone.notes == shared.notes


def test_a_target_of_experts_alone_needs_the_width_of_the_drafts_mlp(tmp_path: Path) -> None:
    config = read_config(checkpoint("qwen3", tmp_path / "qwen3") / "config.json")
    experts = {**config, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    del experts["intermediate_size"]
    inputs = {"target": TargetForecast.of(experts)}
    edges = {"features": Ref("f"), "batches": Ref("b"), "target": Ref("m")}
    with pytest.raises(ConfigError, match=r"intermediate_size: the target's config\.json has none"):
        foresee(TrainDflash(**edges), inputs=inputs)
    needed = foresee(TrainDflash(**edges, intermediate_size=256), inputs=inputs)
    assert 256 == needed.forecast.shape.intermediate_size


def test_a_directory_tells_its_own_files(tmp_path: Path) -> None:
    folder = checkpoint("qwen3", tmp_path / "qwen3")
    needed = foresee(LoadTarget(checkpoint=str(folder)))
    assert {"checkpoint": sum(file.stat().st_size for file in folder.glob("*.safetensors"))} == needed.disk
    assert needed.forecast.sizes == target_sizes(folder)


@pytest.mark.parametrize("place", ["dtype", "torch_dtype", "text_config"])
@pytest.mark.parametrize("value", [["x"], {"a": 1}, 16])
def test_a_dtype_that_is_no_name_is_refused_and_an_unknown_one_counts_as_bfloat16(place: str, value: Any) -> None:
    config = {"text_config": {"dtype": value}} if place == "text_config" else {place: value}
    with pytest.raises(DataError, match=r"config.json: (torch_)?dtype must be the name of a dtype"):
        dtype_of(config)
    assert "bfloat16" == dtype_of({"dtype": "float8"}) == dtype_of({})
    assert "float32" == dtype_of({"torch_dtype": "float32", "text_config": {}})


def test_a_config_without_a_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "hidden_size": 4, "num_attention_heads": 2}')
    with pytest.raises(DataError, match=r"config\.json: num_hidden_layers is missing"):
        foresee(LoadTarget(checkpoint=str(tmp_path)))


@pytest.mark.parametrize(("dtype", "ranks", "bytes_each"), [("bfloat16", 1, 2), ("bfloat16", 2, 2), ("float32", 1, 0)])
def test_a_copy_of_the_weights_is_counted_where_the_dtype_is_narrower(
    dtype: str, ranks: int, bytes_each: int, tmp_path: Path
) -> None:
    """In two bytes each, beside all that an update or a pass needs; in float32 only several ranks gather one."""
    inputs = {"target": TargetForecast.of(read_config(checkpoint("qwen3", tmp_path / "target") / "config.json"))}
    inputs["features"] = FeaturesForecast(num_layers=5, dtype="bfloat16", tokens=None)
    launch = Launch(device="cpu", kind="ranks", nproc=ranks) if ranks > 1 else Launch(device="cpu")
    config = TrainDflash(features=Ref("a"), batches=Ref("b"), target=Ref("c"), dtype=dtype)
    found = foresee(config, inputs=inputs, launch=launch)
    parameters = draft_parameters(found.forecast.shape)
    assert bytes_each * parameters == found.memory["weights to compute with"]
    assert 4 * parameters // ranks == found.memory["draft"]


def test_measuring_tau_needs_the_target_and_a_copy_of_the_draft_beside_a_training(tmp_path: Path) -> None:
    config = read_config(checkpoint("qwen3", tmp_path / "target") / "config.json")
    inputs = {"target": TargetForecast.of(config)}
    inputs["tokens"] = TokensForecast(by_split=None, expected=None, longest=64, vocab_size=None)
    inputs["features"] = FeaturesForecast(num_layers=5, dtype="bfloat16", tokens=inputs["tokens"])
    training = {"features": Ref("a"), "batches": Ref("b"), "target": Ref("c"), "tokens": Ref("d")}
    silent, measuring = (
        foresee(TrainDflash(**training, keep_checkpoints=1, **changes), inputs=inputs)
        for changes in ({}, {"eval_every": 5, "select": "tau"})
    )
    assert "target" not in silent.memory
    assert 2 * inputs["target"].sizes.parameters == measuring.memory["target"]
    copied = 4 * draft_parameters(measuring.forecast.shape)
    assert copied == measuring.memory["draft that decodes"]
    assert silent.disk["checkpoints"] * 3 == measuring.disk["checkpoints"] * 2
