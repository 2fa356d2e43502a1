"""The parts of a target that a training names. Torch-free: `dflow plan` checks them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from dsl.errors import ConfigError
from ops.finetune_vlm.op import FinetuneVlm

Part = Literal["vision", "projector", "text", "embeddings"]
SEEING: tuple[Part, ...] = ("vision", "projector")  # without a gradient in a step without an image
READING: tuple[Part, ...] = ("text", "embeddings")


def parts_in(config: Mapping[str, Any]) -> tuple[Part, ...]:
    """Those of a target of this config.json."""
    return (*SEEING, *READING) if config.get("vision_config") else READING


def check_parts(config: FinetuneVlm, parts: Collection[Part], model_type: str) -> None:
    """Raises ConfigError if a field names a part that the target does not have, or if nothing is left to train."""
    fields: list[tuple[str, Part]] = [(f'freeze = "{part}"', part) for part in config.freeze]
    rates: tuple[tuple[str, Part], ...] = (("lr_vision", "vision"), ("lr_projector", "projector"))
    fields += [(name, part) for name, part in rates if getattr(config, name) is not None]
    for name, part in fields:
        if part not in parts:
            raise ConfigError(f"{name}: a {model_type} target has no such part")
    if set(parts) <= {*config.freeze}:
        raise ConfigError(f"freeze = {list(config.freeze)}: no part of the target is left to train")
