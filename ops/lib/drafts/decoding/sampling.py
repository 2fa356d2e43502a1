"""How tokens are drawn, and which of a draft's tokens are accepted.

Every draw is a number of its own in [0, 1), a function of seed, sample and place alone, so that the other prompts of a
batch change nothing.

    B batch, D draft tokens of a block, K = D + 1, V vocabulary, P any shape
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def uniform_draws(seed: int, sample_id: str, purpose: int | str, count: int) -> Tensor:
    """float64 [count] in [0, 1), a function of the arguments alone; a longer row begins with the shorter one.

    They are the bytes of a hash, since torch's generator on a CPU looks at 32 bits of its seed: of 100,000 samples two
    would have the same row.
    """
    stream = hashlib.shake_256(f"{seed}\0{purpose}\0{sample_id}".encode()).digest(8 * count)
    bits = np.frombuffer(stream, dtype="<u8") >> 11  # as many as a float64 holds
    return torch.from_numpy(bits * 2.0**-53)


def choose(logits_PV: Tensor, draws_P: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """One token for each distribution, int64 [P]: the likeliest at temperature 0, else the one that the draw falls on.

    top_p keeps the likeliest tokens that reach this probability.
    """
    if temperature == 0:
        return logits_PV.argmax(-1)
    probabilities_PV = probabilities(logits_PV, temperature)
    if top_p < 1:
        ordered_PV, order_PV = probabilities_PV.sort(dim=-1, descending=True, stable=True)
        before_PV = ordered_PV.cumsum(-1) - ordered_PV
        kept_PV = ordered_PV * (before_PV < top_p)
        probabilities_PV = torch.zeros_like(probabilities_PV).scatter(-1, order_PV, kept_PV)
    return token_at(probabilities_PV, draws_P)


def probabilities(logits_PV: Tensor, temperature: float) -> Tensor:
    """The distribution at a temperature above 0, float64."""
    return (logits_PV.double() / temperature).softmax(-1)


def token_at(weights_PV: Tensor, draws_P: Tensor) -> Tensor:
    """The token in whose share of the weights the draw falls, int64 [P]; weights need not add up to 1.

    Shares stand in the order of the vocabulary, so a draw gives the same token wherever rounding moves no border past
    it.
    """
    borders_PV = weights_PV.cumsum(-1)
    thresholds_P1 = (draws_P * borders_PV[..., -1])[..., None]
    # right=True: a token of weight 0, whose border equals the one before, is never taken.
    return torch.searchsorted(borders_PV, thresholds_P1, right=True)[..., 0]


def accept_sampled(
    proposal_BD: Tensor, target_BKV: Tensor, draft_BDV: Tensor, accept_draws_BD: Tensor, token_draws_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """How many draft tokens are accepted, int64 [B], and the token behind them, int64 [B].

    target_BKV and draft_BDV: the distributions p and q that each place of the block is drawn from, the proposal having
    been drawn from q. A token x is accepted with probability min(1, p(x) / q(x)); the first that is not is drawn anew
    from (p - q)+, and behind a block that was accepted whole the next token is drawn from p. So every token follows p.
    Source: Leviathan, Kalman and Matias, arXiv 2211.17192, algorithm 1 and appendix A.1.
    """
    D = proposal_BD.shape[1]
    p_BD = target_BKV[:, :D].gather(-1, proposal_BD[..., None])[..., 0]
    q_BD = draft_BDV.gather(-1, proposal_BD[..., None])[..., 0]
    count_B = _leading(accept_draws_BD * q_BD < p_BD)
    row_B = torch.arange(len(count_B), device=count_B.device)
    p_BV = target_BKV[row_B, count_B]
    q_BV = draft_BDV[row_B, count_B.clamp(max=D - 1)].masked_fill((count_B == D)[:, None], 0.0)
    residual_BV = (p_BV - q_BV).clamp(min=0.0)
    # Where p and q differ by rounding only, nothing may be left of a residual.
    residual_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, p_BV)
    return count_B, token_at(residual_BV, token_draws_BK[row_B, count_B])


def accept_greedy(proposal_BD: Tensor, choices_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The same at temperature 0, where the target's choices are known: the matching prefix, and the choice behind."""
    count_B = _leading(proposal_BD == choices_BK[:, :-1])
    return count_B, choices_BK.gather(1, count_B[:, None])[:, 0]


def _leading(accepted_BD: Tensor) -> Tensor:
    """How many are true before the first that is not, int64 [B]."""
    return accepted_BD.long().cumprod(dim=1).sum(dim=1)
