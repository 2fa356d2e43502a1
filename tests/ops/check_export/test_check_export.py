"""The gate: what it ships of a real export, what it says of SGLang, and what it refuses besides a damaged draft."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path

import attrs
import pytest
from draft_chain import tiny_config
from fake_stage import FakeStage
from gate_cases import ALGORITHMS, check, with_algorithm
from own_algorithm import known_slot_bias
from serve_cases import record_run

from dsl.closure import Project
from dsl.errors import ConfigError, DataError
from dsl.estimate import PlanContext
from dsl.launch import Launch
from dsl.op import Ref, op_of
from executor.model_tools.served import find_served
from executor.records.run_record import find_record
from ops.artifacts import CheckedDraft
from ops.check_export import live
from ops.check_export.op import CheckExport
from ops.check_export.plan import estimate
from ops.check_export.served_prompts import LiveResult, LiveUnavailable, largest
from ops.check_export.show import report as check_export_sections
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.export_draft.show import report as export_draft_sections
from ops.lib.data.files import read_json, read_jsonl, write_json
from ops.lib.drafts.backbone.contract import mistake
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.forecasts import DraftForecast, ReportForecast, TargetForecast
from ops.lib.sglang.serve_command import launch_command
from ops.lib.vision.processor_files import image_settings, pixel_limits
from ops.load_draft.op import LoadDraft
from ops.load_draft.run import load_draft

ROOT = Path(__file__).parents[3]


def test_a_real_export_passes_and_is_shipped_with_its_card(tmp_path, gate_inputs, capsys):
    stage = check(tmp_path / "a", gate_inputs)
    shipped = stage.out_dir / "draft"
    assert ["README.md", "config.json", "model.safetensors"] == sorted(file.name for file in shipped.iterdir())
    for name in ("config.json", "model.safetensors"):
        assert (gate_inputs["draft"].path / name).read_bytes() == (shipped / name).read_bytes()
    checked = read_json(stage.out_dir / "check.json")
    assert ("passed", "skipped", 4) == (checked["static"], checked["live"]["status"], checked["prompts"])
    assert "SGLang 0.5.21 or 0.5.23, which is not installed" in checked["live"]["reason"]
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert 2 == len(warned) and [2.0] == stage.metric("check/warnings")  # the skipped stage, and images by pillow
    assert [1.0] == stage.metric("check/live_skipped") == stage.metric("check/static_passed")
    report = read_json(gate_inputs["report"].path / "report.json")
    assert pytest.approx(report["tau"]["all"]["tau"]) == checked["tau"]["evaluate"]["all"]
    assert [] == stage.metric("check/tau_served") == stage.metric("check/tau_evaluate")
    again = check(tmp_path / "b", gate_inputs)
    assert stage.artifact(CheckedDraft).digest == again.artifact(CheckedDraft).digest


def test_what_the_store_puts_beside_an_artifact_is_neither_a_mistake_nor_shipped(tmp_path, gate_inputs):
    folder = shutil.copytree(gate_inputs["draft"].path, tmp_path / "committed")
    (folder / "manifest.json").write_text("{}")
    stage = check(tmp_path, gate_inputs | {"draft": attrs.evolve(gate_inputs["draft"], path=folder)})
    assert ["README.md", "config.json", "model.safetensors"] == sorted(
        file.name for file in (stage.out_dir / "draft").iterdir()
    )


def test_the_shipped_card_has_the_measured_lengths_where_the_exports_card_has_a_place_for_them(tmp_path, gate_inputs):
    before = (gate_inputs["draft"].path / "README.md").read_text()
    after = (check(tmp_path, gate_inputs).out_dir / "draft" / "README.md").read_text()
    tau = read_json(gate_inputs["report"].path / "report.json")["tau"]
    assert "Not measured yet." in before and "Not measured yet." not in after
    for name in ("all", "image", "text"):
        assert f"| {name} | {tau[name]['prompts']} | {tau[name]['tau']:.2f} |" in after
    assert before.partition("<!--")[0] == after.partition("<!--")[0]
    assert before.rpartition("-->")[2] == after.rpartition("-->")[2]


def test_the_card_tells_target_data_recipe_the_mlflow_run_and_the_command(gate_inputs):
    card = (gate_inputs["draft"].path / "README.md").read_text()
    training = read_json(gate_inputs["trained"].path / "training.json")
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-text-to-text\ntags:\n- dflash\n")
    for row in (
        f"| digest | `{gate_inputs['target'].digest}` |",
        "| model_type | qwen3_vl |",
        f"| digest of the tokens | `{gate_inputs['tokens'].digest}` |",
        f"| samples of the train split | {training['samples']} |",
        f"| tokens trained on, over all epochs | {training['tokens']} |",
        "| block_size | 4 |",
        "| lr | 0.0006 |",
        f"| steps | {training['steps']} |",
        f"| val/expected_tau | {training['val_metrics']['val/expected_tau']:.4g} |",
        f"tags.`dflow.digest` = '{gate_inputs['trained'].digest}'",
    ):
        assert row in card
    command = next(line for line in card.splitlines() if line.startswith("python -m "))
    for part in (
        '--model-path "$TARGET"',
        "--speculative-algorithm DFLASH --speculative-draft-model-path . --speculative-num-draft-tokens 4",
        "--image-processor-backend pil",
        "--dtype float32",
    ):
        assert part in command
    assert "\nTARGET=/path/to/target\n" in card
    assert f"`objects/{gate_inputs['target'].digest}/model` in the store of the training" in card


@pytest.mark.parametrize("name", ALGORITHMS)
def test_card_and_report_tell_the_algorithm_and_count_blocks_as_the_training(tmp_path, gate_inputs, name):
    algorithm = ALGORITHMS[name]
    export = with_algorithm(tmp_path, gate_inputs, algorithm)["draft"].path
    size = "width" if name == "lilicorr" else "rank"
    card = (export / "README.md").read_text()
    assert f"\n# Draft for a qwen3_vl checkpoint ({name})\n" in card and f"tags:\n- {name}\n" in card
    for row in (f"algorithm | {name}", f"{size} | {getattr(algorithm, size)}", "block_size | 4"):
        assert f"| {row} |" in card.splitlines()
    (section,) = export_draft_sections(export)
    written = read_json(gate_inputs["draft"].path / "config.json")
    expected = {"algorithm": name, size: getattr(algorithm, size), "block_size": 4}
    expected["mask_token_id"] = written["dflash_config"]["mask_token_id"]
    expected["target_layer_ids"] = json.dumps(written["dflash_config"]["target_layer_ids"])
    assert expected.items() <= dict(section.body.rows).items()


def test_nobody_knows_how_the_images_of_an_imported_draft_were_prepared(tmp_path, gate_inputs):
    told = "The images of the training were prepared with"
    stage = FakeStage(tmp_path, {"target": gate_inputs["target"]})
    load_draft(LoadDraft(source=str(gate_inputs["draft"].path), target=Ref("target")), stage)
    assert told not in (stage.out_dir / "README.md").read_text()
    assert told in (gate_inputs["draft"].path / "README.md").read_text()


def test_the_cards_command_is_what_dflow_serve_runs_with_the_sizes_of_the_trainings_images(tmp_path, gate_inputs):
    """For a draft whose training limited images otherwise than the target does."""
    own = gate_inputs["trained"]
    limits = read_json(own.path / "training.json")["captured"]["pixel_limits"]
    assert limits == pixel_limits(*image_settings(gate_inputs["target"].path / "model"))
    smaller = {**limits, "max_pixels": limits["max_pixels"] // 2}
    trained = shutil.copytree(own.path, tmp_path / "trained")
    training = read_json(trained / "training.json")
    training["captured"]["pixel_limits"] = smaller
    write_json(trained / "training.json", training)
    for path, images in ((own.path, []), (trained, ["--mm-process-config", json.dumps({"image": smaller})])):
        folder = tmp_path / ("limited" if images else "own")
        stage = FakeStage(folder / "export", {**gate_inputs, "draft": attrs.evolve(own, path=path)})
        export_draft(ExportDraft(draft=Ref("a"), target=Ref("b")), stage)
        card = (stage.out_dir / "README.md").read_text()
        told = shlex.split(next(line for line in card.splitlines() if line.startswith("python -m ")))
        made = {"train": path, "export": stage.out_dir, "target": gate_inputs["target"].path}
        store, run = record_run(folder / "store", made, more="")
        served = find_served(store, find_record(store.records, run), None)
        command = launch_command(str(served.target), served.served, served.draft)
        places = {str(served.target): "$TARGET", served.draft.path: "."}
        assert told == [places.get(part, part) for part in command]
        at = told.index("--mm-process-config") if images else 0
        assert images == told[at : at + len(images)]


@pytest.mark.parametrize("name", ["draft", "target", "tokens"])
def test_a_report_of_another_draft_target_or_tokens_is_refused(tmp_path, gate_inputs, name):
    other = gate_inputs | {name: attrs.evolve(gate_inputs[name], digest="0" * 64)}
    with pytest.raises(DataError, match=f"this report was made with another {name} than this node reads"):
        check(tmp_path, other)


def pretend_sglang(monkeypatch, folder, version):
    """Write the metadata of an installed SGLang of that version, without its code."""
    package = folder / "installed" / f"sglang-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(package.parent))


def test_another_version_of_sglang_is_passed_over_loudly_or_refused(tmp_path, gate_inputs, monkeypatch, capsys):
    pretend_sglang(monkeypatch, tmp_path, "0.5.20")
    checked = read_json(check(tmp_path / "auto", gate_inputs).out_dir / "check.json")
    assert "skipped" == checked["live"]["status"]
    assert "0.5.20 is installed: pip install sglang==0.5.23" in checked["live"]["reason"]
    assert "SKIPPED" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"0\.5\.20 is installed: pip install sglang==0\.5\.23"):
        check(tmp_path / "required", gate_inputs, live="required")
    assert (
        'live = "off"'
        == read_json(check(tmp_path / "off", gate_inputs, live="off").out_dir / "check.json")["live"]["reason"]
    )


def test_an_export_for_another_version_of_sglang_is_refused_by_name(tmp_path, gate_inputs, monkeypatch):
    pretend_sglang(monkeypatch, tmp_path, "0.5.21")
    copy = shutil.copytree(gate_inputs["draft"].path, tmp_path / "draft")
    config = read_json(copy / "config.json")
    config["dflow"]["engine"] = "sglang-0.5.23"
    write_json(copy / "config.json", config)
    inputs = gate_inputs | {"draft": attrs.evolve(gate_inputs["draft"], path=copy)}
    with pytest.raises(DataError, match=r"needs SGLang 0\.5\.23, for which the draft was exported.* 0\.5\.21 is inst"):
        check(tmp_path / "required", inputs, live="required")
    reason = read_json(check(tmp_path / "auto", inputs).out_dir / "check.json")["live"]["reason"]
    assert "and 0.5.21 is installed: pip install sglang==0.5.23" in reason
    config["dflow"]["engine"] = 23
    write_json(copy / "config.json", config)
    with pytest.raises(DataError, match=r"dflow.engine must be the name of an engine, got 23"):
        check(tmp_path / "number", inputs)


def test_required_without_sglang_is_refused(tmp_path, gate_inputs):
    with pytest.raises(DataError, match=r"needs SGLang 0\.5\.21 or 0\.5\.23, which is not installed"):
        check(tmp_path, gate_inputs, live="required")


def test_the_version_of_sglang_is_in_the_key_where_it_is_asked():
    edges = {"draft": Ref("a"), "target": Ref("b"), "tokens": Ref("c"), "report": Ref("d")}
    assert ("sglang",) == CheckExport(**edges).chosen_libraries()
    assert () == CheckExport(**edges, live="off").chosen_libraries()
    with pytest.raises(ConfigError, match='expected one of "auto", "required", "off"'):
        CheckExport(**edges, live="maybe")


def test_the_code_that_asks_sglang_is_in_the_key_though_it_is_imported_by_name():
    reached = Project([ROOT]).closure([op_of(CheckExport).run]).digests
    assert {
        "ops/check_export/live.py",
        "ops/lib/drafts/backbone/serving_contract.py",
        "ops/lib/sglang/dflash_worker.py",
    } <= reached.keys()


class Serving:
    """A stand-in for the module `ops.check_export.live`: its `check_live` returns a result, or raises an error."""

    def __init__(self, answer):
        self.answer, self.asked = answer, None

    def check_live(self, draft_dir, target_dir, prompts, config, stage):
        self.asked = (draft_dir, target_dir, prompts)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(prompts)


def served(prompts, shorter=0, **changes):
    answers = tuple(Decoded(prompt.tokens, prompt.accepted[shorter:]) for prompt in prompts)
    return LiveResult(version="0.5.21", answers=answers, forward={"2 layers": 1e-6}, **changes)


def test_what_sglang_served_stands_beside_what_evaluate_measured(tmp_path, gate_inputs, monkeypatch):
    pretend_sglang(monkeypatch, tmp_path, "0.5.21")
    serving = Serving(served)
    monkeypatch.setattr(live, "check_live", serving.check_live)
    stage = check(tmp_path, gate_inputs, live="required", live_prompts=1)
    rows = {row["id"]: row for row in read_jsonl(gate_inputs["report"].path / "prompts.jsonl")}
    draft_dir, target_dir, prompts = serving.asked
    assert (gate_inputs["draft"].path, gate_inputs["target"].path / "model") == (draft_dir, target_dir)
    assert ["image", "text"] == sorted(prompt.sample.category for prompt in prompts)
    for prompt in prompts:
        row = rows[prompt.sample.id]
        assert (tuple(row["tokens"]), tuple(row["accepted"]), 8) == (
            prompt.tokens,
            prompt.accepted,
            prompt.max_new_tokens,
        )
    chosen = [rows[prompt.sample.id] for prompt in prompts]
    tau = sum(len(row["tokens"]) - 1 for row in chosen) / sum(len(row["accepted"]) for row in chosen)
    assert [pytest.approx(tau)] == stage.metric("check/tau_served") == stage.metric("check/tau_evaluate")
    assert [0.0] == stage.metric("check/live_skipped")
    assert [1e-6] == stage.metric("check/forward_difference")
    checked = read_json(stage.out_dir / "check.json")
    assert ("passed", "0.5.21") == (checked["live"]["status"], checked["live"]["sglang"])
    assert checked["tau"]["served"] == checked["tau"]["evaluate"]
    lines = list(read_jsonl(stage.out_dir / "served.jsonl"))
    assert [(row["id"], row["accepted"]) for row in chosen] == [(row["id"], row["accepted"]) for row in lines]
    assert f"| all | {tau:.2f} | {tau:.2f} |" in (stage.out_dir / "draft" / "README.md").read_text()


def test_a_draft_that_sglang_serves_otherwise_is_not_called_done(tmp_path, gate_inputs, monkeypatch):
    pretend_sglang(monkeypatch, tmp_path, "0.5.21")
    wrong = mistake("", "sample x: step 2 accepts 1, evaluate 3", "goes on", "look at the features")
    monkeypatch.setattr(
        live, "check_live", Serving(lambda prompts: served(prompts, shorter=1, mistakes=(wrong,))).check_live
    )
    with pytest.raises(DataError) as error:
        check(tmp_path, gate_inputs)
    lines = "  sample x: step 2 accepts 1, evaluate 3\n      SGLang: goes on\n    what to do: look at the features\n"
    assert lines in str(error.value)
    kept = tmp_path / "work" / "served.jsonl"
    assert str(error.value).endswith(f"SGLang's answer to each prompt: {kept}")
    prompts = list(read_jsonl(gate_inputs["report"].path / "prompts.jsonl"))
    assert {row["id"]: row["accepted"][1:] for row in prompts} == {
        row["id"]: row["accepted"] for row in read_jsonl(kept)
    }


def test_a_skipped_stage_says_how_it_is_repeated(tmp_path, gate_inputs, capsys):
    stage = check(tmp_path, gate_inputs)
    repeat = "dflow resume RUN --from check"
    assert repeat in read_json(stage.out_dir / "check.json")["live"]["remedy"]
    assert repeat in (stage.out_dir / "draft" / "README.md").read_text()
    assert repeat in capsys.readouterr().out


@pytest.fixture
def without_worker(monkeypatch):
    """Let DSpark drafts be served by a worker that the live stage does not run, as for a user's algorithm."""
    monkeypatch.setattr(Dspark, "engine", "OTHER")


@pytest.mark.usefixtures("without_worker")
def test_no_remedy_of_a_draft_is_to_run_the_live_stage_where_that_has_no_worker_for_it(tmp_path, gate_inputs, capsys):
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS["dspark"])
    stage = check(tmp_path / "check", inputs)
    checked, card = read_json(stage.out_dir / "check.json"), (stage.out_dir / "draft" / "README.md").read_text()
    texts = [checked["live"]["remedy"], card, *(str(section.body) for section in check_export_sections(stage.out_dir))]
    assert [] == [text for text in [*texts, capsys.readouterr().out] if "--from check" in text]
    assert "workers DFLASH and DSPARK only, and this draft is served by OTHER" in checked["live"]["reason"]
    assert "(`dflow serve`)" in checked["live"]["remedy"]
    assert "meets the contract of SGLang's OTHER worker" in " ".join(texts)
    with pytest.raises(DataError, match="workers DFLASH and DSPARK only, and this draft is served by OTHER"):
        check(tmp_path / "required", inputs, live="required")


def test_of_an_algorithm_that_no_server_serves_nothing_names_a_server(tmp_path, gate_inputs, capsys):
    with known_slot_bias() as algorithm:
        inputs = with_algorithm(tmp_path, gate_inputs, algorithm)
        exported = (inputs["draft"].path / "README.md").read_text()
        stage = check(tmp_path / "check", inputs)
        required = CheckExport.mistakes_with_nodes_above({"live": "required"}, lambda *_: {"algorithm": "slot_bias"})
        edges = {"draft": Ref("a"), "target": Ref("b"), "tokens": Ref("c"), "report": Ref("d")}
        plan = estimate(CheckExport(**edges), forecast(algorithm))
    checked, card = read_json(stage.out_dir / "check.json"), (stage.out_dir / "draft" / "README.md").read_text()
    sections = " ".join(str(section.body) for section in check_export_sections(stage.out_dir))
    reason = "no server serves this algorithm"
    assert reason == checked["live"]["reason"] and checked["live"]["remedy"].startswith(f"{reason}: the tau of the")
    assert {"live": f'"required", but {reason}; use "auto"'} == required and (f"live: skipped, {reason}",) == plan.notes
    assert all("No server serves this algorithm: dflow alone decodes with it" in text for text in (exported, card))
    texts = [exported, card, sections, *checked["live"].values(), capsys.readouterr().out]
    assert [] == [text for text in texts if "launch_server" in text or "SGLang" in text or "dflow serve" in text]


@pytest.mark.usefixtures("without_worker")
@pytest.mark.parametrize("algorithm", ["dflash", "dflash2", "dspark"])
def test_a_plan_tells_where_the_live_stage_has_no_worker(algorithm):
    has_none = algorithm == "dspark"
    trained = {"algorithm": algorithm}
    found = CheckExport.mistakes_with_nodes_above({"live": "required"}, lambda *_edges: trained)
    assert has_none == ("served by OTHER" in found.get("live", ""))
    assert {} == CheckExport.mistakes_with_nodes_above({"live": "auto"}, lambda *_edges: trained)
    assert {} == CheckExport.mistakes_with_nodes_above({"live": "required"}, lambda *_edges: {})


@pytest.mark.usefixtures("without_worker")
@pytest.mark.parametrize(("live", "told"), [("auto", 1), ("off", 0)])
def test_the_plan_of_such_a_draft_has_no_live_stage(live, told):
    edges = {"draft": Ref("a"), "target": Ref("b"), "tokens": Ref("c"), "report": Ref("d")}
    found = estimate(CheckExport(**edges, live=live), forecast(ALGORITHMS["dspark"]))
    assert (told, {}) == (len([note for note in found.notes if "served by OTHER" in note]), found.memory)
    assert {} != estimate(CheckExport(**edges), forecast(ALGORITHMS["dflash2"])).memory


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_live_stage_serves_drafts_of_every_algorithm(tmp_path, gate_inputs, monkeypatch, name):
    pretend_sglang(monkeypatch, tmp_path, "0.5.21")
    serving = Serving(served)
    monkeypatch.setattr(live, "check_live", serving.check_live)
    inputs = with_algorithm(tmp_path, gate_inputs, ALGORITHMS[name])
    checked = read_json(check(tmp_path / "check", inputs, live="required").out_dir / "check.json")
    assert ("passed", ALGORITHMS[name].engine) == (checked["live"]["status"], checked["engine"])
    assert inputs["draft"].path == serving.asked[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_plan_knows_the_memory_of_the_live_stage_for_every_algorithm(name):
    edges = {"draft": Ref("a"), "target": Ref("b"), "tokens": Ref("c"), "report": Ref("d")}
    needed, off = (estimate(CheckExport(**edges, live=live), forecast(ALGORITHMS[name])) for live in ("auto", "off"))
    assert {"target", "drafts"} == needed.memory.keys()
    assert {} == off.memory


def forecast(algorithm):
    """The context of a gate that reads a draft of this algorithm."""
    family = {"model_type": "qwen3", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 4}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
    return PlanContext(
        inputs={
            "target": TargetForecast.of(family | sizes),
            "draft": DraftForecast(shape=tiny_config(algorithm=algorithm)),
            "tokens": None,
            "report": ReportForecast(max_prompts=2, max_new_tokens=8, dtype="float32"),
        },
        launch=Launch(device="cpu"),
        artifact=None,
        root=ROOT,
        free_disk=1,
    )


def test_not_a_number_is_the_largest_difference():
    assert 2.0 == largest([1.0, 2.0, 0.5])
    for values in ([math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]):
        assert math.isnan(largest(values))


def test_server_arguments_are_those_that_a_capture_takes():
    edges = {"draft": Ref("a"), "target": Ref("b"), "tokens": Ref("c"), "report": Ref("d")}
    given = {"mem_fraction_static": 0.7}
    assert given == CheckExport(**edges, server_args=given).server_args
    with pytest.raises(ConfigError, match="load_format is not allowed: weights other than the checkpoint's"):
        CheckExport(**edges, server_args={"load_format": "dummy"})


def test_a_machine_on_which_sglang_cannot_serve_is_passed_over_or_refused(tmp_path, gate_inputs, monkeypatch, capsys):
    pretend_sglang(monkeypatch, tmp_path, "0.5.21")
    monkeypatch.setattr(live, "check_live", Serving(LiveUnavailable("SGLang refuses DFLASH on a CPU")).check_live)
    reason = read_json(check(tmp_path / "a", gate_inputs).out_dir / "check.json")["live"]["reason"]
    assert "SGLang refuses DFLASH on a CPU" == reason
    lines = capsys.readouterr().out.splitlines()
    assert "info: the live stage was skipped: SGLang refuses DFLASH on a CPU" in lines
    (warned,) = [line for line in lines if "SKIPPED" in line]
    assert len(warned) < 130 and "dflow resume RUN --from check (docs/serving.md)" in warned
    with pytest.raises(DataError, match="refuses DFLASH on a CPU"):
        check(tmp_path / "b", gate_inputs, live="required")


def test_tools_that_a_server_would_show_otherwise_are_warned_of(tmp_path, gate_inputs):
    tokens = shutil.copytree(gate_inputs["tokens"].path, tmp_path / "tokens")
    told = {"image_backend": "torchvision", "tools_unlike": {"sglang-0.5.23": ['adds "defer_loading": null']}}
    write_json(tokens / "tokens.json", read_json(tokens / "tokens.json") | told)
    stage = check(tmp_path / "a", gate_inputs | {"tokens": attrs.evolve(gate_inputs["tokens"], path=tokens)})
    [warning] = read_json(stage.out_dir / "check.json")["warnings"]
    assert 'than in the training (sglang-0.5.23 adds "defer_loading": null): set tools_as' in warning


def test_images_that_a_server_would_prepare_otherwise_are_warned_of(tmp_path, gate_inputs, capsys):
    [warning] = read_json(check(tmp_path / "a", gate_inputs).out_dir / "check.json")["warnings"]
    assert "--image-processor-backend pil" in warning
    assert f"warning: {warning}" in capsys.readouterr().out
    tokens = shutil.copytree(gate_inputs["tokens"].path, tmp_path / "tokens")
    write_json(tokens / "tokens.json", read_json(tokens / "tokens.json") | {"image_backend": "torchvision"})
    same = gate_inputs | {"tokens": attrs.evolve(gate_inputs["tokens"], path=tokens)}
    assert [] == read_json(check(tmp_path / "b", same).out_dir / "check.json")["warnings"]
