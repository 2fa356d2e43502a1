"""What `evaluate` needs: the memory of target, drafts and caches for one batch of prompts."""

from __future__ import annotations

from dsl.resources import Outlook, Resources
from ops.lib.drafts.dflash.footprint import draft_parameters
from ops.lib.estimates import DraftForeseen, ReportForeseen, TargetForeseen
from ops.lib.target.sizes import ITEM_SIZES

LONGEST = 3072  # tokens of a prompt where nothing says how long they get


def evaluate_resources(outlook: Outlook) -> Resources:
    config = outlook.config
    foreseen = ReportForeseen(max_prompts=config.max_prompts, max_new_tokens=config.max_new_tokens, dtype=config.dtype)
    target: TargetForeseen | None = outlook.inputs["target"]
    draft: DraftForeseen | None = outlook.inputs["draft"]
    if target is None or draft is None:
        return Resources(foreseen=foreseen)
    sizes, shape, item_size = target.sizes, draft.shape, ITEM_SIZES[config.dtype]
    tokens = outlook.inputs["tokens"]
    prompt = tokens.longest if tokens is not None and config.benchmark is None else LONGEST
    drafts = 1 + config.random_draft
    own_cache = shape.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim
    length = prompt + config.max_new_tokens + shape.block_size
    cached = length * (sizes.cache_per_token + own_cache) + 2 * sizes.state_per_sequence
    features = len(shape.target_layer_ids) * shape.hidden_size * prompt
    batch = config.batch_size
    return Resources(
        memory={
            "target": sizes.parameters * item_size,
            "drafts": drafts * draft_parameters(shape) * item_size,
            "caches": batch * cached * item_size,
            "prefill": sizes.forward_bytes(batch * prompt, item_size) + batch * features * item_size,
        },
        foreseen=foreseen,
    )
