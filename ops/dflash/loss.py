"""Cross-entropy through the target's frozen head, without keeping logits.

The head gets no gradient, so that of the loss with respect to a hidden state x is w (softmax(x W^T) - onehot) W:
two matrix products over a chunk of slots, made while the chunk's logits are there, and the logits are dropped.

Legend: W weighted slots, M hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1024


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_WM: Tensor, head_VM: Tensor, labels_W: Tensor, weights_W: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, correct = [], []
        gradient_WM = torch.empty_like(hidden_WM)
        for start in range(0, len(hidden_WM), CHUNK):
            rows = slice(start, start + CHUNK)
            labels, weights = labels_W[rows, None], weights_W[rows, None]
            logits = hidden_WM[rows] @ head_VM.T
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            correct.append(logits.argmax(dim=-1) == labels_W[rows])
            log_probabilities = logits.log_softmax(dim=-1)
            losses.append(-(weights * log_probabilities.gather(1, labels)).sum(dtype=torch.float64))
            if ctx.needs_input_grad[0]:
                slope = log_probabilities.exp_()
                slope.scatter_add_(1, labels, torch.full_like(weights, -1, dtype=slope.dtype))
                gradient_WM[rows] = (slope * weights).to(hidden_WM.dtype) @ head_VM
        ctx.save_for_backward(gradient_WM)
        correct_W = torch.cat(correct) if correct else labels_W.bool()
        ctx.mark_non_differentiable(correct_W)
        return torch.stack(losses).sum() if losses else hidden_WM.sum(dtype=torch.float64), correct_W

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_correct: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_WM,) = ctx.saved_tensors
        return gradient_WM * grad_loss.to(gradient_WM.dtype), None, None, None


def dflash_loss(hidden_WM: Tensor, head_VM: Tensor, labels_W: Tensor, weights_W: Tensor) -> tuple[Tensor, Tensor]:
    """sum(w * CE) over slots, float64 [], and whether each slot's best token is its label, bool [W].

    hidden_WM are the final hidden states of the slots with a weight; slot 0 and weightless slots must not be among
    them. The caller divides by sum(w) over the *global* batch. Cross-entropy is computed in float32 (float64 for
    float64 inputs). Only hidden_WM gets a gradient. Memory: chunks of 1024 rows of logits.
    """
    return _FrozenHeadCrossEntropy.apply(hidden_WM, head_VM, labels_W, weights_W)
