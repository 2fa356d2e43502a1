"""The parts of a target, each with its own learning rate or frozen, and the optimizer over them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from torch import nn

from dsl.errors import ConfigError
from dsl.stage import Stage
from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.target.model import Target
from ops.lib.training.optimizer import adamw_options

Part = Literal["vision", "projector", "text", "embeddings"]
SEEING: tuple[Part, ...] = ("vision", "projector")  # what has no gradient where a step has no image
BETAS = (0.9, 0.95)


def parts_of(target: Target) -> dict[str, Part]:
    """Name of every parameter -> its part. A head of its own belongs to the embeddings."""
    ends = {id(target.embed_weight), id(target.head_weight)}
    return {
        name: "embeddings" if id(parameter) in ends else target.family.part_of(name)
        for name, parameter in target.model.named_parameters()
    }


def freeze(config: FinetuneVlm, target: Target, stage: Stage) -> None:
    """Let all parts be trained but those that are to be frozen; before the model is sharded.

    Raises ConfigError where a field names a part that the target does not have, or where nothing is left to train.
    """
    parts = parts_of(target)
    fields = [(f'freeze = "{part}"', part) for part in config.freeze]
    rates: tuple[tuple[str, Part], ...] = (("lr_vision", "vision"), ("lr_projector", "projector"))
    fields += [(name, part) for name, part in rates if getattr(config, name) is not None]
    for name, part in fields:
        if part not in parts.values():
            raise ConfigError(f"{name}: a {target.family.config['model_type']} target has no such part")
    sizes: Counter[str] = Counter()
    for name, parameter in target.model.named_parameters():
        trained = parts[name] not in config.freeze
        parameter.requires_grad_(trained)
        sizes["trained" if trained else "frozen"] += parameter.numel()
    if not sizes["trained"]:
        raise ConfigError(f"freeze = {list(config.freeze)}: no part of the target is left to be trained")
    stage.info(f"{sizes['trained']:,} parameters are trained, {sizes['frozen']:,} are frozen")


def make_optimizer(config: FinetuneVlm, model: nn.Module, parts: dict[str, Part]) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained, at rate 0; a group's "peak" is the highest rate of its part.

    Matrices are decayed; norms and biases are not. AdamW is made with `adamw_options` of the parameters' device.
    """
    peaks = {"vision": config.lr_vision, "projector": config.lr_projector}
    groups: dict[tuple[Part, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part, decayed = parts[name], parameter.ndim >= 2
        group = groups.setdefault(
            (part, decayed),
            {
                "params": [],
                "weight_decay": config.weight_decay if decayed else 0.0,
                "peak": peaks.get(part) or config.lr,
            },
        )
        group["params"].append(parameter)
    options = adamw_options(next(model.parameters()).device)
    return torch.optim.AdamW(list(groups.values()), lr=0.0, betas=BETAS, **options)


def set_rates(optimizer: torch.optim.AdamW, share: float) -> None:
    """Set the rate of every group to this share of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]
