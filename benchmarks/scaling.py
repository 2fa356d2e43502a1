"""Traffic and memory of sequence parallelism per rank, compared with the formulas: gloo ranks on this machine's CPU.

    python benchmarks/scaling.py --context 4096 --anchors 256

For every degree and exchange, fresh processes run one draft step's exchanges and attention, forward and backward: the
context's keys and values of all layers once, then the blocks in chunks. Projections, MLP and head are omitted: they
exchange nothing and need the same memory at every degree. The table shows, for the rank with the maximum,

- sent: MiB to other ranks per layer, counted in the forward and in the backward pass, beside the formula;
- held: MiB of context keys and values that the rank attends to, all layers, beside the formula;
- work: visible prefix tokens of its blocks, over the mean of all ranks;
- peak: maximum resident memory during the step, minus that before it.

Exits with 1 if a count differs from its formula. Linux only.

Legend: P ranks, T context tokens, t = T / P, N blocks, K block size, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attrs import asdict, define, evolve, frozen
from torch import Tensor

from benchmarks.harness import reset_peak, resident
from dsl.stage import LOOPBACK_ONLY
from ops.lib.drafts.attention.blocks import ContextRange, split_attention
from ops.lib.sequence_parallel.degree import check_degree
from ops.lib.sequence_parallel.exchange import Exchange, choose_exchange, deal_blocks, elements_sent, make_exchange
from ops.lib.sequence_parallel.mesh import make_mesh

MIB = 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@frozen(kw_only=True)
class Sizes:
    """Sizes of a step. context: a multiple of every degree. chunk: blocks of a rank in one exchange."""

    context: int
    anchors: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    chunk: int
    dtype: str

    def dealt(self, degree: int) -> int:
        """Blocks of each rank, dummies included."""
        return math.ceil(self.anchors / degree)

    def shapes(self, degree: int) -> dict[str, int]:
        """The sizes for `choose_exchange` and `elements_sent`."""
        return {
            "context": self.context,
            "slots": self.dealt(degree) * degree * self.block_size,
            "query_heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "degree": degree,
        }


@define
class Measured:
    """What one rank counted in one step, in elements and bytes."""

    sent_forward: int = 0
    sent_backward: int = 0
    held: int = 0
    prefix_tokens: int = 0
    peak: int = 0


def main() -> None:
    sizes, degrees = arguments()
    print(
        f"{sizes.context} context tokens, {sizes.anchors} anchors x {sizes.block_size}, {sizes.heads} query and "
        f"{sizes.kv_heads} key/value heads of size {sizes.head_dim}, {sizes.layers} layers, {sizes.dtype}, "
        f"chunks of {sizes.chunk} blocks a rank; MiB per rank\n"
    )
    print(" P  exchange   sent fwd  sent bwd   formula |     held   formula |   work |     peak")
    wrong = 0
    for degree in degrees:
        for name in ("gather", "ulysses") if degree > 1 else ("alone",):
            if name == "ulysses" and sizes.heads % math.lcm(sizes.kv_heads, degree):
                print(f"{degree:2}  {name:8}   {sizes.heads} query heads do not allow it")
                continue
            wrong += not report(name, degree, sizes, measure(name, degree, sizes))
    print()
    for degree in degrees:
        print("auto at P = {}: {}, {}".format(degree, *choose_exchange("auto", **sizes.shapes(degree))))
    sys.exit(wrong > 0)


def arguments() -> tuple[Sizes, list[int]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4])
    for name, default in (("context", 4096), ("anchors", 256), ("block-size", 16), ("heads", 8), ("kv-heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("head-dim", 32), ("layers", 3), ("chunk", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    values = vars(parser.parse_args())
    degrees = values.pop("degrees")
    if values["anchors"] > values["context"]:
        parser.error(f"--anchors {values['anchors']} do not fit into --context {values['context']}")
    multiple = math.lcm(*degrees)
    values["context"] = math.ceil(values["context"] / multiple) * multiple
    for degree in degrees:
        check_degree(
            world_size=degree,
            sp_degree=degree,
            sp_exchange="auto",
            query_heads=values["heads"],
            kv_heads=values["kv_heads"],
            shortest=values["context"],
            pad_multiple=multiple,
        )
    return Sizes(**values), degrees


def report(name: str, degree: int, sizes: Sizes, ranks: list[Measured]) -> bool:
    """Print a row of the table; returns whether the counts of every rank equal the formulas."""
    itemsize = DTYPES[sizes.dtype].itemsize
    sent = elements_sent(name, **sizes.shapes(degree))
    heads = math.lcm(sizes.kv_heads, degree) // degree if name == "ulysses" else sizes.kv_heads
    held = 2 * heads * sizes.context * sizes.head_dim * sizes.layers * itemsize
    expected = (sent * sizes.layers, sent * sizes.layers, held)
    agrees = all(expected == (rank.sent_forward, rank.sent_backward, rank.held) for rank in ranks)
    most = Measured(**{field: max(getattr(rank, field) for rank in ranks) for field in asdict(ranks[0])})
    forward, backward = (count / sizes.layers * itemsize / MIB for count in (most.sent_forward, most.sent_backward))
    mean = sum(rank.prefix_tokens for rank in ranks) / len(ranks)
    print(
        f"{degree:2}  {name:8} {forward:10.3f}{backward:10.3f}{sent * itemsize / MIB:10.3f} |"
        f"{most.held / MIB:9.3f}{held / MIB:10.3f} | {most.prefix_tokens / mean:6.4f} |{most.peak / MIB:9.1f}"
        f"{'' if agrees else '   DIFFERS FROM THE FORMULA'}"
    )
    return agrees


def measure(name: str, degree: int, sizes: Sizes) -> list[Measured]:
    """Measurements of `degree` fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        # The server imports torch once for all; it never computes, so forking it is safe.
        multiprocessing.set_forkserver_preload(["ops.lib.sequence_parallel.exchange"])
        mp.start_processes(one_rank, (name, degree, sizes, folder), nprocs=degree, start_method="forkserver")
        return [Measured(**torch.load(Path(folder) / f"{rank}.pt", weights_only=True)) for rank in range(degree)]


def one_rank(rank: int, name: str, degree: int, sizes: Sizes, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= LOOPBACK_ONLY
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", degree), rank=rank, world_size=degree)
    group = make_mesh(degree, degree, torch.device("cpu")).get_group("sp")
    # A small step first: connections, threads and code are in memory before the measurement.
    step(make_exchange(name, group), evolve(sizes, context=16 * degree, anchors=2 * degree), rank, degree)
    dist.barrier()
    reset_peak()
    before = resident("VmRSS")
    measured = step(make_exchange(name, group), sizes, rank, degree)
    measured.peak = resident("VmHWM") - before
    torch.save(asdict(measured), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def step(exchange: Exchange, sizes: Sizes, rank: int, degree: int) -> Measured:
    """One step's exchanges and attention, forward and backward, on one rank."""
    chunks, prefix_tokens = plan(sizes, rank, degree)
    slices = [random_pair(sizes, sizes.context // degree, seed=rank) for _ in range(sizes.layers)]
    exchanged = [exchange.context(*pair) for pair in slices]
    # The gradient of the context's keys and values is summed over the chunks, and sent back in one message per layer.
    leaves = [[x_GTD.detach().requires_grad_() for x_GTD in pair] for pair in exchanged]
    for count, seen in chunks:
        chunk_of_blocks(exchange.seen(seen), exchange, count, leaves, sizes)
    for pair, leaf in zip(exchanged, leaves, strict=True):
        torch.autograd.backward(pair, [x_GTD.grad for x_GTD in leaf])
    return Measured(
        sent_forward=exchange.sent.forward,
        sent_backward=exchange.sent.backward,
        held=sum(x_GTD.nbytes for pair in leaves for x_GTD in pair),
        prefix_tokens=prefix_tokens,
    )


def chunk_of_blocks(
    seen: ContextRange, exchange: Exchange, count: int, leaves: list[list[Tensor]], sizes: Sizes
) -> None:
    """The blocks of one chunk through all layers and back; adds to the gradients of the leaves."""
    shape, dtype = (count, sizes.block_size), DTYPES[sizes.dtype]
    x_NKHD = torch.ones(*shape, sizes.heads, sizes.head_dim, dtype=dtype, requires_grad=True)
    for k_GTD, v_GTD in leaves:
        k_NKGD, v_NKGD = (x_NKHD[:, :, : sizes.kv_heads] * factor for factor in (0.5, 2.0))
        heads = exchange.blocks(x_NKHD, k_NKGD, v_NKGD)
        x_NKHD = exchange.back(split_attention(*heads, k_GTD, v_GTD, seen, None))
    x_NKHD.sum().backward()


def plan(sizes: Sizes, rank: int, degree: int) -> tuple[list[tuple[int, list[ContextRange]]], int]:
    """Chunks of blocks (their number, the context of every rank's), and the prefix tokens of this rank's blocks."""
    anchors_N = torch.randperm(sizes.context, generator=torch.Generator().manual_seed(0))[: sizes.anchors]
    anchors_N = anchors_N.sort().values
    dealt, dummies = deal_blocks(anchors_N, degree)
    ends = [torch.cat([anchors_N[own], anchors_N.new_zeros(more)]) for own, more in zip(dealt, dummies, strict=True)]
    chunks = []
    for low in range(0, sizes.dealt(degree), sizes.chunk):
        parts = [end_N[low : low + sizes.chunk] for end_N in ends]
        chunks.append((len(parts[0]), [ContextRange(start_N=torch.zeros_like(part), end_N=part) for part in parts]))
    return chunks, int(ends[rank].sum())


def random_pair(sizes: Sizes, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, sizes.kv_heads, tokens, sizes.head_dim)
    both_2GtD = torch.randn(shape, generator=generator).to(DTYPES[sizes.dtype])
    k_GtD, v_GtD = (x_GtD.clone().requires_grad_() for x_GtD in both_2GtD)
    return k_GtD, v_GtD


if __name__ == "__main__":
    main()
