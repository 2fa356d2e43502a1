"""What models with a mixture of experts need; the experts themselves run in SGLang's own plain torch on a CPU."""

from __future__ import annotations

from types import ModuleType

from import_hooks import after_import


@after_import("sglang.kernels.ops.elementwise.elementwise")
def shared_expert(module: ModuleType) -> None:
    """Qwen3.5's shared expert, which every token passes, adds what its gate, one number a token, lets through."""
    import torch

    def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
        out += (hidden @ gate).sigmoid()[:, None] * shared

    module.fused_gate_sigmoid_mul_add = add_gated
