"""The tensors of a safetensors file: shapes and dtypes by its header, and a digest of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dsl.errors import DataError

Stored = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, safetensors dtype


def stored_tensors(path: Path) -> Stored:
    """Shape and dtype of every tensor, from the file's header. Raises DataError for a truncated or damaged file."""
    try:
        with safe_open(path, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot be read ({error})") from error


def tensors_digest(path: Path) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
