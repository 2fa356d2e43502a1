"""Training over ranks gives what one process gives: gloo, data and sequence parallel, all four ranks.

One launch computes everything (parity_worker.py), and these tests look at what it wrote. The table of
docs/sequence_parallel.md is checked against it; to write it anew, with the figures of this machine:

    WRITE_DOCS=1 python -m pytest tests/ops/train_dflash/test_parallel_parity.py
"""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from draft_chain import train_config
from fake_stage import FakeStage
from import_graph import PYTHON_PATH, ROOT, SUPPORT
from parity_bugs import BUGS
from parity_cases import (
    LAYOUTS,
    MUON,
    ONE,
    OPTIONS,
    PROBLEMS,
    REFUSED,
    STOP_AFTER,
    TABLE,
    WHOLE,
    read_inputs,
    train_values,
    write_inputs,
)
from run_ranks import run_ranks
from safetensors.torch import load_file

from ops.lib.drafts.backbone.step import MicroBatch
from ops.train_dflash.engine import set_up
from ops.train_dflash.inputs import open_inputs
from ops.train_dflash.run import train_dflash

HERE = SUPPORT / "training"
DOCS = ROOT / "docs" / "sequence_parallel.md"
EXACT, ROUNDED = 1e-9, 1e-5
LIMITS = {"loss": EXACT, "accuracy": EXACT, "first": EXACT, "last": EXACT, "weights": EXACT, "float32": ROUNDED}
HEAD = (
    "| input | dp x sp | exchange | loss | accuracy | gradient, step 1 | gradient, step 20 | weights, step 20 "
    "| float32 gradient |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
BEGIN, END = "<!-- parity: written by tests/ops/train_dflash/test_parallel_parity.py -->\n", "<!-- end of parity -->\n"


@pytest.fixture(scope="module")
def folder(tokens, target, features, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    write_inputs(folder, tokens, target, features)
    paths = PYTHON_PATH
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}
    run_ranks(4, [str(HERE / "parity_worker.py"), str(folder)], folder, 500, variables)
    missing = [rank for rank in range(4) if not (folder / f"rank-{rank}.json").exists()]
    assert [] == missing, (folder / "log").read_text()[-5000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """The figures that each rank wrote."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def seen(ranks):
    """Figures by "problem | layout | exchange", each from the rank that compared it."""
    return {key: value for rank in reversed(ranks) for key, value in rank.items()}


def key_of(problem, layout):
    return f"{problem.name} | {layout} | {layout.exchange}"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_one_process_equals_the_reference(seen, problem):
    figures = seen[f"{problem.name} | reference"]
    assert {"loss", "accuracy", "first"} == figures.keys()
    assert {} == {name: value for name, value in figures.items() if not value <= EXACT}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout} {layout.exchange}")
@pytest.mark.parametrize("problem", TABLE, ids=lambda problem: problem.name)
def test_twenty_steps_over_ranks_equal_those_of_one_process(seen, problem, layout):
    figures = seen[key_of(problem, layout)]
    assert {} == {name: figures[name] for name, limit in LIMITS.items() if not figures[name] <= limit}


@pytest.mark.parametrize(
    ("problem", "layout"), [(problem, layout) for problem in OPTIONS for layout in problem.layouts], ids=str
)
def test_every_option_is_exact_over_ranks(seen, problem, layout):
    figures = seen[key_of(problem, layout)]
    assert {} == {
        name: figures[name] for name in ("loss", "accuracy", "first", "last", "weights") if not figures[name] <= EXACT
    }


@pytest.mark.parametrize("name", ["DFlash2", "DSpark", "LiLiCorr"])
def test_the_first_gradient_of_an_algorithm_over_ranks_is_that_of_one_process_and_of_the_reference(seen, name):
    problem = next(each for each in OPTIONS if each.name == name)
    figures = [seen[key_of(problem, layout)] for layout in problem.layouts] + [seen[f"{name} | reference"]]
    assert max(figure["first"] for figure in figures) <= 1e-12


def test_bfloat16_with_float32_masters_over_ranks_stays_near_the_exact_gradient(seen):
    figures = [seen[key_of(problem, layout)] for problem in OPTIONS if problem.bfloat16 for layout in problem.layouts]
    assert len(figures) > 1
    assert all(0 < figure["bfloat16"] < 0.05 for figure in figures)


def test_every_case_has_contexts_that_are_no_multiple_of_the_degree(seen):
    for layout in LAYOUTS:
        shares = [seen[key_of(problem, layout)]["padded"] for problem in TABLE]
        assert (layout.sp > 1) == (min(shares) > 0)


def test_muon_over_ranks_stays_within_the_rounding_of_bfloat16(seen):
    for layout in MUON.layouts:
        figures = seen[key_of(MUON, layout)]
        assert figures["first"] <= EXACT
        assert figures["muon"] <= 5e-3


@pytest.mark.parametrize("exchange", ["ulysses", "gather"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_bug_shows_in_the_gradient(ranks, bug, exchange):
    assert [True] * 4 == [rank[f"bug | {bug} | {exchange}"] > 1e-3 for rank in ranks]


def columns(log):
    """step -> metrics of a training, without those of speed and memory."""
    machine = ("train/tokens_per_second", "train/anchors_per_second", "train/mfu", "train/wait_share", "val/time_share")
    steps: dict[int, dict[str, float]] = {}
    for metrics, step in log:
        kept = {name: value for name, value in metrics.items() if name not in (*machine, "train/memory_gigabytes")}
        steps.setdefault(step, {}).update(kept)
    return steps


def assert_same_curve(expected, *parts):
    """The parts, one after the other, are the expected curve: loss, anchors, accuracy, norms, and those of val."""
    expected, got = columns(expected), columns([row for part in parts for row in part])
    assert expected.keys() == got.keys()
    assert any("val/loss" in metrics for step, metrics in got.items() if STOP_AFTER < step < len(got))
    for step, metrics in expected.items():
        assert metrics == pytest.approx(got[step], rel=EXACT, abs=EXACT)


def test_a_training_of_one_process_resumes_on_two_times_two_ranks(seen, ranks):
    whole = seen["training | uninterrupted | 1 x 1"]
    first, then = seen["training | one then four | 1 x 1"], seen["training | one then four | 2 x 2"]
    assert (
        f"train_dflash stopped after step {STOP_AFTER} of {len(columns(whole))}"
        == (seen["training | one then four | 1 x 1 | stopped"])
    )
    assert STOP_AFTER + 1 == min(columns(then))
    assert_same_curve(whole, first, then)


def test_a_training_of_two_times_two_ranks_resumes_on_one_process(folder, seen, ranks):
    """The file is that of FSDP2's parts; rank 1 alone was asked to stop."""
    stopped = [rank["training | four then one | 2 x 2 | stopped"] for rank in ranks]
    assert [stopped[0]] * 4 == stopped
    assert stopped[0].startswith(f"train_dflash stopped after step {STOP_AFTER} of")
    stage = FakeStage(folder / "four then one", read_inputs(folder, "whole"))
    train_dflash(train_config(**WHOLE), stage)
    assert STOP_AFTER == stage.progressed[0][0]
    assert_same_curve(seen["training | uninterrupted | 1 x 1"], seen["training | four then one | 2 x 2"], stage.logged)
    assert_same_draft(folder, "four then one")


def test_a_whole_training_on_ranks_gives_the_draft_and_the_curve_of_one_process(folder, seen, ranks):
    whole = seen["training | uninterrupted | 1 x 1"]
    for rank in ranks:
        assert_same_curve(whole, rank["training | four | 2 x 2"])
    assert_same_draft(folder, "four")
    assert_same_draft(folder, "one then four")


def assert_same_draft(folder, name):
    """The moving average that is exported, in float32."""
    expected, got = (load_file(folder / place / "out" / "model.safetensors") for place in ("uninterrupted", name))
    assert expected.keys() == got.keys()
    for weight, tensor in expected.items():
        torch.testing.assert_close(got[weight], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank_alike(ranks, name):
    messages = [rank.get(f"refused | {name}") for rank in ranks]
    assert [messages[0]] * 4 == messages
    assert REFUSED[name][-1] in messages[0]


def micro_batches_of(folder, problem, layout=ONE):
    """The micro-batches of a problem's first steps on one process, and the engine."""
    config = train_config(**train_values(problem))
    stage = FakeStage(folder / "scratch", read_inputs(folder, problem.inputs))
    inputs = open_inputs(config, stage)
    setup = set_up(config, stage, inputs)
    return [item.batch for item in setup.train.steps(inputs.steps[:3], 0) if item.batch is not None], setup.engine


def parts_of(batch: MicroBatch):
    """Every tensor of a micro-batch by name, those of the nested metadata too."""
    named = {
        name: getattr(batch, name) for name in batch.__slots__ if isinstance(getattr(batch, name, None), torch.Tensor)
    }
    for rank, seen in enumerate(batch.seen):
        named |= {f"seen {rank} start": seen.start_N, f"seen {rank} end": seen.end_N}
    return named


def test_changing_one_micro_batch_leaves_the_others_as_they_were(folder):
    batches, engine = micro_batches_of(folder, TABLE[0])
    assert len(batches) > 4
    losses = [float(engine.measure(batch).loss) for batch in batches]
    before = [{name: tensor.clone() for name, tensor in parts_of(batch).items()} for batch in batches]
    for tensor in parts_of(batches[1]).values():
        tensor.fill_(0)
    for seen in batches[1].seen:
        seen.derived["a plan"] = "of another"
    others = [number for number in range(len(batches)) if number != 1]
    for number in others:
        assert all("a plan" not in seen.derived for seen in batches[number].seen)
        for name, tensor in parts_of(batches[number]).items():
            assert torch.equal(before[number][name], tensor), name
        assert losses[number] == float(engine.measure(batches[number]).loss)


def test_micro_batches_share_no_object_and_no_memory(folder):
    batches, _ = micro_batches_of(folder, TABLE[0])
    for objects in (
        lambda batch: {id(seen) for seen in batch.seen} | {id(seen.derived) for seen in batch.seen},
        lambda batch: {tensor.untyped_storage().data_ptr() for tensor in parts_of(batch).values()},
    ):
        found = [objects(batch) for batch in batches]
        assert sum(map(len, found)) == len(set().union(*found))


def test_the_table_in_the_docs_has_these_cases_within_their_limits(seen):
    text = DOCS.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if os.environ.get("WRITE_DOCS"):
        DOCS.write_text(text[:begin] + "\n" + table(seen) + "\n" + text[end:])
        text = DOCS.read_text()
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    documented, fresh = (cells(one) for one in (text[begin:end], table(seen)))
    assert [row[:3] for row in fresh] == [row[:3] for row in documented]
    for row in documented:
        for figure, limit in zip(row[3:], LIMITS.values(), strict=True):
            assert figure == "-" or float(figure) <= limit


def table(seen):
    """The parity table in Markdown."""
    rows = [HEAD]
    for problem in TABLE:
        reference = seen[f"{problem.name} | reference"]
        rows.append(row_of(problem.name, "1 x 1", "against the reference", reference))
        for layout in LAYOUTS:
            exchange = "-" if layout.sp == 1 else layout.exchange
            rows.append(row_of(problem.name, str(layout), exchange, seen[key_of(problem, layout)]))
    return "\n".join(rows)


def row_of(problem, layout, exchange, figures):
    shown = (f"{figures[name]:.0e}" if name in figures else "-" for name in LIMITS)
    return f"| {problem} | {layout} | {exchange} | " + " | ".join(shown) + " |"


def cells(markdown):
    """The rows of a table below its head."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"\|", line)[1:-1]] for line in lines[2:]]
