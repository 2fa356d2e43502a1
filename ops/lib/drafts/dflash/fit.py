"""Whether a draft fits a target: it reads the target's states, and shares its embedding and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError
from ops.lib.drafts.dflash.config import DraftConfig

LAYER_IDS = "target_layer_ids"
SAME_TARGET = "give train_dflash, export_draft and evaluate the same target"
_SHARED = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_layers"}


def unfit_fields(draft: DraftConfig, target: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a draft's config that the target of this target.json cannot serve, and what is wrong with each."""
    wrong = {
        name: f"{getattr(draft, name)}, and the target's is {target[of_target]}"
        for name, of_target in _SHARED.items()
        if getattr(draft, name) != target[of_target]
    }
    last = target["num_layers"] - 2  # the output of the last layer cannot be captured
    outside = [layer for layer in draft.target_layer_ids if layer > last]
    if outside:
        wrong[LAYER_IDS] = f"{list(draft.target_layer_ids)}, and the target has 0..{last} to read"
    return wrong


def check_draft_fits(draft: DraftConfig, target: Mapping[str, Any]) -> None:
    """Raises DataError that names each field which does not fit, and what to do."""
    wrong = unfit_fields(draft, target)
    if wrong:
        raise DataError(f"the draft does not fit the target: {unfit_text(wrong)}; {SAME_TARGET}")


def unfit_text(wrong: Mapping[str, str]) -> str:
    """What `unfit_fields` found, in one line."""
    return "; ".join(f"{name} {what}" for name, what in wrong.items())
