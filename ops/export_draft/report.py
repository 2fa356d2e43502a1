"""Report sections of `export_draft`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import name_and_fields
from ops.lib.drafts.backbone.config import algorithm_of
from ops.lib.report_sections import Section, facts

SHOWN = (
    "block_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "dtype",
)


def report(folder: Path) -> Sequence[Section]:
    """The algorithm and the shape of the draft, and its serving contract in the form of plain DFlash."""
    written = read_json(folder / "config.json")
    algorithm, config = algorithm_of(written).from_serving(written)
    values: dict[str, Any] = {**name_and_fields(algorithm), **config.get("dflash_config", {})}
    values["bytes"] = (folder / "model.safetensors").stat().st_size
    return [Section("draft", facts({**values, **{name: config[name] for name in SHOWN if name in config}}))]
