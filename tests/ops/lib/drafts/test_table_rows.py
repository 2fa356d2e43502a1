"""Tables read by row: the gradients of rows that are read often, as a step in bfloat16 adds them up."""

import pytest
import torch
from draft_chain import tiny_config

from ops.lib.drafts.backbone.model import table_rows
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dflash2.model import Selector
from ops.lib.drafts.dspark.model import MarkovHead
from ops.lib.training.weights import WorkingWeights

ROWS, WIDTH, OFTEN = 7, 8, 6000
ONE_ROUNDING = 2.0**-8  # of bfloat16, with some to spare: half of it at most


def read_often(seed):
    """Tokens, most of them the same one, and gradients of one sign, as those of a frequent token often have."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.where(
        torch.rand(OFTEN, generator=generator) < 0.8, 3, torch.randint(ROWS, (OFTEN,), generator=generator)
    )
    return tokens, torch.rand(OFTEN, WIDTH, generator=generator).bfloat16()


def summed(tokens, gradients):
    """[ROWS, WIDTH] in float64."""
    return torch.zeros(ROWS, WIDTH, dtype=torch.float64).index_add_(0, tokens, gradients.double())


def assert_one_rounding(expected, gradient):
    """The gradient of the float32 master."""
    assert torch.float32 == gradient.dtype
    assert float(((gradient - expected).abs() / expected.abs().clamp_min(1e-9)).max()) < ONE_ROUNDING


def test_dsparks_table_is_off_by_one_rounding_however_often_a_row_is_read():
    head = MarkovHead(ROWS, WIDTH)
    tokens, upstream = read_often(0)
    with WorkingWeights(head, torch.bfloat16).in_place():
        head.latent(tokens, torch.bfloat16).backward(upstream)
    assert_one_rounding(summed(tokens, upstream), head.markov_w1.weight.grad)


def test_dflash2s_tables_are_off_by_one_rounding_however_often_a_row_is_read():
    selector = Selector(
        tiny_config(vocab_size=ROWS, mask_token_id=0, algorithm=Dflash2(rank=WIDTH, candidates=4)), WIDTH
    )
    with torch.no_grad():
        for table in (selector.predecessor_codebook, selector.successor_codebook):
            table.fill_(1.0)
    (before, upstream), (candidates, _) = read_often(1), read_often(2)
    projected = upstream.float()
    with WorkingWeights(selector, torch.bfloat16).in_place():
        selector.follow(projected, before, candidates[:, None]).sum().backward()
    # with tables of ones, what a row gets from each use is the projected state
    assert_one_rounding(summed(before, projected), selector.predecessor_codebook.grad)
    assert_one_rounding(summed(candidates, projected), selector.successor_codebook.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_the_dtype_of_the_masters_rows_and_gradients_are_those_of_indexing(dtype):
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    tokens = torch.randint(ROWS, (9, 4), generator=generator)
    upstream = torch.randn(9, 4, WIDTH, generator=generator, dtype=dtype)
    table[tokens].backward(upstream)
    expected, table.grad = table.grad, None
    rows = table_rows(table, tokens, dtype)
    assert torch.equal(table[tokens], rows)
    rows.backward(upstream)
    torch.testing.assert_close(table.grad, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-15)
