"""The sizes of the drafts that the benchmarks of a GPU train; torch-free."""

from __future__ import annotations

ANCHORS = 512
CONTEXTS = (3072, 32768)
QWEN3_8B = {
    "hidden": 4096,
    "layers": 5,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate": 12288,
    "vocabulary": 151936,
    "block": 16,
    "target_layers": 5,
}
# Enough to run every line on a CPU: FlexAttention takes no smaller head.
TINY_ANCHORS = 10
TINY_CONTEXTS = (96, 192)
TINY = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 96,
    "vocabulary": 300,
    "block": 8,
    "target_layers": 2,
}


def step_sizes(tiny: bool, context: int) -> dict[str, int]:
    """Everything that decides a training step, by the names of the sides' options."""
    if tiny:
        return {"context": context, "anchors": TINY_ANCHORS, **TINY}
    return {"context": context, "anchors": ANCHORS, **QWEN3_8B}


def contexts(tiny: bool) -> tuple[int, int]:
    """The two lengths that steps are timed at."""
    return TINY_CONTEXTS if tiny else CONTEXTS
