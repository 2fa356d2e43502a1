"""From the plan of batches to what a rank computes: reading, dealing, micro-batches, and a sample's noise blocks.

Legend: S tokens of a sample, F features, A anchors, K block size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import BatchPlan
from ops.capture_targets.shards import FeatureSample
from ops.dflash.anchors import block_labels, block_tokens, draw_anchors, slot_weights
from ops.files import read_json, read_jsonl
from ops.shard_sequence.run import padded_length


@frozen
class PlannedStep:
    """The samples of one global step."""

    epoch: int
    samples: tuple[int, ...]


@frozen
class Blocks:
    """One sample with its noise blocks.

    sample: its index; features [S, F]; anchors int64 [A]; tokens, labels int64 [A, K]; weights float32 [A, K].
    """

    sample: int
    features_SF: Tensor
    anchors_A: Tensor
    tokens_AK: Tensor
    labels_AK: Tensor
    weights_AK: Tensor


@frozen
class BlockMaker:
    """Makes the noise blocks of samples."""

    num_anchors: int
    weights_K: Tensor
    mask_token_id: int

    def blocks(self, sample: FeatureSample, index: int, *, seed: int, epoch: int) -> Blocks:
        """The blocks at the anchors that (seed, epoch, index) draws; there may be none."""
        anchors_A = draw_anchors(sample.loss_mask, self.num_anchors, seed=seed, epoch=epoch, sample=index)
        block_size = len(self.weights_K)
        return Blocks(
            sample=index,
            features_SF=sample.features,
            anchors_A=anchors_A,
            tokens_AK=block_tokens(sample.input_ids, anchors_A, block_size, self.mask_token_id),
            labels_AK=block_labels(sample.input_ids, anchors_A, block_size),
            weights_AK=slot_weights(sample.loss_mask, anchors_A, self.weights_K),
        )


def read_plan(batches: BatchPlan, lengths: Sequence[int]) -> tuple[list[PlannedStep], int]:
    """The steps of a plan, and its pad_multiple.

    Raises DataError where the plan is empty, or was made for other features: another number of samples, or steps whose
    tokens are not those of their samples.
    """
    plan = read_json(batches.path / "plan.json")
    if plan["samples"] != len(lengths):
        raise DataError(
            f"{batches.path}: the plan was made for other features: it deals {plan['samples']} samples, "
            f"and the features hold {len(lengths)} of the split {plan['split']}"
        )
    padded = [padded_length(length, plan["pad_multiple"]) for length in lengths]
    steps = []
    for row in read_jsonl(batches.path / "steps.jsonl"):
        tokens = sum(padded[sample] for sample in row["samples"])
        if tokens != row["tokens"]:
            raise DataError(
                f"{batches.path}: the plan was made for other features: step {row['step']} has {row['tokens']} "
                f"tokens in the plan, and its samples have {tokens}"
            )
        steps.append(PlannedStep(row["epoch"], tuple(row["samples"])))
    if not steps:
        raise DataError(f"{batches.path}: the plan holds no step; there is nothing to train on")
    return steps, plan["pad_multiple"]


def deal(samples: Sequence[int], costs: Sequence[int], world_size: int) -> list[list[int]]:
    """The samples of each rank, in the order given: the dearest first to the rank with the least so far.

    costs is indexed by sample. A rank may get none.
    """
    loads = [0] * world_size
    rank_of = {}
    for sample in sorted(samples, key=lambda sample: (-costs[sample], sample)):
        rank = loads.index(min(loads))
        rank_of[sample] = rank
        loads[rank] += costs[sample]
    return [[sample for sample in samples if rank_of[sample] == rank] for rank in range(world_size)]


def micro_batches(samples: Sequence[int], costs: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Cut samples into runs of at most `limit` tokens; a longer sample is a run of its own."""
    batch: list[int] = []
    tokens = 0
    for sample in samples:
        if batch and tokens + costs[sample] > limit:
            yield batch
            batch, tokens = [], 0
        batch.append(sample)
        tokens += costs[sample]
    if batch:
        yield batch
