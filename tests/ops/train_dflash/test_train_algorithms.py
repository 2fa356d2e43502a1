"""Every algorithm through the op: what it writes, resuming, warm starts, and whose keys its code is part of."""

import shutil
from pathlib import Path

import pytest
import torch
from draft_chain import make_inputs, make_plan, tiny_config, train_config
from fake_stage import FakeStage, folder_digest
from safetensors.torch import load_file

from dsl.closure import Project
from dsl.errors import ConfigError, DataError, StopRequested
from dsl.op import op_of
from ops.artifacts import Draft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.hooks import added_parameters, no_hidden_matrices, undecayed
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.dflash2.config import Dflash2, Dflash2Options
from ops.lib.drafts.dspark.config import Dspark, DsparkOptions
from ops.lib.drafts.lilicorr.config import Lilicorr, LilicorrOptions
from ops.lib.report_sections import Compared
from ops.lib.training.optimizer import make_optimizer
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash
from ops.train_dflash.show import compare

ROOT = Path(__file__).parents[3]
FIELDS = {
    "dflash": {},
    "dflash2": {"algorithm": "dflash2", "dflash2": Dflash2Options(rank=4, candidates=4)},
    "dspark": {"algorithm": "dspark", "dspark": DsparkOptions(rank=4)},
    "lilicorr": {
        "algorithm": "lilicorr",
        "lilicorr": LilicorrOptions(candidates=4, width=8, heads=2, factors=4, conv=True, group=4),
    },
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    made = make_inputs(folder, final_hidden=True)
    return made | {"batches": make_plan(folder / "short", made["features"], epochs=4, tokens_per_step=160)}


def train(folder, inputs, name, stop_after=None, **changes):
    stage = FakeStage(folder, inputs, stop_after=stop_after)
    train_dflash(train_config(**{"lr": 1e-2, "checkpoint_every": 3} | FIELDS[name] | changes), stage)
    return stage


@pytest.mark.parametrize("name", ["dflash2", "dspark", "lilicorr"])
def test_a_training_writes_its_algorithm_and_resumes_to_the_same_bytes(tmp_path, inputs, name):
    whole = train(tmp_path / "whole", inputs, name)
    config = from_serving(read_json(whole.out_dir / "config.json"))
    assert FIELDS[name][name].sizes() == {size: getattr(config.algorithm, size) for size in FIELDS[name][name].sizes()}
    trained = read_json(whole.out_dir / "training.json")
    names = {
        "dflash2": ("candidate_recall",),
        "dspark": ("overlap", "confidence"),
        "lilicorr": ("candidate_recall", "prefix_recall"),
    }[name]
    assert names == config.algorithm.metrics(with_teacher=True)
    assert all(0 < trained["final_metrics"][f"train/{metric}"] <= 1 for metric in names)
    assert {f"{metric}_slot_01" for metric in (*names, "loss", "accuracy")} == {
        each.removeprefix("train/") for values, _ in whole.logged for each in values if each.endswith("_slot_01")
    }
    with pytest.raises(StopRequested):
        train(tmp_path / "cut", inputs, name, stop_after=4)
    assert folder_digest(whole.out_dir) == folder_digest(train(tmp_path / "cut", inputs, name).out_dir)


@pytest.mark.parametrize("name", ["dflash2", "dspark", "lilicorr"])
def test_any_algorithm_starts_from_a_plain_draft_and_none_from_another(tmp_path, inputs, name):
    plain = train(tmp_path / "plain", inputs, "dflash")
    started = train(tmp_path / "started", inputs | {"warm_start": plain.artifact(Draft)}, name, max_steps=1, lr=1e-9)
    before, after = (load_file(stage.out_dir / "model.safetensors") for stage in (plain, started))
    assert before.keys() < after.keys()
    assert all((before[each] - after[each]).abs().max() < 1e-6 for each in before)
    other = "dspark" if name == "dflash2" else "dflash2"
    with pytest.raises(DataError, match=f"algorithm: {name} in the draft, {other} in this training"):
        train(tmp_path / "other", inputs | {"warm_start": started.artifact(Draft)}, other, max_steps=1)


OF_LATTICE = {"candidates": 4, "width": 8, "heads": 2, "factors": 4, "group": 4, "cross_entropy": 1e-7, "regret": 0.0}
STARTS = {  # the draft, whether what is trained from it has convolutions, and what it has of the draft's heads
    "DFlash2": ("dflash2", Dflash2Options(rank=4, group=4, selector=0.0), True, ()),
    "LiLiCorr with convolutions": ("lilicorr", LilicorrOptions(**OF_LATTICE, conv=True), True, ("lilicorr.",)),
    "LiLiCorr without": ("lilicorr", LilicorrOptions(**OF_LATTICE), False, ("lilicorr.",)),
    "LiLiCorr without, which gets them": ("lilicorr", LilicorrOptions(**OF_LATTICE), True, ("lilicorr.",)),
}


@pytest.mark.parametrize("start", STARTS)
def test_lilicorr_starts_from_all_that_it_shares_with_drafts_of_dflash2_and_its_own(tmp_path, inputs, start):
    name, own, conv, heads = STARTS[start]
    parent = train(tmp_path / "parent", inputs, name, **{name: own})
    given = inputs | {"warm_start": parent.artifact(Draft)}
    once = {"seed": 5, "max_steps": 1, "lr": 1e-9, "log_every": 1}
    lilicorr = once | {"lilicorr": LilicorrOptions(**OF_LATTICE, conv=conv)}
    started, fresh = (train(tmp_path / str(i), each, "lilicorr", **lilicorr) for i, each in enumerate((given, inputs)))
    again = train(tmp_path / "again", given, name, **once, **{name: own})
    kept, found, drawn = (load_file(each.out_dir / "model.safetensors") for each in (parent, started, fresh))
    shared = {each for each in kept if not each.startswith(("candidate_selector.", "lilicorr."))}
    shared |= {each for each in kept if each.startswith(heads)}
    assert found.keys() == drawn.keys() and shared == kept.keys() & found.keys()
    for each, weight in found.items():
        torch.testing.assert_close(weight, (kept if each in shared else drawn)[each], rtol=0, atol=1e-6)
    loss, same, other = (stage.metric("train/loss")[0] for stage in (started, again, fresh))
    assert loss == pytest.approx(same, rel=1e-5)
    assert abs(loss - other) > 0.1
    if heads:
        assert started.metric("train/accuracy") == again.metric("train/accuracy")


@pytest.mark.parametrize(
    ("name", "own", "remedy"),
    [
        (
            "dflash2",
            LilicorrOptions(**OF_LATTICE),
            "the draft's backbone was trained with its convolutions: set lilicorr.conv = true, lilicorr.taps = 2 and "
            "lilicorr.group = 16",
        ),
        ("dflash2", LilicorrOptions(**OF_LATTICE, conv=True), "lilicorr.taps = 2 and lilicorr.group = 16"),
        ("lilicorr", LilicorrOptions(**OF_LATTICE), "lilicorr.conv = true, lilicorr.taps = 2 and lilicorr.group = 4"),
        ("lilicorr", LilicorrOptions(**OF_LATTICE | {"width": 4}, conv=True), "set the sizes of lilicorr as in the"),
        ("dspark", LilicorrOptions(**OF_LATTICE), "starts from a draft of DFlash, DFlash2 or LiLiCorr"),
    ],
)
def test_a_start_that_would_lose_convolutions_or_change_the_lattice_is_refused(tmp_path, inputs, name, own, remedy):
    parent = train(tmp_path / "parent", inputs, name, max_steps=1)
    with pytest.raises(DataError) as caught:
        train(tmp_path / "t", inputs | {"warm_start": parent.artifact(Draft)}, "lilicorr", lilicorr=own)
    assert f"algorithm: {name} in the draft, lilicorr in this training, or other sizes of it: " in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "is_warned"),
    [
        ("dflash2", {}, False),
        ("dspark", {"dspark": DsparkOptions(rank=4, sample_from_anchor=False)}, False),
        ("dspark", {}, True),
    ],
)
def test_a_warm_start_in_another_layout_is_warned_of(tmp_path, inputs, capsys, name, changes, is_warned):
    plain = train(tmp_path / "plain", inputs, "dflash", max_steps=1)
    assert "warning" not in capsys.readouterr().out
    train(tmp_path / "started", inputs | {"warm_start": plain.artifact(Draft)}, name, max_steps=1, **changes)
    warning = "warning: warm_start: in the layout of this dspark draft every slot predicts another token"
    assert is_warned == (warning in capsys.readouterr().out)


@pytest.mark.parametrize(
    ("algorithm", "hidden"),
    [
        (Dflash2(group=4, rank=4), ("kernel_projection.weight", "hidden_projection.weight")),
        (Dspark(rank=4), ()),
        (
            Lilicorr(candidates=4, width=8, layers=1, heads=2, factors=4, taps=2, group=4),
            (
                *("kernel_projection.weight", "token_proj.weight", "pass_hidden_proj.weight", "context_proj.weight"),
                *("factor_input_proj.weight", "out_head.weight", "in_head.weight", "out_proj.weight"),
                *("down_proj.weight", ".0.mlp.up_proj.weight"),
            ),
        ),
    ],
)
def test_muon_takes_hidden_matrices_alone_and_no_kernel_is_decayed(algorithm, hidden):
    model = DraftModel(tiny_config(vocab_size=32, algorithm=algorithm))
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(
        model, 0.1, kind="muon", no_hidden_matrices=no_hidden_matrices(model), undecayed=undecayed(model)
    )
    added = added_parameters(model)
    muon, adamw = ({names[each] for group in part.param_groups for each in group["params"]} for part in optimizer.parts)
    assert {name for name in added if name.endswith(hidden)} == muon & added
    assert added - muon == adamw & added
    for each in (optimizer, make_optimizer(model, 0.1, undecayed=undecayed(model))):
        kept = {names[one] for group in each.param_groups if not group["weight_decay"] for one in group["params"]}
        assert {name for name in added if "base_kernel" in name} == {name for name in kept if "kernel" in name}


def test_a_training_by_muon_decays_no_identity(tmp_path, inputs):
    fields = {"optimizer": "muon", "max_steps": 2, "weight_decay": 50.0, "lr": 1e-3}
    weights = load_file(train(tmp_path, inputs, "dflash2", **fields).out_dir / "model.safetensors")
    kernels = [weight[:, 0] for name, weight in weights.items() if name.endswith("base_kernel")]
    assert all(0.995 < float(kernel.mean()) < 1.005 for kernel in kernels) and kernels


def test_without_the_targets_states_the_terms_that_need_them_are_named(tmp_path):
    bare = make_inputs(tmp_path / "inputs")
    with pytest.raises(DataError, match=r'the loss of algorithm = "dspark" needs .* set final_hidden = true'):
        train(tmp_path / "train", bare, "dspark")


@pytest.mark.parametrize(
    ("changes", "measured"),
    [({"l1": 0.0}, set()), ({"l1": 0.9}, {"overlap"})],
)
def test_what_a_dspark_without_a_teacher_or_a_head_does_not_measure_is_not_logged(tmp_path, inputs, changes, measured):
    own = DsparkOptions(rank=4, confidence_head=False, base=1.0, **changes)
    stage = train(tmp_path, inputs, "dspark", dspark=own, max_steps=2)
    trained = read_json(stage.out_dir / "training.json")
    logged = {*stage.logged[0][0], *trained["final_metrics"], *trained["val_metrics"]}
    assert measured == {metric for metric in ("overlap", "confidence") if any(metric in name for name in logged)}


def test_a_table_of_another_algorithm_is_refused():
    with pytest.raises(ConfigError, match="'dspark' needs algorithm = \"dspark\""):
        train_config(dspark=DsparkOptions())


@pytest.mark.parametrize(
    ("edited", "file", "runs_again"),
    [
        *(
            (name, file, {name})
            for name in FIELDS
            for file in ("model", "loss")
            if (name, file) != ("dflash2", "model")
        ),
        ("dflash2", "model", {"dflash2", "lilicorr"}),  # the convolutions
        ("dflash", "config", {"dflash"}),
        *((name, "config", set(FIELDS)) for name in (*FIELDS,) if name != "dflash"),  # its table is in every config
        *((name, "reference", set()) for name in FIELDS if name != "dflash"),
    ],
)
def test_editing_an_algorithm_changes_the_code_of_its_own_trainings_alone(tmp_path, edited, file, runs_again):
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "ops" / "lib" / "drafts" / edited / f"{file}.py"
    path.write_text(path.read_text().replace("return ", "return None or ", 1))
    changed = set()
    for name in FIELDS:
        symbols = [op_of(TrainDflash).run, *train_config(**FIELDS[name]).chosen_code()]
        codes = [Project([root]).closure(symbols).digests for root in (ROOT, tmp_path)]
        if codes[0] != codes[1]:
            changed.add(name)
    assert runs_again == changed


def test_drafts_side_by_side_show_what_an_algorithm_adds_and_what_its_step_costs(tmp_path, inputs):
    artifacts = []
    for name, seconds in (("dflash", (0.2, 0.4)), ("dflash2", (0.36, 0.36)), ("dspark", (0.33, None))):
        trained = train(tmp_path / name, inputs, name)
        for seed, step in enumerate(seconds):
            folder = shutil.copytree(trained.out_dir, tmp_path / f"{name}-{seed}")
            write_json(folder / "measurements.json", {"step_seconds": step})
            artifacts.append(Compared(folder, {"train.algorithm": name, "train.seed": str(seed)}))
    (section,) = compare(artifacts)
    rows = {row[0]: dict(zip(section.body.columns, row, strict=True)) for row in section.body.rows}
    assert list(rows) == ["dflash", "dflash2", "dspark"]
    sizes = {
        name: sum(weight.numel() for weight in load_file(tmp_path / f"{name}-0" / "model.safetensors").values())
        for name in rows
    }
    assert sizes == {name: row["parameters"] for name, row in rows.items()}
    added = {name: size - sizes["dflash"] for name, size in sizes.items()}
    assert added == {name: row["beside plain DFlash"] for name, row in rows.items()}
    assert [1.0, 1.2, 1.1] == [row["times that of dflash"] for row in rows.values()]
    val = read_json(tmp_path / "dflash2-0" / "training.json")["val_metrics"]
    assert rows["dflash2"]["val/candidate_recall"] == round(val["val/candidate_recall"], 4)
    assert rows["dflash"]["val/candidate_recall"] is None
