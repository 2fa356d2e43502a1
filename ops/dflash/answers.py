"""The answers of a batch while they grow.

B rows that are open, K tokens of a block, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from ops.dflash.decode import Decoded, until_eos
from ops.dflash.finite import check_finite


@define
class _Growing:
    tokens: list[int] = field(factory=list)
    margins: list[float] = field(factory=list)
    accepted: list[int] = field(factory=list)


@define(eq=False)
class Answers:
    """One answer for each prompt. open: the prompts whose answers go on, in the order of the batch's rows."""

    names: Sequence[str]
    most_tokens: int
    eos_token_ids: frozenset[int]
    open: list[int]
    _growing: list[_Growing]

    @classmethod
    def of(cls, names: Sequence[str], most_tokens: int, eos_token_ids: frozenset[int]) -> Answers:
        """Empty answers to the prompts of these names, each to end behind its EOS or with so many tokens."""
        return cls(names, most_tokens, eos_token_ids, list(range(len(names))), [_Growing() for _ in names])

    def margins(self, logits_BKV: Tensor) -> Tensor:
        """The distance of the target's two best logits for the next tokens of each open row, float32 [B, K].

        Raises DataError where they are not finite; so this comes before a token is chosen.
        """
        best_BK2 = logits_BKV.float().topk(2).values
        margins_BK = best_BK2[..., 0] - best_BK2[..., 1]
        check_finite(margins_BK, "target", logits_BKV.dtype, self._place)
        return margins_BK

    def check_draft(self, logits_BDV: Tensor) -> None:
        """Raise DataError where the draft's logits behind the anchors are not finite."""
        check_finite(logits_BDV.amax(-1), "draft", logits_BDV.dtype, self._place)

    def add_one(self, tokens_B: Tensor, margins_B1: Tensor) -> Tensor | None:
        """Take in the next token of each open row and its margin. Returns as `add_block` does."""
        return self._add([[token] for token in tokens_B.tolist()], margins_B1, None)

    def add_block(self, proposal_BD: Tensor, count_B: Tensor, tokens_B: Tensor, margins_BK: Tensor) -> Tensor | None:
        """Take in what each open row accepted of a proposal, and the token behind it.

        The places of the rows that go on, int64, or None where all do.
        """
        counts = count_B.tolist()
        rows = zip(proposal_BD.tolist(), counts, tokens_B.tolist(), strict=True)
        new = [[*proposal[:count], token] for proposal, count, token in rows]
        return self._add(new, margins_BK, counts)

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
            one.tokens += until_eos(tokens, self.eos_token_ids)  # there is none in an open answer
            one.margins += near[: len(tokens)]
            if counts is not None:
                one.accepted.append(counts[place])
            if one.tokens[-1] not in self.eos_token_ids and len(one.tokens) < self.most_tokens:
                places.append(place)
                still_open.append(prompt)
        all_go_on = len(still_open) == len(self.open)
        self.open = still_open
        return None if all_go_on else torch.tensor(places, dtype=torch.int64, device=margins_BK.device)

    def _place(self, row: int, column: int) -> str:
        prompt = self.open[row]
        return f"sample {self.names[prompt]}, token {len(self._growing[prompt].tokens) + column} of the answer"
