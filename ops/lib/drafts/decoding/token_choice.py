"""How the tokens of a speculative batch come about: greedily, or drawn at a temperature.

Both have the same methods. `done_B` is how many tokens a row's answer has already: the place of the next one.

    B batch, D draft tokens of a block, K = D + 1, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from ops.lib.drafts.decoding.sampling import (
    accept_greedy,
    accept_sampled,
    choose,
    probabilities,
    token_at,
    uniform_draws,
)


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
        """Go on with these rows alone."""


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
