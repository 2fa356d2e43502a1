"""Quantised weights of a target: which are taken, what their tensors stand for, and what becomes of them where
transformers runs the target. Loads no torch.

SGLang computes with such weights as they are. transformers dequantises some methods while it loads them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.lib.data.files import shown_json

if TYPE_CHECKING:
    from ops.lib.target.stored_weights import StoredTensor

SETTINGS = ("quantization_config", "compression_config")  # of config.json, or of a part of it
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
UNQUANTISED = ("F64", "F32", "F16", "BF16")  # dtypes by safetensors
OF_BUFFERS = ("I64", "BOOL")  # of positions and masks that older checkpoints have among their weights
# Last names that only quantisation gives: models have a `scale`, `std_scale` or `per_expert_scale` of their own.
OF_QUANTISATION = re.compile(
    r"(weight|input|output|k|v)(_global)?_scale(_\d+)?|.+_scale_inv|(.+_)?scales|.+_zero_point|qzeros|qweight|weight_packed"
    r"|weight_shape|.+_blocks|g_idx|SCB|(nested_)?(absmax|quant_map)|bitsandbytes.*"
)
OF_PARTNER = re.compile(r"[._]scale$")  # of a name that is one of quantisation if what is before it is quantised
# Last names of tensors of which no quantisation is the sign; of Qwen's families, all that there are.
LAST_NAMES = {"weight", "bias", "A_log", "dt_bias", "gate_up_proj", "down_proj", "inv_freq"}

DEQUANTISED = ("fp8", "mxfp4")  # by transformers while it loads them
METHODS = (*DEQUANTISED, "awq", "gptq", "compressed-tensors")
FP8_BLOCK = (128, 128)  # of weights by one scale, where the file names none
OF_FP8 = "F8_E4M3"
PACKED = re.compile(r"(?:qweight|weight_packed|_blocks)$")  # last names of tensors that hold several numbers in one
BITS = {"I32": 32, "U32": 32, "I64": 64, "U8": 8, "I8": 8, "I16": 16}  # of an element of these, by safetensors' names
UNQUANTISED_ONE = "use the checkpoint that it was quantised from"
BY_SGLANG = 'capture with backend = "sglang", which computes with them as they are'


def method_of(config: Mapping[str, Any]) -> str | None:
    """The method of quantisation that a config.json names, if it is one of METHODS."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    return method if method in METHODS else None


def has_fp8_blocks(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names FP8 weights with a scale for each block of them, weight_scale_inv in the files."""
    return method_of(config) == "fp8" and bool(config["quantization_config"].get("weight_block_size"))


def signs_of(directory: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> list[str]:
    """What shows that weights are quantised, in words: fields of config.json, files, names and dtypes of tensors."""
    return [*_settings(directory, config), *_quantised(stored)]


def method_mistake(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> str:
    """A text on why the tensors are not those of the method that config.json names; empty if they may be, or if
    there are none yet.
    """
    if stored and next(_quantised(stored), None) is None:
        return (
            f"config.json names {method_of(config)} as the method of quantisation, and no tensor is quantised; use the "
            "config.json that belongs to these files"
        )
    return ""


def dequantising_mistake(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor], instead: str = BY_SGLANG
) -> str:
    """A text on why transformers cannot run a target with these weights; empty if it can.

    stored: the tensors of its files; empty where they are not known yet. instead: what to do without running it.
    """
    method = method_of(config)
    if method is None:
        return ""
    remedy = f"{instead}, or {UNQUANTISED_ONE}"
    if method not in DEQUANTISED:
        return f"transformers does not dequantise the {method} weights of this target: {remedy}"
    if method == "fp8" and importlib.util.find_spec("accelerate") is None:
        return f"transformers dequantises FP8 weights only with the package accelerate: install it, or {remedy}"
    wrong = _without_scales(config, stored)
    return f"transformers does not dequantise {wrong}: {remedy}" if wrong else ""


def dequantising_note(config: Mapping[str, Any], dtype: str) -> str | None:
    """What is other than at a server where transformers runs a quantised target; None for an unquantised one."""
    method = method_of(config)
    if method is None:
        return None
    return (
        f"the {method} weights of the target are dequantised to {dtype} here, and a server computes with them as they "
        "are: its states differ, and it may accept fewer tokens"
    )


def training_mistake(config: Mapping[str, Any]) -> str:
    """A text on why a model of this config.json cannot be trained; empty if quantisation does not prevent it."""
    method = method_of(config)
    return f"the weights are quantised ({method}) and cannot be trained: {UNQUANTISED_ONE}" if method else ""


def numbers_of(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that the tensors stand for, by the tensors' names; packed ones in one dimension.

    Left out is what only describes others, such as scales.
    """
    method = method_of(config)
    if method is None:
        return {name: tensor.shape for name, tensor in stored.items()}
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in stored.items():
        last = name.rpartition(".")[2]
        if PACKED.search(last) and tensor.dtype in BITS:
            found[name] = (prod(tensor.shape) * BITS[tensor.dtype] // _bits(config),)
        elif not quantises(name, stored):
            found[name] = tensor.shape
    return found


def quantises(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor's name shows that it describes quantised weights: by itself, or as the scale of one of them."""
    if OF_QUANTISATION.fullmatch(name.rpartition(".")[2]):
        return True
    base = OF_PARTNER.sub("", name)
    described = (stored.get(base) or stored.get(f"{base}.weight")) if base != name else None
    return described is not None and described.dtype not in UNQUANTISED


def _bits(config: Mapping[str, Any]) -> int:
    """The bits of a packed number."""
    settings = config["quantization_config"]
    groups = settings.get("config_groups") or {}
    of_groups = [(group.get("weights") or {}).get("num_bits") for group in groups.values()]
    return int(settings.get("bits") or next(filter(None, of_groups), 4))


def _settings(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Texts on quantisation found in the JSON files."""
    parts = {"": config} | {f"{name}.": part for name, part in config.items() if isinstance(part, Mapping)}
    for prefix, part in parts.items():
        for name in SETTINGS:
            if part.get(name):
                yield f"{prefix}{name} of config.json{_method(part[name])}"
    yield from (name for name in FILES if (directory / name).exists())


def _method(settings: Any) -> str:
    named = (settings.get("quant_method") or settings.get("quant_algo")) if isinstance(settings, Mapping) else settings
    return f": {shown_json(named)}" if named else ""


def _quantised(stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    for name, tensor in sorted(stored.items()):
        if tensor.dtype not in (*UNQUANTISED, *OF_BUFFERS):
            yield f"{name} of dtype {tensor.dtype}"
        elif quantises(name, stored):
            yield name


def _without_scales(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> str:
    """The first tensor without scales by which transformers dequantises it rightly, in words; empty for none.

    It takes the size of FP8's blocks from the number of scales, so a last block that is not whole shifts all others.
    """
    block = config["quantization_config"].get("weight_block_size") or FP8_BLOCK
    for name, tensor in sorted(stored.items()):
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" not in stored:
            return f"{name} without scales"
        if tensor.dtype != OF_FP8:
            continue
        scales = stored.get(f"{name}_scale_inv")
        if scales is None or len(scales.shape) < 2:
            return f"{name} of FP8 without scales of blocks ({name}_scale_inv)"
        pairs = zip(tensor.shape[-2:], scales.shape[-2:], block, strict=True)
        if any(count > 1 and size != count * width for size, count, width in pairs):
            return f"{name} of FP8 whose sizes {list(tensor.shape)} are not multiples of its blocks {list(block)}"
    return ""
