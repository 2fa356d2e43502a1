"""What is counted over the micro-batches of a step, and that counting waits for no device."""

import pytest
import torch
from draft_chain import make_inputs, train_config
from fake_stage import FakeStage

from ops.lib.drafts.backbone.step import Slots
from ops.train_dflash.engine import set_up
from ops.train_dflash.inputs import open_inputs
from ops.train_dflash.step import measure, train_step
from ops.train_dflash.tally import ANCHORS, HEAD, LOSS, WEIGHT, count_slots, new_tally, slot_accuracy


@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_slots_are_counted_as_one_by_one(block_size):
    generator = torch.Generator().manual_seed(block_size)
    tally = new_tally(block_size)
    seen, right = [0] * block_size, [0] * block_size
    for length in (0, 1, 200):
        slots_W = torch.randint(1, block_size, (length,), generator=generator)
        correct_W = torch.rand(length, generator=generator) < 0.3
        count_slots(tally, slots_W, correct_W)
        for slot, correct in zip(slots_W.tolist(), correct_W.tolist(), strict=True):
            seen[slot] += 1
            right[slot] += correct
    assert [*right[1:], *seen[1:]] == tally[HEAD:].tolist()
    assert [r / max(1, s) for r, s in zip(right[1:], seen[1:], strict=True)] == slot_accuracy(tally)


def test_counting_reads_nothing_from_the_device():
    """On the meta device there is nothing to be read."""
    tally = new_tally(4, torch.device("meta"))
    slots_W, correct_W = torch.ones(9, dtype=torch.int64, device="meta"), torch.ones(9, dtype=torch.bool, device="meta")
    count_slots(tally, slots_W, correct_W)
    assert "meta" == tally.device.type


def test_a_step_with_an_engine_on_another_device_is_not_waited_for(tmp_path):
    """All of a step but the passes themselves, whose outcome is that of a device that cannot be read."""

    class Unread:
        """An engine whose device is the meta device."""

        def __init__(self, engine):
            self.model, self.computing, self.loss = engine.model, engine.computing, engine.loss
            self.embed_VM = engine.embed_VM.to("meta")

        def train(self, batch, scale, *_releases):
            slots_W = torch.ones(3, dtype=torch.int64, device="meta")
            loss = torch.zeros((), dtype=torch.float64, device="meta")
            return Slots(loss, slots_W, torch.ones(3, dtype=torch.bool, device="meta"))

    config = train_config(micro_batch_tokens=30)
    stage = FakeStage(tmp_path, make_inputs(tmp_path))
    inputs = open_inputs(config, stage)
    setup = set_up(config, stage, inputs)
    tally = train_step(Unread(setup.engine), setup.train.steps(inputs.steps[:1], 0), 1)
    assert "meta" == tally.device.type


def test_weight_and_anchors_are_known_before_the_pass_and_are_those_of_the_weights(tmp_path):
    config = train_config(micro_batch_tokens=30)
    stage = FakeStage(tmp_path, make_inputs(tmp_path))
    inputs = open_inputs(config, stage)
    setup = set_up(config, stage, inputs)
    items = list(setup.train.steps(inputs.steps[:1], 0))
    assert len(items) > 2
    for item in items:
        assert item.weight == float(item.batch.weights_NK.sum(dtype=torch.float64))
        assert item.anchors == int((item.batch.weights_NK.sum(dim=1) > 0).sum())
    assert items[0].denominator == pytest.approx(sum(item.weight for item in items), rel=1e-12)
    tally = train_step(setup.engine, iter(items), 1)
    assert sum(item.anchors for item in items) == tally[ANCHORS]
    losses = [float(setup.engine.measure(item.batch).loss) for item in items]
    assert float(tally[LOSS]) == pytest.approx(sum(losses), rel=1e-6)
    assert measure(setup.engine, setup.val, 2)[WEIGHT] > 0
