"""Runs of text and images that concatenate into one model input.

S tokens, R pixel rows, P patch_dim, I images
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from attrs import frozen
from PIL import Image
from torch import Tensor

from dsl.errors import DataError
from ops.lib.vision.processor import Processor


@frozen(eq=False)
class TextChunk:
    """A part of a sample that is text. input_ids int64 [S]; loss_mask bool [S].

    Raises DataError for other shapes or dtypes.
    """

    input_ids: Tensor
    loss_mask: Tensor

    def __attrs_post_init__(self) -> None:
        if self.input_ids.ndim != 1 or self.input_ids.shape != self.loss_mask.shape:
            raise DataError(
                f"a text chunk has input_ids [S] and loss_mask [S], not {list(self.input_ids.shape)} and "
                f"{list(self.loss_mask.shape)}"
            )
        if (self.input_ids.dtype, self.loss_mask.dtype) != (torch.int64, torch.bool):
            raise DataError(
                f"a text chunk has int64 ids and a bool mask, not {self.input_ids.dtype} and {self.loss_mask.dtype}"
            )


@frozen(eq=False)
class ImageChunk:
    """One image: pixel_values float32 [R, P] and image_grid_thw int64 [1, 3], with R = t*h*w rows.

    It stands for t*h*w / merge_size^2 tokens, none of which is in the loss. expected_tokens: their number according to
    the header of the encoded image. Raises DataError if rows, grid, merge size and expected tokens are inconsistent.
    """

    pixel_values: Tensor
    image_grid_thw: Tensor
    image_token_id: int
    merge_size: int
    expected_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.image_grid_thw.shape != (1, 3) or self.pixel_values.ndim != 2:
            raise DataError(
                f"an image chunk has pixel_values [R, P] and image_grid_thw [1, 3], not "
                f"{list(self.pixel_values.shape)} and {list(self.image_grid_thw.shape)}"
            )
        t, h, w = self.image_grid_thw[0].tolist()
        if t * h * w != len(self.pixel_values) or t * h * w == 0:
            raise DataError(f"an image of {t} x {h} x {w} patches has {len(self.pixel_values)} rows of pixel values")
        if h % self.merge_size or w % self.merge_size:
            raise DataError(f"an image of {h} x {w} patches cannot be merged by {self.merge_size} x {self.merge_size}")
        if self.expected_tokens not in (None, self.num_tokens):
            raise DataError(
                f"an image of {t} x {h} x {w} patches, merged by {self.merge_size} x {self.merge_size}, has "
                f"{self.num_tokens} tokens, but {self.expected_tokens} are expected; do both sides use the same image "
                "processor, min_pixels and max_pixels?"
            )

    @classmethod
    def from_image(cls, processor: Processor, image: Image.Image, expected_tokens: int | None = None) -> Self:
        """Make a chunk from an RGB image.

        Raises DataError for a processor without images, and ValueError for an image that the processor rejects.
        """
        if not processor.sees or processor.image_token_id is None:
            raise DataError(f"processor {processor.source} has no image processor or no image token")
        features = processor.pixels(image)
        return cls(
            pixel_values=features["pixel_values"].to(torch.float32),
            image_grid_thw=features["image_grid_thw"].to(torch.int64),
            image_token_id=processor.image_token_id,
            merge_size=processor.merge_size,
            expected_tokens=expected_tokens,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.pixel_values) // self.merge_size**2

    @property
    def input_ids(self) -> Tensor:
        """The ids of the image: its image token, repeated for each token, int64 [S]."""
        return torch.full((self.num_tokens,), self.image_token_id, dtype=torch.int64)

    @property
    def loss_mask(self) -> Tensor:
        """The loss mask of the image: False throughout, bool [S]."""
        return torch.zeros(self.num_tokens, dtype=torch.bool)


Chunk = TextChunk | ImageChunk


@frozen(eq=False)
class ChunkedInput:
    """Joined chunks of text and images as one input.

    input_ids int64 [S]; loss_mask bool [S]; pixel_values float32 [R, P]; image_grid_thw int64 [I, 3]. Without an image
    R = I = 0.
    """

    input_ids: Tensor
    loss_mask: Tensor
    pixel_values: Tensor
    image_grid_thw: Tensor


def concatenate(chunks: Sequence[Chunk], patch_dim: int) -> ChunkedInput:
    """The chunks joined into one input. patch_dim: the processor's P. Raises DataError for no chunks, and for another
    P.
    """
    if not chunks:
        raise DataError("no chunks to concatenate")
    images = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
    for image in images:
        if image.pixel_values.shape[1] != patch_dim:
            raise DataError(
                f"an image has rows of {image.pixel_values.shape[1]} values, the processor's patch_dim is {patch_dim}"
            )
    return ChunkedInput(
        input_ids=torch.cat([chunk.input_ids for chunk in chunks]),
        loss_mask=torch.cat([chunk.loss_mask for chunk in chunks]),
        pixel_values=torch.cat([torch.empty(0, patch_dim), *(image.pixel_values for image in images)]),
        image_grid_thw=torch.cat([torch.empty(0, 3, dtype=torch.int64), *(image.image_grid_thw for image in images)]),
    )


def place_images(
    input_ids: Tensor, loss_mask: Tensor, image_token_id: int, images: Sequence[ImageChunk]
) -> list[Chunk]:
    """The chunks of a tokenised text with one placeholder for each image; the i-th placeholder becomes images[i].

    input_ids int64 [S]; loss_mask bool [S]. Raises DataError if the numbers of placeholders and images differ.
    """
    places = (input_ids == image_token_id).nonzero()[:, 0].tolist()
    if len(places) != len(images):
        raise DataError(f"{len(places)} image placeholders for {len(images)} images")
    chunks: list[Chunk] = []
    start = 0
    for place, image in zip(places, images, strict=True):
        chunks += [TextChunk(input_ids[start:place], loss_mask[start:place]), image]
        start = place + 1
    return [*chunks, TextChunk(input_ids[start:], loss_mask[start:])]
