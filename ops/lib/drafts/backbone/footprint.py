"""Parameters of a draft, and the memory of its training, computed from its sizes; torch-free.

What a pass keeps for its backward is counted tensor by tensor, as step.py and model.py make them.

Legend: F feature width, M hidden, W intermediate, H query heads, G key/value heads, D head size, K block size,
V vocabulary, T context tokens of a micro-batch on this rank, Z slots of a chunk of blocks, P parameters.
"""

from __future__ import annotations

from attrs import frozen

from ops.lib.drafts.backbone.config import DraftConfig

MASTER = 4  # bytes of a float32 weight, gradient, moment or average
HEAD_TILE = 8192  # rows and columns of logits at a time on a GPU (ops/lib/drafts/losses/head.py)
GPU_LOGITS, CPU_LOGITS = 2**28, 2**20  # of whole rows at a time (comparison.py),
CPU_ROWS = 32  # of which there are at least so many
AHEAD_BYTES = 2**31  # while more than these wait, no other micro-batch is made (ops/train_dflash/prefetch.py)


def draft_parameters(config: DraftConfig) -> int:
    """Trained weights: without embedding and head, which are the target's."""
    M, W, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, G = config.num_attention_heads, config.num_key_value_heads
    attention = 2 * M * H * D + 2 * M * G * D + 2 * D
    biases = H * D + 2 * G * D + M if config.attention_bias else 0
    layer = attention + biases + 3 * M * W + 2 * M
    backbone = len(config.target_layer_ids) * M * M + 2 * M + config.num_hidden_layers * layer
    return backbone + config.algorithm.parameters(config)


@frozen(kw_only=True)
class Pass:
    """What decides the memory of one pass. item_size: bytes of the dtype to compute in; context: T; blocks: of a chunk;
    waiting: micro-batches whose features are on the device besides the one in use; fewer if they are large.
    """

    draft: DraftConfig
    item_size: int
    context: int
    blocks: int
    waiting: int
    checkpointed: bool = False
    teacher: bool = False
    on_cpu: bool = False


def context_bytes(work: Pass) -> int:
    """What the context keeps while the blocks go through: features in use, projections, keys, values, their gradients.

    Two widths of M are kept, and three more live while the projections are differentiated.
    Keys and values are kept in float32 as well where the dtype is narrower, for every chunk adds to their gradients.
    """
    draft, size = work.draft, work.item_size
    F, M, kv = _features(draft), draft.hidden_size, 2 * draft.num_key_value_heads * draft.head_dim
    copies = kv * (MASTER + 2 * size) if size < MASTER else 0  # wide leaves; cast back, and beside the blocks' own
    layer = 2 * kv * size + copies + kv * MASTER
    return work.context * (F * size + 5 * M * size + draft.num_hidden_layers * layer)


def waiting_bytes(work: Pass) -> int:
    """Features of micro-batches that wait, or are being made."""
    width = _features(work.draft)
    teacher = work.blocks * work.draft.block_size * work.draft.hidden_size if work.teacher else 0
    one = (work.context * width + teacher) * work.item_size
    return min(work.waiting, AHEAD_BYTES // one + 1) * one


def block_bytes(work: Pass) -> int:
    """What a chunk of blocks keeps for its backward in all layers, and the widest step of one layer's backward."""
    draft = work.draft
    M, W, D = draft.hidden_size, draft.intermediate_size, draft.head_dim
    queries, kv = draft.num_attention_heads * D, draft.num_key_value_heads * D
    slots = work.blocks * draft.block_size
    layer = 4 * M + 3 * queries + 3 * kv + 4 * W
    kept = layer + draft.num_hidden_layers * M if work.checkpointed else layer * draft.num_hidden_layers
    return slots * (kept + 2 * W + 2 * M + draft.algorithm.slot_floats(draft)) * work.item_size


def joined_bytes(work: Pass) -> int:
    """Keys and values of [context | blocks] side by side in every layer, which FlexAttention takes and keeps."""
    draft = work.draft
    kv = 2 * draft.num_key_value_heads * draft.head_dim
    layers = 1 if work.checkpointed else draft.num_hidden_layers
    return layers * kv * (work.context + work.blocks * draft.block_size) * work.item_size


def head_bytes(work: Pass) -> int:
    """Logits at a time with their copy for the product, and the rows of sums; with a teacher its logits and the slope
    as well, which on a GPU is made in the dtype of products.
    """
    slots, vocabulary = work.blocks * work.draft.block_size, work.draft.vocab_size
    rows = min(HEAD_TILE, slots)
    copy = work.item_size if work.item_size < MASTER else 0
    sums = rows * work.draft.hidden_size * (MASTER + work.item_size)
    if not work.teacher:
        logits = rows * min(HEAD_TILE, vocabulary)
        return (min(logits, CPU_LOGITS) if work.on_cpu else logits) * (MASTER + copy) + 2 * sums
    if work.on_cpu:
        return 3 * min(slots, max(CPU_ROWS, CPU_LOGITS // vocabulary)) * vocabulary * (MASTER + copy) + 3 * sums
    return min(slots, max(1, GPU_LOGITS // vocabulary)) * vocabulary * (2 * MASTER + work.item_size) + 3 * sums


def cast_bytes(work: Pass) -> int:
    """The copy of the weights in a narrower dtype that a step computes with; FSDP2 gathers an equal one."""
    return draft_parameters(work.draft) * work.item_size if work.item_size < MASTER else 0


def _features(draft: DraftConfig) -> int:
    return len(draft.target_layer_ids) * draft.hidden_size
