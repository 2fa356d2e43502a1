"""Blocks over a context of a few samples, and what an attention makes of them, for the tests of all attentions.

Legend: T packed context tokens, N blocks, K block size, H query heads, G key/value heads, R = H / G, D head size.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from ops.lib.drafts.attention.blocks import Attend, ContextRange


@frozen
class Case:
    """Inputs of block attention: what each block of a few samples sees, and the sizes."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    T: int
    K: int
    G: int = 2
    R: int = 2
    D: int = 8
    window: int | None = None

    def seen(self) -> ContextRange:
        return ContextRange(torch.tensor(self.starts), torch.tensor(self.ends))

    def inputs(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> list[Tensor]:
        """The random tensors q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD; the context has the projections' strides,
        [T, G, D].
        """
        generator = torch.Generator().manual_seed(0)
        N, K, G, D = len(self.starts), self.K, self.G, self.D
        shapes = [(N, K, G * self.R, D), (N, K, G, D), (N, K, G, D), (self.T, G, D), (self.T, G, D)]
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
        return [x.requires_grad_() for x in (*made[:3], made[3].transpose(0, 1), made[4].transpose(0, 1))]


def random_case(seed: int, sorted_blocks: bool = False, **sizes) -> Case:
    """A case of three samples of 70, 1 and 200 tokens, with random blocks, dummies, and 9 tokens that no block sees."""
    generator = torch.Generator().manual_seed(seed)
    spans = []
    for start, length, blocks in ((0, 70, 9), (70, 1, 2), (71, 200, 25)):
        drawn = torch.randint(0, length + 1, (blocks,), generator=generator).tolist()
        spans += [(start, start + end) for end in (*drawn, 0, length)]
    spans += [(0, 0), (0, 0)]
    order = sorted(spans) if sorted_blocks else [spans[i] for i in torch.randperm(len(spans), generator=generator)]
    starts, ends = zip(*order, strict=True)
    return Case(starts, ends, T=280, **sizes)


def attended(attend: Attend, case: Case, dtype: torch.dtype, device: str | torch.device = "cpu") -> list[Tensor]:
    """Compute attention: the output, and the gradients of q, own k and v, context k and v, all float64 on the CPU."""
    inputs = case.inputs(dtype, device)
    out = attend(*inputs, case.seen(), case.window)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(out, inputs, direction.to(device, dtype))
    return [x.detach().to("cpu", torch.float64) for x in (out, *gradients)]


def error(expected: list[Tensor], actual: list[Tensor]) -> float:
    """The largest difference of an element, relative to the largest element of its tensor where that is above 1."""
    assert [x.shape for x in expected] == [x.shape for x in actual]
    pairs = zip(expected, actual, strict=True)
    return max(float((a - e).abs().max() / e.abs().max().clamp(min=1)) for e, a in pairs if e.numel())
