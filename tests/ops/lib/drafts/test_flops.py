"""The formula of a step's operations against torch's counter over the plain products."""

import pytest
import torch
import torch.nn.functional as F
from draft_chain import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.long_context import QWEN3_8B
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.sizes import step_flops
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.dflash.config import Dflash
from ops.lib.drafts.dflash2.config import Dflash2, Dflash2Options
from ops.lib.drafts.dflash2.loss import block_losses
from ops.lib.drafts.dflash2.model import Convolution
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.drafts.lilicorr.config import Lilicorr
from ops.lib.drafts.lilicorr.model import Correlator
from ops.lib.drafts.losses.head import head_cross_entropy
from ops.lib.drafts.losses.loss import Loss
from ops.lib.drafts.losses.loss_request import Asked


def plain_products(config, tokens, prefixes, weighted, with_teacher):
    """Every matrix product of a step once, forward and backward, with the shapes of the model; no norms, no RoPE."""
    K, M, D = config.layout().queries, config.hidden_size, config.head_dim
    H, G = config.num_attention_heads, config.num_key_value_heads

    def weight(*shape):
        return torch.randn(*shape, requires_grad=True)

    features = torch.randn(tokens, len(config.target_layer_ids) * M)
    context = F.linear(features, weight(M, features.shape[1]))
    x = weight(len(prefixes) * K, M)
    for _ in range(config.num_hidden_layers):
        q = F.linear(x, weight(H * D, M))
        k, v, k_context, v_context = (F.linear(of, weight(G * D, M)) for of in (x, x, context, context))
        mixed = []
        for index, prefix in enumerate(prefixes):
            own = slice(index * K, index * K + K)
            keys = torch.cat((k_context[:prefix], k[own])).view(-1, G, D).repeat_interleave(H // G, 1)
            values = torch.cat((v_context[:prefix], v[own])).view(-1, G, D).repeat_interleave(H // G, 1)
            scores = torch.einsum("qhd,khd->hqk", q[own].view(K, H, D), keys)
            mixed.append(torch.einsum("hqk,khd->qhd", scores, values).reshape(K, H * D))
        x = F.linear(torch.cat(mixed), weight(M, H * D)) + x
        gated = F.linear(x, weight(config.intermediate_size, M)) * F.linear(x, weight(config.intermediate_size, M))
        x = F.linear(gated, weight(M, config.intermediate_size)) + x
    head = torch.randn(config.vocab_size, M)
    if with_teacher:
        F.linear(torch.randn(weighted, M), head)
    F.linear(x[:weighted], head).sum().backward()


@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("algorithm", [Dflash(), Dspark(rank=4)])
def test_the_formula_counts_what_torch_counts(algorithm, with_teacher):
    config = tiny_config(num_hidden_layers=2, algorithm=algorithm)
    prefixes = [3, 7, 0, 11]
    with FlopCounterMode(display=False) as counter:
        plain_products(config, 12, prefixes, 9, with_teacher)
    queries = {"dflash": 4, "dspark": 3}[algorithm.name]
    assert queries == config.layout().queries
    counted = counter.get_total_flops() + len(prefixes) * queries * algorithm.slot_flops(config)
    assert counted == step_flops(config, 12, len(prefixes), sum(prefixes), 9, with_teacher=with_teacher)


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_dflash2_counts_the_products_of_its_convolutions_and_selector_and_no_logits_twice():
    algorithm = Dflash2(taps=2, group=4, rank=6, candidates=4)
    config = tiny_config(num_hidden_layers=3, algorithm=algorithm)
    M, W = config.hidden_size, 10
    blocks_NKM = torch.randn(5, 2, M, requires_grad=True)
    convolution = Convolution(M, algorithm.taps, algorithm.group)
    made = counted(lambda: convolution.enter(blocks_NKM)[1].sum().backward())
    model, head_VM, tokens_NK = DraftModel(config), torch.randn(config.vocab_size, M), torch.arange(12).view(3, 4)
    hidden_WM = torch.randn(W, M, requires_grad=True)
    asked = Asked(hidden_WM, torch.arange(1, W + 1), tokens_NK, torch.ones(3, 4))
    loss = Loss(own=Dflash2Options(rank=6, candidates=4))

    def with_selector():
        outcome = block_losses(model, asked, head_VM, loss)
        (outcome.losses_W + outcome.added_W).sum().backward()

    def base_only():
        head_cross_entropy(hidden_WM, head_VM, asked.labels_W)[0].sum().backward()

    rows_of_the_head = (
        2 * (algorithm.candidates + 1) * M * W
    )  # summed by the scores' slopes, which torch does not count
    selector = counted(with_selector) - counted(base_only) + rows_of_the_head
    assert 2 * config.num_hidden_layers * made + selector == W * algorithm.slot_flops(config)


def test_lilicorr_counts_the_products_of_its_lattice_but_for_those_of_a_block_as_a_whole():
    """Which are the projection of the context's end and its share of the vectors: some percent."""
    algorithm, N = Lilicorr(candidates=8, width=32, heads=2, factors=24), 5
    config = tiny_config(block_size=8, algorithm=algorithm)
    C, M, V, S = algorithm.candidates, config.hidden_size, config.vocab_size, config.block_size - 1
    hidden_NSM = torch.randn(N, S, M, requires_grad=True)
    best = torch.randn(N, S, V, requires_grad=True).log_softmax(-1).topk(C)
    context = BlockContext(torch.randn(V, M), torch.randn(N, M, requires_grad=True), torch.ones(N, dtype=torch.bool))
    correlator = Correlator(config)

    def run():
        places_NS, has_slot_NS = torch.zeros(N, S, dtype=torch.int64), torch.ones(N, S, dtype=torch.bool)
        lattice = (best.indices, best.values, hidden_NSM, context, has_slot_NS)
        correlator.after(places_NS, *lattice).sum().backward()

    rows_of_the_head = 2 * 2 * (C + 1) * M
    expected = N * S * (algorithm.slot_flops(config) - rows_of_the_head)
    assert expected == pytest.approx(counted(run), rel=0.05)


def test_a_window_bounds_what_a_sliding_layer_sees():
    full = tiny_config()
    sliding = tiny_config(layer_types=("full_attention", "sliding_attention"), sliding_window=5)
    more = step_flops(full, 40, 2, 60, 6) - step_flops(sliding, 40, 2, 60, 6)
    assert more == 3 * 2 * 2 * full.block_size * full.num_attention_heads * full.head_dim * (60 - 2 * 5)
    assert step_flops(full, 40, 2, 8, 6) == step_flops(sliding, 40, 2, 8, 6)


def test_a_draft_for_a_target_of_8_billion_parameters_takes_about_70_tflop_a_sequence():
    assert 71e12 == pytest.approx(step_flops(QWEN3_8B, 3072, 512, 512 * 1536, 512 * 15), rel=0.02)
