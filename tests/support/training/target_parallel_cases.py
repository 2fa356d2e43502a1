"""Targets, batches and layouts with which training a target over ranks is compared with one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from attrs import evolve, frozen
from family_checkpoints import FAMILIES as CHECKPOINTS
from family_checkpoints import IDS, VISION
from torch import Tensor
from transformers import PreTrainedModel

from ops.lib.data.token_shards import TokenSample
from ops.lib.vision.batch import ModelInputs, collate

VOCABULARY, HIDDEN = 61, 64
FIRST_WORD = max(IDS.values()) + 1  # ids below are special tokens
PATCH_DIM = 3 * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2


@frozen
class Layout:
    """A layout of dp rows with sp ranks each."""

    dp: int
    sp: int

    def __str__(self) -> str:
        return f"{self.dp} x {self.sp}"

    @property
    def ranks(self) -> int:
        return self.dp * self.sp


ONE = Layout(1, 1)
ON_FOUR, ON_TWO = (Layout(2, 2), Layout(1, 4)), (Layout(2, 1), Layout(1, 2))
LAYOUTS = (ONE, *ON_TWO, *ON_FOUR)
OPTIONS_AT = (ONE, Layout(2, 2))

# What differs from the tiny checkpoints. Ulysses repeats the KV head of qwen2_5_vl at every degree, the others' two at
# degree 4; the window of qwen3 is shorter than the sequences and longer than a slice of them.
TEXT = {
    "qwen3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "qwen2_5_vl": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3_vl": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}
HYBRID = "qwen3_5"
BATCHES = {
    "qwen3": ("left", "text"),
    "qwen2_5_vl": ("text", "left", "mixed"),
    "qwen3_vl": ("text", "left", "images", "mixed"),
    # With a batch of one, transformers runs its linear attention over padding on the left.
    "qwen3_5": ("text", "images", "mixed"),
}


def layouts_of(family: str) -> tuple[Layout, ...]:
    """The layouts that a family can use: hybrids are sharded, but their sequences are not shared."""
    return tuple(layout for layout in LAYOUTS if layout.sp == 1 or family != HYBRID)


@cache
def model_of(family: str) -> PreTrainedModel:
    """A tiny random model, float64, in training mode. Callers copy it."""
    text = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, **TEXT[family]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = CHECKPOINTS[family].make(text, {"out_hidden_size": HIDDEN}, family == "qwen3_vl")
        model = made.double().train()
        for parameter in model.parameters():  # weights of 1 and 0 would hide mistakes
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.data.add_(torch.randn_like(parameter), alpha=scale)
    return model


def sample(seed: int, length: int, grids: Sequence[tuple[int, int]] = ()) -> TokenSample:
    """A sample of random tokens, about half of them answers, with an image [1, h, w] after token 2 for each grid."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator)
    answers = torch.rand(length, generator=generator) < 0.5
    answers[-2:] = True
    pieces, masks = [tokens[:2]], [answers[:2]]
    for height, width in grids:
        image = torch.tensor(
            [
                IDS["vision_start_token_id"],
                *[IDS["image_token_id"]] * (height * width // VISION["spatial_merge_size"] ** 2),
                IDS["vision_end_token_id"],
            ]
        )
        pieces, masks = [*pieces, image], [*masks, torch.zeros(len(image), dtype=torch.bool)]
    rows = sum(height * width for height, width in grids)
    return TokenSample(
        id=str(seed),
        category="image" if grids else "text",
        input_ids=torch.cat([*pieces, tokens[2:]]),
        loss_mask=torch.cat([*masks, answers[2:]]),
        pixel_values=torch.randn(rows, PATCH_DIM, generator=generator),
        image_grid_thw=torch.tensor([[1, *grid] for grid in grids], dtype=torch.int64).view(-1, 3),
        prompt_tokens=2,
    )


def batch_of(kind: str) -> ModelInputs:
    """A batch of four samples of different lengths. mixed: image, none, two images, none; so only even rows
    have one.
    """
    if kind == "left":
        return left_padded(batch_of("text"))
    grids: dict[str, list[list[tuple[int, int]]]] = {
        "text": [[], [], [], []],
        "images": [[(4, 4)], [(2, 4)], [(4, 2), (2, 2)], [(2, 2)]],
        "mixed": [[(4, 6)], [], [(2, 4), (4, 4)], []],
    }
    lengths = (13, 23, 8, 17)
    return collate([sample(seed, length, grids[kind][seed]) for seed, length in enumerate(lengths)])


def left_padded(batch: ModelInputs) -> ModelInputs:
    """The batch with its padding on the left."""
    shifts = (batch.input_ids.shape[1] - batch.attention_mask.sum(dim=1)).tolist()

    def moved(rows: Tensor) -> Tensor:
        return torch.stack([row.roll(shift) for row, shift in zip(rows, shifts, strict=True)])

    names = ("input_ids", "attention_mask", "loss_mask")
    return evolve(batch, **{name: moved(getattr(batch, name)) for name in names})


def dealt(batch: ModelInputs, layout: Layout, dp_rank: int) -> ModelInputs | None:
    """The samples of a dp row; None if the batch has fewer samples than rows."""
    rows = list(range(dp_rank, len(batch), layout.dp))
    return batch[rows] if rows else None
