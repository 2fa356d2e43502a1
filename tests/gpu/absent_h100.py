"""torch.compile for an H100 that is not there: tensors of the GPU have no values, its kernels are compiled and not run.

`install` makes torch, its compiler and Triton believe in one H100. Kernels are compiled by dynamo, inductor, Triton and
ptxas for sm_90, down to machine code, and what each takes of the GPU is kept in `kernels`; a launch does nothing.
Tensors of the host keep their values (`AbsentGpu`). It needs torch's build for CUDA, the C file beside this one loaded
first, and a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface
import torch._inductor.config
import torch._inductor.runtime.triton_helpers
import torch._inductor.runtime.triton_heuristics as heuristics
import torch._subclasses.fake_tensor
import torch.cuda
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget

SHARED_MEMORY = 227 * 1024  # bytes that a block of threads may take
DEVICE = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)

kernels: list[tuple[str, int]] = []  # the name and the bytes of shared memory of every kernel that was compiled


class AbsentGpu(FakeTensorMode):
    """A mode in which tensors on the GPU have shapes but no values; the host computes as usual."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out):
            return kwargs["out"]  # its shape is given, and fake tensors do not know these products
        if not any(map(_is_of_the_gpu, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._without_values, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _without_values(self, leaf: Any) -> Any:
        is_real = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        return self.from_tensor(leaf) if is_real else leaf


def _is_of_the_gpu(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda")


def install() -> None:
    _replace(torch.cuda, is_available=True, device_count=1, current_device=0, is_initialized=True, _lazy_init=None)
    _replace(torch.cuda, get_device_capability=(9, 0), get_device_properties=PROPERTIES, is_bf16_supported=True)
    _replace(torch.cuda, get_arch_list=["sm_90"], synchronize=None, set_device=None)
    _replace(torch.cuda, get_rng_state=torch.zeros(16, dtype=torch.uint8), set_rng_state=None)
    interface = torch._dynamo.device_interface.CudaInterface
    for place in (interface, interface.Worker):
        _replace(place, get_device_properties=PROPERTIES, get_compute_capability=90, current_device=0, static=True)
    _replace(interface, is_available=True, device_count=1, get_raw_stream=0, is_bf16_supported=True, static=True)
    _replace(interface, exchange_device=0, maybe_exchange_device=0, set_device=None, static=True)
    _replace(torch._C, _cuda_getDevice=0, _cuda_setDevice=None, _cuda_getCurrentRawStream=0)
    _replace(torch._C, _cuda_exchangeDevice=0, _cuda_maybeExchangeDevice=0)
    _replace(torch._inductor.runtime.triton_helpers, set_driver_to_gpu=None)
    _replace(torch._subclasses.fake_tensor, init_gpu_context=None)
    torch.Tensor.pin_memory = lambda host: host
    triton.runtime.driver.set_active(_Driver())
    memory = torch._C._dynamo.guards  # what compiled code allocates with
    memory._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=DEVICE
    )
    memory._reinterpret_tensor = lambda tensor, size, stride, offset=0: tensor.as_strided(
        size, stride, offset + tensor.storage_offset()
    )
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    heuristics.TritonCompileResult.make_launcher = _launcher
    _replace(heuristics.StaticTritonCompileResult, can_statically_launch=None, static=True)
    heuristics.CachingAutotuner.autotune_to_one_config = _take_the_first
    _replace(heuristics.CachingAutotuner, save_gpu_kernel=None)


def _replace(place: Any, *, static: bool = False, **values: Any) -> None:
    """Functions that return these values."""
    for name, value in values.items():
        function = _always(value)
        setattr(place, name, staticmethod(function) if static else function)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_arguments, **_named: value


class _Driver:
    """A driver for Triton that names the device to compile for, and loads nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *_arguments, **_named: [0.0, 0.0, 0.0]


def _launcher(result: Any) -> Any:
    """The launcher of a compiled kernel, whose machine code exists and is not loaded."""
    name, metadata = result.inductor_meta.get("kernel_name", "?"), result.kernel.metadata
    assert result.kernel.asm["cubin"]
    kernels.append((name, metadata.shared))

    def launch(*_arguments: Any, **_named: Any) -> None:
        return None

    launch.config, launch.n_regs, launch.n_spills = result.config, 0, 0  # type: ignore[attr-defined]
    launch.shared, launch.store_cubin, launch.cache_hash = metadata.shared, False, name  # type: ignore[attr-defined]
    return launch


def _take_the_first(tuner: Any, *_arguments: Any, **_named: Any) -> None:
    """Choose the first of the ways to run a kernel, all of which are compiled."""
    tuner.launchers = tuner.launchers[:1]
