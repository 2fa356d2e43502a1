"""What is measured on samples that are not trained on: the loss, and the accuracy of greedy answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from attrs import frozen
from transformers import AutoTokenizer

from dsl.errors import DataError
from dsl.stage import Stage
from ops.finetune_vlm.accuracy import Metric, count_right, measurable
from ops.finetune_vlm.batches import micro_batches, passes_of_rank
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.saving import whole_target
from ops.lib.data.token_shards import TokenReader
from ops.lib.sequence_parallel.target import ParallelTarget, answer_tokens
from ops.lib.training import ranks

HELD_OUT = ("val", "test")


@frozen
class HeldOut:
    """The held-out splits, by name, and the samples of each (as indices) whose answers are compared."""

    config: FinetuneVlm
    stage: Stage
    metric: Metric
    readers: dict[str, TokenReader]
    compared: dict[str, list[int]]

    @classmethod
    def read(cls, config: FinetuneVlm, stage: Stage) -> HeldOut:
        """Raises DataError for a pattern that no label matches; a split without a sample to compare is told only."""
        metric = Metric(config.metric, config.pattern)
        readers = {split: TokenReader(stage.inputs["tokens"], split) for split in HELD_OUT}
        compared = {split: measurable(reader, metric, config.eval_samples) for split, reader in readers.items()}
        labels = [record["label"] for reader in readers.values() for record in reader.records]
        if metric.kind == "pattern" and labels and not any(compared.values()):
            raise DataError(
                f"pattern = '{metric.pattern}' matches no label of the splits {' and '.join(HELD_OUT)}, so there would "
                f'be no accuracy; a label is "{labels[0]}"'
            )
        for split in HELD_OUT if metric.kind != "none" else ():
            if not compared[split]:
                stage.info(f"no accuracy on {split}: no label there to compare an answer with")
        return cls(config, stage, metric, readers, compared)

    @torch.no_grad()
    def loss(self, split: str, parallel: ParallelTarget) -> float | None:
        """Mean cross-entropy per answer token; None without one. All ranks call it."""
        reader = self.readers[split]
        if not len(reader):
            return None
        parallel.target.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=parallel.device)
        for batch in passes_of_rank(reader, list(range(len(reader))), self.config.micro_batch_tokens, self.stage):
            sums[0] += parallel.answer_loss(batch)
            if batch is not None and parallel.sp_rank == 0:
                sums[1] += answer_tokens(batch)
        parallel.target.model.train()
        loss, answers = ranks.summed(sums).tolist()
        return loss / answers if answers else None

    def accuracy(
        self, split: str, parallel: ParallelTarget, saved: Path, stop_if_asked: Callable[[], None]
    ) -> float | None:
        """Share of right answers of what lies in `saved`, each rank decoding a part; None where nothing is compared.

        stop_if_asked: called before every batch, on all ranks alike; may raise StopRequested.
        """
        config, stage, reader, indices = self.config, self.stage, self.readers[split], self.compared[split]
        if not indices:
            return None
        tokenizer = AutoTokenizer.from_pretrained(reader.tokens.path / "processor")
        lengths = [record["prompt_tokens"] + config.max_new_tokens for record in reader.records]
        batches = micro_batches(indices, lengths, config.micro_batch_tokens, stage.rank, stage.world_size)
        own = sum(map(len, batches))
        right = done = 0
        with whole_target(parallel, saved) as target:
            stage.progress(done, own)
            for batch in batches:
                stop_if_asked()
                if batch:
                    right += count_right(
                        target,
                        reader,
                        batch,
                        self.metric,
                        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                        config.max_new_tokens,
                    )
                    done += len(batch)
                    stage.progress(done, own)
        return int(ranks.summed(torch.tensor(right, device=parallel.device))) / len(indices)
