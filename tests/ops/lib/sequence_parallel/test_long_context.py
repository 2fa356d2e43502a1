"""The tables for long contexts in docs/sequence_parallel.md are what the code computes; to write them anew:

WRITE_DOCS=1 python -m pytest tests/ops/lib/sequence_parallel/test_long_context.py
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from benchmarks.long_context import QWEN3_8B, rank_flops, tables
from ops.lib.drafts.backbone.sizes import draft_parameters
from ops.lib.drafts.backbone.step_memory import attended_share, rank_memory

DOCS = Path(__file__).parents[4] / "docs" / "sequence_parallel.md"
BEGIN, END = (
    "<!-- long contexts: written by tests/ops/lib/sequence_parallel/test_long_context.py -->",
    "<!-- end of long contexts -->",
)


def test_the_tables_in_the_docs_are_what_the_code_computes():
    text = DOCS.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("WRITE_DOCS"):
        DOCS.write_text(f"{text[:begin]}\n\n{tables()}\n\n{text[end:]}")
        return
    assert tables() == text[begin:end].strip()


def test_one_process_holds_masters_gradients_two_moments_and_a_copy_in_bfloat16():
    parts = rank_memory(QWEN3_8B, context=3072, anchors=64, degree=1, exchange="alone", ranks=1)
    assert (16 + 2) * draft_parameters(QWEN3_8B) == parts["weights"]


@pytest.mark.parametrize(("kv_heads", "degree", "held"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (2, 4, 1), (6, 4, 3)])
def test_ulysses_attends_to_one_of_p_shares_of_the_repeated_heads(kv_heads, degree, held):
    assert held == attended_share("ulysses", kv_heads, degree) * kv_heads
    assert held == math.lcm(kv_heads, degree) / degree
    assert 1 == attended_share("gather", kv_heads, degree)


def test_ranks_share_out_what_grows_with_the_context_but_for_what_gather_gathers():
    sizes = {"context": 131_072, "anchors": 512, "ranks": 8}
    one, gather, ulysses = (
        rank_memory(QWEN3_8B, **sizes, degree=degree, exchange=exchange)
        for degree, exchange in ((1, "alone"), (8, "gather"), (8, "ulysses"))
    )
    for name in ("features", "projections"):
        assert one[name] == 8 * gather[name] == 8 * ulysses[name]
    assert one["attended"] == gather["attended"] == 8 * ulysses["attended"]
    assert one["weights"] == gather["weights"]
    assert rank_flops(QWEN3_8B, context=131_072, anchors=512, degree=1) == pytest.approx(
        8 * rank_flops(QWEN3_8B, context=131_072, anchors=512, degree=8)
    )
