"""A sample of dflow as a request of SGLang 0.5.21: its tokens, its images, and their three-dimensional positions.

S tokens of a request, R pixel rows, I images
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from attrs import frozen
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.managers.mm_utils import MultiModalityDataPaddingPatternMultimodalTokens
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from dsl.errors import DataError
from ops.tokenize_chat.shards import TokenSample


@frozen
class VisionTokens:
    """What a model's config says of images in its token stream."""

    model_type: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    merge_size: int
    tokens_per_second: float | None

    @classmethod
    def of(cls, hf_config: Any) -> VisionTokens | None:
        """None for a text model. `hf_config` is that of SGLang's ModelConfig."""
        vision = getattr(hf_config, "vision_config", None)
        if vision is None:
            return None
        return cls(
            model_type=hf_config.model_type,
            image_token_id=hf_config.image_token_id,
            video_token_id=hf_config.video_token_id,
            vision_start_token_id=hf_config.vision_start_token_id,
            merge_size=vision.spatial_merge_size,
            tokens_per_second=getattr(vision, "tokens_per_second", None),
        )

    def positions(self, input_ids: Tensor, image_grid_thw: Tensor) -> tuple[Tensor, Tensor]:
        """mRoPE positions int64 [3, S] of ids [S] with images of the grids [I, 3], and their delta [1, 1]."""
        positions, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=self.merge_size,
            image_token_id=self.image_token_id,
            video_token_id=self.video_token_id,
            vision_start_token_id=self.vision_start_token_id,
            model_type=self.model_type,
            tokens_per_second=self.tokens_per_second,
            input_ids=input_ids[None],
            image_grid_thw=image_grid_thw,
        )
        return positions.squeeze(1), delta


def make_request(sample: TokenSample, input_ids: Tensor, vision: VisionTokens | None, max_new_tokens: int = 1) -> Req:
    """A greedy request for `input_ids` int64 [S], a prefix of the sample's ids or all of them, with its images.

    Image tokens are expanded already, as in every TokenSample; SGLang finds each image by the padding value that it
    derives from the image's hash. Raises DataError where the prefix and the images do not fit (see `check_expansion`).
    """
    ids = array("q", input_ids.tolist())
    images = None
    if len(sample.image_grid_thw):
        images = _image_inputs(sample, input_ids, vision)
        ids = MultiModalityDataPaddingPatternMultimodalTokens().pad_input_tokens(ids, images)
    request = Req(
        rid=sample.id,
        origin_input_text="",
        origin_input_ids=ids,
        origin_input_ids_unpadded=array("q", input_ids.tolist()),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=max_new_tokens),
    )
    if images is not None:
        request.extend_image_inputs(images)
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.set_extend_range(len(request.prefix_indices), len(request.origin_input_ids))
    return request


def check_expansion(sample: TokenSample, input_ids: Tensor, vision: VisionTokens | None) -> None:
    """Raises DataError where the engine would take another number of image tokens than the ids hold.

    An image of grid t, h, w is t*h*w / merge_size^2 tokens in one run, and t*h*w pixel rows.
    """
    if vision is None:
        raise DataError(f"sample {sample.id}: it holds images, but the target is a text model: leave it out")
    grids = sample.image_grid_thw
    expected = (grids.prod(dim=1) // vision.merge_size**2).tolist()
    found = int((input_ids == vision.image_token_id).sum())
    if found != sum(expected):
        raise DataError(
            f"sample {sample.id}: {found} image tokens, but the engine makes {sum(expected)} of its {len(grids)} "
            f"images (grids {grids.tolist()}, {vision.merge_size} x {vision.merge_size} patches to a token): "
            "tokenize it with the target's own processor"
        )
    if int(grids.prod(dim=1).sum()) != len(sample.pixel_values):
        raise DataError(
            f"sample {sample.id}: {len(sample.pixel_values)} pixel rows, but its grids {grids.tolist()} take "
            f"{int(grids.prod(dim=1).sum())}: tokenize it again"
        )


def _image_inputs(sample: TokenSample, input_ids: Tensor, vision: VisionTokens | None) -> MultimodalInputs:
    check_expansion(sample, input_ids, vision)
    assert vision is not None
    positions, delta = vision.positions(input_ids, sample.image_grid_thw)
    return MultimodalInputs(
        mm_items=list(_image_items(sample, input_ids, vision)),
        im_token_id=vision.image_token_id,
        video_token_id=vision.video_token_id,
        mrope_positions=positions,
        mrope_position_delta=delta,
    )


def _image_items(sample: TokenSample, input_ids: Tensor, vision: VisionTokens) -> Iterator[MultimodalDataItem]:
    """One item for each image: its pixel rows, where its tokens stand, and its hash."""
    rows = sample.image_grid_thw.prod(dim=1).tolist()
    tokens = [count // vision.merge_size**2 for count in rows]
    places = torch.nonzero(input_ids == vision.image_token_id).flatten().tolist()
    row_bounds, token_bounds = [0, *accumulate(rows)], [0, *accumulate(tokens)]
    for image, ((first_row, end_row), (first, end)) in enumerate(
        zip(pairwise(row_bounds), pairwise(token_bounds), strict=True)
    ):
        grid = sample.image_grid_thw[image]
        pixels = sample.pixel_values[first_row:end_row]
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=pixels,
            offsets=[(places[first], places[end - 1])],
            model_specific_data={"image_grid_thw": grid[None]},
        )
        item.set_hash(image_hash(pixels, grid))
        yield item


def image_hash(pixel_values: Tensor, grid_thw: Tensor) -> int:
    """What SGLang's embedding cache knows an image by: its pixels [R, patch_dim] and its grid [3].

    SGLang's own hash is of the pixels alone. Two images of one colour, one wide and one tall, would share it, and the
    second would get the first one's embedding.
    """
    digest = hashlib.sha256(str((grid_thw.tolist(), str(pixel_values.dtype), tuple(pixel_values.shape))).encode())
    digest.update(pixel_values.contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big")
