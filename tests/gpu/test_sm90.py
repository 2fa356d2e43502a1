"""A training step compiled for an H100 on a machine without a GPU: how many graphs, and whether its kernels fit.

Dynamo, inductor, Triton and ptxas run as on that GPU; nothing is launched. `make test-sm90` makes the environment.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SHARED_MEMORY = 227 * 1024  # bytes that a block of threads may take on an H100
# docs/gpu.md: of layers, FlexAttention and its mask, and the loss. DSpark compares distributions by four functions.
GRAPHS = {"dflash": 7, "dflash2": 7, "dspark": 9, "lilicorr": 7}


def lacking() -> str | None:
    """Why nothing can be compiled for a GPU here."""
    if torch.version.cuda is None:
        return "torch is not built for CUDA: make test-sm90"
    if torch.cuda.is_available():
        return "there is a GPU: make test-gpu"
    if shutil.which("cc") is None:
        return "no C compiler"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "no Triton: make test-sm90"
    return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Path:
    """The library that answers for CUDA's runtime and driver."""
    library = tmp_path_factory.mktemp("stubs") / "libcuda.so.1"
    build = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(HERE / "stubs.c")]
    subprocess.run(build, check=True)
    return library


@functools.cache
def compiled(algorithm: str, stubs: Path) -> dict:
    """Run compile_step.py; returns the JSON that it prints."""
    root = HERE.parents[1]
    environment = os.environ | {"LD_PRELOAD": str(stubs), "PYTHONPATH": f"{root}:{HERE}"}
    command = [sys.executable, str(HERE / "compile_step.py"), algorithm]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", GRAPHS)
def test_a_step_compiles_for_an_h100_without_a_break_and_once_for_all_sizes(algorithm, stubs):
    """3,072 tokens with 512 anchors, the same again, fewer of both, a few blocks, and 131,072 tokens."""
    found = compiled(algorithm, stubs)
    assert [GRAPHS[algorithm]] * 5 == found["graphs"]
    assert 0 == found["breaks"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", GRAPHS)
def test_every_kernel_fits_into_the_shared_memory_of_an_h100(algorithm, stubs):
    kernels = compiled(algorithm, stubs)["kernels"]
    attention = [shared for name, shared in kernels if "flex_attention" in name and "tem" in name]
    assert 2 <= len(attention)  # forward and backward
    assert 64 * 1024 < max(attention)  # so these are read
    assert max(shared for _name, shared in kernels) <= SHARED_MEMORY
