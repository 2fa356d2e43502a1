"""Answers of the target to a batch of prompts: KV cache, greedy or sampled.

Prompts of different lengths are padded on the left, so that the last column holds every prompt's last token. That
side is exact for all families: attention masks the padding, positions are counted without it, and a linear-attention
layer, whose state starts at zero, stays there while it reads zeroes (padding behind a prompt would decay its state).

    B batch, S longest prompt, T tokens so far, N new tokens at most, V vocabulary
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor
from transformers import DynamicCache

from ops.load_target.model import Target
from ops.tokenize_chat.shards import TokenSample
from ops.vision.batch import ModelInputs


@frozen
class Sampling:
    """How a token is chosen. temperature 0 is greedy; top_p keeps the likeliest tokens that reach this probability."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@torch.inference_mode()
def generate(target: Target, prompts: Sequence[TokenSample], draws_BN: Tensor, sampling: Sampling) -> list[list[int]]:
    """The tokens that answer each prompt, the EOS included where the answer reached it.

    prompts: samples whose input_ids end with the generation prompt. draws_BN: float64 [B, max_new_tokens] in [0, 1),
    see `uniform_draws`; a token depends on its own row alone, but for the rounding of a batched forward pass.
    """
    inputs = pad_left(target.inputs(prompts))
    mask_BT = inputs.attention_mask
    positions_BS = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    # Three-dimensional positions of images are the model's own affair; those of text would count the padding.
    given = {} if inputs.has_images else {"position_ids": positions_BS}
    cache = DynamicCache(config=target.model.config.get_text_config())
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits_BV = target.forward(inputs, **given, **options).logits[:, -1]
    next_position_B = positions_BS[:, -1] + 1 + target.family.position_offsets(target.model)
    draws_BN = draws_BN.to(logits_BV.device)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt in each row of the batch
    for step in range(sampling.max_new_tokens):
        tokens_B = choose(logits_BV, draws_BN[:, step], sampling)
        open_rows = []
        for place, (row, token) in enumerate(zip(rows, tokens_B.tolist(), strict=True)):
            if not ended(answers[row], target.eos_token_ids):
                answers[row].append(token)
            if not ended(answers[row], target.eos_token_ids):
                open_rows.append(place)
        if not open_rows or step + 1 == sampling.max_new_tokens:
            break
        if 2 * len(open_rows) <= len(rows):  # each halving copies the cache once
            keep = torch.tensor(open_rows, device=logits_BV.device)
            cache.reorder_cache(keep)
            rows = [rows[place] for place in open_rows]
            tokens_B, draws_BN = tokens_B[keep], draws_BN[keep]
            mask_BT, next_position_B = mask_BT[keep], next_position_B[keep]
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=1)
        logits_BV = target.model(
            input_ids=tokens_B[:, None],
            attention_mask=mask_BT,
            position_ids=(next_position_B + step)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    return answers


def ended(tokens: Sequence[int], eos_token_ids: frozenset[int]) -> bool:
    """Whether an answer is closed by an EOS token."""
    return bool(tokens) and tokens[-1] in eos_token_ids


def choose(logits_BV: Tensor, draws_B: Tensor, sampling: Sampling) -> Tensor:
    """One token per row, int64 [B]: the likeliest, or the one in whose share of the distribution the draw falls.

    Shares stand in the order of the vocabulary, so a draw gives the same token wherever rounding moves no border past
    it.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = (logits_BV.double() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = ordered_BV.cumsum(-1) - ordered_BV
        kept_BV = ordered_BV * (before_BV < sampling.top_p)
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter(-1, order_BV, kept_BV)
    borders_BV = probabilities_BV.cumsum(-1)
    thresholds_B = draws_B * borders_BV[:, -1]
    # right=True: a token of probability 0, whose border equals the one before, is never taken.
    return torch.searchsorted(borders_BV, thresholds_B[:, None], right=True)[:, 0]


def uniform_draws(seed: int, sample_id: str, turn: int, count: int) -> Tensor:
    """float64 [count] in [0, 1), a function of the arguments alone; a longer row begins with the shorter one."""
    digest = hashlib.sha256(f"{seed}\0{turn}\0{sample_id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def pad_left(inputs: ModelInputs) -> ModelInputs:
    """The same batch with its padding moved from the right to the left."""
    shifts = (inputs.input_ids.shape[1] - inputs.attention_mask.sum(dim=1)).tolist()

    def moved(tensor_BS: Tensor) -> Tensor:
        return torch.stack([row.roll(shift) for row, shift in zip(tensor_BS, shifts, strict=True)])

    return evolve(
        inputs,
        input_ids=moved(inputs.input_ids),
        attention_mask=moved(inputs.attention_mask),
        loss_mask=moved(inputs.loss_mask),
    )
