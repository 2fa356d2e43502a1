"""Held-out accuracy: the target's greedy answers against the samples' labels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence

import torch
from attrs import frozen

from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.target.model import Target
from ops.regenerate_answers.decode import Sampling, generate


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
        """Whether the answer matches the label."""
        if self.kind == "pattern":
            return self._named(answer) == self._named(label)
        if self.kind == "exact_match":
            return answer.strip() == label.strip()
        words, wanted = (" ".join(text.casefold().split()) for text in (answer, label))
        return _stands_in(wanted, words)

    def _named(self, text: str) -> str | None:
        """The pattern's group at its first match, None without one."""
        found = re.search(self.pattern or "", text)
        return found.group(1) if found else None


def measurable(reader: TokenReader, metric: Metric, limit: int | None) -> list[int]:
    """The samples of a split whose labels can be compared, as indices, ascending; `limit` of them by hash of the id.

    A split may be sorted by class, and its first samples all be of one.
    """
    found = [index for index, record in enumerate(reader.records) if metric.applies(record["label"])]
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
    """How many samples of a batch the target answers right. decode: ids to text."""
    answers = greedy_answers(target, [reader.sample(index) for index in indices], max_new_tokens)
    labels = [reader.records[index]["label"] for index in indices]
    return sum(metric.right(label, decode(answer)) for label, answer in zip(labels, answers, strict=True))


def greedy_answers(target: Target, samples: Sequence[TokenSample], max_new_tokens: int) -> list[list[int]]:
    """The greedy answer to each sample's prompt, as far as max_new_tokens, without its EOS; one batch."""
    no_draws_BN = torch.zeros(len(samples), max_new_tokens, dtype=torch.float64)
    answers = generate(target, [sample.prompt() for sample in samples], no_draws_BN, Sampling(max_new_tokens))
    return [[token for token in answer if token not in target.eos_token_ids] for answer in answers]


def _stands_in(wanted: str, text: str) -> bool:
    """Whether a text holds the wanted one as words of its own."""
    start = text.find(wanted)
    while start >= 0:
        end = start + len(wanted)
        inside = [(text[start - 1 : start], wanted[0]), (wanted[-1], text[end : end + 1])]
        if not any(_of_words(before) and _of_words(after) for before, after in inside):
            return True
        start = text.find(wanted, start + 1)
    return False


def _of_words(character: str) -> bool:
    """Whether it belongs to words that blanks keep apart: a digit, or a letter of a script with upper and lower case.

    Chinese, Japanese or Thai have neither case nor blanks between words.
    """
    return character == "_" or character.isdigit() or character.lower() != character.upper()
