"""A target trained over ranks has the loss and the gradients that one process has: FSDP2 and Ulysses, by gloo.

One launch computes everything (target_parallel_worker.py), and these tests look at what it wrote.
"""

from __future__ import annotations

import json
import os

import pytest
from import_graph import PYTHON_PATH, SUPPORT
from run_ranks import run_ranks
from target_parallel_bugs import BUGS
from target_parallel_cases import BATCHES, HYBRID, OPTIONS_AT, layouts_of

HERE = SUPPORT / "training"
EXACT, ROUNDED = 1e-9, 1e-5
PARITY = [(family, kind, layout) for family in BATCHES for kind in BATCHES[family] for layout in layouts_of(family)]
CHECKED_IN_FLOAT32 = [case for case in PARITY if case[1] == BATCHES[case[0]][-1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target-parallel")
    paths = PYTHON_PATH
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}
    run_ranks(4, [str(HERE / "target_parallel_worker.py"), str(folder)], folder, 500, variables)
    missing = [rank for rank in range(4) if not (folder / f"rank-{rank}.json").exists()]
    assert [] == missing, (folder / "log").read_text()[-5000:]
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    """Case -> what each rank that took part in it saw."""
    cases: dict[str, list[dict]] = {}
    for rank in range(4):
        for case, figures in json.loads((folder / f"rank-{rank}.json").read_text()).items():
            cases.setdefault(case, []).append(figures)
    return cases


@pytest.mark.parametrize(("family", "kind", "layout"), PARITY, ids=str)
def test_loss_and_every_gradient_equal_those_of_one_process(seen, family, kind, layout):
    ranks = seen[f"{family} | {kind} | {layout}"]
    assert layout.ranks == len(ranks)
    assert [] == [figures for figures in ranks if not (figures["loss"] <= EXACT and figures["gradient"] <= EXACT)]


@pytest.mark.parametrize(("family", "kind", "layout"), CHECKED_IN_FLOAT32, ids=str)
def test_float32_gradients_differ_by_rounding_only(seen, family, kind, layout):
    assert all(figures["float32"] <= ROUNDED for figures in seen[f"{family} | {kind} | {layout}"])


@pytest.mark.parametrize("layout", OPTIONS_AT, ids=str)
@pytest.mark.parametrize("case", ["gradient checkpointing", "micro-batches", "frozen vision", "frozen text"])
def test_gradients_are_the_same_with(seen, case, layout):
    for figures in seen[f"{case} | {layout}"]:
        assert {} == {name: figure for name, figure in figures.items() if not figure <= EXACT}


@pytest.mark.parametrize("layout", OPTIONS_AT, ids=str)
def test_a_loss_measured_without_gradients_is_that_of_the_present_weights(seen, layout):
    for figures in seen[f"measured | {layout}"]:
        assert {} == {name: figure for name, figure in figures.items() if not figure <= EXACT}


@pytest.mark.parametrize("layout", OPTIONS_AT, ids=str)
def test_bfloat16_keeps_float32_masters_and_stays_near_the_exact_gradient(seen, layout):
    for figures in seen[f"bfloat16 | {layout}"]:
        assert ["torch.float32"] == figures["masters"]
        assert 0 < figures["gradient"] < 0.1


@pytest.mark.parametrize("bug", [name for name in BUGS if name != "ratio of the model's heads"])
def test_a_deliberate_bug_shows_in_the_gradient(seen, bug):
    ranks = seen[f"bug | {bug}"]
    assert 4 == len(ranks)
    assert all(figures["gradient"] > 0.1 for figures in ranks)


@pytest.mark.parametrize(("bug", "off"), [("loss reduced in place", 0.75), ("factor of sp only", 0.5)])
def test_a_wrong_factor_scales_the_gradient(seen, bug, off):
    assert [pytest.approx(off, abs=1e-6)] * 4 == [figures["gradient"] for figures in seen[f"bug | {bug}"]]


def test_the_models_own_ratio_of_heads_fails_with_words(seen):
    ranks = seen["bug | ratio of the model's heads"]
    assert 4 == len(ranks)
    assert all("key and value must divide the number of heads" in figures["failed"] for figures in ranks)


def test_without_the_dummy_image_a_rank_without_images_breaks_the_others(folder):
    """gloo ends a process at the first message that does not fit, or gives up after its timeout."""
    outcomes = [json.loads((folder / f"stuck-{rank}.json").read_text()) for rank in range(4)]
    assert all(any("failed" in outcome for outcome in pair) for pair in (outcomes[:2], outcomes[2:]))


def test_a_hybrid_is_compared_at_dp_only_and_the_others_at_degrees_2_and_4():
    degrees = {family: {layout.sp for layout in layouts_of(family)} for family in BATCHES}
    assert {family: {1} if family == HYBRID else {1, 2, 4} for family in BATCHES} == degrees
