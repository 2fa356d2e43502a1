"""The answers of a batch while they grow.

B rows that are open, K tokens of a block, V vocabulary
"""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from ops.dflash.decode import Decoded, until_eos


@define
class _Growing:
    tokens: list[int] = field(factory=list)
    margins: list[float] = field(factory=list)
    accepted: list[int] = field(factory=list)


@define(eq=False)
class Answers:
    """One answer for each prompt. open: the prompts whose answers go on, in the order of the batch's rows."""

    most_tokens: int
    eos_token_ids: frozenset[int]
    open: list[int]
    _growing: list[_Growing]

    @classmethod
    def of(cls, count: int, most_tokens: int, eos_token_ids: frozenset[int]) -> Answers:
        """Empty answers to `count` prompts, each to end behind its EOS or with so many tokens."""
        return cls(most_tokens, eos_token_ids, list(range(count)), [_Growing() for _ in range(count)])

    def add_one(self, tokens_B: Tensor, logits_BV: Tensor) -> Tensor | None:
        """Take in the next token of each open row and the logits it was chosen by. Returns as `add_block` does."""
        return self._add([[token] for token in tokens_B.tolist()], margins(logits_BV[:, None]), None)

    def add_block(self, proposal_BD: Tensor, count_B: Tensor, tokens_B: Tensor, logits_BKV: Tensor) -> Tensor | None:
        """Take in what each open row accepted of a proposal, and the token behind it.

        The places of the rows that go on, int64, or None where all do.
        """
        counts = count_B.tolist()
        rows = zip(proposal_BD.tolist(), counts, tokens_B.tolist(), strict=True)
        new = [[*proposal[:count], token] for proposal, count, token in rows]
        return self._add(new, margins(logits_BKV), counts)

    def lengths(self, device: torch.device) -> Tensor:
        """Tokens of each open answer, int64 [B]."""
        return torch.tensor([len(self._growing[prompt].tokens) for prompt in self.open], device=device)

    def decoded(self) -> list[Decoded]:
        """The answers as they are now."""
        return [
            Decoded(
                tuple(one.tokens[: self.most_tokens]),
                tuple(one.accepted),
                tuple(one.margins[: min(len(one.tokens), self.most_tokens)]),
            )
            for one in self._growing
        ]

    def _add(self, new: list[list[int]], margins_BK: Tensor, counts: list[int] | None) -> Tensor | None:
        places, still_open = [], []
        for place, (prompt, tokens, near) in enumerate(zip(self.open, new, margins_BK.tolist(), strict=True)):
            one = self._growing[prompt]
            one.tokens = until_eos([*one.tokens, *tokens], self.eos_token_ids)
            one.margins += near[: len(tokens)]
            if counts is not None:
                one.accepted.append(counts[place])
            if one.tokens[-1] not in self.eos_token_ids and len(one.tokens) < self.most_tokens:
                places.append(place)
                still_open.append(prompt)
        all_go_on = len(still_open) == len(self.open)
        self.open = still_open
        return None if all_go_on else torch.tensor(places, dtype=torch.int64, device=margins_BK.device)


def margins(logits_BKV: Tensor) -> Tensor:
    """The distance of the two best logits, float32 [B, K]."""
    best_BK2 = logits_BKV.float().topk(2).values
    return best_BK2[..., 0] - best_BK2[..., 1]
