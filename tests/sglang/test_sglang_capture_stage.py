"""The stage with backend = "sglang": its artifact, a kill in the middle, several ranks, and what it refuses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from attrs import evolve
from capture_cases import FAMILIES, make_samples, make_target, processor_of, write_tokens
from capture_worker import write_job
from fake_stage import FakeStage
from family_checkpoints import picture, token_sample
from import_graph import PYTHON_PATH
from run_ranks import run_ranks
from safetensors.torch import load_file

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import BatchPlan, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets import sglang as sglang_backend
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.lib.data.files import read_json, write_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.sglang.version import installed_version
from ops.lib.target.feature_shards import FeatureReader
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SHARDS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetModel:
    """A Qwen3-VL whose heads two ranks can share out."""
    return make_target("qwen3_vl", tmp_path_factory.mktemp("target"), num_key_value_heads=2)


@pytest.fixture(scope="module")
def tokens(target, tmp_path_factory) -> TokenShards:
    processor = processor_of(target)
    kinds = make_samples(processor, FAMILIES["qwen3_vl"])
    answer = "There are three of them: one is large, two are small, and all of them are yellow. " * 2
    samples = []
    for number in range(6 * SHARDS):
        images = [picture(24, 48, number)] if number % 3 == 0 else []
        samples.append(token_sample(processor, "What is it?", answer[: 40 + 3 * number], images, name=f"s{number}"))
    return write_tokens(tmp_path_factory.mktemp("tokens") / "out", target, processor, [*kinds.values(), *samples])


def config(**changes):
    given = {"splits": ("train",), "shard_tokens": 300, "backend": "sglang", **changes}
    return CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), **given)


def capture(folder, tokens, target, **changes) -> FakeStage:
    stage = FakeStage(folder, {"tokens": tokens, "target": target})
    capture_targets(config(**changes), stage)
    return stage


@pytest.fixture(scope="module")
def undisturbed(tokens, target, tmp_path_factory) -> TargetFeatures:
    stage = capture(tmp_path_factory.mktemp("sglang"), tokens, target, final_hidden=True)
    return stage.artifact(TargetFeatures)


@pytest.fixture(scope="module")
def by_transformers(tokens, target, tmp_path_factory) -> TargetFeatures:
    folder = tmp_path_factory.mktemp("transformers")
    return capture(folder, tokens, target, final_hidden=True, backend="huggingface").artifact(TargetFeatures)


def shards(features: TargetFeatures) -> list[str]:
    return [shard["file"] for shard in read_json(features.path / "features.json")["shards"]]


def test_both_backends_write_the_same_artifact_but_for_their_name(undisturbed, by_transformers):
    ours, theirs = (read_json(features.path / "features.json") for features in (undisturbed, by_transformers))
    assert ("sglang", installed_version()) == (ours.pop("backend"), ours.pop("backend_version"))
    assert "huggingface" == theirs.pop("backend")
    assert ours == theirs
    assert len(shards(undisturbed)) >= SHARDS
    furthest: dict[str, float] = {}
    for file in shards(undisturbed):
        one, other = load_file(undisturbed.path / file), load_file(by_transformers.path / file)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            difference = float((tensor.double() - other[name].double()).abs().max())
            furthest[name] = max(difference, furthest.get(name, 0.0))
    print(", ".join(f"{name} {difference:.1e}" for name, difference in furthest.items()))
    assert 0 == furthest["input_ids"] == furthest["loss_mask"] == furthest["token_offsets"]
    assert max(furthest.values()) <= 5e-5


def test_a_draft_learns_from_either_backends_features_alike(undisturbed, by_transformers, target, tmp_path):
    losses = []
    for features in (undisturbed, by_transformers):
        folder = tmp_path / read_json(features.path / "features.json")["backend"]
        assert 4 + 6 * SHARDS == len(FeatureReader(features, "train"))
        stage = FakeStage(folder / "shard", {"features": features})
        shard_sequence(ShardSequence(features=Ref("capture"), tokens_per_step=512, epochs=1, seed=0), stage)
        inputs = {"features": features, "batches": stage.artifact(BatchPlan), "target": target}
        references = {name: Ref(name) for name in inputs}
        stage = FakeStage(folder / "train", inputs)
        train_dflash(TrainDflash(**references, block_size=8, num_layers=1, num_anchors=8, max_steps=3, seed=0), stage)
        losses.append(stage.metric("train/loss"))
    print(f"losses on SGLang's features {losses[0]}, on transformers' {losses[1]}")
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def variables() -> dict[str, str]:
    """The environment of a worker. On a CPU SGLang wants to be told the cores where it has more ranks than the machine
    has NUMA nodes."""
    paths = [PYTHON_PATH, str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": ":".join(paths), "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}


def start(job: Path, *count: str) -> subprocess.Popen[str]:
    """The worker in a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(FOLDER / "capture_worker.py"), str(job), *count],
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_capture_killed_in_the_middle_goes_on_and_ends_with_the_same_bytes(undisturbed, tokens, target, tmp_path):
    job, work = tmp_path / "job.json", tmp_path / "stage" / "work"
    write_job(job, tmp_path / "stage", tokens, target, **plain_config(final_hidden=True))
    killed = start(job, "2")
    said = killed.communicate()[0]
    assert -signal.SIGKILL == killed.returncode, said
    finished = {file.name: file.stat().st_mtime_ns for file in work.glob("*.safetensors")}
    print(f"killed with {len(finished)} of {len(shards(undisturbed))} shards made")
    assert 2 <= len(finished) < len(shards(undisturbed))
    again = start(job)
    said = again.communicate()[0]
    assert 0 == again.returncode, said
    assert finished == {name: (work / name).stat().st_mtime_ns for name in finished}
    out = tmp_path / "stage" / "out"
    assert [file.read_bytes() for file in sorted(undisturbed.path.glob("*.safetensors"))] == [
        file.read_bytes() for file in sorted(out.glob("*.safetensors"))
    ]


def plain_config(**changes):
    """The config's fields as JSON."""
    given = attrs.asdict(config(**changes), recurse=False)
    return {name: value for name, value in given.items() if name not in ("tokens", "target")}


@pytest.mark.slow
def test_two_ranks_that_share_the_shards_end_with_the_same_bytes(undisturbed, tokens, target, tmp_path):
    job = tmp_path / "job.json"
    write_job(job, tmp_path / "stage", tokens, target, **plain_config(final_hidden=True))
    codes = run_ranks(2, [str(FOLDER / "capture_worker.py"), str(job)], tmp_path, 600, variables())
    assert [0, 0] == codes, (tmp_path / "log").read_text()
    for file in shards(undisturbed):
        assert (undisturbed.path / file).read_bytes() == (tmp_path / "stage" / "out" / file).read_bytes()


def test_two_ranks_that_share_the_model_capture_the_same_states(undisturbed, tokens, target, tmp_path):
    job = tmp_path / "job.json"
    write_job(job, tmp_path / "stage", tokens, target, **plain_config(final_hidden=True, tp_degree=2))
    codes = run_ranks(2, [str(FOLDER / "capture_worker.py"), str(job)], tmp_path, 600, variables())
    assert [0, 0] == codes, (tmp_path / "log").read_text()
    difference = 0.0
    for file in shards(undisturbed):
        one, two = (load_file(folder / file) for folder in (undisturbed.path, tmp_path / "stage" / "out"))
        difference = max(difference, *(float((one[n] - two[n]).abs().max()) for n in ("features", "final_hidden")))
    print(f"tensor parallel over 2 ranks: {difference:.1e} from one process")
    assert 0 < difference <= 5e-5  # sums over two halves are rounded otherwise


def test_memory_that_runs_out_in_sglang_halves_the_batch(undisturbed, tokens, target, tmp_path, monkeypatch, capsys):
    states = SglangRuntime.states
    asked = []

    def small_memory(runtime, samples, layer_ids, **options):
        asked.append(len(samples))
        if len(asked) == 2:
            raise torch.OutOfMemoryError("no memory left")
        return states(runtime, samples, layer_ids, **options)

    monkeypatch.setattr(SglangRuntime, "states", small_memory)
    stage = capture(tmp_path, tokens, target)
    assert "later batches have at most" in capsys.readouterr().out
    for file in shards(undisturbed):
        ours, theirs = load_file(stage.out_dir / file)["features"], load_file(undisturbed.path / file)["features"]
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)


@pytest.fixture
def nothing_loaded(monkeypatch):
    """Whatever is refused must be so before the target is loaded."""

    def loaded(*_arguments, **_options):
        pytest.fail("the target was loaded first")

    monkeypatch.setattr(SglangRuntime, "start", loaded)


def test_a_sample_beyond_the_targets_context_is_refused_by_name(tokens, target, tmp_path, nothing_loaded, monkeypatch):
    longest = max(TokenReader(tokens, "train").records, key=lambda record: record["tokens"])
    limit = longest["tokens"] - 1
    monkeypatch.setattr(sglang_backend, "context_length", lambda _folder, _trust: limit)
    message = (
        rf"sample {longest['id']}: {longest['tokens']} tokens, more than the target's context of {limit}: "
        "drop such samples"
    )
    with pytest.raises(DataError, match=message):
        capture(tmp_path, tokens, target)


def test_a_family_whose_layers_sglang_does_not_keep_is_refused(tokens, target, tmp_path, nothing_loaded):
    folder = tmp_path / "target"
    config = read_json(target.path / "model" / "config.json") | {"architectures": ["GPT2LMHeadModel"]}
    write_json(make_dir(folder / "model") / "config.json", config)
    write_json(folder / "target.json", read_json(target.path / "target.json"))
    with pytest.raises(DataError, match=r'in its GPT2LMHeadModel.*: use backend = "huggingface"'):
        capture(tmp_path, tokens, evolve(target, path=folder))


def test_a_qwen25_vl_whose_pixels_sglang_would_take_for_embeddings_is_refused(tokens, target, tmp_path, nothing_loaded):
    folder = tmp_path / "target"
    write_json(make_dir(folder / "model") / "config.json", other_family(target, "qwen2_5_vl"))
    write_json(folder / "target.json", read_json(target.path / "target.json"))
    with pytest.raises(DataError, match="interprets pixel rows of 1176 numbers as pixels, others as embeddings"):
        capture(tmp_path, tokens, evolve(target, path=folder))


def test_a_second_runtime_reads_its_own_config_at_the_same_path(tokens, target, tmp_path):
    """And what the backend refuses: without the key SGLang rotates images otherwise than transformers does."""
    folder = tmp_path / "model"
    shutil.copytree(target.path / "model", folder)
    reader = TokenReader(tokens, "train")
    (image,) = (sample for index in range(4) if (sample := reader.sample(index)).id == "two images")

    def captured():
        with SglangRuntime.start(folder, device="cpu", dtype="float32", pool_tokens=512, context_length=200) as runtime:
            return runtime.capture([image], (1, 6))[0]

    interleaved = captured()
    changed = read_json(folder / "config.json")
    del changed["text_config"]["rope_parameters"]["mrope_interleaved"]
    write_json(folder / "config.json", changed)
    difference = float((interleaved - captured()).abs().max())
    print(f"images rotated by sections instead of interleaved: {difference:.2f}")
    assert difference >= 100 * 5e-5


def test_a_config_by_which_sglang_would_rotate_images_otherwise_is_refused(tokens, target, tmp_path, nothing_loaded):
    folder, changed = tmp_path / "target", read_json(target.path / "model" / "config.json")
    del changed["text_config"]["rope_parameters"]["mrope_interleaved"]
    write_json(make_dir(folder / "model") / "config.json", changed)
    write_json(folder / "target.json", read_json(target.path / "target.json"))
    with pytest.raises(DataError, match="of this qwen3_vl lack mrope_interleaved = true"):
        capture(tmp_path, tokens, evolve(target, path=folder))


def other_family(target, model_type):
    return read_json(target.path / "model" / "config.json") | {"model_type": model_type}


def make_dir(folder):
    folder.mkdir(parents=True)
    return folder


def test_finished_shards_stay_when_a_later_sample_is_refused(tokens, target, tmp_path):
    """An image with a token too many, in the last sample but one."""
    processor = processor_of(target)
    samples = [TokenReader(tokens, "train").sample(index) for index in range(len(TokenReader(tokens, "train")))]
    place = next(index for index in range(len(samples) - 1, -1, -1) if len(samples[index].image_grid_thw))
    ids = samples[place].input_ids.clone()
    ids[-3] = TokenReader(tokens).info["image_token_id"]
    samples[place] = evolve(samples[place], input_ids=ids)
    damaged = write_tokens(tmp_path / "tokens", target, processor, samples)
    with pytest.raises(DataError, match=rf"sample {samples[place].id}: \d+ image tokens, but the engine expects"):
        capture(tmp_path / "stage", damaged, target)
    kept = sorted(file.name for file in (tmp_path / "stage" / "work").glob("*.safetensors"))
    print(f"{len(kept)} finished shards stay")
    assert len(kept) >= 2
    assert "train-00000.safetensors" == kept[0]
