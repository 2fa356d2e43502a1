"""SGLang on a CPU: the patches are in place before any test module imports it, here and in child processes."""

from __future__ import annotations

import functools
import os

import pytest
import sglang_on_cpu

sglang_on_cpu.install(os.environ)

import torch  # noqa: E402 (after the patches)
from algorithm_cases import anchor_first_draft, lilicorr_draft  # noqa: E402
from dflash_cases import Case, make_case  # noqa: E402

from ops.artifacts import Draft  # noqa: E402
from ops.lib.sglang.version import installed_version  # noqa: E402

LONGEST = (
    *("test_sglang_capture_stage.py", "test_sglang_gate.py", "test_sglang_other_gate.py"),
    *("test_sglang_dflash.py", "test_sglang_server.py"),
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)  # first, so that no worker has one alone at the end
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def text_case(tmp_path_factory):
    """A tiny Qwen3 with drafts of three qualities."""
    return make_case("qwen3", tmp_path_factory.mktemp("text"), images=False)


@pytest.fixture(scope="session")
def vision_case(tmp_path_factory):
    """The same of a tiny dense Qwen3-VL, most of whose prompts hold images."""
    return make_case("qwen3_vl", tmp_path_factory.mktemp("vision"), images=True)


@pytest.fixture(scope="session")
def anchor_first(request, tmp_path_factory):
    """By the name of a case: it, and its draft of DSpark whose slot 0 predicts."""

    @functools.cache
    def make(name: str) -> tuple[Case, Draft]:
        case = request.getfixturevalue(name)
        return case, anchor_first_draft(case, tmp_path_factory.mktemp("anchor_first"))

    return make


@pytest.fixture(scope="session")
def trained_lilicorr(text_case, tmp_path_factory) -> Draft:
    """A draft of LiLiCorr for `text_case` whose lattice was trained."""
    return lilicorr_draft(text_case, tmp_path_factory.mktemp("lilicorr") / "draft", f"sglang-{installed_version()}")


@pytest.fixture(scope="session")
def qwen2_5_vl_case(tmp_path_factory):
    """The same of a tiny Qwen2.5-VL. SGLang's image path takes its patches of 14 pixels alone."""
    patches = {"patch_size": 14, "size": {"shortest_edge": 28**2, "longest_edge": 28**2 * 64}}
    tower = {"intermediate_size": 64, "patch_size": 14, "window_size": 56}
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    return make_case("qwen2_5_vl", folder, images=True, scale=3.5, processor=patches, vision=tower)


@pytest.fixture
def show(capsys):
    """Print a figure also where pytest keeps the output of tests to itself."""

    def print_line(line):
        with capsys.disabled():
            print(f"\n{line}", end="")

    return print_line
