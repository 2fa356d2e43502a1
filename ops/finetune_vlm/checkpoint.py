"""The progress of a fine-tuning in one safetensors file: weights, AdamW's moments, and the step."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ops.files import finish_file


def save_progress(path: Path, step: int, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Replace the file at `path` by the state after `step` steps."""
    tensors = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors[f"weight/{name}"] = parameter.detach()
        tensors[f"exp_avg/{name}"] = state["exp_avg"]
        tensors[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, {"step": str(step)})
    finish_file(partial, path)


def load_progress(path: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> int:
    """Put the saved state into model and optimizer; the number of steps done, 0 where nothing was saved."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as saved, torch.no_grad():
        step = int(saved.metadata()["step"])
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.get_tensor(f"weight/{name}"))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": saved.get_tensor(f"exp_avg/{name}").to(parameter.device),
                "exp_avg_sq": saved.get_tensor(f"exp_avg_sq/{name}").to(parameter.device),
            }
    return step
