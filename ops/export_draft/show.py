"""A draft as `dflow report` and MLflow show it: sections, and a logged model with its signature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import name_and_fields
from ops.lib.drafts.backbone.config import algorithm_of, from_serving
from ops.lib.logged_model import LoggedModel, Tensor
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
    """The report sections of an exported draft: algorithm, shape, and serving config in the form of plain DFlash."""
    written = read_json(folder / "config.json")
    algorithm, config = algorithm_of(written).from_serving(written)
    values: dict[str, Any] = {**name_and_fields(algorithm), **config.get("dflash_config", {})}
    values["bytes"] = (folder / "model.safetensors").stat().st_size
    return [Section("draft", facts({**values, **{name: config[name] for name in SHOWN if name in config}}))]


KIND = "dflash-draft"
SHELL_BEGIN, SHELL_END = "```sh\n", "\n```"  # of the model card


def logged_model(folder: Path) -> LoggedModel:
    """A serving directory as a model for MLflow: a step proposes tokens from the target's states and an
    anchor token.
    """
    serving = read_json(folder / "config.json")
    draft = from_serving(serving)
    width = len(draft.target_layer_ids) * draft.hidden_size
    card = (folder / "README.md").read_text(encoding="utf-8")
    return LoggedModel(
        kind=KIND,
        inputs=(
            Tensor("context_features", str(serving["dtype"]), (-1, width)),
            Tensor("anchor_token", "int64", (1,)),
        ),
        outputs=(Tensor("proposed_tokens", "int64", (draft.block_size - 1,)),),
        params={
            "block_size": str(draft.block_size),
            "layers": str(draft.num_hidden_layers),
            "target_layer_ids": ", ".join(map(str, draft.target_layer_ids)),
            "mask_token_id": str(draft.mask_token_id),
            "dtype": str(serving["dtype"]),
        },
        tags={
            "block_size": str(draft.block_size),
            "target": serving["dflow"]["target"],
            "serve": card.partition(SHELL_BEGIN)[2].partition(SHELL_END)[0],
            "path": str(folder),
        },
    )
