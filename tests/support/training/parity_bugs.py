"""Mistakes of a training over ranks, put into a made engine on purpose; its layout has sp_degree SP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ops.lib.drafts.backbone import step as engine_step
from ops.lib.drafts.backbone.step import Engine, MicroBatch, Slots
from ops.lib.drafts.losses.loss import denominator
from ops.lib.drafts.losses.slots import draw_anchors
from ops.train_dflash import batches

SP = 2


@contextmanager
def reduced_in_place(engine: Engine) -> Iterator[None]:
    """Bug: the sp ranks' sums are reduced in place, unseen by autograd, and taken for the sample's whole loss."""
    combine = engine_step.combine

    def reduced(*arguments: object) -> Tensor:
        loss = combine(*arguments)
        dist.all_reduce(loss.detach(), group=engine.exchange.group)  # shares the loss's memory
        return loss

    with patch.object(engine_step, "combine", reduced), _scaled(lambda _batch, scale: scale / SP):
        yield


def scaled_by_sp_only(_engine: Engine) -> AbstractContextManager[None]:
    """Bug: the mean over ranks is undone for the sp ranks only."""
    return _scaled(lambda _batch, scale: scale * SP / dist.get_world_size())


def denominator_of_the_rank(engine: Engine) -> AbstractContextManager[None]:
    """Bug: each rank divides by the weights of its own blocks, and gradients are averaged."""
    return _scaled(lambda batch, _scale: 1 / denominator(engine.loss, batch.weights_NK))


def anchors_of_the_shard(_engine: Engine) -> AbstractContextManager[None]:
    """Bug: each sp rank draws its share of the anchors from its own slice of the sequence."""

    def shard_wise(loss_mask_S: Tensor, num_anchors: int, *, seed: int, epoch: int, sample: int) -> Tensor:
        size, share = -(-len(loss_mask_S) // SP), -(-num_anchors // SP)
        return torch.cat(
            [
                first + draw_anchors(loss_mask_S[first : first + size], share, seed=seed, epoch=epoch, sample=sample)
                for first in range(0, len(loss_mask_S), size)
            ]
        )

    return patch.object(batches, "draw_anchors", shard_wise)


BUGS: dict[str, Callable[[Engine], AbstractContextManager[None]]] = {
    "loss reduced in place": reduced_in_place,
    "scaled by the wrong number of ranks": scaled_by_sp_only,
    "anchors drawn per shard": anchors_of_the_shard,
    "denominator of the rank": denominator_of_the_rank,
}


@contextmanager
def _scaled(change: Callable[[MicroBatch, float], float]) -> Iterator[None]:
    """Open a context in which the loss of every micro-batch is scaled by another factor."""
    train = Engine.train

    def wrong(engine: Engine, batch: MicroBatch, scale: float, *before: Callable[[], None]) -> Slots:
        return train(engine, batch, change(batch, scale), *before)

    with patch.object(Engine, "train", wrong):
        yield
