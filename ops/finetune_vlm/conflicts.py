"""What a training of the target needs of its tokens, as promised and as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.forecasts import PROMPTS_ONLY, TokensForecast


def conflicts(_config: FinetuneVlm, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: tokens without a sample to train on, or without answers."""
    tokens: TokensForecast | None = forecast["tokens"]
    if tokens is not None and "train" in tokens.empty:
        return {"tokens": "the train split has no samples: nothing to train the target on"}
    return {"tokens": PROMPTS_ONLY} if tokens is not None and tokens.prompts_only else {}
