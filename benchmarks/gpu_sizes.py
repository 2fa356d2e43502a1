"""The sizes of the drafts that the benchmarks of a GPU train; torch-free."""

from __future__ import annotations

NAMES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "block", "target_layers")
ANCHORS, CHUNK, CONTEXTS = 512, 128, (3072, 32768, 131072)
QWEN3_8B = dict(zip(NAMES, (4096, 5, 32, 8, 128, 12288, 151936, 16, 5), strict=True))
# Enough to run every line on a CPU: FlexAttention takes no smaller head.
TINY_ANCHORS, TINY_CHUNK, TINY_CONTEXTS = 10, 4, (96, 192, 384)
TINY = dict(zip(NAMES, (64, 2, 4, 2, 16, 96, 300, 8, 2), strict=True))
ALGORITHMS = ("dflash", "dspark", "dflash2")


def step_sizes(tiny: bool, context: int) -> dict[str, int]:
    """The sizes that decide a training step, by the names of the sides' options."""
    return {"context": context, "anchors": TINY_ANCHORS if tiny else ANCHORS, **(TINY if tiny else QWEN3_8B)}


def contexts(tiny: bool) -> tuple[int, ...]:
    """The context lengths at which steps are timed; every side is timed at the first one."""
    return TINY_CONTEXTS if tiny else CONTEXTS
