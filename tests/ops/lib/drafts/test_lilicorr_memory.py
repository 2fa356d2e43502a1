"""What lattices keep for their backward pass: some blocks at a time, and as a plan says."""

from __future__ import annotations

import pytest
import torch
from case_reader import fast_step
from draft_cases import random_case
from draft_chain import tiny_config, train_config
from peak_memory import peak_memory
from step_cases import assert_equal_steps

from ops.lib.drafts.lilicorr import loss as lilicorr_loss
from ops.lib.drafts.lilicorr.config import CUDA_NODES, Lilicorr, LilicorrOptions
from ops.lib.drafts.losses.loss import Loss
from ops.train_dflash.plan import step_memory

SMALL = Lilicorr(candidates=8, width=8, layers=2, heads=2, factors=4)
PASS = """
import sys
import torch
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.lilicorr.config import Lilicorr
from ops.lib.drafts.lilicorr.model import Correlator

torch.set_num_threads(1)
M, V, K, N = 256, 512, 16, int(sys.argv[1])
own = Lilicorr(candidates=8, width=256, factors=256)
config = DraftConfig(
    algorithm=own, hidden_size=M, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
    intermediate_size=M, vocab_size=V, block_size=K, mask_token_id=0, target_layer_ids=(1,), num_target_layers=4,
    max_position_embeddings=64,
)
correlator = Correlator(config)

def run(blocks):
    best = torch.randn(blocks, K - 1, V).log_softmax(-1).topk(own.candidates)
    hidden = torch.randn(blocks, K - 1, M, requires_grad=True)
    context = BlockContext(torch.randn(V, M), torch.randn(blocks, M), torch.ones(blocks, dtype=torch.bool))
    is_there = torch.ones(blocks, K - 1, dtype=torch.bool)
    correlator.after(is_there.long(), best.indices, best.values, hidden, context, is_there).sum().backward()

run(1)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
run(N)
print(own.pass_bytes(config, N, 4) >> 20)
"""


def test_a_pass_over_lattices_takes_the_memory_that_a_plan_counts():
    (before, planned), peak = peak_memory(PASS, 24)
    taken = peak - (int(before) >> 10)
    print(f"{taken} MiB taken, {planned} MiB planned")
    assert 0.75 * int(planned) < taken < 1.2 * int(planned)


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
