"""Typed batches against one plain row after the other."""

import pickle

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pickles import names_in_pickle
from safetensors import safe_open
from torch import Tensor

from dsl.errors import DataError
from ops.lib.data.token_shards import TokenSample, stored_offsets, stored_sample, write_token_shard
from ops.lib.vision.batch import ModelInputs, TensorBatch, collate
from ops.lib.vision.tensor_list import TensorList


@attrs.define(eq=False)
class Pair(TensorBatch):
    """numbers [B, ...]; pieces: B tensors."""

    numbers: Tensor
    pieces: TensorList


@attrs.define(eq=False)
class OtherPair(TensorBatch):
    numbers: Tensor
    pieces: TensorList


@attrs.define(eq=False)
class Named(TensorBatch):
    numbers: Tensor
    parts_of_it: TensorList


@attrs.define(eq=False)
class Either(TensorBatch):
    """A field that may be of both kinds."""

    values: Tensor | TensorList


def pair(lengths, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 100, (len(lengths), 2), generator=generator)
    pieces = [torch.randint(0, 100, (length, 3), generator=generator).to(dtype) for length in lengths]
    return Pair(numbers, TensorList(pieces))


def pairs():
    lengths = st.lists(st.integers(0, 3), min_size=1, max_size=6)
    return st.builds(pair, lengths, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))


def rows(batch):
    """Every row as plain values, read field by field."""
    return [
        (number.tolist(), piece.tolist(), piece.dtype)
        for number, piece in zip(batch.numbers, batch.pieces, strict=True)
    ]


def sample(length, grids=(), name="s"):
    """A TokenSample of `length` tokens and an image of t x h x w patches for each grid."""
    patches = sum(t * h * w for t, h, w in grids)
    return TokenSample(
        id=name,
        category="image" if grids else "text",
        input_ids=torch.arange(1, length + 1),
        loss_mask=torch.arange(length) >= length // 2,
        pixel_values=torch.arange(patches * 6, dtype=torch.float32).view(patches, 6),
        image_grid_thw=torch.tensor(grids, dtype=torch.int64).view(-1, 3),
        prompt_tokens=length // 2,
    )


@given(pairs(), st.none() | st.integers(-8, 8), st.none() | st.integers(-8, 8), st.sampled_from([None, 1, 2, -1, -2]))
def test_a_slice_is_that_of_the_list_of_rows_and_never_empty(batch, start, stop, step):
    expected = rows(batch)[start:stop:step]
    if expected:
        got = batch[start:stop:step]
        assert isinstance(got, Pair)
        assert expected == rows(got)
    else:
        with pytest.raises(DataError, match="selects none of"):
            batch[start:stop:step]


@given(pairs(), st.data())
def test_rows_are_chosen_by_an_int_ints_a_tensor_and_permuted(batch, data):
    chosen = data.draw(st.lists(st.integers(-len(batch), len(batch) - 1), min_size=1, max_size=8))
    expected = [rows(batch)[row] for row in chosen]
    assert expected == rows(batch[chosen])
    assert expected == rows(batch[torch.tensor(chosen)])
    assert expected[:1] == rows(batch[chosen[0]])
    order = data.draw(st.permutations(range(len(batch))))
    assert [rows(batch)[row] for row in order] == rows(batch.permute(order))
    assert batch == batch.permute(order).permute(torch.tensor(order).argsort())


@given(pairs(), st.integers(1, 8))
def test_chunks_are_those_of_torch_and_cat_to_the_whole(batch, n):
    chunks = batch.chunk(n)
    assert [len(part) for part in torch.arange(len(batch)).chunk(n)] == [len(part) for part in chunks]
    assert rows(batch) == rows(Pair.cat(chunks))
    assert batch == Pair.cat(chunks)


@given(pairs(), st.integers(1, 3))
def test_repeat_gives_the_whole_batch_again_and_again(batch, n):
    assert rows(batch) * n == rows(batch.repeat(n))


@given(pairs())
def test_a_pickle_gives_the_same_batch(batch):
    copy = pickle.loads(pickle.dumps(batch))
    assert rows(batch) == rows(copy)
    assert batch == copy


def test_reading_a_pickle_calls_no_function_or_class_but_our_own():
    assert {
        "ops.lib.vision.batch._unpack_batch",
        "ops.lib.vision.batch.ModelInputs",
        "ops.lib.vision.tensor_list._unpack_list",
    } == names_in_pickle(collate([sample(3, [(1, 2, 2)])]))


@given(pairs(), st.data())
@settings(max_examples=50)
def test_setting_rows_is_that_of_a_list_of_rows_and_touches_no_batch_made_before(batch, data):
    before, expected, view = rows(batch), rows(batch), batch[:]
    places = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, unique=True))
    new = pair([5] * len(places), batch.pieces.dtype, seed=100)
    for place, row in zip(places, rows(new), strict=True):
        expected[place] = row
    batch[places] = new
    assert expected == rows(batch)
    assert before == rows(view)
    view[0] = new[0]
    assert expected == rows(batch)


@given(pairs())
def test_to_gives_a_new_batch_whose_ids_keep_their_dtype(batch):
    moved = batch.to("cpu", torch.float64)
    assert (torch.int64, torch.float64) == (moved.numbers.dtype, moved.pieces.dtype)
    assert [(number, piece) for number, piece, _ in rows(batch)] == [
        (number, piece) for number, piece, _ in rows(moved)
    ]
    assert batch.to() == batch
    assert batch.to() is not batch
    assert torch.device("meta") == batch.to("meta").device


@given(pairs(), pairs())
def test_two_batches_are_equal_where_their_rows_are(one, two):
    assert (rows(one) == rows(two)) == (one == two)


def test_a_batch_is_unequal_to_everything_else_without_an_exception():
    batch = pair([1, 1])
    stacked = torch.stack(list(batch.pieces))
    assert batch != OtherPair(batch.numbers, batch.pieces)
    assert batch != Named(batch.numbers, batch.pieces)
    assert Either(batch.pieces) != Either(stacked)
    assert Either(stacked) != Either(batch.pieces)
    assert Either(stacked) == Either(stacked.clone())
    assert Either(stacked) != Either(stacked.double())
    assert Either(stacked) != Either(stacked[:1])
    for other in (batch.numbers, batch.pieces, None, 1, "text", {"numbers": batch.numbers, "pieces": batch.pieces}):
        assert (batch == other) is False
        assert batch != other
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)


@pytest.mark.parametrize(
    ("numbers", "pieces", "message"),
    [
        (torch.ones(2), [torch.ones(1)], "Pair: the fields differ in length: numbers 2, pieces 1"),
        (torch.ones(()), [torch.ones(1)], "Pair.numbers is a tensor of no dimension; a field is a Tensor"),
        ([1.0], [torch.ones(1)], "Pair.numbers is a list; a field is a Tensor"),
        (
            torch.ones(1, device="meta"),
            [torch.ones(1)],
            "Pair: the fields are on several devices: numbers meta, pieces",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(numbers, pieces, message):
    with pytest.raises(DataError, match=message):
        Pair(numbers, TensorList(pieces))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("numbers", torch.ones(3, 2), "Pair: the fields differ in length: numbers 3, pieces 2"),
        ("numbers", "ab", "Pair.numbers is a str; a field is a Tensor"),
        ("numbers", np.ones((2, 2)), "Pair.numbers is a ndarray; a field is a Tensor"),
        ("numbers", torch.ones(2, 2, device="meta"), "Pair: the fields are on several devices"),
        ("pieces", TensorList([torch.ones(1)]), "Pair: the fields differ in length: numbers 2, pieces 1"),
        ("pieces", [torch.ones(1), torch.ones(1)], "Pair.pieces is a list; a field is a Tensor"),
    ],
)
def test_a_field_that_is_set_by_attribute_has_to_go_with_the_others(name, value, message):
    batch = pair([1, 2])
    before = rows(batch)
    with pytest.raises(DataError, match=message):
        setattr(batch, name, value)
    assert before == rows(batch)
    assert before[:1] == rows(batch[0:1])


def test_a_field_that_is_set_by_attribute_is_that_of_the_batch():
    batch = pair([1, 2])
    numbers, pieces = torch.zeros(2, 5), TensorList([torch.zeros(4), torch.zeros(1)])
    batch.numbers, batch.pieces = numbers, pieces
    assert batch.numbers is numbers and batch.pieces is pieces
    assert [(4,), (1,)] == batch[0:2].pieces.shapes
    with pytest.raises(AttributeError):
        batch.other = numbers


def test_a_class_with_checks_of_its_own_makes_them_when_a_field_is_set():
    inputs = collate([sample(2), sample(3)])
    with pytest.raises(DataError, match=r"ids and masks are of one shape \[B, S\]"):
        inputs.loss_mask = torch.ones(2, 4, dtype=torch.bool)
    inputs.loss_mask = torch.ones(2, 3, dtype=torch.bool)
    assert inputs[0].loss_mask.all()
    wider = attrs.evolve(inputs, **{name: torch.ones(2, 7) for name in ("input_ids", "attention_mask", "loss_mask")})
    assert 7 == wider.input_ids.shape[1]


def test_an_empty_batch_is_refused():
    with pytest.raises(DataError, match="Either: no rows; a batch has at least one"):
        Either(torch.ones(0, 3))
    with pytest.raises(DataError, match="cat of no batches"):
        Pair.cat([])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (OtherPair(torch.ones(1, 2), TensorList([torch.ones(1)])), "a OtherPair cannot be combined with a Pair"),
        (
            Pair(torch.ones(1, 3).long(), TensorList([torch.ones(1)])),
            r"numbers: Tensor \[B, 2\] .* and Tensor \[B, 3\]",
        ),
        (Pair(torch.ones(1, 2), TensorList([torch.ones(1)])), r"numbers: .*torch.float32.* and .*torch.int64"),
        (Pair(torch.ones(1, 2).long(), TensorList([torch.ones(1).half()])), r"pieces: .*float16.* and .*float32"),
    ],
)
def test_batches_that_do_not_go_together_are_refused_and_nothing_is_set(other, message):
    batch = pair([1, 2])
    before = rows(batch)
    with pytest.raises(DataError, match=message):
        Pair.cat([batch, other])
    with pytest.raises(DataError, match=message):
        batch[0] = other
    assert before == rows(batch)


def test_a_field_of_both_kinds_is_not_joined():
    with pytest.raises(
        DataError, match=r"Either.values: Tensor \[B, 2\] of .* and TensorList of .* cannot be combined"
    ):
        Either.cat([Either(torch.ones(1, 2)), Either(TensorList([torch.ones(2)]))])


def test_rows_are_set_once_each_and_as_many_as_there_are():
    batch = pair([1, 2, 3])
    with pytest.raises(DataError, match="2 rows do not fit 1 places"):
        batch[0] = pair([1, 1])
    with pytest.raises(DataError, match=r"\[0, -3\] selects a row twice"):
        batch[[0, -3]] = pair([1, 1])


def test_an_order_that_is_no_permutation_and_a_row_past_the_end_are_refused():
    batch = pair([1, 2, 3])
    for order in ([0, 1], [0, 1, 1], [0, 1, 2, 0]):
        with pytest.raises(DataError, match="is not a permutation of 3 rows"):
            batch.permute(order)
    with pytest.raises(IndexError):
        batch[3]
    with pytest.raises(TypeError, match="rows are selected by"):
        batch["numbers"]


@pytest.mark.parametrize("n", [0, -1])
def test_a_number_below_one_is_refused(n):
    for what in (pair([1]).chunk, pair([1]).repeat):
        with pytest.raises(DataError, match="the number must be at least 1"):
            what(n)


def test_collate_pads_on_the_right_and_keeps_the_pixels_of_each_sample():
    samples = [sample(4, [(1, 2, 2), (1, 2, 4)]), sample(2), sample(3, [(1, 4, 2)])]
    inputs = collate(samples)
    assert [[1, 2, 3, 4], [1, 2, 0, 0], [1, 2, 3, 0]] == inputs.input_ids.tolist()
    assert [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]] == inputs.attention_mask.tolist()
    assert [[0, 0, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]] == inputs.loss_mask.int().tolist()
    assert (torch.int64, torch.int64, torch.bool) == (
        inputs.input_ids.dtype,
        inputs.attention_mask.dtype,
        inputs.loss_mask.dtype,
    )
    assert [(12, 6), (0, 6), (8, 6)] == inputs.pixel_values.shapes
    assert [[[1, 2, 2], [1, 2, 4]], [], [[1, 4, 2]]] == [grid.tolist() for grid in inputs.image_grid_thw]
    pixel_values, grid = inputs.pixels_or_none()
    assert torch.equal(torch.cat([samples[0].pixel_values, samples[2].pixel_values]), pixel_values)
    assert [[1, 2, 2], [1, 2, 4], [1, 4, 2]] == grid.tolist()


def test_collate_refuses_no_samples():
    with pytest.raises(DataError, match="a batch of no samples"):
        collate([])


def test_empty_becomes_none_only_where_no_row_has_an_image():
    inputs = collate([sample(2), sample(3, [(1, 2, 2)]), sample(4)])
    assert [True, False, True, False] == [part.has_images for part in (inputs, inputs[0], inputs[1], inputs[2])]
    assert (None, None) == inputs[[0, 2]].pixels_or_none()
    assert (4, 1) == tuple(len(part) for part in inputs[:2].pixels_or_none())


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=5), st.integers(1, 5))
def test_batches_of_samples_cat_to_the_batch_of_all_samples(kinds, size):
    samples = [sample(length, [(1, 2, 2)] if image else []) for length, image in kinds]
    parts = [collate(samples[start : start + size]) for start in range(0, len(samples), size)]
    assert collate(samples) == ModelInputs.cat(parts)


def test_a_row_of_another_width_is_set_with_padding():
    inputs = collate([sample(2), sample(3)])
    inputs[0] = collate([sample(5, [(1, 2, 2)])])
    assert collate([sample(5, [(1, 2, 2)]), sample(3)]) == inputs
    inputs[0] = collate([sample(1)])
    assert [[1, 0, 0, 0, 0], [1, 2, 3, 0, 0]] == inputs.input_ids.tolist()
    assert [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0]] == inputs.attention_mask.tolist()


def test_model_inputs_of_other_shapes_or_kinds_are_refused():
    inputs = collate([sample(2), sample(3)])
    with pytest.raises(
        DataError, match=r"of one shape \[B, S\], not input_ids \[2, 3\], attention_mask \[2, 3\], loss_"
    ):
        attrs.evolve(inputs, loss_mask=inputs.loss_mask[:, 1:])
    with pytest.raises(DataError, match=r"Tensors are .*image_grid_thw"):
        attrs.evolve(inputs, image_grid_thw=torch.ones(2, 3))


def seen_sample(name: str, length: int, **seen: Tensor) -> TokenSample:
    """A sample of a target that is not Qwen's, with what its processor made."""
    ids = torch.arange(length)
    no_images = torch.empty(0, 3, dtype=torch.int64)
    return TokenSample(name, "image", ids, ids > 1, torch.empty(0, 0), no_images, length, seen)


SEEN = (
    seen_sample("text", 3),
    seen_sample("one", 5, pixels=torch.ones(1, 2, 4), sizes=torch.tensor([[2, 4]])),
    seen_sample("two", 4, pixels=torch.full((2, 3, 3), 2.0), sizes=torch.tensor([[3, 3], [1, 3]])),
)


def test_tensors_by_name_of_any_shape_keep_their_rows_in_a_batch():
    batch = collate(SEEN)
    assert batch.has_images
    assert not collate(SEEN[:1]).has_images
    assert ["pixels", "sizes"] == list(batch.seen)
    assert [(0,), (1, 2, 4), (2, 3, 3)] == batch.seen["pixels"].shapes
    assert [(2, 3, 3), (1, 2, 4)] == [tuple(each.shape) for each in batch[[2, 1]].seen_or_none()["pixels"]]
    assert {} == batch[[0]].seen_or_none()
    joined = ModelInputs.cat([collate(SEEN[:1]), collate(SEEN[1:])])
    assert joined == batch
    assert joined != collate(SEEN[:1])
    assert batch == pickle.loads(pickle.dumps(batch))
    assert batch == ModelInputs.cat([batch.permute([2, 0, 1])[[1, 2]], batch[2]])
    changed = batch.repeat(2)
    changed[0] = batch[2]
    assert changed[0].seen == batch[2].seen
    assert torch.bfloat16 == batch.to(dtype=torch.bfloat16).seen["pixels"].dtype
    assert torch.int64 == batch.to(dtype=torch.bfloat16).seen["sizes"].dtype
    with pytest.raises(DataError, match=r"seen\[pixels\] 2"):
        attrs.evolve(batch, seen={"pixels": batch.seen["pixels"][:2]})


def test_tensors_by_name_are_read_from_a_shard_as_they_were_written(tmp_path):
    write_token_shard(tmp_path / "shard", SEEN, 0)
    with safe_open(tmp_path / "shard", framework="pt") as tensors:
        offsets = stored_offsets(tensors)
        for row, sample in enumerate(SEEN):
            read = stored_sample(tensors, offsets, row, id=sample.id, category="image", prompt_tokens=1)
            assert sample.seen.keys() == read.seen.keys()
            for name, tensor in sample.seen.items():
                assert torch.equal(tensor, read.seen[name])
            assert torch.equal(sample.input_ids, read.input_ids)
    other = seen_sample("other", 3, pixels=torch.ones(2))
    with pytest.raises(DataError, match="the processor makes pixels of 2 kinds"):
        write_token_shard(tmp_path / "other", [*SEEN, other], 0)
