"""vLLM on a CPU: skipped where it is not installed. `make test-vllm` installs it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SUPPORT = HERE / "cpu_support"
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

try:  # this folder is called as the package
    importlib.metadata.version("vllm")
    IS_INSTALLED = True
except importlib.metadata.PackageNotFoundError:
    IS_INSTALLED = False
if IS_INSTALLED:
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = ":".join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH", ""))))
    sys.path.insert(0, str(SUPPORT))
    import sitecustomize  # noqa: F401 (its hook, in this process)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slow)
            if not IS_INSTALLED:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))
