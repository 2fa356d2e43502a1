"""Memory, FLOPs and traffic of one of P sequence-parallel ranks in a step over one long context, in tables.

    python benchmarks/long_context.py                                    # the tables of docs/sequence_parallel.md
    python benchmarks/long_context.py --context 65536 --anchors 1024 --degree 4 16

Computed for a draft for Qwen3-8B in bfloat16 on a GPU, whose attention takes [context | blocks] side by side:

    weights      masters and moments 12 W / R, gradients 4 W, the copy to compute with b W, gathered where R > 1
    features     t F b
    projections  t (5 M + 2 L C) b     what they keep for their backward, and keys and values before the exchange
    attended     s L C (8 + 3 b)       float32 leaves, copies in the dtype, gradients, and once more beside the blocks
    blocks       what the rank's blocks keep for their backward, and their keys and values beside the context's, r L C b
    head         a tile of logits with its copy for the product, and two rows of sums

FLOPs are those of the whole step over P: blocks are distributed by the context that they see, and the exchanges
distribute the projections.

Legend: W parameters, R ranks that FSDP2 shards over, T context, t = T / P of a rank, s = T for "gather" and one process
and T E / (G P) for "ulysses", F feature width, M hidden, L layers, C = 2 G D, G key/value heads, E = lcm(G, P), D head
size, K block size, r slots attended, b bytes of the dtype.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from fractions import Fraction

from benchmarks import gpu_sizes
from benchmarks.harness import table
from benchmarks.sides.ours import draft_config
from benchmarks.sides.problem import Sizes
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.sizes import MASTER, draft_parameters, step_flops
from ops.lib.sequence_parallel.exchange import elements_sent

PARTS = ("weights", "features", "projections", "attended", "blocks", "head")
HEAD_TILE = 8192  # rows and columns of logits at a time on a GPU
ANCHORS, CONTEXTS, DEGREES = 512, (32_768, 131_072), (1, 2, 4, 8)
QWEN3_8B = draft_config(Sizes(context=CONTEXTS[-1] // 2, anchors=ANCHORS, **gpu_sizes.QWEN3_8B))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--degree", type=int, nargs="+", default=DEGREES, help="of sequence parallelism")
    parser.add_argument("--anchors", type=int, default=ANCHORS)
    arguments = parser.parse_args(argv)
    print(tables(arguments.context, arguments.degree, arguments.anchors))
    return 0


def tables(contexts: Sequence[int] = CONTEXTS, degrees: Sequence[int] = DEGREES, anchors: int = ANCHORS) -> str:
    """The Markdown tables of a rank's memory in GiB, its FLOPs, and what it sends in MiB."""
    rows = [["context", "P", "exchange", *PARTS, "sum", "TFLOP of a rank"]]
    for context in contexts:
        for degree in degrees:
            names = ("alone",) if degree == 1 else ("gather", "ulysses")
            rows += [_memory_row(context, degree, name, anchors) for name in names]
    sent = [["context", "P", "ulysses", "gather", "feature"]]
    sent += [_sent_row(context, degree, anchors) for context in contexts for degree in degrees if degree > 1]
    title = "MiB that a rank sends in the forward pass of a step, and again in the backward pass:"
    return f"{table(rows, aligned=False)}\n\n{title}\n\n{table(sent, aligned=False)}"


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
    return {
        "weights": weights * MASTER * 3 // ranks + weights * (MASTER + computed_with),
        "features": t * len(draft.target_layer_ids) * draft.hidden_size * size,
        "projections": t * (5 * draft.hidden_size + 2 * layers * C) * size,
        "attended": int(context * share * layers * C * attended),
        "blocks": block_bytes(draft, blocks * draft.block_size, size) + int(layers * C * slots * size),
        "head": head_bytes(draft, blocks * draft.block_size, size),
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


def rank_flops(draft: DraftConfig, *, context: int, anchors: int, degree: int) -> float:
    """The FLOPs of a rank, for anchors spread evenly over the context and a weight for every slot except slot 0."""
    seen, weighted = anchors * context // 2, anchors * (draft.block_size - 1)
    return step_flops(draft, context, anchors, seen, weighted) / degree


def _memory_row(context: int, degree: int, exchange: str, anchors: int) -> list[str]:
    parts = rank_memory(QWEN3_8B, context=context, anchors=anchors, degree=degree, exchange=exchange, ranks=degree)
    flops = rank_flops(QWEN3_8B, context=context, anchors=anchors, degree=degree)
    sizes = [*(parts[name] for name in PARTS), sum(parts.values())]
    return [f"{context:,}", str(degree), exchange, *(f"{size / 2**30:.2f}" for size in sizes), f"{flops / 1e12:.1f}"]


def _sent_row(context: int, degree: int, anchors: int) -> list[str]:
    """A table row of the MiB that a rank sends for all layers, by exchange.

    The column "feature" is for sending the projected feature once instead.
    """
    draft = QWEN3_8B
    sizes = {
        "context": context,
        "slots": anchors * draft.block_size,
        "query_heads": draft.num_attention_heads,
        "kv_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "degree": degree,
    }
    elements = [draft.num_hidden_layers * elements_sent(name, **sizes) for name in ("ulysses", "gather")]
    elements.append((degree - 1) * context * draft.hidden_size // degree)
    return [f"{context:,}", str(degree), *(f"{2 * count / 2**20:,.0f}" for count in elements)]


if __name__ == "__main__":
    raise SystemExit(main())
