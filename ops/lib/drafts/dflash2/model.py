"""The convolutions around the sublayers, the selector's tables, and the walk over the candidates.

N blocks, K slots, M hidden size, T taps, G groups of M / group dimensions, V vocabulary, R rank, B rows, D proposals,
C candidates
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn
from ops.lib.drafts.backbone.model import DraftModel, Linear, table_rows
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from ops.lib.drafts.dflash2.config import sizes


class Convolution(Around):
    """A short convolution over the slots before (i = 0) and after (i = 1) a sublayer.

    conv_i(y)_k = sum_t (base[i, t] + made_k[i, t]) * y_(k - t). made_k is a projection of the sublayer's normed input;
    each of its values serves a group of neighbouring dimensions. There is nothing before slot 0. Initially tap 0 is one
    and all else zero, so that x passes unchanged; weight decay would pull base away from that.
    """

    hidden_matrices = ("kernel_projection.weight",)
    undecayed = ("base_kernel",)

    def __init__(self, hidden_size: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.reach = taps, taps - 1
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = Linear(hidden_size, 2 * taps * hidden_size // group, bias=False)

    def enter(self, x_NKM: Tensor) -> tuple[Tensor, Tensor]:
        made_NK2TG = self.kernel_projection(x_NKM).unflatten(-1, (2, self.taps, -1))
        return self._convolved(x_NKM, made_NK2TG, 0), made_NK2TG

    def leave(self, y_NKM: Tensor, kept: Tensor) -> Tensor:
        return self._convolved(y_NKM, kept, 1)

    def draw(self, generator: torch.Generator, std: float) -> None:
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def _convolved(self, y_NKM: Tensor, made_NK2TG: Tensor, side: int) -> Tensor:
        base_TM, made_NKTG = self.base_kernel[side].to(y_NKM.dtype), made_NK2TG[:, :, side]
        if torch.compiler.is_compiling():  # which keeps little for the backward pass by itself
            return convolved(y_NKM, base_TM, made_NKTG)
        found: Tensor = _Convolved.apply(y_NKM, base_TM, made_NKTG)
        return found


def convolved(y_NKM: Tensor, base_TM: Tensor, made_NKTG: Tensor) -> Tensor:
    """The convolution sum_t (base[t] + made_k[t]) * y_(k - t); each value of made serves a group of dimensions."""
    total_NKM = kernel(base_TM, made_NKTG, 0) * y_NKM
    for tap in range(1, _taps(y_NKM, base_TM)):
        shifted_NKM = F.pad(y_NKM[:, :-tap], (0, 0, tap, 0))
        total_NKM = total_NKM + kernel(base_TM, made_NKTG, tap) * shifted_NKM
    return total_NKM


def kernel(base_TM: Tensor, made_NKTG: Tensor, tap: int) -> Tensor:
    """The convolution's weights of every slot at a tap, [N, K, M]."""
    return (base_TM[tap].unflatten(0, (made_NKTG.shape[3], -1)) + made_NKTG[:, :, tap, :, None]).flatten(-2)


def _taps(y_NKM: Tensor, base_TM: Tensor) -> int:
    """The number of taps that can reach a slot of the block."""
    return min(base_TM.shape[0], y_NKM.shape[1])


class _Convolved(torch.autograd.Function):
    """The function `convolved` with its own backward pass, which keeps only the inputs and makes the kernels again."""

    @staticmethod
    def forward(ctx: Any, y_NKM: Tensor, base_TM: Tensor, made_NKTG: Tensor) -> Tensor:
        ctx.save_for_backward(y_NKM, base_TM, made_NKTG)
        total_NKM = kernel(base_TM, made_NKTG, 0).mul_(y_NKM)
        for tap in range(1, _taps(y_NKM, base_TM)):
            total_NKM[:, tap:] += kernel(base_TM, made_NKTG[:, tap:], tap).mul_(y_NKM[:, :-tap])
        return total_NKM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total_NKM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y_NKM, base_TM, made_NKTG = ctx.saved_tensors
        of_y_NKM = kernel(base_TM, made_NKTG, 0).mul_(of_total_NKM)
        of_base_TM, of_made_NKTG = torch.zeros_like(base_TM), torch.zeros_like(made_NKTG)
        for tap in range(_taps(y_NKM, base_TM)):
            of_slots = of_total_NKM[:, tap:]
            if tap:
                of_y_NKM[:, :-tap] += kernel(base_TM, made_NKTG[:, tap:], tap).mul_(of_slots)
            of_kernel = of_slots * y_NKM[:, : y_NKM.shape[1] - tap]
            of_base_TM[tap] = of_kernel.sum((0, 1))
            of_made_NKTG[:, tap:, tap] = of_kernel.unflatten(-1, (made_NKTG.shape[3], -1)).sum(-1)
        return of_y_NKM, of_base_TM, of_made_NKTG


class Selector(Drawn):
    """Scores for a candidate c after a token p, given a slot's hidden state h: <A[p] * (H h), B[c]>.

    Initially B is zero, so the logits alone decide; A and H change from the second step on. If A were zero too, no
    gradient would ever reach them.
    """

    hidden_matrices = ("hidden_projection.weight",)

    def __init__(self, config: DraftConfig, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = Linear(config.hidden_size, rank, bias=False)

    def draw(self, generator: torch.Generator, std: float) -> None:
        for weight in (self.predecessor_codebook, self.hidden_projection.weight):
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        self.successor_codebook.zero_()

    def follow(self, projected: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """The scores [..., C] of candidates [..., C] after the tokens `before` [...]. projected: H h, [..., R]."""
        wanted = table_rows(self.predecessor_codebook, before, projected.dtype) * projected
        offered = table_rows(self.successor_codebook, candidates, projected.dtype)
        return (offered @ wanted[..., None])[..., 0]


def around_sublayers(config: DraftConfig) -> dict[str, Around]:
    own = sizes(config)
    return {name: Convolution(config.hidden_size, own.taps, own.group) for name in ("attention_conv", "mlp_conv")}


def heads(config: DraftConfig) -> dict[str, Drawn]:
    return {"candidate_selector": Selector(config, sizes(config).rank)}


def selector_of(draft: nn.Module) -> Selector:
    selector = draft.candidate_selector
    assert isinstance(selector, Selector)
    return selector


def propose(draft: DraftModel, hidden_BDM: Tensor, logits_BDV: Tensor, anchors_B: Tensor, choice: Choice) -> Proposal:
    """Choose tokens from left to right, at each slot the best of its candidates, given the token chosen before.

    When tokens are drawn, only candidates have a probability. The selector's term has the draft's dtype, and is added
    to the logits in at least float32, as in SGLang.
    """
    best = logits_BDV.topk(sizes(draft.config).candidates, dim=-1)
    logits_BDC = best.values.to(torch.promote_types(best.values.dtype, torch.float32))
    selector = selector_of(draft)
    projected_BDR = selector.hidden_projection(hidden_BDM)
    tokens = [anchors_B]
    for place in range(hidden_BDM.shape[1]):
        candidates_BC = best.indices[:, place]
        scores_BC = logits_BDC[:, place] + selector.follow(projected_BDR[:, place], tokens[-1], candidates_BC)
        tokens.append(choice.among(scores_BC, candidates_BC, logits_BDV.shape[-1], place))
    return Proposal(torch.stack(tokens[1:], dim=1))
