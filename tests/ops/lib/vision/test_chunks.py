"""Chunks of text and images against the plain concatenation of ids, and against transformers' image processor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dsl.errors import DataError
from ops.lib.vision.chunks import ImageChunk, TextChunk, concatenate, place_images
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import write_builtin_processor

IMAGE, PATCH_DIM, MERGE = 99, 6, 2


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    write_builtin_processor(folder, [[{"role": "user", "content": [{"type": "text", "text": "Hm?"}]}]], 300)
    return load_processor(str(folder))


def text(ids, mask=None):
    return TextChunk(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask or [False] * len(ids), dtype=torch.bool))


def image(h=2, w=2, value=0.0, **fields):
    rows = torch.full((h * w, PATCH_DIM), value)
    return ImageChunk(rows, torch.tensor([[1, h, w]]), IMAGE, MERGE, **fields)


def pieces():
    return st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5)


@given(pieces())
def test_many_text_chunks_equal_one(parts):
    ids = [token for part in parts for token in part]
    masks = [[token > 4 for token in part] for part in parts]
    many = concatenate([text(part, mask) for part, mask in zip(parts, masks, strict=True)], PATCH_DIM)
    one = concatenate([text(ids, [token > 4 for token in ids])], PATCH_DIM)
    assert ids == many.input_ids.tolist() == one.input_ids.tolist()
    assert [token > 4 for token in ids] == many.loss_mask.tolist() == one.loss_mask.tolist()
    assert (0, PATCH_DIM) == tuple(many.pixel_values.shape) == tuple(one.pixel_values.shape)
    assert (0, 3) == tuple(many.image_grid_thw.shape) == tuple(one.image_grid_thw.shape)


def test_a_text_only_input_equals_the_path_without_chunks(processor):
    encoded = processor.tokenizer("What is it?", add_special_tokens=False)["input_ids"]
    got = concatenate([text(encoded)], processor.patch_dim)
    assert encoded == got.input_ids.tolist()
    assert [torch.int64, torch.bool, torch.float32, torch.int64] == [
        part.dtype for part in (got.input_ids, got.loss_mask, got.pixel_values, got.image_grid_thw)
    ]
    assert [len(encoded), len(encoded), 0, 0] == [
        len(part) for part in (got.input_ids, got.loss_mask, got.pixel_values, got.image_grid_thw)
    ]


@given(pieces(), st.data())
def test_placed_images_stand_where_their_placeholders_stood(parts, data):
    sizes = [data.draw(st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 6]))) for _ in parts[1:]]
    images = [image(h, w, float(place)) for place, (h, w) in enumerate(sizes)]
    compact = list(parts[0])
    expected = list(parts[0])
    for part, (h, w) in zip(parts[1:], sizes, strict=True):
        compact += [IMAGE, *part]
        expected += [IMAGE] * (h * w // 4) + part
    chunks = place_images(torch.tensor(compact, dtype=torch.int64), torch.tensor(compact) < 5, IMAGE, images)
    got = concatenate(chunks, PATCH_DIM)
    assert expected == got.input_ids.tolist()
    assert [token < 5 for token in expected] == got.loss_mask.tolist()
    assert [[1, h, w] for h, w in sizes] == got.image_grid_thw.tolist()
    values = [float(place) for place, (h, w) in enumerate(sizes) for _ in range(h * w)]
    assert values == got.pixel_values[:, 0].tolist()


@pytest.mark.parametrize("size", [(16, 16), (40, 24), (5, 60), (64, 64)])
def test_an_image_gives_the_pixels_and_tokens_of_transformers(processor, size):
    picture = Image.effect_noise(size, 80).convert("RGB")
    features = processor.image_processor(images=[picture], return_tensors="pt")
    tokens = int(features["image_grid_thw"].prod()) // processor.image_processor.merge_size**2
    chunk = ImageChunk.from_image(processor, picture, expected_tokens=tokens)
    assert torch.equal(features["pixel_values"], chunk.pixel_values)
    assert torch.equal(features["image_grid_thw"], chunk.image_grid_thw)
    assert tokens == chunk.num_tokens == len(chunk.input_ids) == len(chunk.loss_mask)
    assert {processor.image_token_id} == set(chunk.input_ids.tolist())
    assert not chunk.loss_mask.any()


def test_an_image_that_the_processor_refuses_is_a_value_error(processor):
    with pytest.raises(ValueError, match="aspect ratio"):
        ImageChunk.from_image(processor, Image.new("RGB", (1, 300)))


def test_an_image_for_a_text_only_processor_is_refused(processor, tmp_path):
    processor.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="has no image processor or no image token"):
        ImageChunk.from_image(load_processor(str(tmp_path)), Image.new("RGB", (16, 16)))


def test_other_tokens_than_the_caller_says_are_refused():
    assert 4 == image(4, 4, expected_tokens=4).num_tokens
    with pytest.raises(DataError, match=r"1 x 4 x 4 patches, merged by 2 x 2, has 4 tokens, but 3 are expected"):
        image(4, 4, expected_tokens=3)
    with pytest.raises(DataError, match="has 4 tokens, but 0 are expected"):
        image(4, 4, expected_tokens=0)


@pytest.mark.parametrize(
    ("rows", "grid", "message"),
    [
        (torch.ones(5, PATCH_DIM), [[1, 2, 2]], "an image of 1 x 2 x 2 patches has 5 rows of pixel values"),
        (torch.ones(0, PATCH_DIM), [[0, 2, 2]], "an image of 0 x 2 x 2 patches has 0 rows"),
        (torch.ones(6, PATCH_DIM), [[1, 3, 2]], "an image of 3 x 2 patches cannot be merged by 2 x 2"),
        (torch.ones(8, PATCH_DIM), [[1, 2, 2], [1, 2, 2]], r"pixel_values \[R, P\] and image_grid_thw \[1, 3\], not"),
        (torch.ones(4), [[1, 2, 2]], r"pixel_values \[R, P\] and image_grid_thw \[1, 3\], not \[4\] and \[1, 3\]"),
    ],
)
def test_an_image_whose_rows_do_not_fit_its_grid_is_refused(rows, grid, message):
    with pytest.raises(DataError, match=message):
        ImageChunk(rows, torch.tensor(grid), IMAGE, MERGE)


def test_a_text_whose_mask_does_not_fit_its_ids_is_refused():
    with pytest.raises(DataError, match=r"input_ids \[S\] and loss_mask \[S\], not \[2\] and \[1\]"):
        TextChunk(torch.tensor([1, 2]), torch.tensor([True]))
    with pytest.raises(DataError, match=r"int64 ids and a bool mask, not torch.int32 and torch.bool"):
        TextChunk(torch.tensor([1], dtype=torch.int32), torch.tensor([True]))
    with pytest.raises(DataError, match=r"not \[1, 1\] and \[1, 1\]"):
        TextChunk(torch.tensor([[1]]), torch.tensor([[True]]))


def test_rows_of_another_width_and_no_chunks_are_refused():
    with pytest.raises(DataError, match="rows of 6 values, the processor's patch_dim is 96"):
        concatenate([text([1]), image()], 96)
    with pytest.raises(DataError, match="no chunks to concatenate"):
        concatenate([], PATCH_DIM)


@pytest.mark.parametrize("images", [[], [image(), image()]])
def test_more_or_fewer_images_than_placeholders_are_refused(images):
    with pytest.raises(DataError, match=f"1 image placeholders for {len(images)} images"):
        place_images(torch.tensor([1, IMAGE]), torch.tensor([True, False]), IMAGE, images)
