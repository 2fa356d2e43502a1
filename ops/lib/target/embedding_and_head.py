"""The two ends of a target, its embedding and its lm_head, read from the files of a checkpoint.

V vocabulary, M hidden size of the target
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import evolve, field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.data.files import read_json, read_object
from ops.lib.target.checkpoint_files import weight_files
from ops.lib.target.head_settings import PLAIN, HeadSettings, head_settings
from ops.lib.target.stored_weights import Ends, head_bias
from ops.lib.vision.family_config import with_defaults

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors


def frozen_ends(
    target: TargetModel, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Head]:
    """Embedding [V, M] and head; nothing else is read from the checkpoint's files.

    They are copied from the file's pages to the device and cast there, without host memory of the rank.
    """
    info: Mapping[str, Any] = read_json(target.path / "target.json")
    files = tensor_files(target.path / "model")

    def read(key: str) -> Tensor:
        with safe_open(files[key], framework="pt") as tensors:
            return tensors.get_tensor(key).to(device).to(dtype)

    settings = head_settings(with_defaults(read_object(target.path / "model" / "config.json")))
    embed, head_key = read(info["embed_key"]), info["lm_head_key"]
    head = embed if head_key == info["embed_key"] else read(head_key)
    bias_key = head_bias(target.path / "model", files, Ends(info["embed_key"], head_key), settings.bias)
    bias_V = None if bias_key is None else read(bias_key)
    return embed, Head.of_target(head, settings, bias_V)


def logits_of(product: Tensor, settings: HeadSettings) -> Tensor:
    """The logits of h W^T + b, [..., V]."""
    scaled = product if settings.scale == 1 else product * settings.scale
    return capped(scaled, settings.soft_cap)


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """soft_cap * tanh(logits / soft_cap); its slope is 1 - (value / soft_cap)^2."""
    return logits if soft_cap is None else (logits / soft_cap).tanh() * soft_cap


@frozen(eq=False)
class Head:
    """A target's head, and what its logits are made by.

    settings: of the states that are asked for, which are a draft's in its training. teacher: of the target's states
    beside them. bias_V: added to products by settings with a bias. Heads made of another one share its wide weight.
    """

    weight_VM: Tensor
    settings: HeadSettings = PLAIN
    teacher: HeadSettings = PLAIN
    bias_V: Tensor | None = None
    _wide: list[Tensor] = field(factory=list)

    @classmethod
    def of_target(cls, weight_VM: Tensor, settings: HeadSettings, bias_V: Tensor | None = None) -> Head:
        """The head whose logits are the target's own."""
        return cls(weight_VM, settings, settings, bias_V)

    def beside(self, draft: HeadSettings) -> Tensor | Head:
        """The head for a draft's states, and the target's beside them; only its weight where all logits are the plain
        product.
        """
        is_plain = draft == self.teacher == PLAIN
        return self.weight_VM if is_plain else evolve(self, settings=draft)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states [..., M], in the weight's dtype: the reference of what losses compute in parts."""
        product = hidden.to(self.weight_VM.dtype) @ self.weight_VM.T
        if self.settings.bias and self.bias_V is not None:
            product = product + self.bias_V
        return logits_of(product, self.settings)

    @property
    def weight_VX(self) -> Tensor:
        """The weight with the bias as one more column, and columns of zeros that keep rows aligned."""
        if self.bias_V is None:
            return self.weight_VM
        if not self._wide:
            columns_VC = self.weight_VM.new_zeros(len(self.weight_VM), ALIGNED)
            columns_VC[:, 0] = self.bias_V
            self._wide.append(torch.cat((self.weight_VM, columns_VC), dim=1))
        return self._wide[0]

    def states(self, hidden_WM: Tensor, settings: HeadSettings) -> Tensor:
        """States whose product with weight_VX is scale * (h W^T + b), [W, X]; differentiable."""
        hidden_WX = hidden_WM if settings.scale == 1 else hidden_WM * settings.scale
        if self.bias_V is None:
            return hidden_WX
        columns_WC = hidden_WM.new_zeros(len(hidden_WM), ALIGNED)
        columns_WC[:, 0] = settings.scale * settings.bias
        return torch.cat((hidden_WX, columns_WC), dim=1)


AnyHead: TypeAlias = Tensor | Head  # a weight [V, M]: logits are its plain product
ALIGNED = 8  # numbers


@frozen
class SoftCaps:
    """The soft caps of a draft's logits and of the target's beside them; None: none."""

    own: float | None = None
    teacher: float | None = None


def of_teacher(head: AnyHead) -> AnyHead:
    """The head for the target's states."""
    return head if isinstance(head, Tensor) else evolve(head, settings=head.teacher)


def folded(
    head: AnyHead, hidden_WM: Tensor, teacher_WM: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, SoftCaps]:
    """A weight and states whose plain products are the logits before their soft caps, and these.

    What has neither scale nor bias stays as it is. Differentiable in hidden_WM.
    """
    if isinstance(head, Tensor):
        return head, hidden_WM, teacher_WM, SoftCaps()
    if teacher_WM is not None:
        teacher_WM = head.states(teacher_WM, head.teacher)
    caps = SoftCaps(head.settings.soft_cap, head.teacher.soft_cap)
    return head.weight_VX, head.states(hidden_WM, head.settings), teacher_WM, caps


def stored_dtype(directory: Path) -> torch.dtype | None:
    """The dtype of a checkpoint's floating tensors; None for several, or for one that no computation supports."""
    found: set[str] = set()
    for file in sorted(set(tensor_files(directory).values())):
        with safe_open(file, framework="pt") as tensors:
            found |= {each.get_dtype() for each in map(tensors.get_slice, tensors.keys())}
    floating = {name for name in found if name.startswith(("F", "BF"))}
    return DTYPES.get(floating.pop()) if len(floating) == 1 else None


def tensor_files(directory: Path) -> dict[str, Path]:
    """The safetensors file of each tensor that transformers loads, by the tensor's name.

    Raises DataError if the directory has none, or a damaged one.
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
