"""How tokens are chosen, greedily or drawn at a temperature, and which of a draft's tokens are accepted.

`GreedyChoice` and `SampledChoice` have the same methods; their `done_B` is how many tokens a row's answer has already.

Every draw is a separate number in [0, 1), a function of only seed, sample and place, so that the other prompts of a
batch change nothing.

    B batch, D draft tokens of a block, K = D + 1, V vocabulary, P any shape
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field
from torch import Tensor


def uniform_draws(seed: int, sample_id: str, purpose: int | str, count: int) -> Tensor:
    """float64 [count] in [0, 1), a function of only the arguments; a longer row begins with the shorter one.

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
    been drawn from q. A token x is accepted with probability min(1, p(x) / q(x)); the first that is not is drawn again
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


class GreedyChoice:
    """Temperature 0."""

    def first(self, logits_BV: Tensor) -> Tensor:
        """The first token of each answer, int64 [B]."""
        return logits_BV.argmax(-1)

    def propose(self, logits_BDV: Tensor, done_B: Tensor) -> Tensor:
        """The draft's tokens, int64 [B, D]."""
        return logits_BDV.argmax(-1)

    def accept(self, proposal_BD: Tensor, logits_BKV: Tensor, done_B: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the proposal are accepted, and the token behind them, int64 [B]."""
        return accept_greedy(proposal_BD, logits_BKV.argmax(-1))

    def select(self, places: Tensor) -> None:
        """Continue with only these rows."""


@define(eq=False)
class SampledChoice:
    """A temperature above 0: the draft draws from its own distributions, and `accept_sampled` keeps the target's.

    A place of an answer has one draw for each purpose, float64 [B, N]. A draft's draw that was refused with what stood
    before it may serve again: until the target reaches its place nothing depends on it.
    """

    temperature: float
    draft_BN: Tensor
    accept_BN: Tensor
    token_BN: Tensor
    _distributions_BDV: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(
        cls, temperature: float, seed: int, sample_ids: Sequence[str], count: int, device: torch.device
    ) -> SampledChoice:
        """With `count` draws of each purpose for each sample."""
        return cls(
            temperature,
            *(draws(seed, sample_ids, purpose, count).to(device) for purpose in ("draft", "accept", "token")),
        )

    def first(self, logits_BV: Tensor) -> Tensor:
        return choose(logits_BV, self.token_BN[:, 0], self.temperature)

    def propose(self, logits_BDV: Tensor, done_B: Tensor) -> Tensor:
        self._distributions_BDV = probabilities(logits_BDV, self.temperature)
        return token_at(self._distributions_BDV, _at(self.draft_BN, done_B, logits_BDV.shape[1]))

    def accept(self, proposal_BD: Tensor, logits_BKV: Tensor, done_B: Tensor) -> tuple[Tensor, Tensor]:
        block_size = logits_BKV.shape[1]
        return accept_sampled(
            proposal_BD,
            probabilities(logits_BKV, self.temperature),
            self._distributions_BDV,
            _at(self.accept_BN, done_B, block_size - 1),
            _at(self.token_BN, done_B, block_size),
        )

    def select(self, places: Tensor) -> None:
        self.draft_BN, self.accept_BN, self.token_BN = (
            draws_BN[places] for draws_BN in (self.draft_BN, self.accept_BN, self.token_BN)
        )


def draws(seed: int, sample_ids: Sequence[str], purpose: str, count: int) -> Tensor:
    """float64 [B, count]: a row of draws for each sample."""
    return torch.stack([uniform_draws(seed, sample_id, purpose, count) for sample_id in sample_ids])


def _at(draws_BN: Tensor, first_B: Tensor, count: int) -> Tensor:
    """The draws of `count` places from a row's first on, [B, count]."""
    return draws_BN.gather(1, first_B[:, None] + torch.arange(count, device=first_B.device))
