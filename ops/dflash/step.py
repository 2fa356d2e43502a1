"""The training step of one micro-batch: the draft's loss over its blocks, and the gradients.

The context's keys and values are computed once, cut out of the graph, and the blocks go through the draft in chunks of
anchors: given the context, blocks are independent. Every chunk is backpropagated at once, so that its activations can
go, and adds to the gradient of the context's keys and values; that gradient then goes through the projections. Memory
does not grow with the number of anchors; the result differs from one pass by rounding only.

Under sequence parallelism a rank holds a slice of the context and some of the blocks, and an Exchange decides what
travels: see ops/sequence_parallel.

Legend: T packed context tokens of the micro-batch, t those of this rank, F features, M hidden, N blocks of this rank,
K block size, W weighted slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from attrs import frozen
from torch import Tensor

from ops.dflash.attention import Attend, Seen
from ops.dflash.head import head_cross_entropy, head_kl
from ops.dflash.loss import Loss, combine
from ops.dflash.model import DraftModel
from ops.sequence_parallel.exchange import Exchange


@frozen(eq=False)
class MicroBatch:
    """What one rank computes in one pass; every tensor on the rank's device but those of `seen`.

    features_tF: the rank's slice of the packed context, in the dtype to compute in; positions_t: absolute positions.
    seen: per SP rank, what its blocks see. anchor_ids, positions int64 [N]: the anchors' tokens and absolute positions;
    labels int64 [N, K]; weights float32 [N, K]. teacher_NKM: the target's final hidden states that predict each slot's
    token, where the loss asks for the target's distribution.
    """

    features_tF: Tensor
    positions_t: Tensor
    seen: tuple[Seen, ...]
    anchor_ids_N: Tensor
    positions_N: Tensor
    labels_NK: Tensor
    weights_NK: Tensor
    teacher_NKM: Tensor | None = None


@frozen(eq=False)
class Slots:
    """The outcome of a micro-batch on one rank: sum(w * CE), float64 []; per weighted slot its number, from 1, and
    whether its best token is the label."""

    loss: Tensor
    slots_W: Tensor
    correct_W: Tensor


@frozen(eq=False)
class Engine:
    """The draft, the target's frozen ends [V, M], and how to compute.

    anchor_chunk: blocks in one pass, all of them where None. computing: entered around the passes of a step, with the
    weights that it computes with inside.
    """

    model: DraftModel
    embed_VM: Tensor
    head_VM: Tensor
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

        before_last is called before the last backward pass, that of the context, before_blocks before the last one of
        blocks: the moments to let gradients be reduced over ranks.
        """
        context = self._context(batch)
        # In float32 at least, as every chunk adds to their gradients.
        wide = torch.promote_types(batch.features_tF.dtype, torch.float32)
        leaves = [tensor.detach().to(wide).requires_grad_() for tensor in context]
        outcomes = []
        chunks = list(self._chunks(batch))
        for number, chunk in enumerate(chunks, start=1):
            outcome = self._blocks(chunk, leaves)
            if before_blocks is not None and number == len(chunks):
                before_blocks()
            (outcome.loss * scale).backward()
            outcomes.append(Slots(outcome.loss.detach(), outcome.slots_W, outcome.correct_W))
        if before_last is not None:
            before_last()
        gradients = [_gradient(leaf).to(tensor.dtype) for leaf, tensor in zip(leaves, context, strict=True)]
        torch.autograd.backward(context, gradients)
        return _joined(outcomes)

    @torch.no_grad()
    def measure(self, batch: MicroBatch) -> Slots:
        """The same without gradients."""
        context = self._context(batch)
        return _joined([self._blocks(chunk, context) for chunk in self._chunks(batch)])

    def _context(self, batch: MicroBatch) -> list[Tensor]:
        """Keys and values of one layer after the other, as this rank attends to them."""
        pairs = self.model.context_kv(batch.features_tF, batch.positions_t)
        return [tensor for pair in pairs for tensor in self.exchange.context(*pair)]

    def _chunks(self, batch: MicroBatch) -> Iterator[MicroBatch]:
        count = len(batch.anchor_ids_N)
        size = self.anchor_chunk or count
        for start in range(0, count, size):
            rows = slice(start, start + size)
            yield MicroBatch(
                features_tF=batch.features_tF,
                positions_t=batch.positions_t,
                seen=tuple(Seen(seen.start_N[rows], seen.end_N[rows]) for seen in batch.seen),
                anchor_ids_N=batch.anchor_ids_N[rows],
                positions_N=batch.positions_N[rows],
                labels_NK=batch.labels_NK[rows],
                weights_NK=batch.weights_NK[rows],
                teacher_NKM=None if batch.teacher_NKM is None else batch.teacher_NKM[rows],
            )

    def _blocks(self, chunk: MicroBatch, context: Sequence[Tensor]) -> Slots:
        seen = self.exchange.seen(chunk.seen)

        def attend(q: Tensor, k: Tensor, v: Tensor, k_GTD: Tensor, v_GTD: Tensor, window: int | None) -> Tensor:
            q, k, v = self.exchange.blocks(q, k, v)
            return self.exchange.back(self.attend(q, k, v, k_GTD, v_GTD, seen, window))

        rows_W = chunk.weights_NK.flatten().nonzero().squeeze(1)
        if not len(rows_W):  # a pass with one unweighted slot keeps the ranks in step
            rows_W = rows_W.new_zeros(1)
        dtype = chunk.features_tF.dtype
        hidden_WM = self.model.forward_blocks(
            self.embed_VM[chunk.anchor_ids_N].to(dtype),
            self.embed_VM[self.model.config.mask_token_id].to(dtype),
            chunk.positions_N,
            [(k.to(dtype), v.to(dtype)) for k, v in zip(context[::2], context[1::2], strict=True)],
            attend,
            rows_W,
            self.activation_checkpointing,
        )
        labels_W = chunk.labels_NK.flatten()[rows_W]
        if chunk.teacher_NKM is None:
            losses_W, correct_W = head_cross_entropy(hidden_WM, self.head_VM, labels_W)
        else:
            teacher_WM = chunk.teacher_NKM.flatten(0, 1)[rows_W]
            losses_W, correct_W = head_kl(hidden_WM, teacher_WM, self.head_VM, labels_W)
        loss = combine(self.loss, losses_W, chunk.weights_NK, rows_W)
        slots_W = rows_W % self.model.config.block_size
        counted = slots_W > 0
        return Slots(loss, slots_W[counted], correct_W[counted])


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _joined(outcomes: Sequence[Slots]) -> Slots:
    return Slots(
        torch.stack([outcome.loss for outcome in outcomes]).sum(),
        torch.cat([outcome.slots_W for outcome in outcomes]),
        torch.cat([outcome.correct_W for outcome in outcomes]),
    )
