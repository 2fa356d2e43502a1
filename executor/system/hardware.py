"""This machine: its GPUs as NVIDIA's driver lists them, and since when it runs."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the second on WSL
UNLISTED = (Path("/dev/kfd"), Path("/dev/nvmap"), Path("/dev/nvhost-gpu"), Path("/dev/nvgpu"))  # AMD's and Tegra's
NO_GPU = 'launch.device is "cuda", but torch finds no GPU here; use "auto" or "cpu"'


def boot_id() -> str:
    """The id of this machine's current boot; containers on the machine share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def nvml() -> ModuleType | None:
    """NVIDIA's management library, initialised; None without a driver. It is not imported without a device."""
    if not any(driver.exists() for driver in DRIVERS):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    library: ModuleType = pynvml
    return library


def gpu_indices() -> tuple[str, ...]:
    """Indices of all GPUs in bus order, as nvidia-smi numbers them; empty without a working driver."""
    library = nvml()
    if library is None:
        return ()
    try:
        return tuple(map(str, range(library.nvmlDeviceGetCount())))
    except library.NVMLError:
        return ()


def may_have_gpu() -> bool:
    """Whether torch might find a GPU, even one that NVML does not list. Loads no torch.

    False where this machine has no GPU device, or the installed torch is built for CPUs.
    """
    from importlib import metadata  # slow

    try:
        of_cpu = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        of_cpu = False
    return not of_cpu and any(file.exists() for file in (*DRIVERS, *UNLISTED))


def gpu_memory() -> int | None:
    """Bytes of memory of the smallest GPU; None without one, or where the driver does not report it."""
    library = nvml()
    if library is None:
        return None
    handle = library.nvmlDeviceGetHandleByIndex
    try:
        sizes = [library.nvmlDeviceGetMemoryInfo(handle(int(index))).total for index in gpu_indices()]
    except library.NVMLError:
        return None
    return min(sizes, default=None)
