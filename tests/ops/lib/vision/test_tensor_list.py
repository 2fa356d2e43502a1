"""TensorList against a plain Python list of tensors."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pickles import names_in_pickle

from dsl.errors import DataError
from ops.lib.vision.tensor_list import TensorList

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def filled(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype) for shape in shapes
    ]


@st.composite
def tensors(draw, dtype=None):
    """One to six tensors of any shapes (no dimension, no rows) and one dtype."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    return filled(shapes, dtype or draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))


def same(expected, got):
    """Whether a TensorList holds exactly the tensors of a list, compared here without its own equality."""
    return len(expected) == len(got) and all(
        one.dtype == two.dtype and one.shape == two.shape and one.tolist() == two.tolist()
        for one, two in zip(expected, got, strict=True)
    )


def ends():
    return st.none() | st.integers(-8, 8)


@given(tensors())
def test_a_list_holds_its_tensors_in_order_and_tells_their_shapes(items):
    got = TensorList(items)
    assert same(items, got)
    assert [tuple(item.shape) for item in items] == got.shapes
    assert (items[0].dtype, items[0].device, len(items)) == (got.dtype, got.device, len(got))


@given(tensors(), st.integers(-8, 8))
def test_an_int_gives_a_tensor_or_an_index_error_as_in_a_list(items, index):
    if -len(items) <= index < len(items):
        assert items[index] is TensorList(items)[index]
        assert items[index] is TensorList(items)[torch.tensor(index)]
    else:
        with pytest.raises(IndexError):
            TensorList(items)[index]


@given(tensors(), ends(), ends(), st.none() | st.integers(-3, 3).filter(bool))
def test_a_slice_is_that_of_a_list_and_never_empty(items, start, stop, step):
    expected = items[start:stop:step]
    if expected:
        got = TensorList(items)[start:stop:step]
        assert isinstance(got, TensorList)
        assert same(expected, got)
    else:
        with pytest.raises(DataError, match="selects none of"):
            TensorList(items)[start:stop:step]


@given(tensors(), st.data())
def test_ints_in_a_list_or_a_tensor_select_and_permute(items, data):
    rows = data.draw(st.lists(st.integers(-len(items), len(items) - 1), min_size=1, max_size=8))
    expected = [items[row] for row in rows]
    assert same(expected, TensorList(items)[rows])
    assert same(expected, TensorList(items)[tuple(rows)])
    assert same(expected, TensorList(items)[torch.tensor(rows)])
    order = data.draw(st.permutations(range(len(items))))
    inverse = sorted(range(len(items)), key=lambda place: order[place])
    assert same(items, TensorList(items)[order][inverse])


def test_a_tensor_of_bools_marks_the_rows():
    items = filled([(1,), (2,), (3,)], torch.float32)
    assert same([items[0], items[2]], TensorList(items)[torch.tensor([True, False, True])])


@given(tensors(), st.integers(1, 9))
def test_chunks_are_those_of_torch_and_cat_to_the_whole(items, n):
    chunks = TensorList(items).chunk(n)
    assert [len(part) for part in torch.arange(len(items)).chunk(n)] == [len(part) for part in chunks]
    assert same(items, TensorList.cat(chunks))


@given(tensors(), st.integers(1, 4))
def test_repeat_gives_the_whole_list_again_and_again(items, n):
    assert same(items * n, TensorList(items).repeat(n))
    assert same(items * n, TensorList.cat([TensorList(items)] * n))


@given(tensors(), st.sampled_from(DTYPES))
def test_to_gives_a_new_list_and_leaves_the_old_one(items, dtype):
    before = TensorList(items)
    after = before.to(dtype=dtype)
    assert same([item.to(dtype) for item in items], after)
    assert same(items, before)
    assert same(items, before.to("cpu"))
    assert before.to("cpu") is not before
    assert torch.device("meta") == before.to("meta").device


@given(tensors())
def test_a_pickle_gives_the_same_list(items):
    copy = pickle.loads(pickle.dumps(TensorList(items)))
    assert same(items, copy)
    assert TensorList(items) == copy


def test_a_pickle_holds_bfloat16_exactly_and_only_what_the_views_show():
    large = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    items = [large[10:13], torch.tensor([float("inf"), -0.0, 1e-40]).to(torch.bfloat16), large[:0]]
    written = pickle.dumps(TensorList(items))
    assert len(written) < 500
    read = pickle.loads(written)
    assert [item.view(torch.int16).tolist() for item in items] == [item.view(torch.int16).tolist() for item in read]
    read[0].zero_()  # owns its memory


def test_reading_a_pickle_calls_no_function_but_our_own():
    assert {"ops.lib.vision.tensor_list._unpack_list"} == names_in_pickle(TensorList([torch.ones(2)]))


@given(tensors(), tensors())
def test_two_lists_are_equal_where_dtype_shapes_and_values_are(one, two):
    assert same(one, two) == (TensorList(one) == TensorList(two))
    assert TensorList(one) == TensorList([item.clone() for item in one])
    assert TensorList(one) != TensorList([*one, one[0]])


def test_a_list_is_unequal_to_everything_else_without_an_exception():
    tensor = torch.ones(2, 3)
    assert TensorList([tensor]) != TensorList([tensor.double()])
    assert TensorList([tensor]) != TensorList([tensor.T])
    for other in (tensor, tensor[None], [tensor], None, "text", 1):
        assert (TensorList([tensor]) == other) is False
        assert TensorList([tensor]) != other
    assert (tensor == TensorList([tensor])) is False


def test_a_list_cannot_be_hashed():
    with pytest.raises(TypeError, match="unhashable"):
        hash(TensorList([torch.ones(1)]))


@given(tensors(dtype=torch.int64), st.data())
@settings(max_examples=50)
def test_setting_items_is_that_of_a_list_and_touches_no_selection_made_before(items, data):
    got, expected = TensorList(items), list(items)
    whole = got[:]
    rows = data.draw(st.lists(st.integers(0, len(items) - 1), min_size=1, unique=True))
    values = filled([(7,)] * len(rows), torch.int64)
    for row, value in zip(rows, values, strict=True):
        expected[row] = value
    got[rows] = TensorList(values)
    assert same(expected, got)
    got[-1] = torch.zeros(9, dtype=torch.int64)
    assert same([*expected[:-1], torch.zeros(9, dtype=torch.int64)], got)
    assert same(items, whole)


def test_a_slice_can_be_set():
    got = TensorList(filled([(1,), (2,), (3,)], torch.float32))
    got[1:] = TensorList([torch.zeros(4), torch.ones(5)])
    assert [(1,), (4,), (5,)] == got.shapes


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(1, dtype=torch.int64), "item 0 of a TensorList is torch.float32 on cpu, item 0|item 1 of a"),
        (0, "text", "item 0 of a TensorList is a str, not a tensor"),
        (slice(0, 2), TensorList([torch.ones(1)]), "1 tensors do not fit 2 rows"),
        (slice(0, 2), torch.ones(2, 1), "several rows of a TensorList need a TensorList, not a Tensor"),
        ([0, 0], TensorList([torch.ones(1)] * 2), r"\[0, 0\] selects a row twice"),
        ([0, -2], TensorList([torch.ones(1)] * 2), r"\[0, -2\] selects a row twice"),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_set(index, value, message):
    items = filled([(1,), (2,)], torch.float32)
    got = TensorList(items)
    with pytest.raises(DataError, match=message):
        got[index] = value
    assert same(items, got)


def test_a_list_of_no_tensors_is_refused():
    with pytest.raises(DataError, match="a TensorList of no tensors"):
        TensorList([])
    with pytest.raises(DataError, match="a TensorList of no tensors"):
        TensorList.cat([])


def test_something_else_than_a_tensor_and_a_second_dtype_or_device_are_refused_with_their_place():
    with pytest.raises(DataError, match="item 1 of a TensorList is a list, not a tensor"):
        TensorList([torch.ones(1), [1.0]])
    with pytest.raises(DataError, match=r"item 2 of a TensorList is torch.float64 on cpu, item 0 torch.float32 on cpu"):
        TensorList([torch.ones(1), torch.ones(1), torch.ones(1).double()])
    with pytest.raises(DataError, match=r"item 1 of a TensorList is torch.float32 on meta.*convert them with to\(\)"):
        TensorList.cat([TensorList([torch.ones(1)]), TensorList([torch.ones(1, device="meta")])])


@pytest.mark.parametrize("index", ["text", 1.0, None, True, [True, False], [0.5], torch.tensor([0.5]), [[0]]])
def test_an_index_of_another_kind_is_refused(index):
    with pytest.raises(TypeError, match="rows are selected by a slice, ints, a tensor of ints"):
        TensorList([torch.ones(1), torch.ones(1)])[index]


def test_bools_of_another_length_and_rows_past_the_end_are_refused():
    two = TensorList([torch.ones(1), torch.ones(1)])
    with pytest.raises(TypeError, match=r"of bools \[2\]"):
        two[torch.tensor([True])]
    with pytest.raises(IndexError):
        two[[0, 2]]
    with pytest.raises(IndexError):
        two[2] = torch.ones(1)


@pytest.mark.parametrize("n", [0, -1])
def test_a_number_below_one_is_refused(n):
    with pytest.raises(DataError, match=rf"chunk\({n}\): the number must be at least 1"):
        TensorList([torch.ones(1)]).chunk(n)
    with pytest.raises(DataError, match=rf"repeat\({n}\): the number must be at least 1"):
        TensorList([torch.ones(1)]).repeat(n)
