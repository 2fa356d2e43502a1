"""What targets with FP8 weights need: SGLang has its products of FP8 numbers as kernels of GPUs only."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from import_hooks import after_import

MOST = 448.0  # of FP8's numbers (E4M3)


@after_import("sglang.srt.layers.quantization.fp8_utils")
def products(module: ModuleType) -> None:
    """Activations become FP8 numbers by token or group of columns, as in SGLang's kernels; products are float32's."""
    import torch

    def as_groups(x: torch.Tensor, size: int, **_layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
        groups = x.float().unflatten(-1, (-1, size))
        scales = groups.abs().amax(-1).clamp(min=1e-10) / MOST
        return (groups / scales[..., None]).clamp(-MOST, MOST).to(torch.float8_e4m3fn).flatten(-2), scales

    def of_blocks(
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scales: torch.Tensor,
        weight_scales: torch.Tensor,
        block: list[int],
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        rows, columns = weight.shape
        scales = weight_scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        inputs = x.float() * x_scales.repeat_interleave(block[1], -1)[:, :columns]
        return (inputs @ (weight.float() * scales).T).to(output_dtype)

    def by_token(x: torch.Tensor, scale: torch.Tensor | None, **_layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert scale is None  # only dynamic ones are used
        return as_groups(x, x.shape[-1])

    module.per_token_group_quant_fp8 = as_groups
    module.w8a8_block_fp8_matmul_triton = of_blocks
    module.scaled_fp8_quant = by_token


@after_import("sglang.srt.layers.quantization.compressed_tensors.compressed_tensors")
def scheme(module: ModuleType) -> None:
    """It asks CUDA for its version."""
    module.CompressedTensorsConfig._check_scheme_supported = lambda self, min_capability, error=True: True


@after_import("sglang.srt.layers.quantization.fp8")
def as_on_a_gpu(module: ModuleType) -> None:
    """On a CPU the method packs its weights for kernels of AMX, which not every processor has."""
    module._is_cpu = False
