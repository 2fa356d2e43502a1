"""A head that proposes token by token, and its side of decoding: a target's own MTP head, or an EAGLE-3 draft.

For the token t[i] with the target's state h[i] and the token t[i + 1] after it, at the position of t[i]:

    m[i] = head(E t[i + 1], h[i])
    logits of t[i + 2] follow from m[i]

Keys and values of its one layer come from the target's states for every token that it has verified. Behind the anchor
t[n], the head goes on with its own output: the j-th proposal, and m[n - 2 + j] instead of h, at the next position.
These columns are written over once the target has verified the tokens. What is E, h and m, and what a position is,
the heads say.

B batch, P columns of a pass, M hidden size, D rotated dimensions, F captured feature width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from attrs import define, field
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ops.lib.drafts.decoding.decode_options import ChainUse
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from ops.lib.target.cache import RowLayer, Rows, causal_mask
from ops.lib.target.model import Target
from ops.lib.target.sizes import LEAST_CHUNK, MASK_BYTES, MOST_BYTES
from ops.lib.target.verify import Captured

Rope = tuple[Tensor, Tensor]  # cosines and sines, [B, P, D]


class ChainHead(Protocol):
    """A head. heads, head_size: of the keys and values of its layer."""

    heads: int
    head_size: int

    def capture(self, target: Target) -> AbstractContextManager[Captured]:
        """A context in which every forward pass of the target records what the head reads."""

    def known(self, features_BPF: Tensor, positions_BP: Tensor) -> tuple[Tensor, Tensor, Rope]:
        """Of the target's features: its embedded tokens and its states h, each [B, P, M], and the angles."""

    def embedded(self, target: Target, tokens_P: Tensor) -> Tensor:
        """The head's inputs for tokens, [P, M]."""

    def angles(self, target: Target, positions_BP: Tensor) -> Rope:
        """The angles of positions behind a prompt."""

    def __call__(
        self, embedded_BPM: Tensor, states_BPM: Tensor, rope: Rope, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """The states m, [B, P, M]. mask: bool [B, 1, P, columns]."""

    def logits(self, target: Target, states_BM: Tensor) -> Tensor:
        """Logits of the token after the next one, of states m, [B, V]."""


@define(eq=False)
class ChainRows:
    """A head's side of decoding, in the columns of the target's cache: column i holds keys and values for t[i].

    rows: of the target. offset_B: of a row's next position, less its tokens. own: the columns that are final.
    newest_BPF: the target's features of those behind each row's end, which wait for the token after the last one.
    """

    head: ChainHead
    use: ChainUse
    rows: Rows
    offset_B: Tensor
    own: Rows = field(init=False)
    cache: Cache = field(init=False)
    newest_BPF: Tensor = field(init=False)

    def fill(self, features_BSF: Tensor, room: int) -> None:
        """Take over the features of a prefill, with room for `room` further columns."""
        (rows, columns, _), start_B = features_BSF.shape, self.rows.start_B
        assert columns == self.rows.longest
        self.own = Rows(start_B, torch.zeros_like(start_B), 0)
        empty = DynamicLayer()
        empty.keys = empty.values = features_BSF.new_zeros(rows, self.head.heads, 0, self.head.head_size)
        self.cache = Cache(layers=[RowLayer(empty, columns + room, self.own)])
        self.newest_BPF = features_BSF

    def append(self, features_BKF: Tensor) -> None:
        """Take over the features of the columns behind each row's end."""
        self._end_with_rows()
        self.newest_BPF = features_BKF

    def select(self, places: Tensor) -> None:
        """Continue with only these rows."""
        self.own.select(places)
        self.cache.reorder_cache(places)
        self.newest_BPF, self.offset_B = self.newest_BPF[places], self.offset_B[places]

    def propose(self, target: Target, anchors_B: Tensor, choice: Choice, check: Callable[[Tensor], None]) -> Proposal:
        """The proposal after each anchor, token by token. check: refuses logits [B, 1, V] that are not finite."""
        hidden_BM = self._read(target, anchors_B)
        self._end_with_rows()
        tokens: list[Tensor] = []
        for place in range(self.use.block_size - 1):
            if place:
                position_B1 = (self.rows.length_B + self.offset_B + place - 1)[:, None]
                embedded_BM, angles = self.head.embedded(target, tokens[-1]), self.head.angles(target, position_B1)
                hidden_BM = self._pass(embedded_BM[:, None], hidden_BM[:, None], angles)[:, -1]
            logits_BV = self.head.logits(target, hidden_BM)
            check(logits_BV[:, None])
            tokens.append(choice.next(logits_BV, place))
        return Proposal(torch.stack(tokens, dim=1))

    def _read(self, target: Target, anchors_B: Tensor) -> Tensor:
        """The states m [B, M] of the tokens before the anchors, once all verified tokens are in the columns.

        A row that has fewer new ones than another runs over refused tokens too; its next columns are written over them.
        """
        new_B = self.rows.end_B - self.own.end_B
        count = int(new_B.max())
        positions_BP = self.own.next(count) - self.own.start_B[:, None] + self.offset_B[:, None]
        embedded_BPM, states_BPM, angles = self.head.known(self.newest_BPF[:, :count], positions_BP)
        row_B = torch.arange(len(new_B), device=new_B.device)
        following_BPM = embedded_BPM.roll(-1, dims=1)
        following_BPM[row_B, new_B - 1] = self.head.embedded(target, anchors_B)
        return self._pass(following_BPM, states_BPM, angles)[row_B, new_B - 1]

    def _end_with_rows(self) -> None:
        """Take the columns of all tokens that the target has verified as final; later passes write over the others."""
        self.own.end_B, self.own.longest = self.rows.end_B, self.rows.longest

    def _pass(self, embedded_BPM: Tensor, states_BPM: Tensor, rope: Rope) -> Tensor:
        """The states m of the next columns, [B, P, M], in chunks whose masks take at most MOST_BYTES."""
        rows, count, _ = embedded_BPM.shape
        most = max(LEAST_CHUNK, MOST_BYTES // (rows * (self.own.longest + count) * MASK_BYTES))
        given = zip(*(each.split(most, dim=1) for each in (embedded_BPM, states_BPM, *rope)), strict=True)
        found = []
        for embedded, states, cos, sin in given:
            mask = causal_mask(self.own, embedded.shape[1])
            found.append(self.head(embedded, states, (cos, sin), mask, self.cache))
            self.own.advance(torch.full_like(self.own.end_B, embedded.shape[1]))
        return torch.cat(found, dim=1)
