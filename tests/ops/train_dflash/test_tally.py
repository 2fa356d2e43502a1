"""What is counted over the micro-batches of a step, and that counting waits for no device."""

import pytest
import torch
from draft_chain import make_inputs, train_config
from fake_stage import FakeStage

from ops.lib.drafts.backbone.step import Slots
from ops.train_dflash.engine import set_up
from ops.train_dflash.inputs import open_inputs
from ops.train_dflash.step import measure, train_step
from ops.train_dflash.tally import (
    ANCHORS,
    LOSS,
    WEIGHT,
    accuracy,
    count_slots,
    found_means,
    new_tally,
    slot_accuracy,
    slot_means,
)


@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("found", [(), ("recall",), tuple("abcdefg")])
def test_slots_are_counted_as_one_by_one(block_size, found):
    generator = torch.Generator().manual_seed(block_size)
    tally = new_tally(block_size, found)
    seen, right, lost = [0] * block_size, [0] * block_size, [0.0] * block_size
    others = [[0.0] * block_size for _ in found]
    for length in (0, 1, 200):
        slots_W = torch.randint(1, block_size, (length,), generator=generator)
        correct_W = torch.rand(length, generator=generator) < 0.3
        losses_W, *found_NW = torch.randint(0, 9, (1 + len(found), length), generator=generator).double()
        count_slots(tally, Slots(torch.tensor(0.0), slots_W, correct_W, losses_W, tuple(found_NW)))
        for place, (slot, correct) in enumerate(zip(slots_W.tolist(), correct_W.tolist(), strict=True)):
            seen[slot] += 1
            right[slot] += correct
            lost[slot] += float(losses_W[place])
            for sums, values_W in zip(others, found_NW, strict=True):
                sums[slot] += float(values_W[place])

    def means(sums):
        return [total / max(1, count) for total, count in zip(sums[1:], seen[1:], strict=True)]

    named = zip(("accuracy", "loss", *found), (right, lost, *others), strict=True)
    assert {name: means(sums) for name, sums in named} == slot_means(tally, found)
    assert means(right) == slot_accuracy(tally, found)
    assert accuracy(tally, found) == sum(right) / sum(seen)
    assert found_means(tally, found) == {name: sum(sums) / sum(seen) for name, sums in zip(found, others, strict=True)}


def test_counting_reads_nothing_from_the_device():
    """On the meta device there is nothing to be read."""
    tally = new_tally(4, ("a", "b"), torch.device("meta"))
    slots_W, correct_W = torch.ones(9, dtype=torch.int64, device="meta"), torch.ones(9, dtype=torch.bool, device="meta")
    values_W = torch.zeros(9, device="meta")
    count_slots(tally, Slots(values_W.sum(), slots_W, correct_W, values_W, (values_W, values_W)))
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
            return Slots(loss, slots_W, torch.ones(3, dtype=torch.bool, device="meta"), loss.expand(3), ())

    config = train_config(micro_batch_tokens=30)
    stage = FakeStage(tmp_path, make_inputs(tmp_path))
    inputs = open_inputs(config, stage)
    setup = set_up(config, stage, inputs)
    unread = Unread(setup.engine)
    tally = train_step(unread, setup.train.steps(inputs.steps[:1], 0), 1)
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
