"""How often a step of the engine would wait for a GPU, and how often it copies to it: on a device without values."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.nn.functional as F
from case_reader import CaseReader, drawn_samples, make_engine, prepare
from device_traffic import DEVICE, Traffic
from draft_cases import random_case

from ops.lib.drafts.attention import flex
from ops.lib.drafts.backbone.config import FULL_ATTENTION, SLIDING_ATTENTION
from ops.lib.drafts.losses import head as head_module
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.drafts.losses.loss import Loss
from ops.lib.drafts.losses.tiled_softmax import fusible_sweep, sweep_values
from ops.train_dflash.batches import Place

pytestmark = pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter:UserWarning")
PLACE = Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=DEVICE, dtype=torch.float32)


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch):
    """The sweep that CUDA compiles, and in FlexAttention's place a kernel that takes this device."""

    def kernel(q, k, v, *, block_mask, enable_gqa):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

    def sweep(*arguments):
        return fusible_sweep(sweep_values, *arguments)

    monkeypatch.setattr(head_module, "choose_head", lambda _device: ("chosen by the test", sweep))
    monkeypatch.setattr(flex, "flex_kernel", kernel)


@pytest.mark.parametrize("kind", ["dflash", "kl", "dpace", "focal", "l1", "lk"])
@pytest.mark.parametrize(("anchor_chunk", "chunks"), [(None, 1), (3, 4)])
def test_a_step_waits_and_sorts_nowhere_and_copies_one_table_for_each_chunk_and_window(kind, anchor_chunk, chunks):
    kinds = (SLIDING_ATTENTION, FULL_ATTENTION, FULL_ATTENTION)
    case = random_case(3, samples=4, layer_types=kinds).to(torch.float32)
    engine = make_engine(case, Loss(kind=kind), device=DEVICE, anchor_chunk=anchor_chunk)
    engine = attrs.evolve(engine, attend=flex.flex_attention)
    with Traffic() as preparing:
        batch = prepare(CaseReader(case), drawn_samples(case), PLACE, with_teacher=needs_teacher(kind))
    assert 10 == len(batch.anchor_ids_N)
    with Traffic() as training:
        engine.train(batch, 1.0)
    with Traffic() as measuring:
        engine.measure(batch)
    assert [{}, {}, {}] == [dict(traffic.waits) for traffic in (preparing, training, measuring)]
    assert [0, 0] == [traffic.sorted for traffic in (training, measuring)]
    windows = 2
    micro_batch = 1  # all tensors of it together, the list of its weighted slots among them
    frequencies = 1  # once for a model
    shared = kind in ("l1", "lk")  # which slots share a row of the target, known from the micro-batch
    tables = (windows + shared) * chunks
    assert [micro_batch, frequencies + tables, tables] == [
        traffic.copies for traffic in (preparing, training, measuring)
    ]


def test_what_would_wait_or_sort_is_counted():
    x = torch.ones(3, device=DEVICE)
    with Traffic() as traffic:
        float(x.sum())
        x.nonzero()
        x[x > 0]
        x.cpu()
        torch.ones(3).to(DEVICE)
        torch.ones(3).to(DEVICE, non_blocking=True)
        rows = torch.ones(3, 2, device=DEVICE, requires_grad=True)
        rows[torch.zeros(4, dtype=torch.int64, device=DEVICE)].sum().backward()
    expected = ["item", "nonzero", "index by bool", "copy to the host", "copy to the device"]
    assert dict.fromkeys(expected, 1) == dict(traffic.waits)
    assert 2 == traffic.copies
    assert 1 == traffic.sorted
