"""How probable a target holds the tokens of a batch, without all logits in memory.

B batch, S sequence length, M hidden size, W tokens that have one before them and are no padding
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.losses.head import head_cross_entropy
from ops.lib.target.model import Target
from ops.lib.vision.batch import ModelInputs


@torch.no_grad()
def token_log_probs(target: Target, inputs: ModelInputs) -> Tensor:
    """The log-probability of each token of input_ids[:, 1:], given all tokens before it, float32 [B, S - 1]; 0 for
    padding.

    One forward pass up to the final norm; the head is applied tile by tile, so that no logits [B, S, vocabulary] exist.
    Raises IndexError for ids outside the vocabulary.
    """
    hidden_BSM = target.hidden(inputs)
    labels = inputs.input_ids[:, 1:]
    counted = inputs.attention_mask[:, 1:] == 1
    cross_entropy_W, _ = head_cross_entropy(hidden_BSM[:, :-1][counted], target.head, labels[counted])
    log_probs = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    log_probs[counted] = -cross_entropy_W.float()
    return log_probs
