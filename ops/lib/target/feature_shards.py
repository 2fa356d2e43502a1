"""Feature shards on disk: written once, read through a memory map; and the check that captured states are finite.

T tokens of a shard, S tokens of a sample, N samples of a shard, L layers, M hidden size, F = L * M, W width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import TargetFeatures, TargetModel, TokenShards
from ops.lib.data.files import artifact_file, read_json
from ops.lib.target.float8 import Float8States, StoredStates
from ops.lib.target.model import target_info

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8"}  # safetensors' names
SCALES, ERRORS = "_scales", "float8_errors"


def feature_info(
    target: TargetModel,
    tokens: TokenShards,
    layer_ids: Sequence[int],
    dtype: str,
    *,
    final_hidden: bool,
    feature_dtype: str | None = None,
    backend: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of features.json except its shards, for features that are stored or captured during training.

    dtype: of the forward pass, and of the features where feature_dtype is None.
    backend: its entry for a backend other than transformers. It is an argument since importing another backend here
    would add its code to the key of every capture.
    """
    info, of_tokens = target_info(target), read_json(tokens.path / "tokens.json")
    return {
        "format": 1,
        "target": target.digest,
        "tokens": tokens.digest,
        "target_layer_ids": list(layer_ids),
        "dtype": dtype,
        **({"feature_dtype": feature_dtype} if feature_dtype else {}),
        "hidden_size": info["hidden_size"],
        "num_target_layers": info["num_layers"],
        "positions": "sequential",
        **(backend or {"backend": "huggingface"}),
        "final_hidden": final_hidden,
        "mask_token_id": info["mask_token_id"],
        "image_backend": of_tokens["image_backend"],
        "pixel_limits": of_tokens["pixel_limits"],
        **{name: of_tokens[name] for name in ("tools_as", "tools_unlike", "reasoning_key") if name in of_tokens},
    }


def write_feature_shard(
    path: Path,
    features: StoredStates,
    input_ids: Tensor,
    loss_mask: Tensor,
    token_offsets: Tensor,
    final_hidden: StoredStates | None = None,
    errors: Sequence[float] = (),
) -> None:
    """Write a shard of features as one safetensors file.

    features [T, F], input_ids [T], loss_mask [T], token_offsets [N + 1] and, if kept, final_hidden [T, M]. Encoded
    states have their scales beside them. errors: the relative error of float8 at each layer, then of the final norm.
    """
    tensors = {
        **_tensors_of("features", features),
        "input_ids": input_ids.to(torch.int32),
        "loss_mask": loss_mask.to(torch.uint8),
        "token_offsets": token_offsets.to(torch.int64),
    }
    if final_hidden is not None:
        tensors |= _tensors_of("final_hidden", final_hidden)
    if errors:
        tensors[ERRORS] = torch.tensor(errors)
    save_file(tensors, path)


def _tensors_of(name: str, states: StoredStates) -> dict[str, Tensor]:
    if not isinstance(states, Float8States):
        return {name: states.contiguous()}
    return {name: states.values_TW.contiguous(), name + SCALES: states.scales_TL.contiguous()}


def stored_errors(path: Path) -> list[float]:
    """The relative errors of float8 that a shard was written with."""
    with safe_open(path, framework="pt") as tensors:
        errors: list[float] = tensors.get_tensor(ERRORS).tolist()
    return errors


class FeatureReader:
    """The samples of one split of a TargetFeatures artifact, in order; each read touches only its own rows."""

    def __init__(self, features: TargetFeatures, split: str) -> None:
        self.info: dict[str, Any] = read_json(features.path / "features.json")
        self.width: int = len(self.info["target_layer_ids"]) * self.info["hidden_size"]
        self.lengths: list[int] = []
        self._rows: list[tuple[Path, int, int]] = []
        for shard in self.info["shards"]:
            if shard["split"] != split:
                continue
            path = artifact_file(features.path, shard["file"])
            with safe_open(path, framework="pt") as tensors:
                self._check_stored(path, tensors)
                samples = tensors.get_slice("token_offsets").get_shape()[0] - 1
                if samples != shard["samples"]:
                    raise DataError(f"{path}: {samples} samples, but features.json says {shard['samples']}")
                offsets = tensors.get_tensor("token_offsets").tolist()
            for start, end in pairwise(offsets):
                self._rows.append((path, start, end))
                self.lengths.append(end - start)

    def _check_stored(self, path: Path, tensors: Any) -> None:
        """Check that a shard has the features that features.json describes. Raises DataError."""
        stored = tensors.get_slice("features")
        dtype = stored.get_dtype()
        found = f"{_DTYPES.get(dtype, dtype)} features of width {stored.get_shape()[1]}"
        expected = f"{self.info.get('feature_dtype', self.info['dtype'])} features of width {self.width}"
        if found != expected:
            layers = f"{len(self.info['target_layer_ids'])} layers of {self.info['hidden_size']}"
            raise DataError(f"{path}: {found}, but features.json says {expected} ({layers}); capture again")

    def __len__(self) -> int:
        return len(self._rows)

    def labels(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids int64 [S] and loss_mask bool [S] of a sample, without reading its features."""
        path, start, end = self._rows[index]
        with safe_open(path, framework="pt") as tensors:
            return (
                tensors.get_slice("input_ids")[start:end].long(),
                tensors.get_slice("loss_mask")[start:end].bool(),
            )

    def features(self, index: int, first: int, last: int) -> StoredStates:
        """Features [last - first, F] of tokens first <= j < last of a sample, as they are stored."""
        return self._slice("features", index, first, last)

    def final_hidden(self, index: int, first: int, last: int) -> StoredStates:
        """The target's hidden states after its final norm, [last - first, M]; only if the capture kept them."""
        return self._slice("final_hidden", index, first, last)

    def _slice(self, name: str, index: int, first: int, last: int) -> StoredStates:
        path, start, _ = self._rows[index]
        rows = slice(start + first, start + last)
        with safe_open(path, framework="pt") as tensors:
            states: Tensor = tensors.get_slice(name)[rows]
            if "feature_dtype" not in self.info:
                return states
            return Float8States(states, tensors.get_slice(name + SCALES)[rows])


FINAL = ("the final norm",)  # which the final hidden states come from


def check_finite(
    states: StoredStates, rows: Sequence[tuple[str, int]], parts: Sequence[str], setting: str, dtype: torch.dtype
) -> None:
    """Check that all values are finite. Raises DataError that names the sample, the part and a remedy.

    rows: id and number of rows of each sample, in order. parts: the names of the equal parts of the width. setting: the
    op's field with their dtype, in which the target computes them. It reads the states once, of encoded ones only the
    scales, and waits for the result.
    """
    states_TW = states.scales_TL if isinstance(states, Float8States) else states
    counted = "states of a token and layer" if isinstance(states, Float8States) else "captured values"
    if not states_TW.numel() or bool(torch.stack(torch.aminmax(states_TW)).isfinite().all()):
        return
    ids, counts = zip(*rows, strict=True)
    for name, states_SW in zip(ids, states_TW.split(list(counts)), strict=True):
        wrong = ~states_SW.isfinite()
        if bool(wrong.any()):
            first = next(part for part, share in zip(parts, wrong.chunk(len(parts), 1), strict=True) if share.any())
            shown = str(dtype).removeprefix("torch.")
            raise DataError(
                f"sample {name}: {int(wrong.sum()):,} of {wrong.numel():,} {counted} are not finite in {shown}, "
                f"first in those of {first}; {_remedy(dtype, setting)}"
            )


def layer_parts(layer_ids: Sequence[int]) -> list[str]:
    """The names of the parts of a feature, one for each layer."""
    return [f"layer {layer}" for layer in layer_ids]


def _remedy(dtype: torch.dtype, setting: str) -> str:
    if dtype == torch.float16:
        return f'float16 holds values up to {torch.finfo(dtype).max:,.0f}: set {setting} to "bfloat16" or "float32"'
    wider = "" if dtype == torch.float32 else f', or set {setting} to "float32"'
    return f"the target computes them so: look for damaged weights, and at this sample{wider}"
