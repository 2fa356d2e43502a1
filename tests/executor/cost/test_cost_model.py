"""The cost model on round numbers, whose results are computed by hand in the comments."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from cost_cases import VALUES, works, written
from import_graph import ROOT

from dsl.estimate import CaptureWork, TrainingWork
from dsl.launch import Launch, Pool
from dsl.read_toml import read_graph
from executor.cost.constants import GPUS, Gpu, Machines, gpu_named
from executor.cost.costs import costs
from executor.cost.model import Model, Rates
from executor.cost.rates import Measured, Reached, rates, training_flops
from executor.cost.text import cost_text
from executor.planning.preflight import graph_estimates

CAPTURE = CaptureWork(
    tokens=3_600_000,
    token_flops=1e9,
    token_bytes=1000,
    weights=8_000_000,
    pass_tokens=1000,
    memory=70,
    is_sparse=False,
    dtype="bfloat16",
    is_float8=False,
)
TRAINING = TrainingWork(
    tokens=7_200_000,
    epochs=2.0,
    step_tokens=64_000,
    sample_tokens=1000.0,
    is_counted=True,
    sample_flops=4e12,
    longest_flops=4e12,
    update_bytes=0,
    memory=lambda ranks: 100 // ranks,
    sp_degree=1,
    buffer_batches=4,
    dtype="bfloat16",
)
MACHINES = Machines(gpu=Gpu("G", 1e12, 100, 1e9), disk=1e9, wire=1e9, stream=1e9)
RATES = Rates(capture=1000.0, train=500.0, capture_source="", train_source="")
MODEL = Model(training=TRAINING, capture=CAPTURE, captured=3_600_000, tokens=7_200_000, machines=MACHINES, rates=RATES)


def with_(**changed: object) -> Model:
    """MODEL with other values of machines, training or capture, whichever has the field."""
    found = MODEL
    for part in ("machines", "training", "capture"):
        own = {name: value for name, value in changed.items() if hasattr(getattr(found, part), name)}
        found = evolve(found, **{part: evolve(getattr(found, part), **own)})
    return found


def test_a_gpu_captures_then_trains_at_its_rates() -> None:
    stored = MODEL.stored(1)
    assert (1.0, 4.0, 5.0) == (stored.capture.hours, stored.train.hours, stored.hours)  # 3,600,000 / 1000; 7.2e6 / 500
    assert 1e6 == stored.capture.disk  # 1000 tokens/s of 1000 bytes
    assert 5e5 == stored.train.disk
    assert (0.0, 0.0) == (stored.capture.wire, stored.train.wire)
    assert ("training GPUs", 3_600_000_000) == (stored.bottleneck, stored.stored_bytes)
    assert (70, 100) == (stored.capture.memory, stored.train.memory)


def test_one_gpu_that_streams_captures_and_trains_in_turns() -> None:
    streamed = MODEL.streamed(1)
    assert streamed.hours == pytest.approx(7.2e6 * (1 / 1000 + 1 / 500) / 3600)  # 6 hours: 2 and 4
    assert 0 == streamed.workers
    assert (1 / 3, 2 / 3) == pytest.approx((streamed.capture.busy, streamed.train.busy))
    assert 170 == streamed.train.memory


def test_workers_and_ranks_are_balanced() -> None:
    # 3 workers give 3000 / 1.1 = 2727 tokens/s, 5 ranks take 2500; 64 samples over 5 rows are 13 of one, so 2462
    streamed = MODEL.streamed(8)
    assert (3, 5, "training GPUs") == (streamed.workers, streamed.train.gpus, streamed.bottleneck)
    assert streamed.hours == pytest.approx(7.2e6 / (64 / 13 * 500) / 3600)
    assert streamed.capture.busy == pytest.approx(64 / 13 * 500 / 3000)
    assert (0.0, 0.0, 0) == (streamed.capture.wire, streamed.capture.disk, streamed.stored_bytes)


def test_there_are_no_more_workers_than_the_training_needs() -> None:
    # 8 samples a step: 8 rows at 4000 tokens/s, however many ranks there are; 5 workers give 4545
    streamed = with_(step_tokens=8000).streamed(16)
    assert (5, "batch") == (streamed.workers, streamed.bottleneck)


def test_a_slow_disk_limits_both_stages_and_its_full_point_is_named() -> None:
    stored = with_(disk=2e6).stored(8)  # 2000 tokens/s
    assert ("disk", "disk") == (stored.capture.limit, stored.train.limit)
    assert (0.5, 1.0) == (stored.capture.hours, stored.train.hours)
    assert "full at 2 capturing or 4 training GPUs" in stored.advice[0]
    assert "float8" in stored.advice[0]
    assert "float8" not in with_(disk=2e6, is_float8=True).stored(8).advice[0]


def test_a_step_of_few_samples_limits_many_gpus() -> None:
    stored = with_(step_tokens=6000).stored(8)  # six samples: two of eight GPUs have none
    assert "batch" == stored.train.limit
    assert stored.train.hours == pytest.approx(7.2e6 / (6 * 500) / 3600)
    assert "at most 6 GPUs busy" in stored.advice[0]
    even = with_(step_tokens=9000).stored(8)  # nine of one length: one GPU has two
    assert even.train.hours == pytest.approx(7.2e6 / (9 / 2 * 500) / 3600)


def test_no_step_is_shorter_than_its_longest_sample() -> None:
    long = with_(step_tokens=8000, longest_flops=12e12).stored(8)  # three times the mean of one sample each
    assert long.train.hours == pytest.approx(7.2e6 / (8 / 3 * 500) / 3600)


def test_ranks_that_share_a_sequence_are_one_row() -> None:
    shared = with_(step_tokens=2000, sp_degree=4)
    assert shared.stored(8).train.hours == pytest.approx(7.2e6 / (8 * 500) / 3600)  # 2 samples, 4 ranks each
    assert 0 == shared.streamed(8).train.gpus % 4
    assert 0 == shared.streamed(4).workers


def test_the_network_carries_features_and_updates_but_nothing_on_one_host() -> None:
    # 16 GPUs on 2 hosts: 8000 tokens/s of 1000 bytes are 4 MB/s a host; an update of 640 kB every 8 s is 80 kB/s
    free = with_(update_bytes=640_000, wire=1e9).stored(16)
    assert free.train.wire == pytest.approx(4e6 + 80_000)
    slow = with_(update_bytes=640_000, wire=1e6).stored(16)
    rate = 1e6 / (1000 / 2 + 10)
    assert ("wire", "wire") == (slow.capture.limit, slow.train.limit)
    assert slow.train.hours == pytest.approx(7.2e6 / rate / 3600)
    assert slow.capture.hours == pytest.approx(3.6e6 / (2e6 / 1000) / 3600)
    assert with_(wire=1.0).stored(8) == with_(wire=1e9).stored(8)
    assert "wire" == with_(wire=1e6).streamed(16).bottleneck


def test_each_process_of_a_stream_sends_by_itself() -> None:
    streamed = with_(stream=100_000).streamed(8)  # 100 tokens/s of a process: 4 workers and 4 ranks send most
    assert ("processes", 4) == (streamed.bottleneck, streamed.workers)
    assert streamed.hours == pytest.approx(7.2e6 / 400 / 3600)


def test_what_does_not_fit_a_gpu_is_said_with_the_remedy() -> None:
    lacking = evolve(MODEL, training=evolve(TRAINING, memory=lambda ranks: 130)).streamed(2).advice
    assert any(line.startswith("a training GPU needs 130 bytes and has 100 bytes") for line in lacking)
    large = evolve(MODEL, capture=evolve(CAPTURE, memory=140))
    assert any("tp_degree of capture_targets" in line for line in large.stored(2).advice)
    assert any("store the features" in line for line in large.streamed(2).advice)
    assert any("bfloat16" in line for line in evolve(MODEL, capture=evolve(CAPTURE, dtype="float32")).stored(2).advice)
    assert any("buffer_batches = 4" in line for line in with_(buffer_batches=2).streamed(2).advice)


def test_a_small_pass_takes_as_long_as_reading_the_weights() -> None:
    gpu = Gpu("G", 100e12, 1e9, 1e9)
    # 8 kB of weights a token at 1 GB/s: 8 us; 1 GFLOP at 40 % of 100 TFLOP/s: 25 us; with 100 tokens a pass, 80 us
    assert rates(TRAINING, CAPTURE, gpu, Measured()).capture == pytest.approx(40_000)
    assert rates(TRAINING, evolve(CAPTURE, pass_tokens=100), gpu, Measured()).capture == pytest.approx(12_500)


def test_what_was_measured_takes_the_constants_place() -> None:
    found = rates(TRAINING, CAPTURE, GPUS["h100"], Measured(train=Reached(flops=2e12, run="r7")))
    assert (500.0, "measured by run r7") == (found.train, found.train_source)  # 4 GFLOP a token
    assert "assumed" in found.capture_source


def test_the_metrics_of_a_training_tell_what_its_ranks_and_its_workers_reached() -> None:
    metrics = {"train/tokens_per_second": 300.0, "train/wait_share": 0.25}
    ranks = Launch(kind="ranks", nproc=2)
    # 400 tokens/s while it does not wait, of 2 ranks; 4 GFLOP a token
    assert {"train": 8e11} == training_flops(metrics, TRAINING, ranks)
    online = evolve(TRAINING, capture=CAPTURE)
    assert {} == training_flops(metrics, online, ranks)  # ranks that capture for themselves
    pool = {"stream/workers": 2.0, "capture/busy_share": 0.5, "capture/tokens_per_second": 300.0}
    with_pool = Launch(kind="ranks", nproc=2, pool=Pool(workers=2))
    assert {"train": 8e11, "capture": 3e11} == training_flops(metrics | pool, online, with_pool)


def test_a_gpu_is_found_by_the_name_of_its_driver() -> None:
    assert gpu_named("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_named("NVIDIA H100 PCIe") is GPUS["h100-pcie"]
    assert gpu_named("NVIDIA GH200 480GB") is GPUS["gh200"]
    assert gpu_named("NVIDIA GeForce RTX 3090") is None


def test_the_work_of_a_published_target_is_counted(tmp_path: Path) -> None:
    capture, training = works(written(tmp_path, "dense"))
    # 36 layers of 192.9 million weights; 36 x 4 x 32 heads x 128 x 1536 tokens seen on average
    weights = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128) + 4096
    assert capture.token_flops == pytest.approx(2 * weights + 36 * 4 * 32 * 128 * 1536)
    assert (40_965, 2_457_600_000) == (capture.token_bytes, capture.tokens)  # 5 x 4096 x 2, and 5 of id and mask
    assert (6.0, 14_745_600_000, 3072.0) == (training.epochs, training.tokens, training.sample_tokens)
    weights = 5 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128) + 5 * 4096**2 + 2 * 4096
    assert 6 * weights == training.update_bytes
    short, cut = works(tmp_path / "dense.toml", "train.max_steps=100", "train.dtype=float32")
    assert short == capture
    assert (100 * 512 * 3072, 8 * weights) == (cut.tokens, cut.update_bytes)


def test_the_example_of_the_guide_is_what_a_plan_prints() -> None:
    file = ROOT / "pipelines" / "qwen3_8b.toml"
    graph = read_graph(file, list(VALUES), [], {})
    needs = graph_estimates(graph, {}, 0).needs
    cost = costs(graph, needs, Machines(gpu=GPUS["h100"]), 128, Measured())["train"]
    printed = cost_text("train", cost, 40 * 10**12, Path("/shared/runs"))
    guide = (ROOT / "docs" / "cluster.md").read_text()
    assert "\n".join(f"    {line}" for line in printed.splitlines()) in guide


def test_experts_that_are_not_chosen_cost_nothing(tmp_path: Path) -> None:
    capture, _ = works(written(tmp_path, "sparse"))
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768 + 2 * 2048 + 2 * 128
    assert capture.token_flops == pytest.approx(2 * (48 * layer + 2048) + 48 * 4 * 32 * 128 * 1536)
    assert capture.is_sparse
