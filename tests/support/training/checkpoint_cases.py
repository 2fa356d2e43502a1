"""A small training with checkpoints, and a way to damage one."""

from __future__ import annotations

import torch
from torch import nn

from ops.lib.training.checkpoint import Checkpoints, TrainState
from ops.lib.training.ema import Ema
from ops.lib.training.optimizer import clip_gradients, make_optimizer, set_rate

IDENTITY = {"config": {"lr": 0.1, "gamma": None}, "inputs": {"features": "abc"}}


def new_state(kind="adamw", decay=0.9, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    return TrainState(model, make_optimizer(model, 0.1, kind=kind), [], Ema(model, decay))


def train(state, steps):
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state.step)
        state.optimizer.zero_grad()
        loss = state.model(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        norm = clip_gradients(state.model.parameters(), 1.0)
        set_rate(state.optimizer, 0.01)
        state.optimizer.step()
        state.ema.update()
        state.counters["seen"] = state.counters.get("seen", 0) + 4
        state.history.append(torch.tensor([0.01, norm, loss.item()], dtype=torch.float64))


def save(folder, state, keep=2):
    with Checkpoints(folder, IDENTITY, rank=0, keep=keep) as saving:
        saving.save(state)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip_a_bit(folder):
    file = folder / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
