"""The two ends of a target, its embedding and its lm_head, read from the files of a checkpoint.

V vocabulary, M hidden size of the target
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.data.files import read_json
from ops.lib.target.checkpoint_files import weight_files
from ops.lib.vision.family_config import text_part

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors


def frozen_ends(
    target: TargetModel, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Embedding and lm_head weight, [V, M] each; nothing else is read from the checkpoint's files.

    They go from the file's pages to the device and are cast there: a rank allocates no host memory for them.
    """
    info: Mapping[str, Any] = read_json(target.path / "target.json")
    files = tensor_files(target.path / "model")

    def read(key: str) -> Tensor:
        with safe_open(files[key], framework="pt") as tensors:
            return tensors.get_tensor(key).to(device).to(dtype)

    embed = read(info["embed_key"])
    head = embed if info["lm_head_key"] == info["embed_key"] else read(info["lm_head_key"])
    return embed, head


@frozen
class HeadSettings:
    """What a target makes of the product of its final state with the head: x = scale * (h W^T + b), and with a soft cap
    soft_cap * tanh(x / soft_cap). bias: whether there is a b, a tensor beside the head's weight.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    bias: bool = False


BIASED_HEADS = ("phi", "gptj", "codegen")  # by their classes, without a field


def head_settings(config: Mapping[str, Any]) -> HeadSettings:
    """The settings of a target's head by its complete config.json, as `load_target` writes it."""
    text = text_part(config)
    scale = _first(text.get("logit_scale"), text.get("lm_head_multiplier"), 1.0)
    if text.get("logits_scaling"):
        scale = text["logits_scaling"] if text.get("model_type") == "hyperclovax" else 1.0 / text["logits_scaling"]
    bias = text.get("lm_head_bias", text.get("model_type") in BIASED_HEADS)
    return HeadSettings(
        float(scale),
        _first(text.get("final_logit_softcapping"), text.get("logits_soft_cap")),
        bool(bias),
    )


def embedding_scale(config: Mapping[str, Any]) -> float:
    """What a target multiplies a row of its embedding's weight by, by its complete config.json."""
    text = text_part(config)
    kind = str(text.get("model_type"))
    if kind.startswith(SQUARE_ROOT) or (kind == "afmoe" and text.get("mup_enabled")):
        return float(text["hidden_size"] ** 0.5)
    return float(_first(text.get("embedding_multiplier"), 1.0))


SQUARE_ROOT = ("gemma", "recurrent_gemma", "vaultgemma", "t5gemma")  # model types that scale it by sqrt(hidden_size)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def stored_dtype(directory: Path) -> torch.dtype | None:
    """The dtype of a checkpoint's floating tensors; None for several, or for one that no computation supports."""
    found: set[str] = set()
    for file in sorted(set(tensor_files(directory).values())):
        with safe_open(file, framework="pt") as tensors:
            found |= {each.get_dtype() for each in map(tensors.get_slice, tensors.keys())}
    floating = {name for name in found if name.startswith(("F", "BF"))}
    return DTYPES.get(floating.pop()) if len(floating) == 1 else None


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, of those that transformers loads. Raises DataError if the directory has none, or
    a damaged one.
    """
    files = weight_files(directory)
    if not files:
        raise DataError(f"{directory}: no *.safetensors in this target directory; other formats are not supported")
    names: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise DataError(f"{file}: damaged or truncated ({error}); copy the checkpoint again") from error
    return names
