"""What torch.compile makes of the engine: few graphs for all sizes, and no number inside FlexAttention's mask."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, error
from attention_cases import random_case as attention_case
from case_reader import CPU, CaseReader, drawn_samples, make_engine, prepare
from draft_cases import random_case
from torch._dynamo.utils import counters

from ops.lib.drafts.attention import flex
from ops.lib.drafts.attention.blocks import dense_attention
from ops.lib.drafts.losses import head as head_module
from ops.lib.drafts.losses.loss import Loss
from ops.lib.drafts.losses.tiled_softmax import fusible_sweep, sweep_values
from ops.lib.kernels.device import compiled
from ops.train_dflash.batches import Place, idle_batch
from ops.train_dflash.staging import Direct

pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own

GRAPHS = 7  # project_first and project, with and without gradients; finish, for the first layer's input as well


@pytest.fixture
def clean_dynamo():
    torch._dynamo.reset()
    counters.clear()  # which a reset leaves
    yield
    torch._dynamo.reset()


def as_flex_leaves_it(*arguments):
    """The dense attention with the output's heads outermost in memory, as FlexAttention has them."""
    out_NKHD = dense_attention(*arguments)
    out_HXD = out_NKHD.flatten(0, 1).transpose(0, 1).contiguous()
    return out_HXD.transpose(0, 1).unflatten(0, out_NKHD.shape[:2])


def test_training_and_measuring_compile_few_graphs_and_then_none(clean_dynamo, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "block_size": 4}
    case = random_case(3, samples=4, head_dim=8, rope_scaling=None, **sizes)
    engine = make_engine(case, Loss(), compiled=True)
    engine = attrs.evolve(engine, attend=as_flex_leaves_it)
    place = Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=CPU, dtype=torch.float64)
    drawn = sorted(drawn_samples(case), key=lambda sample: len(sample.anchors_A))
    assert 1 == len(drawn[0].anchors_A)
    batches = [prepare(CaseReader(case), samples, place) for samples in (drawn[1:], drawn[:1], drawn)]
    batches.append(idle_batch(case.config.block_size, CaseReader(case).width, place).send(Direct(place.device))[0])
    # A block by itself, whose second one is padding, has as many slots as the hidden state has dimensions.
    assert len(batches[1].labels_NK) + 1 == case.config.hidden_size // case.config.block_size
    engine.train(batches[1], 1.0)
    engine.measure(batches[1])
    assert GRAPHS == counters["frames"]["ok"]  # the total counts what torch looked at and left alone as well
    with torch._dynamo.config.patch(error_on_recompile=True):
        for chunk in (None, 3):
            for batch in batches:
                attrs.evolve(engine, anchor_chunk=chunk).train(batch, 1.0)
                attrs.evolve(engine, anchor_chunk=chunk).measure(batch)


def test_more_kinds_of_inputs_than_graphs_are_an_error_and_not_run_uncompiled(clean_dynamo, monkeypatch):
    monkeypatch.setattr("ops.lib.kernels.device.MOST_GRAPHS", 2)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    double = compiled(lambda x: x * 2)
    for ndim in (1, 2):
        assert 2.0 == float(double(torch.ones([2] * ndim)).max())
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        double(torch.ones(2, 2, 2))


ROWS = (1, 2, 7, 63, 65, 200)  # in tiles of 64: as many as there are, and 2 of 33 and 32, 4 of 50
VOCABULARIES = (64, 65, 200, 320)  # in tiles of 64: the last one whole, one column, some columns


@pytest.fixture
def compiled_sweep(clean_dynamo, monkeypatch):
    """The head in tiles of 64 x 64, gone through by the sweep that CUDA compiles."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    sweep = functools.partial(fusible_sweep, compiled(sweep_values, fullgraph=True))
    monkeypatch.setattr(head_module, "choose_head", lambda _device: ("chosen by the test", sweep))
    monkeypatch.setattr(head_module, "_tile", lambda _device: (64, 64))


def through_the_head(rows, vocabulary):
    """Both losses with and without a gradient, against log_softmax."""
    generator = torch.Generator().manual_seed(rows)
    hidden, teacher = (torch.randn(rows, 8, generator=generator) for _ in range(2))
    head_VM, labels = torch.randn(vocabulary, 8, generator=generator), torch.arange(rows) % vocabulary
    log_p, log_q = ((x @ head_VM.T).log_softmax(-1) for x in (hidden, teacher))
    for leaf in (hidden, hidden.clone().requires_grad_()):
        losses, _ = head_module.head_cross_entropy(leaf, head_VM, labels)
        torch.testing.assert_close(losses.detach(), F.nll_loss(log_p, labels, reduction="none"), rtol=1e-4, atol=1e-4)
        losses, _ = head_module.head_kl(leaf, teacher, head_VM, labels)
        expected = F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(losses.detach(), expected, rtol=1e-4, atol=1e-4)


def test_the_heads_sweep_is_three_graphs_and_as_many_for_one_row_for_one_column_and_for_both(compiled_sweep):
    """Of the cross-entropy, and of the draft and of the teacher in the divergence."""
    before = counters["stats"]["unique_graphs"]
    graphs = []
    for rows, vocabulary in ((64, 64), (1, 64), (64, 65), (1, 65)):
        through_the_head(rows, vocabulary)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert [3, 6, 9, 12] == graphs
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in ROWS:
            for vocabulary in VOCABULARIES:
                through_the_head(rows, vocabulary)


LENGTHS = [(20, 16, 300), (33, 16, 300), (57, 8, 1000), (9, 10, 77), (200, 4, 130), (64, 16, 5)]
WINDOWS = (None, 1, 24)


def compiled_flex_case(N, K, T, window, seed):
    ends = torch.randint(0, T + 1, (N,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Case((0,) * N, tuple(ends), T=T, K=K, G=2, R=2, D=16, window=window)


def by_compiled_flex(case, monkeypatch):
    """flex_attention on the CPU with mask and kernel compiled, as on CUDA."""
    monkeypatch.setattr(flex, "flex_kernel", flex._compiled_flex())
    monkeypatch.setattr(flex, "block_mask", flex._compiled_block_mask())
    with torch.no_grad():
        inputs = [x.detach() for x in case.inputs(torch.float32)]
        return flex.flex_attention(*inputs, case.seen(), case.window)


@pytest.fixture
def flex_graphs(clean_dynamo, monkeypatch):
    """The graphs that are made of FlexAttention and its block mask, which run uncompiled."""
    graphs = []

    def backend(graph, _inputs, **_options):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    flex._compiled_flex.cache_clear()
    flex._compiled_block_mask.cache_clear()
    yield graphs
    flex._compiled_flex.cache_clear()
    flex._compiled_block_mask.cache_clear()


def test_flex_attention_is_two_graphs_for_all_sizes_and_its_mask_computes_with_no_symbol(flex_graphs, monkeypatch):
    for seed, (N, K, T) in enumerate(LENGTHS):
        for window in WINDOWS:
            case = compiled_flex_case(N, K, T, window, seed)
            with torch.no_grad():
                expected = dense_attention(*case.inputs(torch.float64), case.seen(), window)
            assert error([expected], [by_compiled_flex(case, monkeypatch).double()]) < 3e-6
    assert 2 == len(flex_graphs)
    calls = [
        (graph, node)
        for graph in flex_graphs
        for node in graph.graph.nodes
        if node.target is torch.ops.higher_order.flex_attention
    ]
    assert 1 == len(calls)
    for graph, node in calls:
        mask = getattr(graph, node.args[4][-1].target)
        *_, captured = node.args  # what the mask function holds
        inputs = [inner for inner in mask.graph.nodes if inner.op == "placeholder"][4:]
        assert len(captured) == len(inputs)
        for outer, inner in zip(captured, inputs, strict=True):
            is_tensor = isinstance(outer.meta["example_value"], torch.Tensor)
            assert is_tensor or not inner.users, f"the mask computes with the number {outer}"


@pytest.mark.slow
def test_flex_attention_compiled_for_the_cpu_has_the_values_of_the_dense_mask(clean_dynamo, monkeypatch):
    before = counters["stats"]["unique_graphs"]
    for seed, (N, K, T) in enumerate(LENGTHS):
        for window in WINDOWS:
            case = compiled_flex_case(N, K, T, window, seed)
            with torch.no_grad():
                expected = dense_attention(*case.inputs(torch.float64), case.seen(), window)
            assert error([expected], [by_compiled_flex(case, monkeypatch).double()]) < 3e-6
    assert 2 == counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("window", [None, 1, 7])
def test_the_runs_of_keys_are_those_that_the_dense_mask_shows(window):
    case = attention_case(5, K=6, window=window)
    runs_4Q = flex.seen_runs(case.seen(), case.K, case.T, window, more_N=2)
    visible = flex.visible_by(runs_4Q)
    queries = runs_4Q.shape[1]
    shown_QC = visible(None, None, torch.arange(queries)[:, None], torch.arange(case.T + queries))
    from_dense_NKC = dense_mask(case)
    real = len(case.starts) * case.K
    assert torch.equal(shown_QC[:real, : case.T + real], from_dense_NKC.flatten(0, 1))
    assert not shown_QC[:real, case.T + real :].any()
    assert bool(shown_QC.any(dim=1).all()), "a query that sees nothing has no softmax"


def dense_mask(case):
    """bool [N, K, T + N * K], by the definition in ops/lib/drafts/attention/blocks.py, a query and a key at a time."""
    N, K, T = len(case.starts), case.K, case.T
    mask = torch.zeros(N, K, T + N * K, dtype=torch.bool)
    for n, (start, end) in enumerate(zip(case.starts, case.ends, strict=True)):
        for k in range(K):
            keys = [(t, t - start) for t in range(start, end)]
            keys += [(T + n * K + j, end - start + j) for j in range(K)]
            for key, position in keys:
                mask[n, k, key] = case.window is None or 0 <= end - start + k - position < case.window
    return mask
