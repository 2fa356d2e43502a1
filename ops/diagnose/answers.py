"""Whether the answers that the draft was trained on are the target's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from ops.capture_targets.huggingface import forward_batch
from ops.diagnose.finding import Finding
from ops.load_target.model import Target
from ops.tokenize_chat.shards import TokenSample

NAME = "own answers"
LEAST_OWN = 0.8
ROWS = 1024  # of logits at once


@frozen
class Own:
    """tokens: of answers that were looked at; chosen: those that the target, given all before, holds likeliest."""

    tokens: int
    chosen: int

    @property
    def share(self) -> float:
        return self.chosen / self.tokens if self.tokens else 1.0


def own_finding(target: Target, samples: Sequence[TokenSample]) -> Finding:
    """samples: of the training."""
    own = count_own(target, samples)
    return Finding(
        name=NAME,
        measured=f"{own.share:.0%} of {own.tokens:,} tokens of the training's answers are the target's greedy choice",
        normal=f"at least {LEAST_OWN:.0%}; all of them but ties after regenerate_answers at temperature 0. Decoding "
        "accepts what the target chooses, not what the data set says",
        advice="put regenerate_answers between the target and capture, and train on the target's own answers",
        is_cause=own.share < LEAST_OWN,
    )


@torch.inference_mode()
def count_own(target: Target, samples: Sequence[TokenSample]) -> Own:
    tokens = chosen = 0
    for sample in samples:
        _, final_BSM = forward_batch(target, [sample], (0,), final_hidden=True)
        places = sample.loss_mask[1:].nonzero().squeeze(1)
        for rows in places.split(ROWS):
            chosen += int((_greedy(target, final_BSM[0, rows]) == sample.input_ids[rows + 1]).sum())
        tokens += len(places)
    return Own(tokens, chosen)


def _greedy(target: Target, hidden_RM: Tensor) -> Tensor:
    return (hidden_RM.to(target.device) @ target.head_weight.T).argmax(-1).cpu()
