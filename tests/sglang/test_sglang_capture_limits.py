"""What the stage with backend = "sglang" may be given, and the sizes at which it ends: arguments, ranks, and pools."""

from __future__ import annotations

import re

import msgspec
import pytest
import torch
from attrs import evolve
from capture_cases import FAMILIES, make_samples, make_target, processor_of, write_tokens
from fake_stage import FakeStage
from safetensors.torch import load_file
from sglang.srt.server_args import ServerArgs

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.artifacts import TargetModel, TokenShards
from ops.capture_targets import sglang as sglang_backend
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.capture_targets.server_args import ALLOWED, FIXED, FIXED_FAMILIES
from ops.capture_targets.sglang_targets import check_degree
from ops.lib.data.token_shards import TokenReader
from ops.lib.sglang.layers import set_layers_to_capture
from ops.lib.sglang.process import make_server_args
from ops.lib.sglang.runtime import SglangRuntime


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetModel:
    return make_target("qwen3_vl", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tokens(target, tmp_path_factory) -> TokenShards:
    processor = processor_of(target)
    samples = make_samples(processor, FAMILIES["qwen3_vl"])
    return write_tokens(tmp_path_factory.mktemp("tokens") / "out", target, processor, list(samples.values()))


def config(**changes):
    given = {"splits": ("train",), "backend": "sglang", **changes}
    return CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), **given)


def capture(folder, tokens, target, **changes) -> FakeStage:
    stage = FakeStage(folder, {"tokens": tokens, "target": target})
    capture_targets(config(**changes), stage)
    return stage


def test_every_server_argument_that_is_named_is_one_of_sglangs():
    fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert set() == (ALLOWED.keys() | FIXED.keys()) - fields
    assert set() == ALLOWED.keys() & FIXED.keys()
    assert all(any(name.startswith(prefix) for name in fields) for prefix in FIXED_FAMILIES)


@pytest.mark.parametrize(
    "given", [{"attention_backend": "abacus"}, {"quantization": "abacus"}, {"kv_cache_dtype": "abacus"}]
)
def test_what_sglang_itself_refuses_is_told_and_leaves_the_process_as_it_was(tokens, target, tmp_path, given):
    ((name, value),) = given.items()
    for _attempt in range(2):
        with pytest.raises(ConfigError, match=rf"SGLang (does not start with server_args {name} = '{value}'|rejects)"):
            capture(tmp_path, tokens, target, server_args=given)


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("float32", {}, ("triton", "sdpa")),
        ("float32", {"attention_backend": "torch_native"}, ("torch_native", "sdpa")),
        ("bfloat16", {"attention_backend": "fa3"}, ("fa3", None)),
    ],
)
def test_float32_on_a_gpu_gets_attention_that_knows_it_unless_another_is_given(target, dtype, given, expected):
    made = make_server_args(
        target.path / "model", device="cuda", dtype=dtype, pool_tokens=100, context_length=50, **given
    )
    assert expected == (made.attention_backend, made.mm_attention_backend)


@pytest.mark.parametrize(
    ("tp_degree", "named"),
    [
        (3, "num_attention_heads = 2, intermediate_size = 64, vision_config.num_heads = 2, vision_config.inter"),
        (4, "num_attention_heads = 2, vision_config.num_heads = 2"),
    ],
)
def test_ranks_that_cannot_share_the_target_are_refused(target, tp_degree, named):
    with pytest.raises(
        ConfigError, match=rf"tp_degree = {tp_degree} does not divide {re.escape(named)}.*of the target"
    ):
        sglang_backend.check_target(target, config(tp_degree=tp_degree))


def test_fewer_key_value_heads_than_ranks_are_held_by_several():
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 24}
    for tp_degree in (1, 2, 4, 6):
        check_degree(sizes, tp_degree)
    with pytest.raises(ConfigError, match="tp_degree = 3 does not divide num_key_value_heads = 2 of the target's"):
        check_degree(sizes, 3)
    experts = {"num_attention_heads": 8, "intermediate_size": 9, "num_experts": 8, "moe_intermediate_size": 6}
    check_degree(experts, 4, ep_size=2)
    with pytest.raises(ConfigError, match="does not divide moe_intermediate_size = 6 of the target's"):
        check_degree(experts, 4)


def test_a_sample_longer_than_what_memory_holds_is_refused_and_the_target_closed(tokens, target, tmp_path, monkeypatch):
    """A pool that is one token too small, as memory would make it."""
    longest = max(TokenReader(tokens, "train").records, key=lambda record: record["tokens"])
    start, limit = SglangRuntime.start, longest["tokens"] - 1

    def small(*given, **options):
        runtime = start(*given, **options)
        runtime.pool_tokens = limit
        return runtime

    monkeypatch.setattr(SglangRuntime, "start", small)
    for _attempt in range(2):  # the first one gave everything back
        with pytest.raises(DataError, match=rf"sample {longest['id']}: .* more than what memory holds, of {limit}: dr"):
            capture(tmp_path, tokens, target)


@pytest.mark.parametrize("page", [16, 48])
def test_the_longest_sample_fits_into_a_pool_of_pages(target, page):
    """Though its last page is not filled. The pages themselves are dealt out by a kernel that no CPU runs."""
    length = 199
    with SglangRuntime.start(
        target.path / "model",
        device="cpu",
        dtype="float32",
        pool_tokens=length,
        context_length=length,
        server_args={"page_size": page},
    ) as runtime:
        assert page == runtime.runner.page_size
        runtime.check_length("the longest", length)
        assert length < runtime.pool_tokens < length + page
        assert runtime.pool_tokens <= runtime.runner.token_to_kv_pool_allocator.available_size()


def test_a_pool_of_one_token_captures_samples_of_one_token(tokens, target):
    sample = TokenReader(tokens, "train").sample(0)
    one = evolve(sample, input_ids=sample.input_ids[:1], loss_mask=sample.loss_mask[:1], prompt_tokens=1)
    with SglangRuntime.start(
        target.path / "model", device="cpu", dtype="float32", pool_tokens=1, context_length=1
    ) as runtime:
        first, second = runtime.capture([one, one], (1, 6))
    assert torch.equal(first, second)
    assert len(first) == 1 and float(first.abs().max()) > 0


def test_the_layers_of_the_nodes_recipe_reach_the_setter(tokens, target, tmp_path, monkeypatch):
    asked = []

    def watched(model, layer_ids, num_layers):
        asked.append(list(layer_ids))
        set_layers_to_capture(model, layer_ids, num_layers)

    monkeypatch.setattr("ops.lib.sglang.runtime.set_layers_to_capture", watched)
    capture(tmp_path, tokens, target, recipe="eagle3")
    assert [[1, 3, 4]] == [one for number, one in enumerate(asked) if one not in asked[:number]]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_gpu_sglang_captures_what_transformers_does(name, dtype, tolerance, tmp_path):
    """With the kernels that serve there. bfloat16 is compared by the distance of all states, as part of their size."""
    if dtype == "float32" and name.startswith("qwen3_5"):
        pytest.skip("SGLang's linear attention on a GPU does not support float32")
    target = make_target(name, tmp_path / "target")
    processor = processor_of(target)
    samples = list(make_samples(processor, FAMILIES[name]).values())
    tokens = write_tokens(tmp_path / "tokens", target, processor, samples)
    folders = []
    for backend in ("sglang", "huggingface"):
        stage = FakeStage(tmp_path / backend, {"tokens": tokens, "target": target}, device="cuda")
        capture_targets(config(backend=backend, dtype=dtype), stage)
        folders.append(stage.out_dir)
    for file in sorted(folders[0].glob("*.safetensors")):
        ours, theirs = (load_file(folder / file.name)["features"].double() for folder in folders)
        if dtype == "float32":
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        difference = float((ours - theirs).norm() / theirs.norm())
        print(f"{name}, {dtype}, {file.name}: {difference:.1e} of the states' size")
        assert difference <= tolerance
