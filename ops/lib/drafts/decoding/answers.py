"""The answers of a batch while they grow.

B rows that are open, K tokens of a block, V vocabulary, N nearest tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from ops.lib.drafts.decoding.decode import Decoded, check_finite, until_eos
from ops.lib.drafts.decoding.proposal import Proposal

NEAREST = 16  # best tokens that are examined for being near the best one: hardly ever are more that close


@frozen(eq=False)
class Nearest:
    """The best tokens at each place, [B, K, N], the best first, and how far their logits lie below the best one."""

    tokens_BKN: Tensor
    distances_BKN: Tensor

    @property
    def margins_BK(self) -> Tensor:
        """The distance between the two best logits, float32."""
        return self.distances_BKN[..., 1]


@define
class _Growing:
    tokens: list[int] = field(factory=list)
    margins: list[float] = field(factory=list)
    accepted: list[int] = field(factory=list)
    near: dict[int, dict[int, float]] = field(factory=dict)
    confidence: list[tuple[float, ...]] = field(factory=list)


@define(eq=False)
class Answers:
    """The growing answers to a batch of prompts. open: prompts whose answers continue, in the order of the batch's
    rows.

    within: tokens whose logits are closer to the best one than this are kept in `Decoded.near`.
    """

    names: Sequence[str]
    most_tokens: int
    eos_token_ids: frozenset[int]
    within: float
    open: list[int]
    _growing: list[_Growing]

    @classmethod
    def of(cls, names: Sequence[str], most_tokens: int, eos_token_ids: frozenset[int], within: float = 0.0) -> Answers:
        """Empty answers to the prompts with these names; each ends after EOS or with most_tokens tokens."""
        return cls(names, most_tokens, eos_token_ids, within, list(range(len(names))), [_Growing() for _ in names])

    def nearest(self, logits_BKV: Tensor) -> Nearest:
        """The target's best tokens for the next places of each open row.

        Raises DataError where their logits are not finite, so call it before a token is chosen.
        """
        count = min(NEAREST if self.within > 0 else 2, logits_BKV.shape[-1])
        best_BKN, tokens_BKN = logits_BKV.float().topk(count)
        nearest = Nearest(tokens_BKN, best_BKN[..., :1] - best_BKN)
        check_finite(nearest.margins_BK, "target", logits_BKV.dtype, self._place)
        return nearest

    def check_draft(self, logits_BDV: Tensor) -> None:
        """Check that the draft's logits after the anchors are finite. Raises DataError."""
        check_finite(logits_BDV.amax(-1), "draft", logits_BDV.dtype, self._place)

    def add_one(self, tokens_B: Tensor, nearest: Nearest) -> Tensor | None:
        """Append the next token of each open row. nearest: the best tokens of that place.

        Returns the places of the rows that continue, int64, or None if all do.
        """
        return self._add([[token] for token in tokens_B.tolist()], nearest, None)

    def add_block(self, proposal: Proposal, count_B: Tensor, tokens_B: Tensor, nearest: Nearest) -> Tensor | None:
        """Append the accepted tokens of a proposal to each open row, and the token after them.

        Returns the places of the rows that continue, int64, or None if all do.
        """
        counts = count_B.tolist()
        rows = zip(proposal.tokens_BD.tolist(), counts, tokens_B.tolist(), strict=True)
        new = [[*proposed[:count], token] for proposed, count, token in rows]
        if proposal.confidence_BD is not None:
            for prompt, confidence, count in zip(self.open, proposal.confidence_BD.tolist(), counts, strict=True):
                self._growing[prompt].confidence.append(tuple(confidence[: count + 1]))
        return self._add(new, nearest, counts)

    def lengths(self, device: torch.device) -> Tensor:
        """The number of tokens of each open answer, int64 [B]."""
        return torch.tensor([len(self._growing[prompt].tokens) for prompt in self.open], device=device)

    def tokens(self, prompt: int) -> list[int]:
        """The tokens of the answer to one prompt so far."""
        return self._growing[prompt].tokens

    def decoded(self) -> list[Decoded]:
        """The answers in their current state, one for each prompt."""
        return [self._decoded(one, min(len(one.tokens), self.most_tokens)) for one in self._growing]

    def _add(self, new: list[list[int]], nearest: Nearest, counts: list[int] | None) -> Tensor | None:
        places, still_open = [], []
        for place, (prompt, tokens, margins) in enumerate(
            zip(self.open, new, nearest.margins_BK.tolist(), strict=True)
        ):
            one = self._growing[prompt]
            for column, margin in enumerate(margins[: len(tokens)]):
                if margin < self.within:
                    one.near[len(one.tokens) + column] = self._near(nearest, place, column)
            one.tokens += until_eos(tokens, self.eos_token_ids)  # there is none in an open answer
            one.margins += margins[: len(tokens)]
            if counts is not None:
                one.accepted.append(counts[place])
            if one.tokens[-1] not in self.eos_token_ids and len(one.tokens) < self.most_tokens:
                places.append(place)
                still_open.append(prompt)
        all_go_on = len(still_open) == len(self.open)
        self.open = still_open
        return None if all_go_on else torch.tensor(places, dtype=torch.int64, device=nearest.tokens_BKN.device)

    def _decoded(self, one: _Growing, length: int) -> Decoded:
        near = {place: tokens for place, tokens in one.near.items() if place < length}
        return Decoded(
            *(tuple(one.tokens[:length]), tuple(one.accepted), tuple(one.margins[:length]), near),
            confidence=tuple(one.confidence),
        )

    def _near(self, nearest: Nearest, row: int, column: int) -> dict[int, float]:
        tokens, distances = nearest.tokens_BKN[row, column].tolist(), nearest.distances_BKN[row, column].tolist()
        return {token: gap for token, gap in zip(tokens, distances, strict=True) if gap < self.within}

    def _place(self, row: int, column: int) -> str:
        prompt = self.open[row]
        return f"sample {self.names[prompt]}, token {len(self._growing[prompt].tokens) + column} of the answer"
