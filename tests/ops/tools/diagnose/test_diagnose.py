"""`dflow diagnose` on a draft that knows the answers by heart: it names the cause that was put in, that one alone, and
none where there is none.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from diagnose_cases import (
    AGAIN,
    BLOCK,
    LAYER,
    NEW_TOKENS,
    PROMPTS,
    causes,
    diagnosed,
    finding,
    make_chain,
    with_config,
    with_weights,
)
from lively_target import make_lively
from safetensors.torch import load_file, save_file
from serve_cases import CHECK, commit, record_run

from dsl.errors import DataError
from dsl.finding import Finding
from executor.cli import main
from executor.model_tools import measure
from executor.store.artifact_store import Store
from executor.system.output import FAILED, OK
from ops.artifacts import DraftCheckpoint, Report, TargetFeatures, TargetModel
from ops.evaluate.verdicts import ITS_TARGET
from ops.lib.data.files import read_json, write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode_batch import DecodeSettings
from ops.lib.target.model import Target
from ops.tools.diagnose import feeding, run
from ops.tools.diagnose.bench import EXPORTED, Bench, Gain, Setting, tau_of
from ops.tools.diagnose.chain import Chain
from ops.tools.diagnose.export import trained_of
from ops.tools.diagnose.judgement import CAUSE, FINE, LEAST_PROMPTS, MORE_PROMPTS, TOO_FEW, UNJUDGED, UNMEASURED
from ops.tools.diagnose.run import STEPS
from ops.tools.diagnose.text import diagnosis_text

FALLING = [(step, 4 - 0.1 * step) for step in range(1, 25)]  # to the step whose weights are exported


@pytest.fixture(scope="module")
def target(target, tmp_path_factory) -> TargetModel:
    """A target whose greedy answers have no rule: a draft can know them from the features alone."""
    made = make_lively(target, tmp_path_factory.mktemp("lively") / "target")
    store = Store.open(tmp_path_factory.mktemp("first") / "runs", write=True)
    return TargetModel(made.path, commit(store, "key", "run", made.path))  # the digest that every store gives it


@pytest.fixture(scope="module")
def chain(target, tokens, tmp_path_factory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("diagnose") / "healthy", target, tokens)


@pytest.fixture(scope="module")
def healthy(chain) -> Mapping[str, Any]:
    """Judged though its tau may be next to block_size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CEILING", 2.0)
        return diagnosed(chain)


@pytest.fixture(scope="module")
def displaced(target, tokens, tmp_path_factory) -> Chain:
    """A draft whose training placed every block one position behind where decoding places it."""
    forward_blocks = DraftModel.forward_blocks

    def late(model, anchors_NM, mask_M, positions_N, *others, **options):
        return forward_blocks(model, anchors_NM, mask_M, positions_N + 1, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModel, "forward_blocks", late)
        return make_chain(tmp_path_factory.mktemp("diagnose") / "displaced", target, tokens)


def test_no_cause_is_named_of_a_healthy_draft(healthy):
    assert [] == causes(healthy)
    assert healthy["tau"]["exported"] > BLOCK / 2
    assert healthy["tau"]["corrected"] == healthy["tau"]["exported"]
    assert [] == [each["code"] for each in healthy["findings"] if each["level"] == UNMEASURED]


def test_prompts_that_do_not_fit_into_the_budget_are_left_out(chain, healthy):
    said: list[str] = []
    result = diagnosed(chain, budget=50.0, report=said.append, begun=time.monotonic() - 50)
    assert (None, 50.0) == (healthy["budget"], result["budget"])
    assert LEAST_PROMPTS == result["prompts"] < healthy["prompts"]
    shown = f"2 of 6, the draft as exported: {LEAST_PROMPTS} of {healthy['prompts']} prompts, "
    (forecast,) = [text for text in said if text.startswith(shown)]
    assert re.search(r", [\d,]+ s at most, after 50 s for loading$", forecast)
    decoded = [text for text in said if ": decoding " in text]
    assert decoded == [text for text in decoded if f": decoding {LEAST_PROMPTS} prompts, " in text]
    advised = {each["advice"] for each in result["findings"] if each["level"] == UNMEASURED}
    assert MORE_PROMPTS not in advised


@pytest.fixture
def evaluated(chain, tmp_path) -> Chain:
    """The chain with a report of its evaluation, in which a step accepts one token of the draft."""
    reader = TokenReader(chain.judged, chain.split)
    rows = [
        {"id": record["id"], "tokens": list(range(5)), "speculative": None, "accepted": [1, 1]}
        for record in reader.records
    ]
    (tmp_path / "report").mkdir()
    write_jsonl(tmp_path / "report" / "prompts.jsonl", rows)
    return evolve(chain, answered=Report(tmp_path / "report", "report"))


def test_where_tau_is_lost_is_told_from_all_prompts_of_the_run_s_evaluation(evaluated, healthy):
    result = diagnosed(evaluated, prompts=LEAST_PROMPTS)
    assert LEAST_PROMPTS == result["prompts"] < PROMPTS
    (part,) = result["parts"]["context"]
    assert (PROMPTS, 2.0) == (part["prompts"], part["tau"])
    (own,) = healthy["parts"]["context"]
    assert own["tau"] == pytest.approx(healthy["tau"]["exported"])


def test_of_a_corrected_draft_the_evaluation_tells_nothing(evaluated, tmp_path):
    result = diagnosed(with_config(evaluated, tmp_path / "spoilt", dflash_config={"target_layer_ids": [LAYER + 1]}))
    (part,) = result["parts"]["context"]
    assert part["tau"] == pytest.approx(result["tau"]["corrected"])


def test_layer_ids_off_by_one_are_named_and_nothing_else(chain, healthy, tmp_path):
    result = diagnosed(with_config(chain, tmp_path / "spoilt", dflash_config={"target_layer_ids": [LAYER + 1]}))
    assert result["tau"]["exported"] < 0.7 * healthy["tau"]["exported"]
    assert ["layer ids"] == causes(result)
    named = finding(result, "layer ids")
    assert f"with [{LAYER + 1}]" in named["what"] and f"with [{LAYER}], as trained" in named["what"]
    assert AGAIN in named["advice"]
    assert result["gains"]["layer ids"] == pytest.approx(healthy["tau"]["exported"] - result["tau"]["exported"])


def test_layer_ids_off_by_one_are_named_even_where_no_record_of_the_training_is_left(chain, healthy, tmp_path):
    spoilt = with_config(
        chain, tmp_path / "spoilt", dflash_config={"target_layer_ids": [LAYER + 1]}, dflow={"trained": 0}
    )
    result = diagnosed(evolve(spoilt, training=None, features=None, learnt=None))
    assert ["layer ids"] == causes(result)
    assert f"with [{LAYER}], one lower" in finding(result, "layer ids")["what"]
    unmeasured = {each["code"] for each in result["findings"] if each["level"] == UNMEASURED}
    assert {"features", "own answers", "held-out gap", "training against decoding", "loss mask"} <= unmeasured


def test_another_mask_token_is_named_and_nothing_else(chain, healthy, tmp_path):
    result = diagnosed(with_config(chain, tmp_path / "spoilt", dflash_config={"mask_token_id": 500}))
    assert result["tau"]["exported"] < 0.7 * healthy["tau"]["exported"]
    assert ["mask token"] == causes(result)
    assert result["tau"]["corrected"] == healthy["tau"]["exported"]


@pytest.mark.parametrize(
    ("wrong", "name"), [({"target_layer_ids": [LAYER + 1]}, "layer ids"), ({"mask_token_id": 500}, "mask token")]
)
def test_what_the_draft_reads_other_than_its_training_says_is_a_cause_whatever_it_costs(
    chain, tmp_path, monkeypatch, wrong, name
):
    monkeypatch.setattr(feeding, "paired_gain", lambda _after, _before: Gain(-0.2, False, False))
    result = diagnosed(with_config(chain, tmp_path / "spoilt", dflash_config=wrong))
    assert [name] == causes(result)


@pytest.mark.parametrize(
    "fed",
    [
        {"block_offset": 1},
        {"block_offset": -1},
        {"target_layer_ids": (LAYER + 1,)},
        {"mask_token_id": 500},
    ],
)
def test_tau_of_a_draft_that_is_fed_otherwise_when_it_is_evaluated_falls(chain, healthy, loaded_bench, fed):
    bench, setting, prompts = loaded_bench
    offset = fed.get("block_offset", 0)
    config = {name: value for name, value in fed.items() if name != "block_offset"}
    tau = tau_of(bench.decode(evolve(setting.evolved(**config), block_offset=offset), prompts, "otherwise"))
    assert tau < 0.7 * healthy["tau"]["exported"]


@pytest.fixture(scope="module")
def loaded_bench(chain):
    """The bench that decodes the draft by a setting, the setting as exported, and the held-out prompts."""
    config = from_serving(read_json(chain.draft.path / "config.json"))
    weights = {EXPORTED: load_file(chain.draft.path / "model.safetensors")}
    target = Target.load(chain.target)
    reader = TokenReader(chain.judged, chain.split)
    prompts = [reader.sample(place) for place in range(len(reader))]
    return Bench(target, weights, DecodeSettings(NEW_TOKENS), PROMPTS, lambda _: None), Setting(config), prompts


def test_without_a_record_the_target_s_mask_token_is_called_so_and_must_be_better_for_certain(
    chain, healthy, tmp_path, monkeypatch
):
    spoilt = evolve(
        with_config(chain, tmp_path / "spoilt", dflash_config={"mask_token_id": 500}, dflow={"trained": 0}),
        training=None,
        features=None,
        learnt=None,
    )
    result = diagnosed(spoilt)
    assert ["mask token"] == causes(result)
    named = finding(result, "mask token")
    assert "as trained" not in named["what"]
    assert named["what"].partition("\n")[0].endswith("with 7, the target's")
    assert "the training's record is gone" in named["advice"]
    monkeypatch.setattr(feeding, "paired_gain", lambda _after, _before: Gain(0.2, True, False))
    told = finding(diagnosed(spoilt), "mask token")
    assert told["level"] != CAUSE
    assert "the target's (7)" in told["what"]


def test_where_putting_it_right_gives_whole_blocks_nothing_else_is_named(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CEILING", 0.5)
    result = diagnosed(with_config(chain, tmp_path / "spoilt", dflash_config={"mask_token_id": 500}), curve=FALLING)
    assert ["mask token"] == causes(result)
    assert finding(result, "length of training")["level"] == UNJUDGED


def test_blocks_off_by_one_against_the_context_are_named_and_nothing_else(displaced, healthy):
    result = diagnosed(displaced)
    assert result["tau"]["exported"] < 0.7 * healthy["tau"]["exported"]
    assert ["positions"] == causes(result)
    assert "one later" in finding(result, "positions")["what"]


def test_a_draft_that_ignores_the_target_s_hidden_states_is_named(target, tokens, tmp_path, monkeypatch):
    context_kv = DraftModel.context_kv

    def blind(model, features_TF, positions_T):
        return context_kv(model, torch.zeros_like(features_TF), positions_T)

    monkeypatch.setattr(DraftModel, "context_kv", blind)
    result = diagnosed(make_chain(tmp_path / "blind", target, tokens))
    assert "hidden states" in causes(result)
    assert not {"layer ids", "positions", "anything learnt"} & set(causes(result))
    tau = f"{result['tau']['exported']:.2f}"
    measured = finding(result, "hidden states")["what"].partition("\n")[0]
    assert measured.startswith(f"tau {tau}; {tau} with layers one lower, ")
    assert measured.endswith(f"{tau} with positions one later, {tau} with positions one earlier")


@pytest.mark.parametrize("prompts", [2, 3])
def test_of_so_few_prompts_that_positions_cannot_be_judged_nothing_else_is_named_in_their_place(displaced, prompts):
    result = diagnosed(displaced, prompts=prompts)
    assert [] == causes(result)
    told = finding(result, "positions")["what"]
    assert "one later" in told and TOO_FEW in told
    assert "diagnose with more prompts (--prompts)" == finding(result, "positions")["advice"]
    for name in ("layer ids", "positions", "training against decoding", "anything learnt"):
        assert finding(result, name)["level"] == UNMEASURED


def test_where_the_split_has_no_more_prompts_test_fraction_is_named(displaced, monkeypatch):
    spread = run.spread_samples
    monkeypatch.setattr(run, "spread_samples", lambda reader, count: spread(reader, min(count, 3)))
    result = diagnosed(displaced, prompts=16)
    step = "the split test has only 3 samples: raise test_fraction of ingest, or add samples to the data"
    assert f"{step}, and run the pipeline again" == finding(result, "positions")["advice"]
    lines = diagnosis_text(result).splitlines()
    assert [True] == [step in line for line in lines if line.startswith("--     positions: ")]
    assert "the split train has only 3 samples" in finding(result, "training against decoding")["advice"]


def test_what_positions_that_cannot_be_judged_may_explain_is_not_named(displaced, monkeypatch):
    monkeypatch.setattr(feeding, "paired_gain", lambda _after, _before: Gain(0.2, True, False))
    result = diagnosed(displaced)
    assert [] == causes(result)
    told = "layer ids and positions, not measured, may explain that"
    assert told in finding(result, "training against decoding")["what"]


def test_of_three_prompts_nothing_is_said_of_layers_and_positions(chain):
    result = diagnosed(chain, prompts=3)
    assert [] == causes(result)
    assert [UNMEASURED] * 2 == [finding(result, name)["level"] for name in ("layer ids", "positions")]
    assert finding(result, "mask token")["level"] != UNMEASURED


@pytest.mark.parametrize("prompts", [4, 5])
def test_positions_are_named_of_few_prompts(displaced, prompts):
    assert ["positions"] == causes(diagnosed(displaced, prompts=prompts))


def test_the_tokens_of_the_training_are_judged_by_its_own_mask_token_and_blocks(chain, tmp_path, monkeypatch):
    reader = TokenReader(chain.learnt, "train")
    frequent = int(torch.cat([reader.labels(place)[0] for place in range(len(reader))]).mode().values)
    result = diagnosed(with_config(chain, tmp_path / "mask", dflash_config={"mask_token_id": frequent}))
    assert ["mask token"] == causes(result)
    assert finding(result, "mask token in texts")["what"].startswith("7 occurs 0 times")
    larger = finding(diagnosed(with_config(chain, tmp_path / "larger", block_size=16)), "cut blocks")
    assert larger["level"] != CAUSE and f"blocks of {BLOCK} " in larger["what"]
    monkeypatch.setattr(run, "CEILING", 1.01)
    smaller = diagnosed(with_config(chain, tmp_path / "smaller", block_size=3), curve=FALLING)
    assert ["config", "length of training"] == causes(smaller)
    assert BLOCK == smaller["block_size"] > smaller["tau"]["corrected"] > 3.03


def test_two_mistakes_at_once_are_both_named_the_weightier_first(chain, healthy, tmp_path):
    wrong = {"target_layer_ids": [LAYER + 1], "mask_token_id": 500}
    result = diagnosed(with_config(chain, tmp_path / "spoilt", dflash_config=wrong))
    assert {"layer ids", "mask token"} == set(causes(result))
    gains = [result["gains"][name] for name in causes(result)]
    assert gains == sorted(gains, reverse=True)
    assert result["tau"]["corrected"] == healthy["tau"]["exported"]


def without_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_another_depth(folder: Path) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})


def without_field(folder: Path) -> None:
    config = read_json(folder / "config.json")
    del config["block_size"]
    write_json(folder / "config.json", config)


@pytest.mark.parametrize(
    ("spoil", "wrong", "instead"),
    [
        (without_tensor, "tensors missing: fc.weight. ", "the weights"),
        (with_nan, "tensors not of finite numbers: norm.weight. ", "the weights"),
        (with_another_depth, "tensors missing: layers.1.input_layernorm.weight, ", "the config"),
        (without_field, "block_size: is missing. ", "the config"),
    ],
)
def test_an_export_that_cannot_be_loaded_is_named_and_the_training_measured(
    chain, healthy, tmp_path, spoil, wrong, instead
):
    spoilt = with_config(chain, tmp_path / "spoilt")
    spoil(spoilt.draft.path)
    result = diagnosed(spoilt)
    assert ["export"] == causes(result)
    measured = finding(result, "export")["what"]
    assert "cannot be loaded: " in measured and wrong in measured
    assert f"measured with {instead} of the training" in measured
    assert "  " not in measured
    expected = {"exported": None, "low": None, "high": None, "corrected": healthy["tau"]["corrected"]}
    assert expected == result["tau"]
    with pytest.raises(DataError, match="unknown: the draft cannot be loaded: "):
        diagnosed(evolve(with_config(spoilt, tmp_path / "unknown", dflow={"trained": 0}), training=None))


def test_a_shallower_draft_than_the_training_s_is_diagnosed_as_it_is(chain, tmp_path):
    deeper = tmp_path / "training"
    shutil.copytree(chain.training.path, deeper)
    with_another_depth(deeper)
    weights = random_draft(from_serving(read_json(deeper / "config.json")), 0).state_dict()
    save_file(weights, deeper / "model.safetensors")
    result = diagnosed(evolve(chain, training=DraftCheckpoint(deeper, "deeper")))
    assert "the draft cannot be loaded" in finding(result, "config")["what"]
    assert "the draft cannot be loaded" in finding(result, "weights")["what"]


def test_wrong_features_are_named_at_any_tau_and_a_falling_loss_is_not(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CEILING", 0.5)
    spoilt = tmp_path / "features"
    shutil.copytree(chain.features.path, spoilt)
    write_json(spoilt / "features.json", read_json(spoilt / "features.json") | {"target_layer_ids": [LAYER + 1]})
    assert ["features"] == causes(diagnosed(evolve(chain, features=TargetFeatures(spoilt, "spoilt")), curve=FALLING))


def test_another_rope_theta_than_in_training_is_named(chain, tmp_path):
    result = diagnosed(with_config(chain, tmp_path / "spoilt", rope_theta=1e6))
    assert ["config"] == causes(result)
    assert "rope_theta 1000000.0" in finding(result, "config")["what"]


def imported(chain: Chain, folder: Path, **fields: Any) -> Chain:
    """The chain with a draft as `load_draft` writes it: without a training."""
    record = {"target": chain.target.digest, "imported": {"publisher": "z-lab", "assumed": {}, "notes": [], **fields}}
    found = with_config(chain, folder, dflow=record)
    return evolve(found, training=None, features=None, learnt=None)


def test_of_an_imported_draft_nothing_is_said_of_its_training(chain, tmp_path):
    result = diagnosed(imported(chain, tmp_path / "imported"), curve=())
    assert [] == causes(result)
    shown = {found["code"]: (found["level"] != UNMEASURED, found["what"]) for found in result["findings"]}
    assert [] == [text for _, text in shown.values() if ", as trained" in text or "is gone" in text]
    of_training = ("target", "config", "weights", "own answers", "features", "loss curve", "loss mask", "held-out gap")
    assert [] == [name for name in of_training if shown[name][0] or "not known" not in shown[name][1]]
    assert "as its own files say" in shown["config"][1]
    assert shown["layer ids"][0]


def test_the_target_of_an_imported_draft_is_compared_where_its_record_names_one(chain, tmp_path):
    same = diagnosed(imported(chain, tmp_path / "same", publisher="dflow"), curve=())
    assert FINE == finding(same, "target")["level"]
    other = diagnosed(imported(chain, tmp_path / "other", publisher="dflow", trained_for="ab" * 32), curve=())
    assert ["target"] == causes(other)
    assert ITS_TARGET == finding(other, "target")["advice"]


def test_weights_that_are_not_those_of_the_training_are_named(chain, tmp_path):
    result = diagnosed(
        with_weights(chain, tmp_path / "spoilt", lambda weight: weight + 0.3 * torch.randn(weight.shape))
    )
    assert ["weights"] == causes(result)


def test_weights_that_the_export_only_rounded_are_those_of_the_training(chain, tmp_path):
    rounded = with_weights(chain, tmp_path / "rounded", lambda weight: weight.bfloat16())
    trained, _ = trained_of(rounded.draft, chain.training, chain.target)
    assert () == trained.differing_tensors


def record(folder: Path, chain: Chain, export: Path) -> tuple[Store, str]:
    """A run of which evaluation and gate failed, with an export that is not that of its training."""
    assert chain.training is not None and chain.features is not None
    artifacts = {"tokenize": chain.judged.path, "target": chain.target.path, "capture": chain.features.path}
    artifacts |= {"train": chain.training.path, "export": export}
    failed = {"state": "failed", "failure": Finding("DataError: the draft breaks the serving contract")}
    more = f"max_new_tokens = {NEW_TOKENS}\n{CHECK}"
    return record_run(folder, artifacts, more=more, states={"eval": failed, "check": failed})


@pytest.fixture
def dflow(monkeypatch) -> Callable[..., int]:
    """The command, with one thread, which is fastest for what is so small."""
    monkeypatch.setattr(measure, "threads_of", lambda _launch, **_useful: 1)
    return run_command


def run_command(store: Store, *arguments: str) -> int:
    return main(["diagnose", *arguments, "--prompts", str(PROMPTS), "--store", str(store.path)])


@pytest.mark.parametrize(
    ("name", "wrong", "now", "right"),
    [
        ("layer ids", {"target_layer_ids": [LAYER + 1]}, f"[{LAYER + 1}]", f"[{LAYER}], as trained"),
        pytest.param("mask token", {"mask_token_id": 500}, "500", "7, as trained", marks=pytest.mark.slow),
    ],
)
def test_the_command_names_a_wrong_export_of_a_run_whose_gate_refused_it(
    chain, healthy, tmp_path, capsys, dflow, name, wrong, now, right
):
    spoilt = with_config(chain, tmp_path / "spoilt", dflash_config=wrong)
    store, run_id = record(tmp_path / "project", chain, spoilt.draft.path)
    objects = {path: path.stat().st_mtime_ns for path in store.path.glob("objects/**/*")}
    assert FAILED == dflow(store, run_id[-4:])
    head, *lines, verdict = capsys.readouterr().out.splitlines()
    assert f"; {healthy['tau']['corrected']:.2f} with corrected inputs" in head
    told = [line for line in lines if line.startswith("CAUSE")]
    assert 1 == len(told)
    assert told[0].startswith(f"CAUSE  {name}: tau ")
    assert f"with {now}; " in told[0] and f"with {right} | normal: " in told[0]
    assert re.search(rf"dflow resume --store \S+/project/runs {run_id} --from export", told[0])
    assert len(healthy["findings"]) == len(lines)
    assert verdict.startswith(f"causes of a low tau, the largest first: {name} (tau +")
    assert objects == {path: path.stat().st_mtime_ns for path in store.path.glob("objects/**/*")}
    kept = read_json(store.records / run_id / "diagnosis.json")["drafts"]
    assert [name] == causes(kept[0])


def test_the_command_names_nothing_of_a_healthy_run_and_says_what_could_not_be_measured(
    chain, healthy, tmp_path, capsys, dflow
):
    store, run_id = record(tmp_path / "project", chain, chain.draft.path)
    assert OK == dflow(store, "--json")
    out, err = capsys.readouterr()
    begun = [f"export: {number} of {len(STEPS)}, {step}" for number, step in enumerate(STEPS, 1)]
    assert begun == [line for line in err.splitlines() if line in begun]
    assert f"{begun[1]}: decoding {PROMPTS} prompts, as exported" in err.splitlines()
    said = json.loads(out)
    assert run_id == said["run"]
    assert [] == causes(said["drafts"][0])
    assert healthy["tau"] == said["drafts"][0]["tau"]
    assert UNMEASURED == finding(said["drafts"][0], "length of training")["level"]
