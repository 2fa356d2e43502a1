"""Report sections of `export_draft`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
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
    """The shape of the draft, and its serving contract."""
    config = read_json(folder / "config.json")
    contract = {**config.get("dflash_config", {}), "bytes": (folder / "model.safetensors").stat().st_size}
    return [Section("draft", facts({**contract, **{name: config[name] for name in SHOWN if name in config}}))]
