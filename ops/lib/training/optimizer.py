"""The optimizers, AdamW or Muon, with weight decay on matrices only; clipping; and the rate over the steps.

Parameters are plain tensors or FSDP2's DTensors. Every optimizer here has step, zero_grad, state and param_groups, and
its state is read and restored by the parameters' names, so that it does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ops.lib.training.dtensors import cut_like, local
from ops.lib.training.muon import Muon


class MuonAdamW:
    """An optimizer that applies Muon to matrices and AdamW to all other parameters."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.parts = (muon, adamw)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: entries for part in self.parts for parameter, entries in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


Optimizer: TypeAlias = torch.optim.AdamW | Muon | MuonAdamW


def make_optimizer(
    model: nn.Module,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    kind: Literal["adamw", "muon"] = "adamw",
    no_hidden_matrices: Collection[str] = (),
    undecayed: Collection[str] = (),
) -> Optimizer:
    """An optimizer over all parameters of a model, at rate 0; norms, biases and `undecayed` have no weight decay.

    kind "adamw"; or "muon": Muon for every matrix except `no_hidden_matrices`, AdamW for the rest. Muon is meant for
    hidden matrices, not for tables with a row for each token. Its update is scaled to the size of AdamW's, so that both
    share rate and weight decay. AdamW gets the `adamw_options` of the parameters' device.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    others = [parameter for parameter in names if parameter.ndim < 2 or names[parameter] in undecayed]
    matrices = [parameter for parameter in names if parameter.ndim >= 2 and names[parameter] not in undecayed]
    options = adamw_options(next((parameter.device for parameter in model.parameters()), torch.device("cpu")))
    if kind == "muon":
        hidden = [
            parameter for parameter in matrices if parameter.ndim == 2 and names[parameter] not in no_hidden_matrices
        ]
        higher = [parameter for parameter in matrices if parameter.ndim > 2 or names[parameter] in no_hidden_matrices]
        adamw = torch.optim.AdamW(_groups(higher, others, weight_decay), lr=0.0, betas=betas, **options)
        return MuonAdamW(Muon([{"params": hidden}], weight_decay=weight_decay), adamw)
    return torch.optim.AdamW(_groups(matrices, others, weight_decay), lr=0.0, betas=betas, **options)


def adamw_options(device: torch.device) -> dict[str, bool]:
    """The fastest AdamW for a device, as keyword arguments of torch.optim.AdamW.

    On CUDA it is the fused one: one kernel per list of tensors, without scratch copies. On a CPU it is torch's default.
    """
    return {"fused": True} if device.type == "cuda" else {}


def _groups(decayed: list[nn.Parameter], others: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def named_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's tensors as "<parameter>.<key>"; shared, not copied, and DTensors where the parameters are."""
    state: Mapping[Tensor, Mapping[str, Tensor]] = optimizer.state
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in state.get(parameter, {}).items()
    }


def restore_state(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore the optimizer's state from whole tensors, named as in named_state.

    Tensors with their parameter's shape are sharded like it. Each is accessed once and copied, so a mapping that reads
    from a file keeps only one in host memory.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    keys_of: dict[str, list[str]] = {}
    for full_name in tensors:
        name, _, key = full_name.rpartition(".")
        keys_of.setdefault(name, []).append(key)
    for part in optimizer.parts if isinstance(optimizer, MuonAdamW) else (optimizer,):
        content = part.state_dict()
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        content["state"] = {
            index: {
                key: _restored(tensors[f"{name_of[parameter]}.{key}"], parameter) for key in keys_of[name_of[parameter]]
            }
            for index, parameter in enumerate(parameters)
            if name_of[parameter] in keys_of
        }
        part.load_state_dict(content)


def _restored(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    return cut_like(whole, parameter) if whole.shape == parameter.shape else whole.clone()


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The global norm of the gradients [], over the parts of all ranks; a collective, without a device sync.

    Parameters without a gradient are skipped; without any the norm is 0, on `device`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    total = nn.utils.get_total_norm(gradients)
    return total.full_tensor() if isinstance(total, DTensor) else total


@torch.no_grad()
def limit_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale the gradients down to the limit. norm: their global norm; nothing is done if it is not finite or below the
    limit.
    """
    if math.isfinite(norm) and norm > limit:
        torch._foreach_mul_(
            [local(parameter.grad) for parameter in parameters if parameter.grad is not None], limit / norm
        )


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale the gradients so that their global norm is at most `limit`; returns the norm before that.

    It waits for the device. If the norm is not finite, the gradients are unchanged.
    """
    given = list(parameters)
    norm = float(gradient_norm(given, torch.device("cpu")))
    limit_gradients(given, norm, limit)
    return norm


def learning_rate(
    step: int,
    total: int,
    peak: float,
    warmup_ratio: float,
    schedule: Literal["cosine", "wsd"] = "cosine",
    decay_ratio: float = 0.2,
    min_ratio: float = 0.0,
) -> float:
    """The rate of step 0 <= step < total: linear up to the peak over the warm-up, then down towards min_ratio * peak.

    "cosine": half a cosine over the remaining steps. "wsd" (warm-up, stable, decay): the peak, and over the last
    decay_ratio of the steps 1 - sqrt(share of the decay done). At step `total` the minimum would be reached.
    Sources: WSD, arXiv 2404.06395; the form 1 - sqrt, arXiv 2405.18392.
    """
    warmup = round(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    else:
        start = max(warmup, total - round(decay_ratio * total))
        share = 1 - math.sqrt(max(0, step - start) / max(1, total - start))
    return peak * (min_ratio + (1 - min_ratio) * share)
