"""The environment variables of a stage's processes: threads, GPUs, allocator, compile cache."""

from __future__ import annotations

import os
from collections.abc import Sequence

from executor.system.resource_pool import VISIBLE, device_order
from executor.system.supervisor import child_environment
from executor.system.user_cache import compile_cache

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# How long a thread of an OpenMP runtime spins for its next work before it sleeps: libgomp's in iterations of the
# loop, LLVM's and Intel's in ms. Their defaults are so high (300,000 iterations, 200 ms) that on a busy machine the
# loop uses the CPU that the awaited threads need. CHOICES: the variables by which a user overrides each default.
SPINS = {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "0"}
CHOICES = {
    "GOMP_SPINCOUNT": ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"),
    "KMP_BLOCKTIME": ("KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_WAIT_POLICY"),
}
# Each rank starts a pool of compile processes: by default as many as it has CPU threads.
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_COMPILE_THREADS = 32  # torch's own limit
# torch's CUDA allocator, unless the user sets either name: torch 2.11 to 2.13 read both.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def stage_environment(threads: int, gpus: Sequence[str] | None = None) -> dict[str, str]:
    """This process's environment with fixed thread counts; `ops` in the working directory cannot shadow dflow's.

    Waiting threads sleep soon, unless this environment sets how they wait.

    gpus: the devices that the stage sees; None leaves them all.
    """
    # Growing segments avoid fragmentation: micro-batches differ in size.
    is_default = (gpus is None or gpus) and not any(name in os.environ for name in ALLOCATOR_NAMES)
    allocator = {ALLOCATOR_NAMES[0]: "expandable_segments:True"} if is_default else {}
    return {
        **child_environment(),
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        **bounded_spin(),
        **device_order(),
        **({} if gpus is None else {VISIBLE: ",".join(gpus)}),
        COMPILE_THREADS: os.environ.get(COMPILE_THREADS, str(min(threads, MOST_COMPILE_THREADS))),
        **allocator,
        **compile_cache(),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # progress goes through the stage; bars would fill the log
    }


def bounded_spin() -> dict[str, str]:
    """The variables of SPINS, except for runtimes that the user has configured."""
    return {name: value for name, value in SPINS.items() if not any(choice in os.environ for choice in CHOICES[name])}
