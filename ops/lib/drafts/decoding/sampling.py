"""How tokens are chosen, greedily or drawn at a temperature, and which of a draft's tokens are accepted.

Every draw is a separate number in [0, 1), a function of only seed, sample and place, so that the other prompts of a
batch change nothing.

    B batch, D draft tokens of a block, K = D + 1, V vocabulary, P any shape
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from attrs import define, field
from torch import Tensor


def uniform_draws(seed: int, sample_id: str, purpose: int | str, count: int) -> Tensor:
    """Random numbers in [0, 1), float64 [count], which depend on the arguments only; a shorter row is a prefix of a
    longer.

    They are bytes of a hash: torch's CPU generator reads only 32 bits of its seed, so of 100,000 samples two would have
    the same row.
    """
    stream = hashlib.shake_256(f"{seed}\0{purpose}\0{sample_id}".encode()).digest(8 * count)
    bits = np.frombuffer(stream, dtype="<u8") >> 11  # as many as a float64 holds
    return torch.from_numpy(bits * 2.0**-53)


def choose(
    logits_PV: Tensor,
    draws_P: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Tensor:
    """One token from each distribution, int64 [P]: the most likely one at temperature 0, else the one that the draw
    hits.

    top_k: only the k most likely tokens count, 0 for all. top_p: of these only the most likely that together reach this
    probability. min_p: of these only those with at least this share of the probability of the most likely one. The
    order is that of transformers.
    """
    if temperature == 0:
        return logits_PV.argmax(-1)
    probabilities_PV = probabilities(logits_PV, temperature)
    if top_p < 1 or top_k or min_p:
        ordered_PV, order_PV = probabilities_PV.sort(dim=-1, descending=True, stable=True)
        if top_k:
            ordered_PV, order_PV = ordered_PV[..., :top_k], order_PV[..., :top_k]
            ordered_PV = ordered_PV / ordered_PV.sum(-1, keepdim=True)
        before_PV = ordered_PV.cumsum(-1) - ordered_PV
        kept_PV = ordered_PV * ((before_PV < top_p) & (ordered_PV >= min_p * ordered_PV[..., :1]))
        probabilities_PV = torch.zeros_like(probabilities_PV).scatter(-1, order_PV, kept_PV)
    return token_at(probabilities_PV, draws_P)


def probabilities(logits_PV: Tensor, temperature: float) -> Tensor:
    """The distribution of tokens at a temperature above 0, float64."""
    return (logits_PV.double() / temperature).softmax(-1)


def token_at(weights_PV: Tensor, draws_P: Tensor) -> Tensor:
    """The token in whose share of the weights the draw falls, int64 [P]; weights need not sum to 1.

    Shares follow the order of the vocabulary, so a draw gives the same token as long as rounding moves no border past
    it.
    """
    borders_PV = weights_PV.cumsum(-1)
    thresholds_P1 = (draws_P * borders_PV[..., -1])[..., None]
    # right=True: a token of weight 0, whose border equals the one before, is never taken.
    return torch.searchsorted(borders_PV, thresholds_P1, right=True)[..., 0]


def accept_sampled(
    proposal_BD: Tensor, target_BKV: Tensor, draft_BDV: Tensor, accept_draws_BD: Tensor, token_draws_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """The number of accepted draft tokens, int64 [B], and the token after them, int64 [B].

    target_BKV, draft_BDV: the distributions p and q of each place; the proposal was drawn from q. A token x is accepted
    with probability min(1, p(x) / q(x)). The first refused token is replaced by a draw from (p - q)+; after a fully
    accepted block the next token is drawn from p. So every token follows p.
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
    """Accept a greedy proposal: the length of the prefix that equals the target's choices, and the choice after it."""
    count_B = _leading(proposal_BD == choices_BK[:, :-1])
    return count_B, choices_BK.gather(1, count_B[:, None])[:, 0]


def _leading(accepted_BD: Tensor) -> Tensor:
    """The number of leading true values in each row, int64 [B]."""
    return accepted_BD.long().cumprod(dim=1).sum(dim=1)


class Choice(Protocol):
    """The rule by which the tokens of a batch are chosen.

    `begin` starts a block. A draft then proposes all of its tokens at once, or one after the other, with `place`
    counting from 0. `accept` ends the block.
    """

    def first(self, logits_BV: Tensor) -> Tensor:
        """The first token of each answer, int64 [B]."""

    def begin(self, done_B: Tensor) -> None:
        """Start a block. done_B: the number of tokens in each row's answer."""

    def propose(self, logits_BDV: Tensor) -> Tensor:
        """Choose all the draft's tokens of a block, int64 [B, D]."""

    def next(self, logits_BV: Tensor, place: int) -> Tensor:
        """Choose the draft's next token, int64 [B]."""

    def among(self, scores_BC: Tensor, tokens_BC: Tensor, vocabulary: int, place: int) -> Tensor:
        """Choose the draft's next token among C candidates, int64 [B]."""

    def accept(self, proposal_BD: Tensor, logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
        """The number of accepted tokens of the proposal, and the token after them, int64 [B] each."""

    def select(self, places: Tensor) -> None:
        """Drop all rows except these, which are kept in this order."""


class GreedyChoice:
    """The rule at temperature 0: always the most likely token."""

    def first(self, logits_BV: Tensor) -> Tensor:
        return logits_BV.argmax(-1)

    def begin(self, done_B: Tensor) -> None:
        """Do nothing: greedy choice has no state."""

    def propose(self, logits_BDV: Tensor) -> Tensor:
        return logits_BDV.argmax(-1)

    def next(self, logits_BV: Tensor, place: int) -> Tensor:
        return logits_BV.argmax(-1)

    def among(self, scores_BC: Tensor, tokens_BC: Tensor, vocabulary: int, place: int) -> Tensor:
        return tokens_BC.gather(1, scores_BC.argmax(-1, keepdim=True))[:, 0]

    def accept(self, proposal_BD: Tensor, logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
        return accept_greedy(proposal_BD, logits_BKV.argmax(-1))

    def select(self, places: Tensor) -> None:
        """Do nothing: greedy choice has no state of rows."""


@define(eq=False)
class SampledChoice:
    """The rule above temperature 0: the draft draws from its own distributions; `accept_sampled` keeps the target's.

    A place of an answer has one random number for each purpose, float64 [B, N]. A number behind a refused token may be
    used again: nothing depends on it until the target reaches its place.
    """

    temperature: float
    draft_BN: Tensor
    accept_BN: Tensor
    token_BN: Tensor
    _done_B: Tensor = field(init=False)
    _drawn_from: list[Tensor] = field(init=False, factory=list)  # the draft's distributions, each [B, places, V]

    @classmethod
    def of(
        cls, temperature: float, seed: int, sample_ids: Sequence[str], count: int, device: torch.device
    ) -> SampledChoice:
        """Create the rule with `count` random numbers of each purpose for each sample."""
        return cls(
            temperature,
            *(draws(seed, sample_ids, purpose, count).to(device) for purpose in ("draft", "accept", "token")),
        )

    def first(self, logits_BV: Tensor) -> Tensor:
        return choose(logits_BV, self.token_BN[:, 0], self.temperature)

    def begin(self, done_B: Tensor) -> None:
        self._done_B = done_B
        self._drawn_from.clear()

    def propose(self, logits_BDV: Tensor) -> Tensor:
        return self._draw(probabilities(logits_BDV, self.temperature), 0)

    def next(self, logits_BV: Tensor, place: int) -> Tensor:
        return self._draw(probabilities(logits_BV, self.temperature)[:, None], place)[:, 0]

    def among(self, scores_BC: Tensor, tokens_BC: Tensor, vocabulary: int, place: int) -> Tensor:
        shares_BC = probabilities(scores_BC, self.temperature)
        shares_BV = shares_BC.new_zeros(len(shares_BC), vocabulary).scatter(1, tokens_BC, shares_BC)
        return self._draw(shares_BV[:, None], place)[:, 0]

    def accept(self, proposal_BD: Tensor, logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
        block_size = logits_BKV.shape[1]
        return accept_sampled(
            proposal_BD,
            probabilities(logits_BKV, self.temperature),
            torch.cat(self._drawn_from, dim=1),
            _at(self.accept_BN, self._done_B, block_size - 1),
            _at(self.token_BN, self._done_B, block_size),
        )

    def select(self, places: Tensor) -> None:
        self.draft_BN, self.accept_BN, self.token_BN = (
            draws_BN[places] for draws_BN in (self.draft_BN, self.accept_BN, self.token_BN)
        )

    def _draw(self, shares_BPV: Tensor, place: int) -> Tensor:
        """Draw tokens [B, P] for the places from `place` on."""
        self._drawn_from.append(shares_BPV)
        return token_at(shares_BPV, _at(self.draft_BN, self._done_B + place, shares_BPV.shape[1]))


def draws(seed: int, sample_ids: Sequence[str], purpose: str, count: int) -> Tensor:
    """Random numbers, float64 [B, count]: a row for each sample."""
    return torch.stack([uniform_draws(seed, sample_id, purpose, count) for sample_id in sample_ids])


def _at(draws_BN: Tensor, first_B: Tensor, count: int) -> Tensor:
    """The random numbers for `count` places, from a row's first place on, [B, count]."""
    return draws_BN.gather(1, first_B[:, None] + torch.arange(count, device=first_B.device))
