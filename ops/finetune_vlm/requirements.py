"""What a training of the target needs of its tokens, as promised and as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.estimates import PROMPTS_ONLY, TokensForeseen


def unfit(_config: FinetuneVlm, foreseen: Mapping[str, Any]) -> dict[str, str]:
    """Tokens without a sample to train on, or without answers."""
    tokens: TokensForeseen | None = foreseen["tokens"]
    if tokens is not None and "train" in tokens.empty:
        return {"tokens": "the train split has no samples: nothing to train the target on"}
    return {"tokens": PROMPTS_ONLY} if tokens is not None and tokens.prompts_only else {}
