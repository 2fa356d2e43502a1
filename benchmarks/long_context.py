"""Memory, FLOPs and traffic of one of P sequence-parallel ranks in a step over one long context, in tables.

    python benchmarks/long_context.py                                    # the tables of docs/sequence_parallel.md
    python benchmarks/long_context.py --context 65536 --anchors 1024 --degree 4 16

Computed for a draft for Qwen3-8B in bfloat16 on a GPU; ops/lib/drafts/backbone/step_memory.py has the formulas.

FLOPs are those of the whole step over P: blocks are distributed by the context that they see, and the exchanges
distribute the projections.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import gpu_sizes
from benchmarks.harness import table
from benchmarks.sides.ours import draft_config
from benchmarks.sides.problem import Sizes
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.sizes import step_flops
from ops.lib.drafts.backbone.step_memory import rank_memory
from ops.lib.sequence_parallel.exchange import elements_sent

PARTS = ("weights", "features", "projections", "attended", "blocks", "head")
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
