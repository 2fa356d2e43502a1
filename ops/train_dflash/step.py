"""A global training step on one rank: a stream of prepared micro-batches, the pass over each, and what is counted.

The loss is sum(w*CE) / sum(w), both over the global batch. The denominator is known before the first forward pass, so
no reduction is differentiated through: each rank backpropagates world_size * sum_local(w*CE) / sum_global(w), and
gradients are averaged over the ranks. That holds for sequence-parallel ranks as well.

Preparing inputs (batches.prepare), the pass (Engine) and counting outputs (`count`) share nothing but the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import frozen
from torch import Tensor

from ops.dflash.config import DraftConfig
from ops.dflash.flops import step_flops
from ops.dflash.loss import Loss, denominator
from ops.dflash.step import Engine, MicroBatch, Slots
from ops.dtensors import reshard
from ops.shard_sequence.run import padded_length
from ops.train_dflash.batches import (
    Drawn,
    Labels,
    Place,
    PlannedStep,
    Rows,
    States,
    draw,
    idle_batch,
    micro_batches,
    needed,
    prepare,
)
from ops.train_dflash.prefetch import Prefetch
from ops.train_dflash.tally import ANCHORLESS, ANCHORS, FLOPS, LOSS, TOKENS, WEIGHT, count_slots, new_tally
from ops.training import ranks
from ops.training.ranks import deal

VAL_SEED, VAL_EPOCH = 0, -1


@frozen(eq=False)
class Prepared:
    """A micro-batch of a global step on this rank.

    batch: None where no sample of the whole step, on any rank, has a weighted slot. denominator: of the loss, over the
    global step. tokens, anchorless and flops count the whole global step, in its first micro-batch on rank 0 alone.
    """

    batch: MicroBatch | None
    denominator: float
    tokens: int
    anchorless: int
    flops: float
    last: bool


@frozen(eq=False)
class Stream:
    """Makes the micro-batches of planned steps for one rank; it touches no weights and no rank that trains.

    reader: the samples of the split; states: gives the features of a micro-batch's rows, when it is prepared.
    """

    reader: Labels
    states: Callable[[Sequence[Rows]], States]
    draft: DraftConfig
    weights_K: Tensor
    num_anchors: int
    loss: Loss
    micro_batch_tokens: int
    pad_multiple: int
    place: Place

    def steps(self, planned: Iterable[PlannedStep], seed: int) -> Iterator[Prepared]:
        """The micro-batches of the steps, one step after the other; every step has at least one."""
        for step in planned:
            yield from self._step(step, seed)

    def split(self) -> Iterator[Prepared]:
        """Those of all samples as one step; the anchors are the same in every measurement and run."""
        return self.steps([PlannedStep(VAL_EPOCH, tuple(range(len(self.reader))))], VAL_SEED)

    def drawn(self, step: PlannedStep, seed: int) -> list[Drawn]:
        """All samples of a step with their anchors."""
        return [
            draw(self.reader, index, self.weights_K, self.num_anchors, seed=seed, epoch=step.epoch)
            for index in step.samples
        ]

    def batches(self, drawn: Sequence[Drawn], dp_rank: int) -> list[list[Drawn]]:
        """A step's micro-batches on the ranks of dp_rank: samples dealt by cost, those without an anchor left out."""
        with_anchor = [sample for sample in drawn if len(sample.anchors_A)]
        own = [
            with_anchor[place] for place in deal([self._cost(one) for one in with_anchor], self.place.dp_size)[dp_rank]
        ]
        lengths = [padded_length(sample.length, self.pad_multiple) for sample in own]
        return [[own[place] for place in places] for places in micro_batches(lengths, self.micro_batch_tokens)]

    def _step(self, step: PlannedStep, seed: int) -> Iterator[Prepared]:
        drawn = self.drawn(step, seed)
        total = sum(denominator(self.loss, sample.weights_AK) for sample in drawn)
        counts = (
            sum(sample.length for sample in drawn),
            sum(len(sample.anchors_A) == 0 for sample in drawn),
            sum(self._cost(sample) for sample in drawn),
        )
        nothing = (0, 0, 0.0)
        if self.place.dp_rank or self.place.sp_rank:
            counts = nothing
        if total == 0:
            yield Prepared(None, total, *counts, last=True)
            return
        own = self.batches(drawn, self.place.dp_rank) or [[]]
        for number, samples in enumerate(own):
            batch = self._prepare(samples)
            yield Prepared(batch, total, *(nothing if number else counts), last=number == len(own) - 1)

    def _prepare(self, samples: Sequence[Drawn]) -> MicroBatch:
        if samples:
            states = self.states(needed(samples, self.place))
            return prepare(states, samples, self.place, with_teacher=self.loss.kind == "kl")
        return idle_batch(self.draft.block_size, self.reader.width, self.place)

    def _cost(self, sample: Drawn) -> float:
        """FLOPs of a sample's step; 0 where it has no anchor."""
        if not len(sample.anchors_A):
            return 0.0
        slots = int((sample.weights_AK > 0).sum())
        return step_flops(self.draft, sample.prefix, len(sample.anchors_A), int(sample.anchors_A.sum()), slots)


def train_step(engine: Engine, prepared: Iterator[Prepared], world_size: int) -> Tensor:
    """Take one step's micro-batches from the stream and add their gradients, averaged over the ranks.

    Returns the global tally; where its weight is zero, there are no gradients.
    """
    tally = new_tally(engine.model.config.block_size)
    ranks.hold_gradients(engine.model)
    for item in prepared:
        if item.batch is not None:
            release = (lambda: ranks.release_gradients(engine.model)) if item.last else None
            count(tally, item, engine.train(item.batch, world_size / item.denominator, release), engine.loss)
        else:
            count(tally, item, None, engine.loss)
        if item.last:
            break
    return ranks.summed(tally.to(engine.embed_VM.device)).cpu()


def measure(engine: Engine, stream: Stream, ahead: int) -> Tensor:
    """The global tally over all samples of a split, without gradients; `ahead` micro-batches wait, at most."""
    tally = new_tally(engine.model.config.block_size)
    with Prefetch(stream.split(), ahead) as prepared:
        for item in prepared:
            count(tally, item, None if item.batch is None else engine.measure(item.batch), engine.loss)
    reshard(engine.model)
    return ranks.summed(tally.to(engine.embed_VM.device)).cpu()


def count(tally: Tensor, item: Prepared, slots: Slots | None, loss: Loss) -> None:
    """Add a micro-batch's outputs to this rank's tally."""
    tally[TOKENS] += item.tokens
    tally[ANCHORLESS] += item.anchorless
    tally[FLOPS] += item.flops
    if item.batch is None or slots is None:
        return
    weights_NK = item.batch.weights_NK.cpu()
    tally[LOSS] += float(slots.loss)
    tally[WEIGHT] += denominator(loss, weights_NK)
    tally[ANCHORS] += int((weights_NK.sum(dim=1) > 0).sum())
    count_slots(tally, slots.slots_W.cpu(), slots.correct_W.cpu())
