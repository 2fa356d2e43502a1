"""One training step's problem, made from its sizes and a seed: every side computes on the very same tensors.

Imported by the interpreters of other trainers as well, so it needs nothing but torch.

Legend: S context length, F features (target layers * hidden), M hidden, V vocabulary, A anchors, K block size,
D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GAMMA = 7.0  # of the slot weights exp(-(k - 1) / gamma): DFlash's value for blocks of 16
PROMPT_SHARE = 8  # one eighth of the context is the prompt, the rest the answer that the anchors are drawn from
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a draft, and the tokens and anchors of its step. Field names are the command line's options."""

    context: int
    anchors: int
    hidden: int = 256
    layers: int = 3
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 768
    vocabulary: int = 32768
    block: int = 16
    target_layers: int = 5

    @property
    def mask_token_id(self) -> int:
        return self.vocabulary - 1

    @property
    def features(self) -> int:
        return self.target_layers * self.hidden


@dataclass(frozen=True, eq=False)
class Problem:
    """The tensors of one training step: a sequence with its anchors, a draft's weights, and a target's ends.

    anchors_A int64, ascending; ids_S int64; loss_mask_S bool. Weights are named as in the serving contract; the ends
    are the frozen embedding and head. All but the first three are in the dtype to compute in.
    """

    sizes: Sizes
    features_SF: Tensor
    ids_S: Tensor
    loss_mask_S: Tensor
    anchors_A: Tensor
    embed_VM: Tensor
    head_VM: Tensor
    weights: dict[str, Tensor]


def make_problem(sizes: Sizes, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Problem:
    """Make the problem of these sizes, drawn in float32, so that another dtype has the same values, rounded.

    The head's scale gives logits a standard deviation of 2. Raises ValueError if the answer has too few tokens.
    """
    on_cpu = torch.Generator().manual_seed(SEED)  # tokens and anchors are the same on every device
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).to(dtype)

    answer = sizes.context // PROMPT_SHARE
    eligible = torch.arange(answer, sizes.context - 1)
    if len(eligible) < sizes.anchors:
        raise ValueError(f"{sizes.anchors} anchors in a context of {sizes.context}: only {len(eligible)} places")
    chosen = torch.randperm(len(eligible), generator=on_cpu)[: sizes.anchors]
    return Problem(
        sizes=sizes,
        features_SF=normal(sizes.context, sizes.features, std=1.0),
        ids_S=torch.randint(sizes.vocabulary - 1, (sizes.context,), generator=on_cpu).to(device),
        loss_mask_S=torch.arange(sizes.context, device=device) >= answer,
        anchors_A=eligible[chosen].sort().values.to(device),
        embed_VM=normal(sizes.vocabulary, sizes.hidden, std=1.0),
        head_VM=normal(sizes.vocabulary, sizes.hidden, std=2.0 * sizes.hidden**-0.5),
        weights={name: _weight(shape, normal) for name, shape in _shapes(sizes).items()},
    )


def warm_up_sizes(sizes: Sizes) -> Sizes:
    """Tiny sizes of the same kind of draft, whose step loads libraries and kernels at almost no cost."""
    return Sizes(
        context=64,
        anchors=8,
        hidden=2 * sizes.head_dim,
        layers=2,
        heads=2 * (sizes.heads // sizes.kv_heads),
        kv_heads=2,
        head_dim=sizes.head_dim,
        intermediate=64,
        vocabulary=256,
        block=sizes.block,
        target_layers=sizes.target_layers,
    )


def slot_targets(problem: Problem) -> tuple[Tensor, Tensor]:
    """Labels int64 [A, K] and weights float32 [A, K] of every slot; slot 0 and slots after the end have no weight."""
    slots_K = torch.arange(problem.sizes.block, device=problem.ids_S.device)
    positions_AK = problem.anchors_A[:, None] + slots_K
    inside_AK = (positions_AK < problem.sizes.context) & (slots_K > 0)
    labels_AK = problem.ids_S[positions_AK.clamp(max=problem.sizes.context - 1)]
    return labels_AK, inside_AK * torch.exp(-(slots_K - 1).clamp(min=0) / GAMMA)


def final_hidden(problem: Problem) -> Tensor:
    """The target's states after its final norm, [S, M]: the last layer's features stand in for them."""
    return problem.features_SF[:, -problem.sizes.hidden :]


def _weight(shape: tuple[int, ...], normal) -> Tensor:
    """A random weight: a matrix as at the start of a training, or a norm other than 1, so that gradients differ."""
    return normal(*shape, std=0.02) if len(shape) == 2 else 1 + normal(*shape, std=0.1)


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    M, width, kv_width = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (M, sizes.features), "hidden_norm.weight": (M,)}
    for index in range(sizes.layers):
        layer = {
            "input_layernorm": (M,),
            "self_attn.q_proj": (width, M),
            "self_attn.k_proj": (kv_width, M),
            "self_attn.v_proj": (kv_width, M),
            "self_attn.o_proj": (M, width),
            "self_attn.q_norm": (sizes.head_dim,),
            "self_attn.k_norm": (sizes.head_dim,),
            "post_attention_layernorm": (M,),
            "mlp.gate_proj": (sizes.intermediate, M),
            "mlp.up_proj": (sizes.intermediate, M),
            "mlp.down_proj": (M, sizes.intermediate),
        }
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (M,)}
