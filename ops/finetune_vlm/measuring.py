"""What is measured on held-out samples: the loss, and the accuracy of greedy answers against the samples' labels."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from transformers import AutoTokenizer

from dsl.errors import DataError, on_one_line, shortened
from dsl.stage import Stage
from ops.finetune_vlm.batches import micro_batches, passes_of_rank
from ops.finetune_vlm.op import FinetuneVlm, search
from ops.finetune_vlm.saving import whole_target
from ops.lib.data.limited_process import Exhausted, limited
from ops.lib.data.sample_account import of_sample
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.sequence_parallel.target import ParallelTarget, answer_tokens
from ops.lib.target.model import Target
from ops.lib.training import rank_group
from ops.regenerate_answers.decode import generate
from ops.regenerate_answers.sampling import Sampling

HELD_OUT = ("val", "test")


@frozen
class Metric:
    """The rule by which an answer counts as right. kind, pattern: the op's fields `metric` and `pattern`."""

    kind: str
    pattern: str | None = None

    def applies(self, label: str) -> bool:
        """Whether a sample with this label can be measured at all."""
        if self.kind == "pattern":
            return self._named(label) is not None
        return self.kind != "none" and bool(label.strip())

    def right(self, label: str, answer: str) -> bool:
        """Whether the answer matches the label."""
        if self.kind == "pattern":
            return self._named(answer) == self._named(label)
        if self.kind == "exact_match":
            return answer.strip() == label.strip()
        words, wanted = (" ".join(text.casefold().split()) for text in (answer, label))
        return _contains_words(wanted, words)

    def least(self, label: str) -> str:
        """The text that every right answer to a sample with this label contains, up to case."""
        return (self._named(label) or "") if self.kind == "pattern" else label.strip()

    def _named(self, text: str) -> str | None:
        """The pattern's group at its first match in the text, None without one. Raises DataError if the search takes
        too long.
        """
        try:
            (reply,) = limited(search).map(self.pattern, [text])
        except Exhausted as error:
            raise DataError(
                f"searching pattern = '{self.pattern}' in \"{shortened(on_one_line(text))}\" {error}; "
                "write it so that no part of the text can match in many ways"
            ) from None
        return reply.result


@frozen
class HeldOut:
    """The held-out splits by name.

    readers: of their samples. compared: the indices of samples whose generated answers are compared with their labels.
    """

    config: FinetuneVlm
    stage: Stage
    metric: Metric
    readers: dict[str, TokenReader]
    compared: dict[str, list[int]]

    @classmethod
    def read(cls, config: FinetuneVlm, stage: Stage) -> HeldOut:
        """Read the held-out splits; reports labels that are too long, and a split without a sample to compare.

        Raises DataError for a pattern that no label matches, and if no answer can be as long as its label.
        """
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
        _check_lengths(config, stage, metric, readers, compared)
        return cls(config, stage, metric, readers, compared)

    def facts(self, split: str) -> dict[str, Any]:
        """The number of compared samples, and the share of the most frequent label if a label repeats; empty without
        any.
        """
        records = [self.readers[split].records[index] for index in self.compared[split]]
        if not records:
            return {}
        labels = Counter(self.metric.least(record["label"]).casefold() for record in records)
        most = labels.most_common(1)[0][1]
        return {
            f"{split}_samples": len(records),
            "majority_share": most / len(records) if most > 1 else None,
        }

    @torch.no_grad()
    def loss(self, split: str, parallel: ParallelTarget) -> float | None:
        """The mean cross-entropy per answer token of a split; None without one. All ranks must call it."""
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
        loss, answers = rank_group.summed(sums).tolist()
        return loss / answers if answers else None

    def accuracy(
        self, split: str, parallel: ParallelTarget, saved: Path, stop_if_asked: Callable[[], None]
    ) -> float | None:
        """The share of right answers of the target in `saved`; None if nothing is compared. Each rank decodes a part.

        stop_if_asked: called before every batch, on all ranks alike; may raise StopRequested.
        """
        config, stage, reader, indices = self.config, self.stage, self.readers[split], self.compared[split]
        if not indices:
            return None
        tokenizer = AutoTokenizer.from_pretrained(reader.tokens.path / "processor", trust_remote_code=False)
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
        return int(rank_group.summed(torch.tensor(right, device=parallel.device))) / len(indices)


def _check_lengths(
    config: FinetuneVlm,
    stage: Stage,
    metric: Metric,
    readers: Mapping[str, TokenReader],
    compared: Mapping[str, Sequence[int]],
) -> None:
    """Warn of labels with more tokens than max_new_tokens, whose samples always count as wrong.

    Raises DataError if all labels are too long.
    """
    records = [readers[split].records[index] for split in HELD_OUT for index in compared[split]]
    if not records:
        return
    folder = stage.inputs["tokens"].path / "processor"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    texts = []
    for record in records:
        with of_sample(record["id"]):
            texts.append(metric.least(record["label"]))
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    too_long = sum(length > config.max_new_tokens for length in lengths)
    if not too_long:
        return
    longest = max(range(len(records)), key=lambda place: lengths[place])
    splits = " and ".join(HELD_OUT)
    text = (
        f"accuracy: {too_long:,} of {len(records):,} labels of {splits} need more than max_new_tokens = "
        f"{config.max_new_tokens}, so their answers never count as right; the longest needs {lengths[longest]} tokens "
        f"(sample {on_one_line(records[longest]['id'])}): raise max_new_tokens"
    )
    if too_long == len(records):
        raise DataError(text)
    if stage.rank == 0:
        stage.warn(text)


def measurable(reader: TokenReader, metric: Metric, limit: int | None) -> list[int]:
    """The indices of a split's samples whose labels can be compared, ascending; at most `limit`, chosen by hash of the
    id.

    The first ones would not do, since a split may be sorted by class.
    """
    found = []
    for index, record in enumerate(reader.records):
        with of_sample(record["id"]):
            if metric.applies(record["label"]):
                found.append(index)
    ids = {index: reader.records[index]["id"] for index in found}
    return sorted(sorted(found, key=lambda index: hashlib.sha256(ids[index].encode()).digest())[:limit])


def count_right(
    target: Target,
    reader: TokenReader,
    indices: Sequence[int],
    metric: Metric,
    decode: Callable[[list[int]], str],
    max_new_tokens: int,
) -> int:
    """The number of samples in a batch that the target answers right. decode: ids to text."""
    answers = greedy_answers(target, [reader.sample(index) for index in indices], max_new_tokens)
    right = 0
    for index, answer in zip(indices, answers, strict=True):
        with of_sample(reader.records[index]["id"]):
            right += metric.right(reader.records[index]["label"], decode(answer))
    return right


def greedy_answers(target: Target, samples: Sequence[TokenSample], max_new_tokens: int) -> list[list[int]]:
    """The greedy answer to each sample's prompt, as far as max_new_tokens, without its EOS; one batch."""
    no_draws_BN = torch.zeros(len(samples), max_new_tokens, dtype=torch.float64)
    answers = generate(target, [sample.prompt() for sample in samples], no_draws_BN, Sampling())
    return [[token for token in answer if token not in target.eos_token_ids] for answer in answers]


def _contains_words(wanted: str, text: str) -> bool:
    """Whether a text contains the wanted text as whole words."""
    start = text.find(wanted)
    while start >= 0:
        end = start + len(wanted)
        inside = [(text[start - 1 : start], wanted[0]), (wanted[-1], text[end : end + 1])]
        if not any(_of_words(before) and _of_words(after) for before, after in inside):
            return True
        start = text.find(wanted, start + 1)
    return False


def _of_words(character: str) -> bool:
    """Whether a character belongs to words separated by blanks: a digit, "_", or a letter with upper and lower case.

    Chinese, Japanese and Thai have neither case nor blanks between words.
    """
    return character == "_" or character.isdigit() or character.lower() != character.upper()
