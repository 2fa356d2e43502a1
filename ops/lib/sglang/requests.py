"""A sample of dflow as a request of SGLang: its tokens, its images, and their three-dimensional positions.

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
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from dsl.errors import DataError
from ops.lib.data.token_shards import TokenSample
from ops.lib.sglang.adapter import adapter


@frozen
class VisionTokens:
    """The image tokens of a model and their sizes, from its config."""

    model_type: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    merge_size: int
    patch_dim: int
    tokens_per_second: float | None

    @classmethod
    def of(cls, hf_config: Any) -> VisionTokens | None:
        """The image tokens of a vision model; None for a text model. hf_config: from SGLang's ModelConfig."""
        vision = getattr(hf_config, "vision_config", None)
        if vision is None:
            return None
        return cls(
            model_type=hf_config.model_type,
            image_token_id=hf_config.image_token_id,
            video_token_id=hf_config.video_token_id,
            vision_start_token_id=hf_config.vision_start_token_id,
            merge_size=vision.spatial_merge_size,
            patch_dim=_channels(vision) * vision.temporal_patch_size * vision.patch_size**2,
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


def _channels(vision: Any) -> int:
    """The channels of a pixel; Qwen2.5-VL has another name for the field."""
    return int(getattr(vision, "in_channels", None) or vision.in_chans)


def make_request(sample: TokenSample, input_ids: Tensor, vision: VisionTokens | None, max_new_tokens: int = 1) -> Req:
    """A greedy request for `input_ids` int64 [S], all of the sample's ids or a prefix, with its images.

    Image tokens are expanded already, as in every TokenSample. SGLang finds an image by padding values derived from its
    hash. Raises DataError if the prefix and the images do not fit (see `check_expansion`), and for images that another
    processor than Qwen's has read.
    """
    if sample.seen:
        raise DataError(
            f"sample {sample.id}: its images were read by a processor that is not Qwen's, and dflow gives SGLang only "
            "images of Qwen's: remove it"
        )
    ids = array("q", input_ids.tolist())
    images = None
    if len(sample.image_grid_thw):
        images = _image_inputs(sample, input_ids, vision)
        ids = adapter().pad_image_tokens(ids, images)
    return greedy_request(sample.id, input_ids, ids, images, max_new_tokens)


def greedy_request(
    name: str, input_ids: Tensor, padded_ids: array[int], images: MultimodalInputs | None, max_new_tokens: int
) -> Req:
    """A greedy request for `input_ids` int64 [S].

    padded_ids: the ids with SGLang's padding values in place of image tokens.
    """
    request = Req(
        rid=name,
        origin_input_text="",
        origin_input_ids=padded_ids,
        origin_input_ids_unpadded=array("q", input_ids.tolist()),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=max_new_tokens),
    )
    if images is not None:
        request.extend_image_inputs(images)
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    adapter().extend_to_end(request)
    return request


def check_expansion(sample: TokenSample, input_ids: Tensor, vision: VisionTokens | None) -> None:
    """Check that a sample's image tokens and pixel rows are those that the engine expects. Raises DataError.

    An image of grid t, h, w has t*h*w pixel rows, and t*h*w / merge_size^2 tokens in one run after a vision start
    token.
    """
    if vision is None:
        raise DataError(f"sample {sample.id}: it has images, but the target is a text model: remove it")
    mistakes = [*_token_mistakes(sample, input_ids, vision), *_row_mistakes(sample, vision)]
    if mistakes:
        raise DataError(
            f"sample {sample.id}: {'; '.join(mistakes)}: tokenize it again with the target's own processor, or leave "
            "it out"
        )


def _token_mistakes(sample: TokenSample, input_ids: Tensor, vision: VisionTokens) -> Iterator[str]:
    if bool((input_ids == vision.video_token_id).any()):
        yield "it has video tokens, and only images are captured"
    if len(input_ids) and int(input_ids[-1]) == vision.vision_start_token_id:
        yield "it ends with a vision start token, without an image after it"
    grids = sample.image_grid_thw
    expected = (grids.prod(dim=1) // vision.merge_size**2).tolist()
    runs = image_runs(input_ids, vision.image_token_id)
    found = [end - first for first, end in runs]
    if sum(found) != sum(expected):
        yield (
            f"{sum(found)} image tokens, but the engine expects {sum(expected)} for its {len(grids)} images (grids "
            f"{grids.tolist()}, {vision.merge_size} x {vision.merge_size} patches to a token)"
        )
    elif found != expected:
        yield f"runs of {found} image tokens, but its images {grids.tolist()} need runs of {expected}"
    bare = [first for first, _end in runs if first == 0 or int(input_ids[first - 1]) != vision.vision_start_token_id]
    if bare:
        yield f"no vision start token before the image tokens at {bare}, so the images would get the positions of text"


def _row_mistakes(sample: TokenSample, vision: VisionTokens) -> Iterator[str]:
    grids, rows = sample.image_grid_thw, sample.pixel_values
    if rows.shape[1] != vision.patch_dim:
        yield f"pixel rows of {rows.shape[1]} numbers, but the target's patches have {vision.patch_dim}"
    if int(grids.prod(dim=1).sum()) != len(rows):
        yield f"{len(rows)} pixel rows, but its grids {grids.tolist()} need {int(grids.prod(dim=1).sum())}"


def image_runs(input_ids: Tensor, image_token_id: int) -> list[tuple[int, int]]:
    """The range [start, end) of each run of image tokens in ids [S]."""
    is_image = torch.nn.functional.pad((input_ids == image_token_id).long(), (1, 1))
    steps = is_image.diff()
    starts, ends = ((steps == step).nonzero().flatten().tolist() for step in (1, -1))
    return list(zip(starts, ends, strict=True))


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
    """SGLang's item for each image: its pixel rows, the positions of its tokens, and its hash."""
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
    """The key of an image in SGLang's embedding cache, from its pixels [R, patch_dim] and its grid [3].

    SGLang's own hash covers only the pixels. Two images of one colour, one wide and one tall, would share it, and the
    second would get the first one's embedding.
    """
    digest = hashlib.sha256(str((grid_thw.tolist(), str(pixel_values.dtype), tuple(pixel_values.shape))).encode())
    digest.update(pixel_values.contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big")
