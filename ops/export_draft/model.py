"""A draft as a logged model in MLflow: its signature, its description, and how it is served."""

from __future__ import annotations

from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.logged_model import LoggedModel, Tensor

KIND = "dflash-draft"
SHELL_BEGIN, SHELL_END = "```sh\n", "\n```"  # of the model card


def logged_model(folder: Path) -> LoggedModel:
    """Describes a serving directory: a step proposes tokens from the target's hidden states and an anchor token."""
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
