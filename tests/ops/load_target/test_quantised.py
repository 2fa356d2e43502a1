"""Targets with quantised weights: what transformers dequantises while it loads them, and what is left to a server."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from any_targets import any_checkpoint
from fake_stage import FakeStage
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsl.errors import DataError
from dsl.op import Ref
from ops.artifacts import TargetModel
from ops.capture_targets.conflicts import backend_note, conflicts
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.plan import weights_bytes
from ops.evaluate.conflicts import conflicts as of_evaluation
from ops.evaluate.op import Evaluate
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.plan import missing_here as missing_for_training
from ops.lib.forecasts import TargetForecast, TargetStated, read_target_config
from ops.lib.target import quantised
from ops.lib.target.model import Target
from ops.lib.target.sizes import TargetSizes
from ops.load_target.op import LoadTarget
from ops.load_target.plan import missing_here
from ops.load_target.run import load_target
from ops.regenerate_answers.conflicts import conflicts as of_answers
from ops.regenerate_answers.op import RegenerateAnswers
from ops.train_dflash.conflicts import conflicts as of_training
from ops.train_dflash.op import TrainDflash

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 16  # of FP8 weights
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


def rewritten(source: Path, folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A copy of a checkpoint with other tensors and these settings of quantisation."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    if settings:
        config["quantization_config"] = dict(settings)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def mxfp4(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [E, out, G, 16], scales [E, out, G] and the weight [E, in, out] that they stand for.

    shape: of the weight [E, in, out]. A byte holds two numbers of four bits, the lower one first; a scale is an
    exponent of 2 plus 127. Source: OCP Microscaling Formats 1.0, and the published gpt-oss checkpoints.
    """
    random = torch.Generator().manual_seed(seed)
    experts, inner, outer = shape
    codes = torch.randint(0, 16, (experts, outer, inner // 32, 32), generator=random)
    scales = torch.randint(123, 126, (experts, outer, inner // 32), generator=random)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    numbers = torch.tensor(FP4)[codes] * 2.0 ** (scales[..., None] - 127)
    return blocks, scales.to(torch.uint8), numbers.reshape(experts, outer, inner).transpose(1, 2)


def fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An FP8 weight, its scales by block, and the weight that both stand for."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scales[:, None, :, None]).reshape(weight.shape)
    return codes.reshape(weight.shape), scales, numbers


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A gpt-oss with experts in MXFP4, as published ones are, and the same in bfloat16."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    plain = any_checkpoint("gpt_oss", folder / "source")
    stored = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    packed = dict(stored)
    for seed, name in enumerate([name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]):
        shape = tuple(packed.pop(name).shape)
        packed[f"{name}_blocks"], packed[f"{name}_scales"], numbers = mxfp4(shape, seed)
        stored[name] = numbers.bfloat16()
        assert torch.equal(stored[name].float(), numbers)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return rewritten(plain, folder / "mxfp4", settings, packed), rewritten(plain, folder / "plain", {}, stored)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama whose projections are in FP8, and the same dequantised, in float32."""
    folder = tmp_path_factory.mktemp("llama")
    source = any_checkpoint("llama", folder / "source")
    plain = load_file(source / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if "_proj." in name]:
        packed[name], packed[f"{name}_scale_inv"], plain[name] = fp8(plain[name])
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return rewritten(source, folder / "fp8", settings, packed), rewritten(source, folder / "plain", {}, plain)


def loaded(checkpoint: Path, folder: Path) -> TargetModel:
    assert {} == missing_here(LoadTarget(checkpoint=str(checkpoint)))
    stage = FakeStage(folder)
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    return stage.artifact(TargetModel)


def states(target: TargetModel, dtype: torch.dtype = torch.float32) -> Tensor:
    model = Target.load(target, dtype=dtype).model
    with torch.inference_mode():
        return torch.stack(model(torch.arange(5, 40)[None], output_hidden_states=True).hidden_states)


def test_mxfp4_experts_are_run_as_what_they_stand_for(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = (loaded(folder, tmp_path / folder.name) for folder in gpt_oss)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(states(plain, dtype), states(packed, dtype))
    kept = json.loads((packed.path / "model" / "config.json").read_text())["quantization_config"]
    assert "mxfp4" == kept["quant_method"] and "dequantize" not in kept  # a server gets the weights as they are
    assert {"_blocks", "_scales"} == {
        f"_{name.rpartition('_')[2]}"
        for name in load_file(packed.path / "model" / "model.safetensors")
        if "experts" in name and not name.endswith("bias")
    }


@pytest.mark.skipif(not HAS_ACCELERATE, reason="transformers needs accelerate for FP8")
def test_fp8_weights_are_run_as_what_they_stand_for(llama: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = (loaded(folder, tmp_path / folder.name) for folder in llama)
    assert torch.equal(states(plain), states(packed))


def test_fp8_weights_without_the_package_for_them_are_refused(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: None)
    stage = FakeStage(tmp_path)
    load_target(LoadTarget(checkpoint=str(llama[0])), stage)
    assert "the weights are not measured: transformers dequantises FP8 weights only" in capsys.readouterr().out
    with pytest.raises(DataError, match="dequantises FP8 weights only with the package accelerate: install it, or cap"):
        Target.load(stage.artifact(TargetModel))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda name, code, scale: {name: code}, "of FP8 without scales of blocks"),
        (
            lambda name, code, scale: {name: code, f"{name}_scale_inv": scale[:1, :1].reshape(1)},
            "of FP8 without scales of blocks",
        ),
        (
            lambda name, code, scale: {name: code[:24], f"{name}_scale_inv": scale[:2]},
            r"of FP8 whose sizes \[24, 64\] are not multiples of its blocks \[16, 16\]",
        ),
    ],
)
def test_fp8_weights_that_transformers_would_read_wrongly_are_refused(
    llama: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[..., dict[str, Tensor]],
    part: str,
) -> None:
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: object())
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = load_file(llama[0] / "model.safetensors")
    code, scale = stored.pop(name), stored.pop(f"{name}_scale_inv")
    settings = json.loads((llama[0] / "config.json").read_text())["quantization_config"]
    folder = rewritten(llama[0], tmp_path / "checkpoint", settings, {**stored, **change(name, code, scale)})
    with pytest.raises(DataError, match=part):
        Target.from_directory(folder, {})
    promised = {"draft": None, "target": TargetForecast.of(read_target_config(folder), folder), "tokens": None}
    evaluation = Evaluate(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"))
    assert re.search(f"{part}.*: leave out this node", of_evaluation(evaluation, promised)["target"])


def test_scales_that_are_missing_are_found(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    stored = load_file(gpt_oss[0] / "model.safetensors")
    name = next(name for name in stored if name.endswith("_scales"))
    del stored[name]
    folder = rewritten(gpt_oss[0], tmp_path / "checkpoint", {"quant_method": "mxfp4"}, stored)
    with pytest.raises(DataError, match=f"does not dequantise {name.removesuffix('_scales')}_blocks without scales: "):
        Target.from_directory(folder, {})


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 32}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


def packed_ints(kind: str, name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """Tensors of a layer's weight [rows, columns] in the form of a method; their values are of no matter here."""
    base, groups = name.removesuffix("weight"), columns // 32
    if kind == "awq":
        return {
            f"{base}qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
            f"{base}qzeros": torch.zeros(groups, rows // 8, dtype=torch.int32),
            f"{base}scales": torch.zeros(groups, rows, dtype=torch.float16),
        }
    if kind == "gptq":
        return {
            f"{base}qweight": torch.zeros(columns // 4, rows, dtype=torch.int32),
            f"{base}qzeros": torch.zeros(groups, rows // 4, dtype=torch.int32),
            f"{base}scales": torch.zeros(groups, rows, dtype=torch.float16),
            f"{base}g_idx": torch.zeros(columns, dtype=torch.int32),
        }
    return {
        f"{base}weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
        f"{base}weight_scale": torch.zeros(rows, groups, dtype=torch.bfloat16),
        f"{base}weight_shape": torch.tensor([rows, columns]),
    }


@pytest.fixture(params=[AWQ, GPTQ, COMPRESSED], ids=lambda settings: settings["quant_method"])
def integers(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = any_checkpoint("llama", tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    for name in [name for name in stored if "_proj." in name]:
        stored |= packed_ints(request.param["quant_method"], name, *stored.pop(name).shape)
    return rewritten(source, tmp_path / "checkpoint", request.param, stored)


def test_what_transformers_does_not_dequantise_is_a_target_of_a_server_only(
    integers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = FakeStage(tmp_path / "stage")
    load_target(LoadTarget(checkpoint=str(integers)), stage)
    out = stage.artifact(TargetModel).path
    method = json.loads((integers / "config.json").read_text())["quantization_config"]["quant_method"]
    wrong = f"transformers does not dequantise the {method} weights of this target"
    whole = "use the checkpoint that it was quantised from"
    sentence = f'{wrong}: capture with backend = "sglang", which computes with them as they are, or {whole}'
    assert f"info: the weights are not measured: {sentence}\n" in capsys.readouterr().out
    target = TargetStated.read(out, "digest")
    inputs = {"tokens": Ref("a"), "target": Ref("b")}
    of_capture = {"tokens": None, "target": target}
    config = CaptureTargets(**inputs, target_layer_ids=(0, 2), dtype="bfloat16")
    assert {"backend": sentence} == conflicts(config, of_capture)
    config = CaptureTargets(**inputs, target_layer_ids=(0, 2), dtype="bfloat16", backend="sglang")
    assert {} == conflicts(config, of_capture)
    config = CaptureTargets(**inputs, target_layer_ids=(0, 2), backend="sglang")
    assert "bfloat16 or float16, and not in float32" in conflicts(config, of_capture)["dtype"]
    evaluation = Evaluate(draft=Ref("c"), **inputs)
    assert of_evaluation(evaluation, {"draft": None, **of_capture}) == {
        "target": f"{wrong}: leave out this node and those that read its report (check_export), and have a server "
        f"report accepted lengths (`dflow serve`), or {whole}"
    }
    answers = of_answers(RegenerateAnswers(samples=Ref("d"), target=Ref("b")), {"samples": None, "target": target})
    assert answers["target"] == f'{wrong}: let a server answer, with backend = "endpoint", or {whole}'
    shared: Any = {"batches": Ref("e"), "target": Ref("b"), "tokens": Ref("a"), "block_size": 4, "num_layers": 1}
    training = TrainDflash(features=Ref("d"), eval_every=10, **shared)
    given = {"target": target}
    assert of_training(training, given)["target"] == f"{wrong}: set eval_prompts = 0, or {whole}"
    assert "target" not in of_training(TrainDflash(features=Ref("d"), **shared), given)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_a_capture_by_transformers_says_what_it_differs_in(
    kind: str, gpt_oss: tuple[Path, Path], llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_target_config((gpt_oss if kind == "mxfp4" else llama)[0])
    capture = CaptureTargets(tokens=Ref("a"), target=Ref("b"), dtype="bfloat16")
    assert backend_note(capture, config) == (
        f"the {kind} weights of the target are dequantised to bfloat16 here, and a server computes with them as they "
        'are: its states differ, and it may accept fewer tokens; backend = "sglang" captures those of the server'
    )
    assert backend_note(CaptureTargets(tokens=Ref("a"), target=Ref("b"), backend="sglang"), config) is None
    assert backend_note(capture, read_target_config((gpt_oss if kind == "mxfp4" else llama)[1])) is None


def test_numbers_are_counted_and_not_what_holds_them(
    gpt_oss: tuple[Path, Path], llama: tuple[Path, Path], integers: Path
) -> None:
    def forecast(folder: Path) -> TargetForecast:
        return TargetForecast.of(read_target_config(folder), folder)

    plain = sum(tensor.numel() for tensor in load_file(llama[1] / "model.safetensors").values())
    assert plain == forecast(llama[0]).sizes.parameters == forecast(llama[1]).sizes.parameters
    assert plain == forecast(integers).sizes.parameters
    assert forecast(gpt_oss[1]).sizes.parameters == forecast(gpt_oss[0]).sizes.parameters
    stored = load_file(gpt_oss[0] / "model.safetensors").values()
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    assert size == forecast(gpt_oss[0]).quantised_bytes
    assert forecast(gpt_oss[1]).quantised_bytes is None
    served = CaptureTargets(tokens=Ref("a"), target=Ref("b"), dtype="bfloat16", backend="sglang")
    assert size == weights_bytes(served, forecast(gpt_oss[0]))
    assert 2 * forecast(gpt_oss[0]).sizes.parameters == weights_bytes(
        CaptureTargets(tokens=Ref("a"), target=Ref("b"), dtype="bfloat16"), forecast(gpt_oss[0])
    )
    only_config = TargetSizes.of(read_target_config(gpt_oss[0]))
    assert 0.02 > abs(only_config.parameters / forecast(gpt_oss[0]).sizes.parameters - 1)


def test_quantised_weights_are_not_trained(llama: tuple[Path, Path]) -> None:
    missing = missing_for_training(FinetuneVlm(tokens=Ref("a"), init=str(llama[0]), steps=1))
    assert missing["init"].endswith(
        "the weights are quantised (fp8) and cannot be trained: use the checkpoint that it was quantised from"
    )


def test_a_method_without_quantised_tensors_is_a_mistake(llama: tuple[Path, Path], tmp_path: Path) -> None:
    stored = load_file(llama[1] / "model.safetensors")
    folder = rewritten(llama[1], tmp_path / "checkpoint", AWQ, stored)
    assert "config.json names awq as the method of quantisation, and no tensor is quantised" in next(
        iter(missing_here(LoadTarget(checkpoint=str(folder))).values())
    )


def test_a_head_that_is_quantised_is_not_found(llama: tuple[Path, Path], tmp_path: Path) -> None:
    stored = load_file(llama[0] / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.float8_e4m3fn)
    settings = json.loads((llama[0] / "config.json").read_text())["quantization_config"]
    folder = rewritten(llama[0], tmp_path / "checkpoint", settings, stored)
    assert "none of the tensors end in lm_head.weight" in next(
        iter(missing_here(LoadTarget(checkpoint=str(folder))).values())
    )
