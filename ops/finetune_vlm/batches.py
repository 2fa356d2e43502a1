"""The samples of a step, and which of them a rank computes in which forward pass.

Everything follows from the seed and the samples' lengths, so ranks need no communication, and a resumed training needs
only the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import Factory, define

from dsl.stage import Stage
from ops.lib.data.batching import batches_by_length
from ops.lib.data.token_shards import TokenReader
from ops.lib.training.rank_group import deal
from ops.lib.vision.batch import ModelInputs, collate

BATCH_SIZE = 32


@define
class Order:
    """The samples of every step; each epoch is a permutation drawn from the seed and the epoch's number.

    lengths: tokens of each sample. A step has batch_size samples (default: 32), or at most batch_tokens tokens but at
    least one sample. The rest of an epoch is dropped, unless the epoch would have no step.
    """

    lengths: Sequence[int]
    seed: int
    batch_size: int | None = None
    batch_tokens: int | None = None
    _steps: list[list[int]] = Factory(list)
    _epochs: int = 0

    def samples(self, step: int) -> list[int]:
        """The indices of a step's samples; steps count from 1."""
        while len(self._steps) < step:
            self._steps += self._epoch(self._epochs)
            self._epochs += 1
        return self._steps[step - 1]

    def _epoch(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        if self.batch_tokens is None:
            size = min(self.batch_size or BATCH_SIZE, len(order))
            return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
        return self._filled(order, self.batch_tokens)

    def _filled(self, order: Sequence[int], limit: int) -> list[list[int]]:
        steps: list[list[int]] = [[]]
        tokens = 0
        for index in order:
            if steps[-1] and tokens + self.lengths[index] > limit:
                steps.append([])
                tokens = 0
            steps[-1].append(index)
            tokens += self.lengths[index]
        return steps[:-1] or steps


def micro_batches(
    samples: Sequence[int], lengths: Sequence[int], limit: int, dp_rank: int = 0, dp_size: int = 1
) -> list[list[int]]:
    """The samples (indices) of each forward pass of one row of ranks.

    Samples are dealt over the rows by their tokens. A row's are cut into passes of at most `limit` padded tokens (at
    least one sample), with similar lengths together. All rows have equally many passes, because FSDP2 gathers weights
    in each; missing ones are empty lists at the end.
    """
    rows = []
    for places in deal([lengths[index] for index in samples], dp_size):
        own = [samples[place] for place in places]
        cut = batches_by_length([lengths[index] for index in own], limit)
        rows.append([[own[place] for place in sorted(batch)] for batch in cut])
    passes = max(len(row) for row in rows)
    return rows[dp_rank] + [[]] * (passes - len(rows[dp_rank]))


def passes_of_rank(reader: TokenReader, samples: Sequence[int], limit: int, stage: Stage) -> list[ModelInputs | None]:
    """The batches of a rank's forward passes over some samples. A pass for which the rank has no batch is None.

    limit: padded tokens of a batch.
    """
    lengths = [record["tokens"] for record in reader.records]
    row, rows = stage.rank // stage.sp_degree, stage.world_size // stage.sp_degree
    cut = micro_batches(samples, lengths, limit, row, rows)
    return [collate([reader.sample(index) for index in batch]) if batch else None for batch in cut]
