"""What `regenerate_answers` needs where the target answers here: its weights, a batch's cache and passes."""

from __future__ import annotations

from dsl.resources import Outlook, Resources
from ops.lib.estimates import TargetForeseen
from ops.lib.target.sizes import ITEM_SIZES


def regenerate_answers_resources(outlook: Outlook) -> Resources:
    """Nothing where a server answers. A batch holds at most batch_tokens, the new tokens included, or one sample."""
    config = outlook.config
    target: TargetForeseen | None = outlook.inputs["target"]
    if target is None or config.backend != "huggingface":
        return Resources()
    sizes, item_size = target.sizes, ITEM_SIZES[config.dtype]
    tokens = max(config.batch_tokens, config.max_prompt_tokens + config.max_new_tokens)
    sequences = max(1, config.batch_tokens // (config.max_new_tokens + 1))
    vocabulary = int(sizes.text["vocab_size"])
    return Resources(
        memory={
            "target": sizes.parameters * item_size,
            "caches": (tokens * sizes.cache_per_token + sequences * sizes.state_per_sequence) * item_size,
            "forward pass": sizes.forward_bytes(tokens, item_size) + sequences * vocabulary * (item_size + 8),
        }
    )
