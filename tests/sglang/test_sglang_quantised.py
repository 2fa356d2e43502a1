"""States of targets with FP8 weights, captured by SGLang's own model code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from any_targets import any_checkpoint
from family_checkpoints import token_sample
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsl.errors import DataError
from dsl.op import Ref
from ops.capture_targets.backend import forward_batch
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.sglang_targets import check_config
from ops.lib.data.files import read_json, write_json
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.target.model import Target, describe_target, read_config
from ops.lib.vision.processor import load_processor

LAYER_IDS = (0, 1, 3)
MOST = 448.0  # of FP8's numbers (E4M3)
OPTIONS = CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), backend="sglang", dtype="bfloat16")
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


SETTINGS = {"compressed-tensors": CHANNELS, "fp8": BLOCKS}


def quantised(folder: Path, method: str, kind: str = "qwen3") -> tuple[Path, Path]:
    """A checkpoint with FP8 weights, and one with the numbers that these stand for."""
    plain, packed = (any_checkpoint(kind, folder / name, head_dim=16) for name in ("plain", "packed"))
    stored = load_file(packed / "model.safetensors")
    numbers = dict(stored)
    for name in [name for name in stored if "_proj." in name]:
        weight = stored[name].float()
        if method == "fp8":
            blocks = weight.unflatten(0, (-1, 16)).unflatten(-1, (-1, 16))
            scales = blocks.abs().amax((1, 3), keepdim=True) / MOST
            codes = (blocks / scales).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
        else:
            scales = weight.abs().amax(1, keepdim=True) / MOST
            codes = (weight / scales).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scales
        stored[name], numbers[name] = (each.reshape(weight.shape) for each in (codes, codes.float() * scales))
    for checkpoint, tensors in ((plain, numbers), (packed, stored)):
        save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    write_json(packed / "config.json", read_json(packed / "config.json") | {"quantization_config": SETTINGS[method]})
    return plain, packed


def distance(ours: Tensor, theirs: Tensor, width: int) -> float:
    """The mean distance of a token's state of one layer, relative to its norm."""
    a, b = (states.float().view(len(states), -1, width) for states in (ours, theirs))
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).mean())


@pytest.mark.parametrize("method", SETTINGS)
def test_states_of_fp8_weights_are_near_those_of_their_numbers(tmp_path, method, show):
    """SGLang runs them in bfloat16, and rounds activations to FP8 too, by a sixteenth each: 0.1 of a state here."""
    plain, packed = quantised(tmp_path, method)
    check_config(read_config(packed), OPTIONS)
    sample = token_sample(load_processor(str(plain)), "What is it?", "It is red.", name="a")
    ours = Target.from_directory(plain, describe_target(plain, 5, (2,)))
    [expected] = forward_batch(ours, [sample], LAYER_IDS)[0]
    with SglangRuntime.start(packed, device="cpu", dtype="bfloat16", pool_tokens=512, context_length=200) as runtime:
        [found] = runtime.capture([sample], LAYER_IDS)
        [before] = runtime.capture([sample], [layer_id - 1 for layer_id in LAYER_IDS[1:]])
    near, off = distance(found, expected, ours.hidden_size), distance(before, expected[:, 64:], ours.hidden_size)
    show(f"{method}: {near:.3f}, the layer before {off:.2f}")
    assert near < 0.2 and off > 0.5


def test_sglangs_llama_loses_scales_of_fp8_blocks_and_its_states_are_no_numbers(tmp_path):
    """It renames weight_scale_inv, which its layers have, to weight_scale; so a plan refuses such a capture."""
    plain, packed = quantised(tmp_path, "fp8", "llama")
    with pytest.raises(DataError, match="does not load in its LlamaForCausalLM, so its states are no numbers"):
        check_config(read_config(packed), OPTIONS)
    sample = token_sample(load_processor(str(plain)), "What is it?", "It is red.", name="a")
    with SglangRuntime.start(packed, device="cpu", dtype="bfloat16", pool_tokens=512, context_length=200) as runtime:
        [found] = runtime.capture([sample], LAYER_IDS)
    assert not found.isfinite().all()
