"""The two ends of a target, its embedding and its lm_head, read from the files of a checkpoint.

V vocabulary, M hidden size of the target
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ops.lib.vision.families import OTHER_PARTS

EMBED_ENDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
HEAD_ENDINGS = ("lm_head.weight",)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors


@frozen
class Ends:
    """Tensor names of the embedding and the head in the checkpoint's files; equal if they are tied."""

    embed_key: str
    lm_head_key: str


def find_ends(
    directory: Path, shape: tuple[int, int], tied: bool, embed_key: str | None = None, lm_head_key: str | None = None
) -> Ends:
    """Finds the tensors of shape [V, M], or checks the given ones.

    A tied model's lm_head.weight, if its files hold one, is equal to the embedding (`weights_mistakes`). Raises
    DataError with the candidates if a key is missing, has another shape, or is ambiguous.
    """
    shapes = {key: tuple(_shape(file, key)) for key, file in tensor_files(directory).items()}
    fitting = sorted(key for key, found in shapes.items() if found == shape and not _elsewhere(key))
    embed = _find("embed_key", embed_key, EMBED_ENDINGS, fitting, directory, shape)
    if not tied:
        others = [key for key in fitting if key != embed]
        return Ends(embed, _find("lm_head_key", lm_head_key, HEAD_ENDINGS, others, directory, shape))
    if lm_head_key not in (None, embed):
        raise DataError(
            f'{directory}: lm_head_key = "{lm_head_key}", but the config has tie_word_embeddings set, so the head is '
            f"{embed}"
        )
    return Ends(embed, embed)


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


def _find(
    field: str, given: str | None, endings: tuple[str, ...], fitting: Sequence[str], directory: Path, shape: tuple
) -> str:
    """The given key, or the only candidate with a known ending."""
    listed = f"the tensors of shape {list(shape)} are: {', '.join(fitting) or 'none'}"
    if given is not None:
        if given not in fitting:
            raise DataError(f'{directory}: {field} = "{given}" is not one of the candidates; {listed}')
        return given
    found = [key for key in fitting if key.endswith(endings)]
    if len(found) != 1:
        count = "none" if not found else f"{len(found)}"
        raise DataError(
            f"{directory}: {count} of the tensors end in {' or '.join(endings)}; {listed}; name one of them as {field}"
        )
    return found[0]


def _elsewhere(key: str) -> bool:
    return any(f".{part}" in f".{key}" for part in OTHER_PARTS)


def _shape(file: Path, key: str) -> list[int]:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_slice(key).get_shape()
