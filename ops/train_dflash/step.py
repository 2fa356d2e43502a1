"""One global training step, and the measurement on the val split: forward, loss and, for training, gradients.

The loss is sum(w*CE) / sum(w), both over the global batch. The denominator is summed over ranks before the first
forward pass, so no reduction is differentiated through: each rank backpropagates
world_size * sum_local(w*CE) / sum_global(w), and gradients are averaged over the ranks.

Legend: T packed tokens, N blocks, K block size, M hidden size, V vocabulary, W weighted slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from ops.capture_targets.shards import FeatureReader
from ops.dflash.loss import dflash_loss
from ops.dflash.model import DraftModel
from ops.shard_sequence.run import padded_length
from ops.train_dflash import ranks
from ops.train_dflash.batches import BlockMaker, Blocks, deal, micro_batches
from ops.train_dflash.tally import ANCHORLESS, ANCHORS, LOSS, TOKENS, WEIGHT, count_slots, new_tally

VAL_SEED, VAL_EPOCH = 0, -1


@frozen
class Forward:
    """The draft with the target's frozen embedding and head (float32 [V, M]) on one rank's device."""

    model: DraftModel
    embed_VM: Tensor
    head_VM: Tensor
    maker: BlockMaker
    micro_batch_tokens: int
    pad_multiple: int
    rank: int
    world_size: int

    def train(self, reader: FeatureReader, samples: Sequence[int], *, seed: int, epoch: int) -> Tensor:
        """Add the gradients of one global step, averaged over the ranks, and return its global tally.

        The features of this rank's samples of the step are held in memory at once.
        """
        own, costs = self._own(reader, samples)
        blocks = {index: self.maker.blocks(reader.sample(index), index, seed=seed, epoch=epoch) for index in own}
        weight = torch.zeros(1, dtype=torch.float64, device=self.embed_VM.device)
        for item in blocks.values():
            weight += item.weights_AK.sum(dtype=torch.float64).item()
        denominator = ranks.summed(weight).item()
        tally = new_tally(len(self.maker.weights_K))
        for batch in micro_batches(own, costs, self.micro_batch_tokens):
            loss = self._batch([blocks[index] for index in batch], tally)
            if loss is not None:
                (loss * (self.world_size / denominator)).backward()
        if denominator > 0:
            ranks.average_gradients(self.model.parameters())
        return ranks.summed(tally.to(self.embed_VM.device)).cpu()

    @torch.no_grad()
    def measure(self, reader: FeatureReader) -> Tensor:
        """The global tally over all samples of a split; the anchors are the same in every measurement and run."""
        own, costs = self._own(reader, range(len(reader)))
        tally = new_tally(len(self.maker.weights_K))
        for batch in micro_batches(own, costs, self.micro_batch_tokens):
            samples = ((index, reader.sample(index)) for index in batch)
            self._batch(
                [self.maker.blocks(sample, index, seed=VAL_SEED, epoch=VAL_EPOCH) for index, sample in samples], tally
            )
        return ranks.summed(tally.to(self.embed_VM.device)).cpu()

    def _own(self, reader: FeatureReader, samples: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """This rank's samples, and the padded tokens of all of them."""
        costs = {index: padded_length(reader.lengths[index], self.pad_multiple) for index in samples}
        return deal(samples, costs, self.world_size)[self.rank], costs

    def _batch(self, items: Sequence[Blocks], tally: Tensor) -> Tensor | None:
        """sum(w*CE) of a micro-batch, counted in the tally; None where no sample of it has an anchor."""
        tally[TOKENS] += sum(len(item.features_SF) for item in items)
        tally[ANCHORLESS] += sum(len(item.anchors_A) == 0 for item in items)
        items = [item for item in items if len(item.anchors_A)]
        if not items:
            return None
        device = self.embed_VM.device
        tokens_NK = torch.cat([item.tokens_AK for item in items]).to(device)
        labels_NK = torch.cat([item.labels_AK for item in items]).to(device)
        weights_NK = torch.cat([item.weights_AK for item in items]).to(device)
        features_TF = torch.cat([item.features_SF for item in items]).to(device, self.embed_VM.dtype)
        hidden_NKM = self.model.forward_blocks(
            features_TF,
            [len(item.features_SF) for item in items],
            self.embed_VM[tokens_NK],
            [item.anchors_A for item in items],
        )
        block_W, slot_W = weights_NK.nonzero(as_tuple=True)
        labels_W, weights_W = labels_NK[block_W, slot_W], weights_NK[block_W, slot_W]
        loss, correct_W = dflash_loss(hidden_NKM[block_W, slot_W], self.head_VM, labels_W, weights_W)
        tally[LOSS] += float(loss.detach())
        tally[WEIGHT] += float(weights_W.sum(dtype=torch.float64))
        tally[ANCHORS] += len(tokens_NK)
        count_slots(tally, slot_W.cpu(), correct_W.cpu())
        return loss
