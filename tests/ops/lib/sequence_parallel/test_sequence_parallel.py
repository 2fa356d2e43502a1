"""The mesh, the exchanges on four gloo ranks against one process, the bytes they send, and how blocks are dealt.

Legend: as in ops/lib/sequence_parallel/exchange.py.
"""

import math
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from meeting import meeting

from dsl.errors import ConfigError
from ops.lib.drafts.attention.blocks import ContextRange
from ops.lib.sequence_parallel.degree import check_degree, known_exchange
from ops.lib.sequence_parallel.exchange import (
    Alone,
    choose_exchange,
    deal_blocks,
    elements_sent,
    flat_mesh,
    make_exchange,
    make_mesh,
)

K, D, T = 3, 5, 24
SEEN = [(0, 0), (0, 3), (0, 9), (9, 9), (9, 12), (9, 17), (9, 20)]  # two samples of 9 and 11 tokens, 4 of padding
HEADS = [(8, 2), (8, 8), (4, 2), (12, 3)]  # at degree 4, 2 key/value heads become 4, and 3 become 12
DEGREES = [2, 4]
EXCHANGES = ["ulysses", "gather"]
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}
GOOD = {
    "world_size": 8,
    "sp_degree": 4,
    "sp_exchange": "auto",
    "query_heads": 8,
    "kv_heads": 2,
    "shortest": 32,
    "pad_multiple": 16,
}


def toy_attention(q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD, seen):
    """Every block by itself: softmax over [its context | its own slots]."""
    R = q_NKHD.shape[2] // k_GTD.shape[0]
    outputs = []
    for n, (start, end) in enumerate(zip(seen.start_N.tolist(), seen.end_N.tolist(), strict=True)):
        keys_HSD = torch.cat([k_GTD[:, start:end], k_NKGD[n].transpose(0, 1)], dim=1).repeat_interleave(R, dim=0)
        values_HSD = torch.cat([v_GTD[:, start:end], v_NKGD[n].transpose(0, 1)], dim=1).repeat_interleave(R, dim=0)
        scores_HKS = q_NKHD[n].transpose(0, 1) @ keys_HSD.transpose(1, 2) * D**-0.5
        outputs.append((scores_HKS.softmax(dim=-1) @ values_HSD).transpose(0, 1))
    return torch.stack(outputs)


def make_case(query_heads, kv_heads):
    """Context keys and values, then blocks' queries, keys and values, and the output's cotangent, in float64."""
    generator = torch.Generator().manual_seed(query_heads * 10 + kv_heads)
    context = [(kv_heads, T, D)] * 2
    blocks = [(len(SEEN), K, heads, D) for heads in (query_heads, kv_heads, kv_heads, query_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (*context, *blocks)]


def make_seen(own, size):
    """The visible context of the blocks `own`, filled up with dummies to `size`."""
    pairs = torch.tensor([SEEN[n] for n in own] + [(0, 0)] * (size - len(own))).view(size, 2)
    return ContextRange(start_N=pairs[:, 0].contiguous(), end_N=pairs[:, 1].contiguous())


def deal():
    costs_N = torch.tensor([end - start for start, end in SEEN])
    return {degree: deal_blocks(costs_N, degree)[0] for degree in (1, *DEGREES)}


def there_and_back(exchange, case, rank, degree, dtype):
    """Output and gradients of one rank's inputs: a slice of the context, and its blocks and dummies."""
    dealt, size, t = deal()[degree], math.ceil(len(SEEN) / degree), T // degree
    own = dealt[rank]
    context = [x_GTD[:, rank * t : (rank + 1) * t].to(dtype) for x_GTD in case[:2]]
    blocks = [torch.zeros(size, *x_NKXD.shape[1:], dtype=dtype) for x_NKXD in case[2:]]
    for filled, x_NKXD in zip(blocks, case[2:], strict=True):
        filled[: len(own)] = x_NKXD[own].to(dtype)
    *leaves, cotangent_NKHD = *context, *blocks
    leaves = [leaf.requires_grad_() for leaf in leaves]
    k_GTD, v_GTD = exchange.context(*leaves[:2])
    heads = exchange.blocks(*leaves[2:])
    seen = exchange.seen([make_seen(other.tolist(), size) for other in dealt])
    out_NKHD = exchange.back(toy_attention(*heads, k_GTD, v_GTD, seen))
    (out_NKHD * cotangent_NKHD).sum().backward()
    return {"out": out_NKHD.detach(), "gradients": [leaf.grad for leaf in leaves]}


def around(exchange, query_heads, kv_heads, rank):
    """Queries sent and brought back, and the gradient that comes back for a cotangent."""
    generator = torch.Generator().manual_seed(rank)
    q_NKHD, k_NKGD, g_NKHD = (
        torch.randn(2, K, heads, D, generator=generator) for heads in (query_heads, kv_heads, query_heads)
    )
    q_NKHD.requires_grad_()
    returned_NKHD = exchange.back(exchange.blocks(q_NKHD, k_NKGD, k_NKGD)[0])
    returned_NKHD.backward(g_NKHD)
    return {"sent": [q_NKHD.detach(), g_NKHD], "returned": [returned_NKHD.detach(), q_NKHD.grad]}


def one_of_four(rank, folder, place):
    """A rank's process: all cases at degree 2 (two groups side by side) and at degree 4."""
    torch.set_num_threads(1)
    os.environ |= {**place, "RANK": str(rank)}
    dist.init_process_group("gloo")
    results = {}
    for degree in DEGREES:
        mesh = make_mesh(4, degree, torch.device("cpu"))
        group, sp_rank = mesh.get_group("sp"), mesh.get_local_rank("sp")
        groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "sp")]
        results[f"mesh {degree}"] = [*groups, list(mesh.get_coordinate()), flat_mesh(mesh).mesh.tolist()]
        for name in EXCHANGES:
            for heads in HEADS:
                for dtype in PRECISION:
                    exchange = make_exchange(name, group)
                    result = there_and_back(exchange, make_case(*heads), sp_rank, degree, dtype)
                    result["counted"] = [exchange.sent.forward, exchange.sent.backward]
                    results[f"{name} {degree} {heads} {dtype}"] = result
                results[f"around {name} {degree} {heads}"] = around(make_exchange(name, group), *heads, rank)
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four_ranks")
    # The server imports torch once for all ranks; it never computes, so forking it is safe.
    multiprocessing.set_forkserver_preload(["ops.lib.sequence_parallel.exchange"])
    with meeting(4) as place:
        mp.start_processes(one_of_four, (folder, place), nprocs=4, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_values_and_gradients_of_every_rank_are_those_of_one_process(four_ranks, name, degree, heads, dtype):
    alone = there_and_back(Alone(), make_case(*heads), 0, 1, torch.float64)
    for rank, results in enumerate(four_ranks):
        theirs, sp_rank = results[f"{name} {degree} {heads} {dtype}"], rank % degree
        own, t = deal()[degree][sp_rank], T // degree
        expected = [alone["out"][own]]
        expected += [grad_GTD[:, sp_rank * t : (sp_rank + 1) * t] for grad_GTD in alone["gradients"][:2]]
        expected += [grad_NKXD[own] for grad_NKXD in alone["gradients"][2:]]
        context, blocks = theirs["gradients"][:2], [theirs["out"], *theirs["gradients"][2:]]
        actual = [blocks[0][: len(own)], *context, *(block_NKXD[: len(own)] for block_NKXD in blocks[1:])]
        assert [dtype] * 6 == [tensor.dtype for tensor in actual]
        for want, got in zip(expected, actual, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=PRECISION[dtype], atol=PRECISION[dtype])
        assert all(block_NKXD[len(own) :].eq(0).all() for block_NKXD in blocks), "dummy blocks give and get nothing"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_counted_elements_equal_the_formula_forward_and_backward(four_ranks, name, degree, heads):
    slots = degree * math.ceil(len(SEEN) / degree) * K
    expected = elements_sent(
        name, context=T, slots=slots, query_heads=heads[0], kv_heads=heads[1], head_dim=D, degree=degree
    )
    for results in four_ranks:
        assert [expected, expected] == results[f"{name} {degree} {heads} {torch.float64}"]["counted"]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_back_is_the_inverse_of_blocks_for_values_and_gradients(four_ranks, name, degree, heads):
    for results in four_ranks:
        around = results[f"around {name} {degree} {heads}"]
        for sent, returned in zip(around["sent"], around["returned"], strict=True):
            assert torch.equal(sent, returned)


def test_the_mesh_puts_the_ranks_of_one_sequence_side_by_side(four_ranks):
    assert [
        [[0, 2], [0, 1], [0, 0], [0, 1, 2, 3]],
        [[1, 3], [0, 1], [0, 1], [0, 1, 2, 3]],
        [[0, 2], [2, 3], [1, 0], [0, 1, 2, 3]],
        [[1, 3], [2, 3], [1, 1], [0, 1, 2, 3]],
    ] == [results["mesh 2"] for results in four_ranks]
    assert [[[r], [0, 1, 2, 3], [0, r], [0, 1, 2, 3]] for r in range(4)] == [r["mesh 4"] for r in four_ranks]


def test_a_degree_that_fits_passes():
    check_degree(**GOOD)
    check_degree(**GOOD | {"sp_exchange": "ulysses"})
    check_degree(**GOOD | {"sp_exchange": "gather", "query_heads": 6})
    check_degree(**GOOD | {"query_heads": 6})


def mistakes_of(**changes):
    with pytest.raises(ConfigError) as caught:
        check_degree(**GOOD | changes)
    head, *mistakes = str(caught.value).split("\n")
    assert "sequence parallelism:" == head
    return mistakes


def test_every_mistake_of_a_degree_is_told_at_once():
    assert [
        "  sp_degree: 6 ranks are fewer than the mesh of dp 2 x sp 4; start a multiple of 4 ranks, "
        "or set sp_degree to a divisor of 6",
        "  sp_degree: 4 ranks cannot share the shortest sample, which has 3 tokens; set sp_degree to at most 3, "
        "or drop short samples",
        "  sp_degree: 4 does not divide pad_multiple = 6, and every rank gets an equal slice; set pad_multiple of "
        "shard_sequence to a multiple of 4",
        '  sp_exchange: "ulysses" at sp_degree = 4 needs 12 key/value heads (lcm of 3 and 4), which do not divide '
        '6 query heads; use sp_exchange = "gather", which does not depend on heads',
    ] == mistakes_of(world_size=6, shortest=3, pad_multiple=6, query_heads=6, kv_heads=3, sp_exchange="ulysses")


def test_fewer_ranks_than_the_degree_are_refused():
    assert [
        "  sp_degree: 2 ranks are fewer than the mesh of dp 1 x sp 4; start a multiple of 4 ranks, "
        "or set sp_degree to a divisor of 2"
    ] == mistakes_of(world_size=2)


def test_ring_is_refused_by_name_with_the_reason():
    assert [
        '  sp_exchange: "ring" is not available. Its schedule balances queries against keys around the ring, but here '
        "the queries are the blocks and the context has no queries, so it balances nothing; "
        '"gather" and "ulysses" are exact and send less'
    ] == mistakes_of(sp_exchange="ring")


def test_unknown_exchanges_and_degrees_below_one_are_refused():
    assert [
        "  sp_degree: must be at least 1, got 0",
        '  sp_exchange: "rings" is not one of auto, ulysses, gather',
    ] == mistakes_of(sp_degree=0, sp_exchange="rings")


def test_a_declared_exchange_is_checked_with_the_same_words():
    known_exchange(None, None, "auto")
    for name in ("ring", "rings"):
        with pytest.raises(ValueError) as caught:
            known_exchange(None, None, name)
        assert [f"  {caught.value}"] == mistakes_of(sp_exchange=name)


@pytest.mark.parametrize(
    ("context", "degree", "ulysses", "gather"),
    [(3072, 2, 43, 6), (3072, 4, 32.25, 9), (16384, 4, 42, 48), (65536, 2, 104, 128), (65536, 8, 45.5, 224)],
)
def test_the_formulas_give_the_mebibytes_of_an_8b_draft(context, degree, ulysses, gather):
    """bfloat16, 32 query and 8 KV heads of size 128, 512 blocks of 16; ulysses is the smaller where it is chosen."""
    sizes = {"context": context, "slots": 512 * 16, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "degree": degree}
    assert [ulysses, gather] == [elements_sent(name, **sizes) * 2 / 2**20 for name in EXCHANGES]
    assert ("ulysses" if ulysses < gather else "gather") == choose_exchange("auto", **sizes)[0]


@given(
    context=st.integers(1, 400),
    blocks=st.integers(1, 400),
    ratio=st.integers(1, 8),
    kv_heads=st.integers(1, 8),
    degree=st.integers(2, 8),
)
def test_auto_takes_what_sends_less_where_the_heads_allow_it(context, blocks, ratio, kv_heads, degree):
    query_heads, exchanged = kv_heads * ratio, math.lcm(kv_heads, degree)
    context, slots = context * degree, blocks * degree
    shorter = context * (degree * kv_heads - exchanged) > slots * (query_heads + exchanged)
    expected = "ulysses" if query_heads % exchanged == 0 and shorter else "gather"
    sizes = {"context": context, "slots": slots, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": 4}
    assert expected == choose_exchange("auto", degree=degree, **sizes)[0]


def test_the_choice_comes_with_its_reason():
    sizes = {"context": 65536, "slots": 8192, "query_heads": 32, "kv_heads": 8, "head_dim": 128}
    assert ("alone", "one rank holds the whole sequence") == choose_exchange("ulysses", **sizes, degree=1)
    assert ("gather", "as configured") == choose_exchange("gather", **sizes, degree=2)
    assert (
        "ulysses",
        "a rank sends 54,525,952 elements a layer with ulysses, 67,108,864 with gather "
        "(65,536 context tokens, 8,192 block slots, sp_degree 2)",
    ) == choose_exchange("auto", **sizes, degree=2)
    assert (
        "gather",
        "ulysses would repeat the 8 key/value heads to 24 at sp_degree 3, which do not divide 32 query heads",
    ) == choose_exchange("auto", **sizes, degree=3)


def test_blocks_are_dealt_in_serpentine_order_of_their_prefixes():
    own, dummies = deal_blocks(torch.tensor([10, 80, 30, 60, 50, 40, 70]), 3)
    assert [[0, 1, 2], [5, 6], [3, 4]] == [indices.tolist() for indices in own], "by cost: 80 30 10 | 70 40 | 60 50"
    assert [0, 1, 1] == dummies


@given(costs=st.lists(st.integers(0, 50), max_size=40), degree=st.integers(1, 8))
def test_every_block_is_dealt_once_and_every_rank_holds_as_many(costs, degree):
    own, dummies = deal_blocks(torch.tensor(costs, dtype=torch.int64), degree)
    assert list(range(len(costs))) == sorted(torch.cat(own).tolist())
    assert [sorted(indices.tolist()) for indices in own] == [indices.tolist() for indices in own]
    assert [math.ceil(len(costs) / degree)] * degree == [len(o) + d for o, d in zip(own, dummies, strict=True)]
    loads = [sum(costs[n] for n in indices) for indices in own]
    assert max(loads) - min(loads) <= max(costs, default=0), "the work differs by one block at most"
