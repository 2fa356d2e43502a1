"""The training step of one micro-batch: the draft's loss over its blocks, and the gradients.

The context's keys and values are computed once, cut out of the graph, and the blocks go through the draft in chunks of
anchors: given the context, blocks are independent. Every chunk is backpropagated immediately, so that its activations
are freed, and adds to the gradient of the context's keys and values; that gradient then goes through the projections.
Memory does not grow with the number of anchors; the result differs from one pass only by rounding.

Under sequence parallelism a rank holds a slice of the context and some of the blocks, and an Exchange decides what
is sent: see ops/lib/sequence_parallel.

What depends on values, such as which slots have a weight, the host knows before the step: nothing here waits for the
device.

Legend: T packed context tokens of the micro-batch, t those of this rank, F features, M hidden, N blocks of this rank,
K block size, W weighted slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from ops.lib.drafts.algorithms import ReadsContext, part_of
from ops.lib.drafts.attention.blocks import Attend
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.check_returns import check_outcome
from ops.lib.drafts.layout import Layout
from ops.lib.drafts.losses.loss import Loss, combine
from ops.lib.drafts.losses.loss_request import Asked, Outcome
from ops.lib.drafts.losses.slots import Weighted
from ops.lib.sequence_parallel.context_range import ContextRange
from ops.lib.sequence_parallel.exchange import Exchange
from ops.lib.target.embedding_and_head import AnyHead

BlockLosses = Callable[[DraftModel, Asked, AnyHead, Loss], Outcome]


@frozen(eq=False)
class MicroBatch:
    """The data that one rank computes in one pass; every tensor except `seen` is on the rank's device.

    features_tF: the rank's slice of the packed context, in the computing dtype. positions_t: absolute positions. seen:
    for each SP rank, the context that its blocks see. anchor_ids, positions int64 [N]: the anchors' tokens and absolute
    positions. labels int64 [N, K]; weights float32 [N, K], 0 for slot 0.
    teacher_UM: the target's final hidden states, if the loss needs the target's distribution. teacher_rows_NK, int64:
    the teacher's row for each slot's token. weighted: the weighted slots; by default found from labels and weights,
    which waits for the device. alike_W, int64, on the CPU: the teacher's row of each weighted slot; by default read
    from its device.
    """

    features_tF: Tensor
    positions_t: Tensor
    seen: tuple[ContextRange, ...]
    anchor_ids_N: Tensor
    positions_N: Tensor
    labels_NK: Tensor
    weights_NK: Tensor
    teacher_UM: Tensor | None = None
    teacher_rows_NK: Tensor | None = None
    weighted: Weighted = field(
        default=Factory(lambda self: Weighted.of(self.labels_NK, self.weights_NK), takes_self=True), kw_only=True
    )
    alike_W: Tensor | None = field(
        default=Factory(lambda self: rows_alike(self.teacher_rows_NK, self.weighted), takes_self=True), kw_only=True
    )


def rows_alike(teacher_rows_NK: Tensor | None, weighted: Weighted) -> Tensor | None:
    """The teacher's row of each weighted slot, for `MicroBatch.alike_W`; None without a teacher."""
    return None if teacher_rows_NK is None else teacher_rows_NK.flatten().index_select(0, weighted.rows_W).cpu()


@frozen(eq=False)
class Slots:
    """The outcome of a micro-batch on one rank.

    loss: sum(w * CE), float64 []. For each weighted slot: slots_W: its place in the block, from 1; correct_W: whether
    the draft would propose the label; losses_W: its loss before weighting; found: the algorithm's metrics.
    """

    loss: Tensor
    slots_W: Tensor
    correct_W: Tensor
    losses_W: Tensor
    found: tuple[Tensor, ...] = ()


@frozen(eq=False)
class Chunk:
    """Some blocks of a micro-batch: at least two blocks, and at least two slots to compute.

    rows_W: those slots as n * K + k: the weighted ones, ascending, and others if there are fewer than two. weighted:
    the number of weighted ones. start, end: the blocks' numbers in the micro-batch. Other fields are as in MicroBatch;
    in alike_W further slots equal no other slot.
    """

    seen: tuple[ContextRange, ...]
    anchor_ids_N: Tensor
    positions_N: Tensor
    labels_NK: Tensor
    weights_NK: Tensor
    teacher_UM: Tensor | None
    teacher_rows_NK: Tensor | None
    alike_W: Tensor | None
    rows_W: Tensor
    weighted: int
    start: int
    end: int


@frozen(eq=False)
class Engine:
    """The draft, the target's frozen ends, and how to compute. head: as `Head.beside` gives it for this draft.

    anchor_chunk: blocks in one pass, None for all. computing: a context around the passes of a step, in which the
    weights have their computing form.
    """

    model: DraftModel
    embed_VM: Tensor
    head: AnyHead
    loss: Loss
    attend: Attend
    exchange: Exchange
    anchor_chunk: int | None = None
    activation_checkpointing: bool = False
    computing: Callable[[], AbstractContextManager[None]] = nullcontext

    def train(
        self,
        batch: MicroBatch,
        scale: float,
        before_last: Callable[[], None] | None = None,
        before_blocks: Callable[[], None] | None = None,
    ) -> Slots:
        """Add the gradients of scale * sum(w * CE) to the parameters.

        before_blocks is called before the last backward pass of blocks, and before_last before the very last, that of
        the context. From these moments on, gradients may be reduced over ranks.
        """
        context = self._context(batch)
        # In float32 at least, as every chunk adds to their gradients.
        wide = torch.promote_types(batch.features_tF.dtype, torch.float32)
        leaves = [tensor.detach().to(wide).requires_grad_() for tensor in context]
        outcomes = []
        chunks = list(self._chunks(batch))
        for number, chunk in enumerate(chunks, start=1):
            outcome = self._blocks(chunk, leaves, batch.features_tF.dtype)
            if before_blocks is not None and number == len(chunks):
                before_blocks()
            (outcome.loss * scale).backward()
            outcomes.append(evolve(outcome, loss=outcome.loss.detach()))
        if before_last is not None:
            before_last()
        gradients = [_gradient(leaf).to(tensor.dtype) for leaf, tensor in zip(leaves, context, strict=True)]
        torch.autograd.backward(context, gradients)
        return _joined(outcomes)

    @torch.no_grad()
    def measure(self, batch: MicroBatch) -> Slots:
        """The losses and metrics of a micro-batch's slots, without gradients."""
        context = self._context(batch)
        return _joined([self._blocks(chunk, context, batch.features_tF.dtype) for chunk in self._chunks(batch)])

    def _context(self, batch: MicroBatch) -> list[Tensor]:
        """The context's keys and values of all layers in one list, as this rank attends to them.

        For an algorithm that reads the end of a block's context, that of this rank's blocks follows, [N, M].
        """
        feature_tM, pairs = self.model.context(batch.features_tF, batch.positions_t)
        found = [tensor for pair in pairs for tensor in self.exchange.context(*pair)]
        return [*found, self.exchange.last(feature_tM, batch.seen)] if self._reads_context else found

    @property
    def _reads_context(self) -> bool:
        return isinstance(self.model.config.algorithm, ReadsContext)

    def _chunks(self, batch: MicroBatch) -> Iterator[Chunk]:
        batch.weighted.check(len(self.embed_VM))
        count = len(batch.anchor_ids_N)
        size = self.anchor_chunk or count
        for start in range(0, count, size):
            yield chunk_of(batch, start, min(start + size, count))

    def _blocks(self, chunk: Chunk, context: Sequence[Tensor], dtype: torch.dtype) -> Slots:
        seen = self.exchange.seen(chunk.seen)
        kv, last = (context[:-1], context[-1]) if self._reads_context else (context, None)

        def attend(q: Tensor, k: Tensor, v: Tensor, k_GTD: Tensor, v_GTD: Tensor, window: int | None) -> Tensor:
            q, k, v = self.exchange.blocks(q, k, v)
            return self.exchange.back(self.attend(q, k, v, k_GTD, v_GTD, seen, window))

        rows_W, K = chunk.rows_W, chunk.labels_NK.shape[1]
        hidden_WM = self.model.forward_blocks(
            self.model.embedded(self.embed_VM.index_select(0, chunk.anchor_ids_N).to(dtype)),
            self.model.embedded(self.embed_VM[self.model.config.mask_token_id].to(dtype)),
            chunk.positions_N,
            [(k.to(dtype), v.to(dtype)) for k, v in zip(kv[::2], kv[1::2], strict=True)],
            attend,
            queries(self.model.config.layout(), rows_W, K),
            self.activation_checkpointing,
        )
        teacher_WM = None
        if chunk.teacher_UM is not None and chunk.teacher_rows_NK is not None:
            teacher_WM = chunk.teacher_UM.index_select(0, chunk.teacher_rows_NK.flatten().index_select(0, rows_W))
        block_losses: BlockLosses = part_of(self.model.config.algorithm, "loss:block_losses")
        around = None if last is None else self._around(chunk, last.to(dtype))
        asked = Asked(hidden_WM, rows_W, chunk.labels_NK, chunk.weights_NK, teacher_WM, chunk.alike_W, around)
        outcome = block_losses(self.model, asked, self.head, self.loss)
        algorithm = self.model.config.algorithm
        check_outcome(algorithm, outcome, len(rows_W), algorithm.metrics(self.loss.needs_teacher))
        loss = outcome.total
        if loss is None:
            loss = combine(self.loss, outcome.losses_W, chunk.weights_NK, rows_W, outcome.added_W)
        losses_W = self.loss.base * outcome.losses_W.detach()
        if outcome.added_W is not None:
            losses_W = losses_W + outcome.added_W.detach()
        found = (rows_W % K, outcome.correct_W, losses_W, *outcome.found)
        slots_W, correct_W, losses_W, *others = (values_W[: chunk.weighted] for values_W in found)
        return Slots(loss, slots_W, correct_W, losses_W, tuple(others))

    def _around(self, chunk: Chunk, last_NM: Tensor) -> BlockContext:
        """The surroundings of a chunk's blocks. last_NM: the end of the context of all blocks of the micro-batch."""
        last_NM = last_NM[chunk.start : chunk.end]
        more = len(chunk.positions_N) - len(last_NM)
        if more:
            last_NM = torch.cat((last_NM, last_NM.new_zeros(more, last_NM.shape[1])))
        return BlockContext(self.embed_VM, last_NM, chunk.positions_N > 0)


def chunk_of(batch: MicroBatch, start: int, end: int) -> Chunk:
    """The blocks [start, end) of a micro-batch; a single block is joined by another one of weight zero.

    A size of one would be a constant in a compiled graph, and so need another graph.
    """
    more = max(0, 2 - (end - start))
    K = batch.labels_NK.shape[1]

    def part(values_N: Tensor) -> Tensor:
        values_N = values_N[start:end]
        return torch.cat((values_N, values_N.new_zeros(more, *values_N.shape[1:]))) if more else values_N

    rows_W = batch.weighted.rows(start, end)
    weighted = len(rows_W)
    alike_W = None
    if batch.alike_W is not None:
        of_weighted = batch.alike_W[batch.weighted.before[start] : batch.weighted.before[end]]
        alike_W = torch.cat((of_weighted, torch.tensor([-1, -2][: max(0, 2 - weighted)], dtype=torch.int64)))
    if start:
        rows_W = rows_W - start * K
    if weighted < 2:  # slots 0 of the first blocks, which have no weight
        rows_W = torch.cat((rows_W, torch.arange(2 - weighted, device=rows_W.device) * K))
    return Chunk(
        seen=tuple(ContextRange(part(seen.start_N), part(seen.end_N)) for seen in batch.seen),
        anchor_ids_N=part(batch.anchor_ids_N),
        positions_N=part(batch.positions_N),
        labels_NK=part(batch.labels_NK),
        weights_NK=part(batch.weights_NK),
        teacher_UM=batch.teacher_UM,
        teacher_rows_NK=None if batch.teacher_rows_NK is None else part(batch.teacher_rows_NK),
        alike_W=alike_W,
        rows_W=rows_W,
        weighted=weighted,
        start=start,
        end=end,
    )


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _joined(outcomes: Sequence[Slots]) -> Slots:
    return Slots(
        torch.stack([outcome.loss for outcome in outcomes]).sum(),
        torch.cat([outcome.slots_W for outcome in outcomes]),
        torch.cat([outcome.correct_W for outcome in outcomes]),
        torch.cat([outcome.losses_W for outcome in outcomes]),
        tuple(torch.cat(values) for values in zip(*(outcome.found for outcome in outcomes), strict=True)),
    )


def queries(layout: Layout, rows_W: Tensor, block_size: int) -> Tensor:
    """The model's slot numbers for the tokens rows_W (n * K + k); an arbitrary slot for the anchor."""
    if layout.queries == block_size and not layout.shift:
        return rows_W
    block_W, token_W = rows_W // block_size, rows_W % block_size
    return block_W * layout.queries + (token_W - layout.shift).clamp(min=0)
