"""What any model needs: torchvision's operators, a stand-in for vllm's kernel, and triton where it is missing."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

from import_hooks import after_import, before_import


@before_import("torchvision")
def define_torchvision_operators() -> None:
    """The wheel is a CUDA build whose C library does not load here; importing it asks for these operators' names."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    _kept.append(library)


@before_import("sglang.srt.layers.rotary_embedding.base")
def stand_in_for_vllm() -> None:
    """RotaryEmbedding imports a kernel of vllm's when it is made; on a CPU it never calls it."""
    if importlib.util.find_spec("vllm") is None:
        package, operators = ModuleType("vllm"), ModuleType("vllm._custom_ops")
        operators.rotary_embedding = _never_called  # type: ignore[attr-defined]
        package._custom_ops = operators  # type: ignore[attr-defined]
        sys.modules.update({"vllm": package, "vllm._custom_ops": operators})


@after_import("sglang.srt.configs.update_config")
def keep_sizes(module: ModuleType) -> None:
    """On a CPU sizes are padded to what the kernels of the CPU engine want; the loaders in use here know none of it."""
    module.adjust_config_with_unaligned_cpu_tp = lambda model_config, load_config, tp_size: model_config


_kept: list[Any] = []  # a torch library lives as long as its object


def _never_called(*_arguments: Any, **_options: Any) -> NoReturn:
    raise NotImplementedError("vllm's rotary_embedding kernel does not exist on a CPU")
