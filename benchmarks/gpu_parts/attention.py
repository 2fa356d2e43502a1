"""Attention and head as training runs them on the device, against plain ones in float64: errors, then times.

Errors are measured with few blocks, since the dense reference computes every score; times at the size of the draft's
step. An error is the largest difference of an element over the largest element of its tensor, gradients included.

Legend: T context, N blocks, K block size, H query heads, G key/value heads, D head size, W slots, M hidden,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_parts.timing import answer, draft_sizes, part_parser, peak_mib, times_of
from benchmarks.sides.ours import draft_config
from benchmarks.sides.problem import Sizes
from ops.lib.drafts.attention.blocks import Attend, choose_attention, dense_attention
from ops.lib.drafts.losses.head import choose_head, head_cross_entropy
from ops.lib.sequence_parallel.context_range import ContextRange

SEED = 0
FEW_BLOCKS, FEW_SLOTS = 32, 256


def main() -> None:
    arguments = part_parser(__doc__).parse_args()
    device, sizes = torch.device(arguments.device), draft_sizes(arguments.tiny)
    repeats = 2 if arguments.tiny else 20
    figures: dict[str, Any] = {"attention": [], "head": []}
    for window in (None, sizes.context // 3):
        for dtype in (torch.float32, torch.bfloat16):
            figures["attention"].append(attention_figures(sizes, window, dtype, device, repeats))
    for dtype in (torch.float32, torch.bfloat16):
        figures["head"].append(head_figures(sizes, dtype, device, repeats))
    answer(figures)


def attention_figures(
    sizes: Sizes, window: int | None, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Measure the chosen attention: its name, its errors, and in bfloat16 its times at full size."""
    name, attend = choose_attention(device, draft_config(sizes), dtype)
    few = replace(sizes, anchors=min(sizes.anchors, FEW_BLOCKS))
    seen, inputs = attention_inputs(few, torch.float64, device)
    upstream = torch.randn(inputs[0].shape, generator=_generator(device), device=device, dtype=torch.float64)
    expected = attended(dense_attention, inputs, upstream, seen, window)
    actual = attended(attend, [_cast(x, dtype) for x in inputs], upstream.to(dtype), seen, window)
    row: dict[str, Any] = {
        "attention": name,
        "dtype": str(dtype).removeprefix("torch."),
        "window": window,
        "error_forward": error(expected[:1], actual[:1]),
        "error_gradients": error(expected[1:], actual[1:]),
    }
    if dtype == torch.bfloat16:
        row |= _attention_times(attend, sizes, window, device, repeats)
    return row


def _attention_times(
    attend: Attend, sizes: Sizes, window: int | None, device: torch.device, repeats: int
) -> dict[str, Any]:
    seen, inputs = attention_inputs(sizes, torch.bfloat16, device)
    upstream = torch.ones_like(inputs[0])

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs, seen, window)

    def both() -> list[Tensor]:
        return attended(attend, inputs, upstream, seen, window)

    return {
        "forward": times_of(forward, device, repeats),
        "forward_backward": times_of(both, device, repeats),
        "mib": peak_mib(both, device),
    }


def head_figures(sizes: Sizes, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Measure the loss through the frozen head without logits, beside log_softmax over logits: errors and times."""
    expected = plain_head(*(_cast(x, torch.float64) for x in head_inputs(sizes, FEW_SLOTS, dtype, device)))
    actual = our_head(*head_inputs(sizes, FEW_SLOTS, dtype, device))
    row: dict[str, Any] = {
        "head": choose_head(device)[0],
        "dtype": str(dtype).removeprefix("torch."),
        "error_loss": error(expected[:1], actual[:1]),
        "error_gradient": error(expected[1:], actual[1:]),
    }
    if dtype == torch.bfloat16:
        slots = sizes.anchors * (sizes.block - 1)
        for name, run in (("ours", our_head), ("plain", plain_head)):
            inputs = head_inputs(sizes, slots, dtype, device)
            row[name] = times_of(partial(run, *inputs), device, repeats)
            row[f"{name}_mib"] = peak_mib(partial(run, *inputs), device)
    return row


def attention_inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[ContextRange, list[Tensor]]:
    """Random inputs of attention: the visible context, and q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD.

    They are drawn in float64 and rounded to dtype.
    """
    generator = _generator(device)
    T, N, K, H, G, D = sizes.context, sizes.anchors, sizes.block, sizes.heads, sizes.kv_heads, sizes.head_dim
    shapes = [(N, K, H, D), (N, K, G, D), (N, K, G, D), (G, T, D), (G, T, D)]
    inputs = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
    ends_N = torch.linspace(1, T - 1, N).long()
    return ContextRange(torch.zeros_like(ends_N), ends_N), [x.requires_grad_() for x in inputs]


def attended(
    attend: Attend, inputs: list[Tensor], upstream: Tensor, seen: ContextRange, window: int | None
) -> list[Tensor]:
    """Compute attention forward and backward: its output, and the gradients of all inputs."""
    out = attend(*inputs, seen, window)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def head_inputs(sizes: Sizes, slots: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random inputs of the loss: hidden [W, M] with a gradient, head [V, M] and labels [W].

    The logits have a standard deviation of 2.
    """
    generator = _generator(device)
    hidden_WM = torch.randn(slots, sizes.hidden, generator=generator, device=device)
    head_VM = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator, device=device) * 2 * sizes.hidden**-0.5
    labels_W = torch.randint(sizes.vocabulary, (slots,), generator=generator, device=device)
    return hidden_WM.to(dtype).requires_grad_(), head_VM.to(dtype), labels_W


def our_head(hidden_WM: Tensor, head_VM: Tensor, labels_W: Tensor) -> list[Tensor]:
    losses_W, _ = head_cross_entropy(hidden_WM, head_VM, labels_W)
    return [losses_W.detach(), *torch.autograd.grad(losses_W.sum(), hidden_WM)]


def plain_head(hidden_WM: Tensor, head_VM: Tensor, labels_W: Tensor) -> list[Tensor]:
    losses_W = F.cross_entropy(F.linear(hidden_WM, head_VM), labels_W, reduction="none")
    return [losses_W.detach(), *torch.autograd.grad(losses_W.sum(), hidden_WM)]


def error(expected: list[Tensor], actual: list[Tensor]) -> float:
    """The largest difference of an element, relative to the largest element of its tensor."""
    pairs = zip(expected, actual, strict=True)
    return max(float((a.double() - e.double()).abs().max() / e.double().abs().max()) for e, a in pairs)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a tensor in dtype, as a new leaf of the graph; index tensors are unchanged."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


if __name__ == "__main__":
    main()
