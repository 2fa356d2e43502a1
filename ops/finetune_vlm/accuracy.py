"""How good a target is on samples that it was not trained on.

B batch, S sequence length, V vocabulary
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor
from transformers import DynamicCache

from ops.load_target.model import Target
from ops.tokenize_chat.shards import TokenSample

BATCH = 64


def answer_loss(target: Target, samples: Sequence[TokenSample]) -> tuple[Tensor, int]:
    """Summed cross-entropy of the answers' tokens given all tokens before them, float32, and how many there are."""
    hidden_BSM = target.hidden(target.inputs(samples))
    rows, positions, labels = [], [], []
    for row, sample in enumerate(samples):
        wanted = sample.loss_mask.nonzero().flatten()
        wanted = wanted[wanted > 0]
        rows.append(torch.full_like(wanted, row))
        positions.append(wanted - 1)
        labels.append(sample.input_ids[wanted])
    hidden_TM = hidden_BSM[torch.cat(rows).to(target.device), torch.cat(positions).to(target.device)]
    labels_T = torch.cat(labels).to(target.device)
    logits_TV = hidden_TM @ target.head_weight.T
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="sum"), len(labels_T)


@torch.inference_mode()
def mean_loss(target: Target, samples: Sequence[TokenSample]) -> float:
    """Mean cross-entropy per answer token."""
    total, count = 0.0, 0
    for start in range(0, len(samples), BATCH):
        loss, tokens = answer_loss(target, samples[start : start + BATCH])
        total, count = total + float(loss), count + tokens
    return total / count


@torch.inference_mode()
def greedy_starts(
    target: Target, samples: Sequence[TokenSample], new_tokens: int, report: Callable[[int], None]
) -> list[list[int]]:
    """The first `new_tokens` tokens of each sample's greedy answer, cut at EOS.

    Prompts of equal length are decoded together, so that no padding is needed. report(n): n prompts are done.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_length[sample.prompt_tokens].append(index)
    batches = [group[i : i + BATCH] for group in by_length.values() for i in range(0, len(group), BATCH)]
    answers: list[list[int]] = [[]] * len(samples)
    done = 0
    for batch in batches:
        prompts = [evolve(samples[i], input_ids=samples[i].input_ids[: samples[i].prompt_tokens]) for i in batch]
        for index, tokens in zip(batch, _greedy(target, prompts, new_tokens), strict=True):
            answers[index] = tokens
        done += len(batch)
        report(done)
    return answers


def _greedy(target: Target, prompts: Sequence[TokenSample], new_tokens: int) -> list[list[int]]:
    cache = DynamicCache(config=target.model.config.get_text_config())
    inputs = target.inputs(prompts)
    next_B = target.forward(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
    columns = [next_B]
    for _ in range(new_tokens - 1):
        next_B = target.model(input_ids=next_B[:, None], past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
        columns.append(next_B)
    answers = torch.stack(columns, dim=1).tolist()
    return [_until(answer, target.eos_token_ids) for answer in answers]


def _until(tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    return next((tokens[:i] for i, token in enumerate(tokens) if token in eos_token_ids), tokens)
