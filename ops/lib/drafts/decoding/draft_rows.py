"""The draft's side of a batch: the context of every row, and one forward pass that proposes for all rows.

B batch, K slots of a block, D proposals, S new columns, T columns, W columns in use, F captured feature width, M hidden
size, V vocabulary, H query heads, G key/value heads, R = H / G
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import define, field
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ops.lib.drafts.algorithms import ReadsContext, part_of
from ops.lib.drafts.backbone.model import AttendBlocks, DraftModel
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.check_returns import check_proposal
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from ops.lib.drafts.layout import Layout
from ops.lib.target.cache import Rows, with_room, write
from ops.lib.target.model import Target

Propose = Callable[..., Proposal]


@define(eq=False)
class DraftRows:
    """The keys and values of every draft layer, in the same columns as the target's cache.

    newest_BSF: the target's features of the columns that were added last, from column `newest` of each row on.
    """

    draft: DraftModel
    use: DraftUse
    rows: Rows
    kv: list[tuple[Tensor, Tensor]] = field(factory=list)  # by layer, each [B, G, T, D]
    newest_BSF: Tensor = field(init=False)
    newest_B: Tensor = field(init=False)

    def fill(self, features_BSF: Tensor, room: int) -> None:
        """Fill the cache from a prefill, without its padding, with room for `room` further columns."""
        columns_BS = torch.arange(features_BSF.shape[1], device=features_BSF.device).expand(features_BSF.shape[:2])
        padding_BS = columns_BS < self.rows.start_B[:, None]
        new = self._project(features_BSF.masked_fill(padding_BS[..., None], 0.0), columns_BS)
        self.kv = [(with_room(k, room), with_room(v, room)) for k, v in new]
        self.newest_BSF, self.newest_B = features_BSF[:, -1:], columns_BS[:, -1]

    def append(self, features_BKF: Tensor) -> None:
        """Add the features of the columns after each row's end; refused tokens are overwritten later."""
        columns_BK = self.rows.next(features_BKF.shape[1])
        for buffers, new in zip(self.kv, self._project(features_BKF, columns_BK), strict=True):
            for buffer, part in zip(buffers, new, strict=True):
                write(buffer, part, columns_BK)
        self.newest_BSF, self.newest_B = features_BKF, columns_BK[:, 0]

    def select(self, places: Tensor) -> None:
        """Drop all rows except these, which are kept in this order."""
        self.kv = [(k[places], v[places]) for k, v in self.kv]
        self.newest_BSF, self.newest_B = self.newest_BSF[places], self.newest_B[places]

    def propose(self, target: Target, anchors_B: Tensor, choice: Choice, check: Callable[[Tensor], None]) -> Proposal:
        """The proposal of the draft's algorithm after each anchor.

        check: refuses logits [B, D, V] that are not finite.
        """
        propose: Propose = part_of(self.draft.config.algorithm, "model:propose")
        hidden_BDM = self.hidden(target, anchors_B)
        product_BDV = hidden_BDM.to(target.head_weight.dtype) @ target.head_weight.T
        logits_BDV = self.draft.logits(product_BDV)
        check(logits_BDV)
        proposal = propose(self.draft, hidden_BDM, logits_BDV, anchors_B, choice, *self._around(target))
        check_proposal(self.draft.config.algorithm, proposal, *hidden_BDM.shape[:2])
        return proposal

    def _around(self, target: Target) -> tuple[BlockContext, ...]:
        """The further arguments of `propose`: the blocks' surroundings, if the algorithm reads them."""
        if not isinstance(self.draft.config.algorithm, ReadsContext):
            return ()
        row_B = torch.arange(len(self.newest_B), device=self.newest_B.device)
        last_BF = self.newest_BSF[row_B, self.rows.end_B - 1 - self.newest_B].to(self.draft.fc.weight.dtype)
        is_there_B = torch.ones_like(row_B, dtype=torch.bool)
        return (BlockContext(target.embed_weight, self.draft.context_feature(last_BF), is_there_B),)

    def hidden(self, target: Target, anchors_B: Tensor) -> Tensor:
        """The draft's states that predict the tokens after each anchor, [B, D, M]."""
        layout, rows = self.layout, self.rows
        dtype, device = self.draft.fc.weight.dtype, anchors_B.device
        embed_VM, embedded = target.embed_weight, self.draft.embedded
        slots = torch.arange(len(anchors_B) * layout.queries, device=device).view(-1, layout.queries)
        hidden = self.draft.forward_blocks(
            embedded(embed_VM[anchors_B].to(dtype)),
            embedded(embed_VM[self.use.mask_token_id].to(dtype)),
            rows.length_B + self.use.block_offset,
            [(k[:, :, : rows.longest], v[:, :, : rows.longest]) for k, v in self.kv],
            self._attention(),
            slots[:, layout.first :].flatten(),
            block_size=self.use.block_size,
        )
        return hidden.view(len(anchors_B), layout.proposals, -1)

    @property
    def layout(self) -> Layout:
        return self.draft.config.layout(self.use.block_size)

    def _project(self, features_BSF: Tensor, columns_BS: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The keys and values [B, G, S, D] of every layer, for new features."""
        positions_BS = (columns_BS - self.rows.start_B[:, None]).clamp(min=0)
        features = features_BSF.flatten(0, 1).to(self.draft.fc.weight.dtype)
        flat = self.draft.context_kv(features, positions_BS.flatten())
        return [(self._by_row(k, len(columns_BS)), self._by_row(v, len(columns_BS))) for k, v in flat]

    @staticmethod
    def _by_row(flat: Tensor, count: int) -> Tensor:
        """Keys or values by row, [B, G, S, D], from [G, B * S, D]."""
        return flat.unflatten(1, (count, -1)).transpose(0, 1)

    def _attention(self) -> AttendBlocks:
        """The attention function for this step's blocks; masks are made once for all layers with the same window."""
        masks: dict[int | None, Tensor] = {}

        def attend(
            q_BKHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, k_BGWD: Tensor, v_BGWD: Tensor, window: int | None
        ) -> Tensor:
            G, R = k_BKGD.shape[2], q_BKHD.shape[2] // k_BKGD.shape[2]
            if window not in masks:
                masks[window] = self._visible(window).repeat(1, 1, R, 1)
            keys = torch.cat((k_BGWD, k_BKGD.transpose(1, 2)), dim=2)
            values = torch.cat((v_BGWD, v_BKGD.transpose(1, 2)), dim=2)
            q_BGXD = q_BKHD.unflatten(2, (G, R)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # X = R * K
            mixed = scaled_dot_product_attention(q_BGXD, keys, values, attn_mask=masks[window])
            return mixed.unflatten(2, (R, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)

        return attend

    def _visible(self, window: int | None) -> Tensor:
        """A mask of the keys of [context | own block] that each slot sees, bool [B, 1, K, W + K].

        See ops/lib/drafts/attention/blocks.py.
        """
        rows, size, device = self.rows, self.layout.queries, self.rows.end_B.device
        column_W = torch.arange(rows.longest, device=device)
        slot_K = torch.arange(size, device=device)
        context_BKW = (column_W >= rows.start_B[:, None, None]) & (column_W < rows.end_B[:, None, None])
        context_BKW = context_BKW.expand(-1, size, -1)
        own_KK = torch.ones(size, size, dtype=torch.bool, device=device)
        if window is not None:
            behind_KK = slot_K[:, None] - slot_K
            context_BKW = context_BKW & (rows.next(size)[..., None] - column_W < window)
            own_KK = (behind_KK >= 0) & (behind_KK < window)
        return torch.cat((context_BKW, own_KK.expand(len(rows.end_B), -1, -1)), dim=2)[:, None]
