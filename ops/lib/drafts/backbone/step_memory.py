"""The memory of one of P sequence-parallel ranks in a training step, by part, computed from the sizes of the draft.

Attention takes [context | blocks] side by side, as on a GPU; a CPU's kernels need less:

    weights      masters and moments 12 W / R, gradients 4 W, the copy to compute with b W, gathered where R > 1
    features     t F b
    projections  t (5 M + 2 L C) b     what they keep for their backward, and keys and values before the exchange
    attended     s L C (8 + 3 b)       float32 leaves, copies in the dtype, gradients, and once more beside the blocks
    blocks       what the rank's blocks keep for their backward, and their keys and values beside the context's, r L C b
    head         a tile of logits with its copy for the product, and two rows of sums
    algorithm    what its heads keep for their backward, if it says so

Legend: W parameters, R ranks that FSDP2 shards over, T context, t = T / P of a rank, s = T for "gather" and one process
and T E / (G P) for "ulysses", F feature width, M hidden, L layers, C = 2 G D, G key/value heads, E = lcm(G, P), D head
size, K block size, r slots attended, b bytes of the dtype.
"""

from __future__ import annotations

import math
from fractions import Fraction

from ops.lib.drafts.algorithms import KeepsInPass
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.sizes import MASTER, draft_parameters

HEAD_TILE = 8192  # rows and columns of logits at a time on a GPU


def rank_memory(
    draft: DraftConfig, *, context: int, anchors: int, degree: int, exchange: str, ranks: int, item_size: int = 2
) -> dict[str, int]:
    """The bytes of each part on one rank, with all of its anchors in one chunk. exchange: "alone", "gather" or
    "ulysses".

    ranks: the number that FSDP2 shards the draft over, including those of other dp rows.
    """
    weights, layers, size = draft_parameters(draft), draft.num_hidden_layers, item_size
    C = 2 * draft.num_key_value_heads * draft.head_dim
    t, blocks = -(-context // degree), -(-anchors // degree)
    share = attended_share(exchange, draft.num_key_value_heads, degree)
    slots = blocks * draft.block_size * share * (degree if exchange == "ulysses" else 1)
    narrow = size if size < MASTER else 0
    computed_with = narrow or (MASTER if ranks > 1 else 0)
    attended = MASTER * (2 if narrow else 1) + 2 * narrow + size
    algorithm = draft.algorithm
    own = {}
    if isinstance(algorithm, KeepsInPass):
        own["algorithm"] = algorithm.pass_bytes(draft, blocks, size)
    return {
        "weights": weights * MASTER * 3 // ranks + weights * (MASTER + computed_with),
        "features": t * len(draft.target_layer_ids) * draft.hidden_size * size,
        "projections": t * (5 * draft.hidden_size + 2 * layers * C) * size,
        "attended": int(context * share * layers * C * attended),
        "blocks": block_bytes(draft, blocks * draft.block_size, size) + int(layers * C * slots * size),
        "head": head_bytes(draft, blocks * draft.block_size, size),
        **own,
    }


def block_bytes(draft: DraftConfig, slots: int, item_size: int) -> int:
    """The bytes that blocks keep for their backward in all layers, and the largest step of one layer's backward."""
    M, W, D = draft.hidden_size, draft.intermediate_size, draft.head_dim
    queries, kv = draft.num_attention_heads * D, draft.num_key_value_heads * D
    kept = draft.num_hidden_layers * (4 * M + 3 * queries + 3 * kv + 4 * W)
    return slots * (kept + 2 * W + 2 * M) * item_size


def head_bytes(draft: DraftConfig, slots: int, item_size: int) -> int:
    """The bytes of the loss: a tile of logits with its copy in a narrower dtype, and the rows of sums.

    See ops/lib/drafts/losses/head.py.
    """
    rows = min(HEAD_TILE, slots)
    copy = item_size if item_size < MASTER else 0
    logits = rows * min(HEAD_TILE, draft.vocab_size) * (MASTER + copy)
    return logits + 2 * rows * draft.hidden_size * (MASTER + item_size)


def attended_share(exchange: str, kv_heads: int, degree: int) -> Fraction:
    """The share of the context's keys and values, over all heads, that a rank attends to: 1, or E / (G P)."""
    return Fraction(math.lcm(kv_heads, degree), kv_heads * degree) if exchange == "ulysses" else Fraction(1)
