"""The mesh of ranks, and what those that share a sequence exchange so that every block sees its whole context.

The sp ranks of one dp row of the mesh share every sample: each holds a slice of its context and a part of its blocks.
They are neighbours (sp is the inner dimension), so that they share a machine if it has sp_degree devices.

Every rank projects the keys and values of its slice of the context. A block's queries need those of all slices:

- `Gather` brings the context's keys and values of all ranks to every rank; blocks stay in place. Its backward
  sums, for each rank's slice, the gradients of all ranks.
- `Ulysses` exchanges tokens for heads: a rank then holds the whole context and the blocks of all ranks, but only its
  share of the heads, and the output goes back the same way. Source: DeepSpeed Ulysses, arXiv 2309.14509.

Both are exact and differentiable. Each exchange is one message, after norms and RoPE, and all ranks of the group must
make the same calls in the same order, in the backward pass too: every rank's loss must depend on its output.

Legend: P sp_degree, T context tokens, t = T / P, N blocks per rank (the same on all), K block size, H query heads,
G KV heads, E = lcm(G, P) exchanged KV heads, h = H / P, e = E / P, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ops.lib.sequence_parallel.context_range import ContextRange
from ops.lib.training.peers import own_peers

DP, SP, FLAT = "dp", "sp", "dp_sp"
# torch 2.13 renames it, and warns at every call of the old name.
_ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def make_mesh(world_size: int, sp_degree: int, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks with dimensions "dp" and "sp", and a process group for each.

    A collective: every rank calls it, after joining the default process group, with a degree accepted by `check_degree`
    (degree.py). Rank r is at (r // sp_degree, r % sp_degree).
    """
    with own_peers() as groups:
        mesh = init_device_mesh(device.type, (world_size // sp_degree, sp_degree), mesh_dim_names=(DP, SP))
        groups += mesh.get_all_groups()
    return mesh


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of these ranks in one dimension, "dp_sp", for FSDP2's fully_shard to shard over dp and sp at once.

    A collective. Averaging over it divides by the number of all ranks, those of sp included.
    """
    with own_peers() as groups:
        flat = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=(FLAT,))
        groups += flat.get_all_groups()
    return flat


@define
class Sent:
    """A count of the elements that this rank has sent to others, in forward and backward passes."""

    forward: int = 0
    backward: int = 0


@frozen(eq=False)
class Alone:
    """The exchange for a single process, which sends nothing. The other exchanges have the same methods."""

    sent: Sent = field(factory=Sent, init=False, kw_only=True)

    def context(self, k_GtD: Tensor, v_GtD: Tensor) -> tuple[Tensor, Tensor]:
        """The context's keys and values that this rank attends to. k_GtD, v_GtD: those of its slice of the tokens."""
        return k_GtD, v_GtD

    def blocks(self, q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the blocks that this rank attends for. Arguments: those of its own blocks."""
        return q_NKHD, k_NKGD, v_NKGD

    def back(self, out_NKHD: Tensor) -> Tensor:
        """The output of this rank's own blocks, from the output of the blocks that it attended for."""
        return out_NKHD

    def last(self, x_tM: Tensor, per_rank: Sequence[ContextRange]) -> Tensor:
        """The row of the last token that each of this rank's own blocks sees, [N, M]; zero for a block without context.

        x_tM: the rows of this rank's slice of the tokens. per_rank: what each rank's own blocks see.
        """
        return _rows(x_tM, per_rank[0], 0)

    def seen(self, per_rank: Sequence[ContextRange]) -> ContextRange:
        """The visible context of the blocks that this rank attends for. per_rank: that of each rank's own blocks.

        Created once for blocks that pass all layers, as attention caches its plan in it.
        """
        return per_rank[0]


@frozen(eq=False)
class Gather(Alone):
    """An exchange by all-gather of the context's keys and values; blocks stay local."""

    group: dist.ProcessGroup

    def last(self, x_tM: Tensor, per_rank: Sequence[ContextRange]) -> Tensor:
        return _last_of_all(x_tM, per_rank, self.group, self.sent)

    def context(self, k_GtD: Tensor, v_GtD: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values: [G, t, D] each become [G, T, D] each."""
        G, _, D = k_GtD.shape
        both_P2GtD = _AllGather.apply(torch.stack([k_GtD, v_GtD]), self.group, self.sent)
        k_GTD, v_GTD = both_P2GtD.permute(1, 2, 0, 3, 4).reshape(2, G, -1, D).unbind()
        return k_GTD, v_GTD

    def seen(self, per_rank: Sequence[ContextRange]) -> ContextRange:
        """The context that this rank's own blocks see."""
        return per_rank[dist.get_rank(self.group)]


@frozen(eq=False)
class Ulysses(Alone):
    """An exchange of tokens for heads, all to all; rank r gets query heads [r*h, (r+1)*h) and KV heads [r*e, (r+1)*e).

    The G KV heads are repeated to E where P does not divide them; a repeated head's gradients are added. Query head i
    belongs to KV head i // (H / G), and so to repeated head i // (H / E): no rank needs heads of another.
    """

    group: dist.ProcessGroup

    def last(self, x_tM: Tensor, per_rank: Sequence[ContextRange]) -> Tensor:
        return _last_of_all(x_tM, per_rank, self.group, self.sent)

    def context(self, k_GtD: Tensor, v_GtD: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange tokens for heads in the context: [G, t, D] each become [e, T, D] each."""
        G, t, D = k_GtD.shape
        P = dist.get_world_size(self.group)
        both_2EtD = torch.stack([k_GtD, v_GtD]).repeat_interleave(_copies(G, P), dim=1)
        sent_P2etD = both_2EtD.view(2, P, -1, t, D).transpose(0, 1)
        got_P2etD = _AllToAll.apply(sent_P2etD, self.group, self.sent)
        k_eTD, v_eTD = got_P2etD.permute(1, 2, 0, 3, 4).reshape(2, -1, P * t, D).unbind()
        return k_eTD, v_eTD

    def blocks(self, q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange blocks: [N, K, H, D] and twice [N, K, G, D] become [P*N, K, h, D] and twice [P*N, K, e, D].

        The results hold all ranks' blocks in rank order, for this rank's heads.
        """
        N, K, _, D = q_NKHD.shape
        P = dist.get_world_size(self.group)
        copies = _copies(k_NKGD.shape[2], P)
        heads = [q_NKHD, k_NKGD.repeat_interleave(copies, dim=2), v_NKGD.repeat_interleave(copies, dim=2)]
        shares = [x_NKXD.view(N, K, P, -1, D).permute(2, 0, 1, 3, 4) for x_NKXD in heads]
        got_PNKXD = _AllToAll.apply(torch.cat(shares, dim=3), self.group, self.sent)
        sizes = [share_PNKXD.shape[3] for share_PNKXD in shares]
        q_BKhD, k_BKeD, v_BKeD = got_PNKXD.view(P * N, K, -1, D).split(sizes, dim=2)
        return q_BKhD, k_BKeD, v_BKeD

    def back(self, out_NKHD: Tensor) -> Tensor:
        """Return outputs to their ranks: [P*N, K, h, D] becomes [N, K, H, D], inverse to `blocks` of the queries."""
        B, K, h, D = out_NKHD.shape
        P = dist.get_world_size(self.group)
        got_PNKhD = _AllToAll.apply(out_NKHD.reshape(P, B // P, K, h, D), self.group, self.sent)
        return got_PNKhD.permute(1, 2, 0, 3, 4).reshape(B // P, K, P * h, D)

    def seen(self, per_rank: Sequence[ContextRange]) -> ContextRange:
        """The context that all ranks' blocks see, in rank order."""
        return ContextRange(
            start_N=torch.cat([seen.start_N for seen in per_rank]), end_N=torch.cat([seen.end_N for seen in per_rank])
        )


Exchange = Alone | Gather | Ulysses


def make_exchange(name: str, group: dist.ProcessGroup | None) -> Exchange:
    """The exchange that `choose_exchange` named, over the process group of the mesh's "sp" dimension."""
    return Alone() if name == "alone" else {"gather": Gather, "ulysses": Ulysses}[name](group)


def choose_exchange(
    requested: str, *, context: int, slots: int, query_heads: int, kv_heads: int, head_dim: int, degree: int
) -> tuple[str, str]:
    """The exchange to use, "alone", "ulysses" or "gather", and the reason for the log.

    requested is sp_exchange. "auto" chooses the one that sends fewer elements at these sizes (see `elements_sent`), if
    the heads allow it; "gather" if both send as many.
    """
    if degree == 1:
        return "alone", "one rank holds the whole sequence"
    if requested != "auto":
        return requested, "as configured"
    exchanged = math.lcm(kv_heads, degree)
    if query_heads % exchanged:
        reason = f"ulysses would repeat the {kv_heads} key/value heads to {exchanged} at sp_degree {degree}"
        return "gather", f"{reason}, which do not divide {query_heads} query heads"
    sizes = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim, "degree": degree}
    ulysses, gather = (elements_sent(name, context=context, slots=slots, **sizes) for name in ("ulysses", "gather"))
    return (
        "ulysses" if ulysses < gather else "gather",
        f"a rank sends {ulysses:,} elements a layer with ulysses, {gather:,} with gather "
        f"({context:,} context tokens, {slots:,} block slots, sp_degree {degree})",
    )


def elements_sent(
    exchange: str, *, context: int, slots: int, query_heads: int, kv_heads: int, head_dim: int, degree: int
) -> int:
    """Elements that a rank sends to others per layer in the forward pass, and again in the backward pass.

    context (T) and slots (blocks x block size) count those of all ranks together, padding included; the result is
    exact for multiples of the degree and rounded down for others.

    ulysses: (P-1)/P^2 * D * (2*T*E + 2*slots*(H + E)), for context, blocks and output.
    gather: (P-1)/P * 2*T*G*D.
    """
    exchanged = math.lcm(kv_heads, degree)
    rows = {
        "alone": 0,
        "ulysses": 2 * context * exchanged + 2 * slots * (query_heads + exchanged),
        "gather": 2 * context * kv_heads * degree,
    }
    return (degree - 1) * head_dim * rows[exchange] // degree**2


def deal_blocks(costs_N: Tensor, degree: int) -> tuple[list[Tensor], list[int]]:
    """The blocks of each rank, int64 and ascending, and the number of dummy blocks that pad each rank.

    costs_N: the length of each block's visible prefix. Blocks are dealt from the longest to the shortest prefix in
    serpentine order, 0..P-1, P-1..0, ..., so that the work is nearly equal. Ties keep their order, so that all ranks
    deal alike. With its dummies every rank holds ceil(N / P) blocks.
    """
    order_N = costs_N.argsort(descending=True, stable=True)
    turn_N = torch.arange(len(costs_N)) % (2 * degree)
    rank_N = torch.minimum(turn_N, 2 * degree - 1 - turn_N)
    dealt = [order_N[rank_N == rank].sort().values for rank in range(degree)]
    return dealt, [math.ceil(len(costs_N) / degree) - len(own) for own in dealt]


class _AllToAll(torch.autograd.Function):
    """An all-to-all along dimension 0: part p goes to rank p, and part p of the result comes from it. Its
    own inverse.
    """

    @staticmethod
    def forward(ctx: Any, parts_P: Tensor, group: dist.ProcessGroup, sent: Sent) -> Tensor:
        ctx.group, ctx.sent = group, sent
        sent.forward += _to_others(parts_P)
        return _swap(parts_P, group)

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None, None]:
        ctx.sent.backward += _to_others(grad_P)
        return _swap(grad_P, ctx.group), None, None


class _AllGather(torch.autograd.Function):
    """A gather of every rank's tensor into a new dimension 0. The backward pass is a reduce-scatter.

    It is done as all-to-all plus a local sum: gloo's own reduce-scatter sends twice as much. This one also adds in the
    same order everywhere, and rounds once for bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, sent: Sent) -> Tensor:
        ctx.group, ctx.sent = group, sent
        P = dist.get_world_size(group)
        sent.forward += (P - 1) * part.numel()
        # Concatenated, not stacked: gloo supports only that form.
        joined = part.new_empty((P * part.shape[0], *part.shape[1:]))
        _ALL_GATHER(joined, part.contiguous(), group=group)
        return joined.view(P, *part.shape)

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None, None]:
        ctx.sent.backward += _to_others(grad_P)
        return _swap(grad_P, ctx.group).sum(dim=0), None, None


def _last_of_all(x_tM: Tensor, per_rank: Sequence[ContextRange], group: dist.ProcessGroup, sent: Sent) -> Tensor:
    """`Alone.last` over ranks: each sends every other the rows of its slice, and zeros for those of other slices."""
    first = dist.get_rank(group) * len(x_tM)
    parts_PNM = torch.stack([_rows(x_tM, seen, first) for seen in per_rank])
    got_PNM: Tensor = _AllToAll.apply(parts_PNM, group, sent)
    return got_PNM.sum(0)


def _rows(x_tM: Tensor, seen: ContextRange, first: int) -> Tensor:
    """The rows of the last tokens that blocks see, [N, M]; zero where that is not in x, which begins at token `first`.

    The last of an empty range lies before its start, and is no token of it.
    """
    place_N = seen.end_N - 1 - first
    is_here_N = (seen.end_N > seen.start_N) & (place_N >= 0) & (place_N < len(x_tM))
    rows_NM = x_tM.index_select(0, place_N.clamp(0, len(x_tM) - 1))
    return torch.where(is_here_N[:, None], rows_NM, 0)


def _swap(parts_P: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange the P parts along dimension 0 between all ranks."""
    parts_P = parts_P.contiguous()
    got_P = torch.empty_like(parts_P)
    dist.all_to_all_single(got_P, parts_P, group=group)
    return got_P


def _to_others(parts_P: Tensor) -> int:
    """The number of elements in all parts except this rank's."""
    return parts_P.numel() - parts_P[0].numel()


def _copies(kv_heads: int, degree: int) -> int:
    """The number of times to repeat each KV head, so that the degree divides their number."""
    return math.lcm(kv_heads, degree) // kv_heads
