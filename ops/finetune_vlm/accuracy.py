"""Held-out accuracy: the target's greedy answers against the samples' labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from attrs import evolve, frozen

from ops.capture_targets.run import batches_by_length
from ops.load_target.model import Target
from ops.regenerate_answers.decode import Sampling, generate
from ops.tokenize_chat.shards import TokenReader, TokenSample


@frozen
class Metric:
    """When an answer counts as right; `kind` and `pattern` are the fields `metric` and `pattern` of the op."""

    kind: str
    pattern: str | None = None

    def applies(self, label: str) -> bool:
        """Whether a sample with this label can be measured at all."""
        if self.kind == "pattern":
            return self._named(label) is not None
        return self.kind != "none" and bool(label.strip())

    def right(self, label: str, answer: str) -> bool:
        """Whether the answer says what the label says."""
        if self.kind == "pattern":
            return self._named(answer) == self._named(label)
        if self.kind == "exact_match":
            return answer.strip() == label.strip()
        words, wanted = (" ".join(text.casefold().split()) for text in (answer, label))
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", words) is not None

    def _named(self, text: str) -> str | None:
        """What the pattern's group holds at its first match, None without one."""
        found = re.search(self.pattern or "", text)
        return found.group(1) if found else None


def measurable(reader: TokenReader, metric: Metric, limit: int | None) -> list[int]:
    """The first `limit` samples of a split whose labels can be compared, as indices."""
    return [index for index, record in enumerate(reader.records) if metric.applies(record["label"])][:limit]


def count_right(
    target: Target,
    reader: TokenReader,
    indices: Sequence[int],
    metric: Metric,
    decode: Callable[[list[int]], str],
    max_new_tokens: int,
    batch_tokens: int,
    report: Callable[[int], None],
) -> int:
    """How many of the samples the target answers right. decode: ids to text; report(n): n answers are there."""
    lengths = [reader.records[index]["prompt_tokens"] + max_new_tokens for index in indices]
    right = done = 0
    for batch in batches_by_length(lengths, batch_tokens):
        own = [indices[place] for place in batch]
        answers = greedy_answers(target, [reader.sample(index) for index in own], max_new_tokens)
        labels = [reader.records[index]["label"] for index in own]
        right += sum(metric.right(label, decode(answer)) for label, answer in zip(labels, answers, strict=True))
        done += len(batch)
        report(done)
    return right


def greedy_answers(target: Target, samples: Sequence[TokenSample], max_new_tokens: int) -> list[list[int]]:
    """The greedy answer to each sample's prompt, as far as max_new_tokens, without its EOS; one batch."""
    prompts = [
        evolve(sample, input_ids=sample.input_ids[:end], loss_mask=sample.loss_mask[:end])
        for sample, end in ((sample, sample.prompt_tokens) for sample in samples)
    ]
    no_draws_BN = torch.zeros(len(prompts), max_new_tokens, dtype=torch.float64)
    answers = generate(target, prompts, no_draws_BN, Sampling(max_new_tokens))
    return [[token for token in answer if token not in target.eos_token_ids] for answer in answers]
