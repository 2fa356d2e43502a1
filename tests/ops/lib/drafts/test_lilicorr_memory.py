"""What lattices keep for their backward pass: some blocks at a time, and as a plan says."""

from __future__ import annotations

import pytest
import torch
from case_reader import fast_step
from draft_cases import random_case
from draft_chain import tiny_config, train_config
from step_cases import assert_equal_steps
from torch.distributed._tools.mem_tracker import MemTracker

from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.lilicorr import loss as lilicorr_loss
from ops.lib.drafts.lilicorr.config import CUDA_NODES, Lilicorr, LilicorrOptions
from ops.lib.drafts.lilicorr.model import Correlator
from ops.lib.drafts.losses.loss import Loss
from ops.train_dflash.plan import step_memory

SMALL = Lilicorr(candidates=8, width=8, layers=2, heads=2, factors=4)
BLOCKS = 8


@pytest.mark.parametrize(
    ("own", "hidden_size", "block_size"),
    [
        (Lilicorr(candidates=8, width=64, layers=2, heads=8, factors=64), 256, 16),
        (Lilicorr(candidates=8, width=256, layers=1, heads=4, factors=128, mlp_ratio=3.0), 256, 8),
        (Lilicorr(candidates=16, width=64, layers=3, heads=2, factors=256), 128, 16),
    ],
    ids=["many heads", "as wide as the draft", "many candidates"],
)
def test_a_plan_counts_the_memory_that_a_pass_over_lattices_takes(own, hidden_size, block_size):
    config = tiny_config(hidden_size=hidden_size, block_size=block_size, algorithm=own, vocab_size=64)
    correlator, slots = Correlator(config), (BLOCKS, block_size - 1)
    hidden_NSM = torch.randn(*slots, hidden_size, requires_grad=True)
    best = torch.randn(*slots, 64).log_softmax(-1).topk(own.candidates)
    is_there_N = torch.ones(BLOCKS, dtype=torch.bool)
    context = BlockContext(torch.randn(64, hidden_size), torch.randn(BLOCKS, hidden_size), is_there_N)
    lattice = (best.indices, best.values, hidden_NSM, context, torch.ones(slots, dtype=torch.bool))
    tracker = MemTracker()
    with tracker:
        correlator.after(torch.zeros(slots, dtype=torch.int64), *lattice).sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    planned = own.pass_bytes(config, BLOCKS, item_size=4)
    print(f"{peak['Total'] / 1e6:.1f} MB taken, {planned / 1e6:.1f} MB planned")
    assert peak["Total"] == pytest.approx(planned, rel=0.12)


def test_a_plan_counts_no_more_lattices_than_are_computed_at_a_time():
    own = Lilicorr(candidates=8, width=64, heads=2, factors=32)
    shape = tiny_config(block_size=16, algorithm=own)
    config = train_config(algorithm="lilicorr", num_anchors=4096, anchor_chunk=4096)
    together = CUDA_NODES // (15 * 8)
    planned = step_memory(config, shape, degree=1, ranks=1, longest=64)
    assert own.pass_bytes(shape, together, 4) == planned["algorithm"] > own.pass_bytes(shape, together - 1, 4)
    assert "algorithm" not in step_memory(config, tiny_config(block_size=16), degree=1, ranks=1, longest=64)


@pytest.mark.parametrize("kind", ["dflash", "dpace", "focal"])
def test_lattices_one_block_at_a_time_give_the_same_step(monkeypatch, kind):
    case = random_case(6, samples=3, block_size=5, num_hidden_layers=1, algorithm=SMALL)
    loss = Loss(kind=kind, own=LilicorrOptions(hinge=0.3))
    together = fast_step(case, loss)
    monkeypatch.setattr(lilicorr_loss, "CPU_NODES", 1)
    passes = []
    scores_of = lilicorr_loss.Correlator.after
    monkeypatch.setattr(
        lilicorr_loss.Correlator,
        "after",
        lambda self, places_NS, *given: passes.append(len(places_NS)) or scores_of(self, places_NS, *given),
    )
    assert_equal_steps(case, loss, rtol=1e-12)
    assert {1} == set(passes) and len(passes) > 2
    alone = fast_step(case, loss)
    torch.testing.assert_close(together[0], alone[0], rtol=1e-13, atol=0)
