"""A global training step on one rank: a stream of prepared micro-batches, the pass over each, and the tally.

The loss is sum(w*CE) / sum(w), both over the global batch. The denominator is known before the first forward pass, so
no reduction is differentiated through: each rank backpropagates world_size * sum_local(w*CE) / sum_global(w), and
gradients are averaged over the ranks. That holds for sequence-parallel ranks as well.

Preparing inputs (batches.pack), the pass (Engine) and counting outputs (`count`) share nothing but the micro-batch.
What is counted stays on the device until the step is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from attrs import frozen
from torch import Tensor

from ops.lib.data.batching import padded_length
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.sizes import step_flops
from ops.lib.drafts.backbone.step import Engine, MicroBatch, Slots
from ops.lib.drafts.losses.loss import Loss, denominator
from ops.lib.training import rank_group
from ops.lib.training.dtensors import reshard
from ops.lib.training.rank_group import deal
from ops.train_dflash.batches import (
    Arrival,
    Drawn,
    Labels,
    Packed,
    Place,
    PlannedStep,
    Rows,
    States,
    draw,
    idle_batch,
    micro_batches,
    needed,
    pack,
)
from ops.train_dflash.prefetch import Prefetch
from ops.train_dflash.staging import Transfer
from ops.train_dflash.tally import ANCHORLESS, ANCHORS, FLOPS, LOSS, TOKENS, WEIGHT, count_slots, new_tally

VAL_SEED, VAL_EPOCH = 0, -1
T = TypeVar("T")


@frozen(eq=False)
class Prepared:
    """A micro-batch of a global step on this rank.

    batch: None if no sample of the whole step, on any rank, has a weighted slot. arrival: of its bytes.
    denominator: of the loss, over the global step. weight, anchors: its own denominator, and its blocks with a weighted
    slot. tokens, anchorless, flops: of the whole global step, given only in the first micro-batch on rank 0.
    """

    batch: MicroBatch | None
    arrival: Arrival | None
    denominator: float
    weight: float
    anchors: int
    tokens: int
    anchorless: int
    flops: float
    last: bool

    def size(self) -> int:
        """The bytes of the micro-batch's features and of the target's final hidden states, as they were sent."""
        if self.batch is None:
            return 0
        teacher_UM = self.batch.teacher_UM
        return self.batch.features_tF.nbytes + (0 if teacher_UM is None else teacher_UM.nbytes)

    def arrived(self) -> MicroBatch | None:
        """The batch, ready for the computing thread; None for none."""
        if self.batch is None or self.arrival is None:
            return None
        return self.arrival.arrive(self.batch)


@frozen(eq=False)
class Stream:
    """A stream of micro-batches of planned steps for one rank; it uses no weights, and does not communicate.

    reader: the samples of the split. states: requests the features of a micro-batch's rows, `ahead` micro-batches
    before it is prepared; what it returns waits for them. transfer: moves it to the device; each stream has its own, as
    two streams may be read at the same time.
    """

    reader: Labels
    states: Callable[[Sequence[Rows]], Callable[[], States]]
    ahead: int
    draft: DraftConfig
    weights_K: Tensor
    num_anchors: int
    loss: Loss
    micro_batch_tokens: int
    pad_multiple: int
    place: Place
    transfer: Transfer

    def steps(self, planned: Iterable[PlannedStep], seed: int) -> Iterator[Prepared]:
        """The micro-batches of the steps, in order; every step has at least one."""
        requested = (each for step in planned for each in self._step(step, seed))
        return (prepare() for prepare in _ahead(requested, self.ahead))

    def split(self) -> Iterator[Prepared]:
        """The micro-batches of all samples, as one step; its anchors are equal in every measurement and run."""
        return self.steps([PlannedStep(VAL_EPOCH, tuple(range(len(self.reader))))], VAL_SEED)

    def ready(self, most: int) -> int:
        """How many prepared micro-batches may wait, so that with the requested ones there are `most` of them."""
        return max(1, most - self.ahead)

    def drawn(self, step: PlannedStep, seed: int) -> list[Drawn]:
        """All samples of a step, with their anchors."""
        return [
            draw(self.reader, index, self.weights_K, self.num_anchors, seed=seed, epoch=step.epoch)
            for index in step.samples
        ]

    def batches(self, drawn: Sequence[Drawn], dp_rank: int) -> list[list[Drawn]]:
        """The micro-batches of a step on the ranks of dp_rank: samples dealt by cost, without those that have no
        anchor.
        """
        with_anchor = [sample for sample in drawn if len(sample.anchors_A)]
        own = [
            with_anchor[place] for place in deal([self._cost(one) for one in with_anchor], self.place.dp_size)[dp_rank]
        ]
        lengths = [padded_length(sample.length, self.pad_multiple) for sample in own]
        return [[own[place] for place in places] for places in micro_batches(lengths, self.micro_batch_tokens)]

    def _step(self, step: PlannedStep, seed: int) -> Iterator[Callable[[], Prepared]]:
        """Request the features of a step's micro-batches; what it yields prepares one."""
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
            yield partial(Prepared, None, None, total, 0.0, 0, *counts, last=True)
            return
        own = self.batches(drawn, self.place.dp_rank) or [[]]
        for number, samples in enumerate(own):
            states = self.states(needed(samples, self.place)) if samples else None
            rest = nothing if number else counts
            yield partial(self._prepared, samples, states, total, rest, last=number == len(own) - 1)

    def _prepared(
        self,
        samples: Sequence[Drawn],
        states: Callable[[], States] | None,
        total: float,
        counts: tuple[int, int, float],
        *,
        last: bool,
    ) -> Prepared:
        packed = self._pack(samples, states)
        batch, arrival = packed.send(self.transfer)
        weight = denominator(self.loss, packed.weights_NK)
        anchors = int((packed.weights_NK.sum(dim=1) > 0).sum())
        return Prepared(batch, arrival, total, weight, anchors, *counts, last=last)

    def _pack(self, samples: Sequence[Drawn], states: Callable[[], States] | None) -> Packed:
        taught = self.loss.needs_teacher
        if states is not None:
            return pack(states(), samples, self.place, with_teacher=taught)
        teacher = self.draft.hidden_size if taught else 0
        return idle_batch(self.draft.block_size, self.reader.width, self.place, teacher=teacher)

    def _cost(self, sample: Drawn) -> float:
        """The FLOPs of a sample's step; 0 if it has no anchor."""
        if not len(sample.anchors_A):
            return 0.0
        return step_flops(
            self.draft,
            sample.prefix,
            len(sample.anchors_A),
            int(sample.anchors_A.sum()),
            int((sample.weights_AK > 0).sum()),
            with_teacher=self.loss.needs_teacher,
        )


def _ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """The items, each when `count` further ones have been made or there are no more."""
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        if len(made) > count:
            yield made.popleft()
    yield from made


def train_step(engine: Engine, prepared: Iterator[Prepared], world_size: int) -> Tensor:
    """Take one step's micro-batches from the stream, and add their gradients, averaged over the ranks.

    Returns the global tally on the device, without waiting for it. If its weight is zero, there are no gradients.
    """
    tally = _Tally.new(engine)
    rank_group.hold_gradients(engine.model)
    with engine.computing():
        for item in prepared:
            batch, slots = item.arrived(), None
            if batch is not None:
                released = (rank_group.release_gradients, rank_group.release_parts) if item.last else ()
                before = (partial(release, engine.model) for release in released)
                slots = engine.train(batch, world_size / item.denominator, *before)
            tally.count(item, slots)
            if item.last:
                break
    return tally.summed()


def measure(engine: Engine, stream: Stream, ahead: int) -> Tensor:
    """Measure the global tally over all samples of a split, without gradients. ahead: the most
    micro-batches that wait.
    """
    tally = _Tally.new(engine)
    with engine.computing(), Prefetch(stream.split(), ahead, Prepared.size) as prepared:
        for item in prepared:
            batch = item.arrived()
            tally.count(item, None if batch is None else engine.measure(batch))
    reshard(engine.model)
    return tally.summed().cpu()


@frozen(eq=False)
class _Tally:
    """The counts of this rank: known on the host, and found by the device. metrics: names of the
    algorithm's metrics.
    """

    known: Tensor
    found: Tensor
    metrics: tuple[str, ...]

    @classmethod
    def new(cls, engine: Engine) -> _Tally:
        draft = engine.model.config
        metrics = draft.algorithm.metrics(engine.loss.needs_teacher)
        known = new_tally(draft.block_size, metrics)
        return cls(known, new_tally(draft.block_size, metrics, engine.embed_VM.device), metrics)

    def count(self, item: Prepared, slots: Slots | None) -> None:
        """Add a micro-batch and the outcome of its pass."""
        self.known[TOKENS] += item.tokens
        self.known[ANCHORLESS] += item.anchorless
        self.known[FLOPS] += item.flops
        self.known[WEIGHT] += item.weight
        self.known[ANCHORS] += item.anchors
        if slots is not None:
            self.found[LOSS].add_(slots.loss)
            count_slots(self.found, slots)

    def summed(self) -> Tensor:
        """The sum of the counts over all ranks, on the device."""
        return rank_group.summed(self.found + self.known.to(self.found.device, non_blocking=True))
