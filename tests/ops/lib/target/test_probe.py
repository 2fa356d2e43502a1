"""The probe of targets: what holds of transformers' architectures, and that it finds what is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_targets import any_checkpoint
from architectures import NOT, OFTEN, OTHER_ROWS, OTHERS, PROBED, PUBLISHED, config_of
from fake_stage import FakeStage
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from dsl.errors import DataError
from dsl.estimate import PlanContext
from dsl.launch import Launch
from ops.artifacts import TargetModel
from ops.lib.data.files import read_json, write_json
from ops.lib.forecasts import TargetStated
from ops.lib.target import measure
from ops.lib.target import probe as probes
from ops.lib.target.cache import Rows
from ops.lib.target.cache_trial import ordinary_tokens, sample_of, verification_of
from ops.lib.target.embedding_and_head import frozen_ends
from ops.lib.target.head_settings import HeadSettings, embedding_scale
from ops.lib.target.model import Target, describe_target, write_target_json
from ops.lib.target.no_memory import lacks_memory
from ops.lib.target.probe import Speculated, probe_config, probe_target, probe_weights, speculated_answers
from ops.lib.target.probed import (
    BLOCKS,
    COPY,
    EMBEDDING,
    HEAD,
    LAYERS,
    LENGTHS,
    MEASURED,
    PADDING,
    PASSES,
    SPECULATION,
    TOKENS,
    WEIGHTS,
    Check,
    Probe,
    kept_probes,
    measured_turns,
    probe_of_copy,
    shortened,
)
from ops.lib.target.sizes import context_length, rope_limit
from ops.lib.target.small_copy import has_range, small_config, small_copy, with_floats
from ops.lib.target.verify import Verification
from ops.lib.vision.config_classes import lacks_layers
from ops.lib.vision.family_config import QWEN, with_defaults
from ops.load_target.op import LoadTarget
from ops.load_target.plan import estimate, missing_here
from ops.load_target.run import load_target
from ops.load_target.show import report

ALL = [LAYERS, HEAD, EMBEDDING, PADDING, BLOCKS, SPECULATION]


def failures(kind: str) -> list[str]:
    probe = probe_config(config_of(kind))
    assert [*ALL, *[LENGTHS] * has_range(config_of(kind))] == [check.name for check in probe.checks]
    return [check.name if check.name == EMBEDDING else check.sentence for check in probe.failed]


@pytest.mark.parametrize("kind", OFTEN)
def test_all_of_an_architecture_holds(kind: str) -> None:
    assert [] == failures(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*OTHERS, *PROBED])
def test_all_of_another_architecture_holds_or_only_its_embedding_is_another(kind: str) -> None:
    assert [EMBEDDING] * (kind in OTHER_ROWS) == failures(kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fast path is not available")
@pytest.mark.parametrize(("kind", "check", "part"), [(kind, *found) for kind, found in NOT.items()])
def test_what_does_not_hold_is_said_with_its_check(kind: str, check: str, part: str) -> None:
    failed = probe_config(config_of(kind)).failed
    assert check == failed[0].name
    assert part in failed[0].sentence


ZAMBA = {"num_hidden_layers": 9, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 4}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "embed_key", "refusal"),
    [
        ("zamba", ZAMBA, None, "this zamba cannot be a target, measured on the weights: .*Fast Mamba kernels"),
        ("mamba2", MAMBA2, None, r"backbone\.embeddings\.weight, lm_head\.weight; name one of them as embed_key"),
        ("mamba2", MAMBA2, "backbone.embeddings.weight", "this mamba2 cannot be a target, .*no later token changes"),
    ],
)
def test_what_has_no_copy_or_other_names_is_refused_by_load_target(
    tmp_path: Path, kind: str, sizes: dict[str, Any], embed_key: str | None, refusal: str
) -> None:
    checkpoint = any_checkpoint(kind, tmp_path / kind, **sizes)
    config = LoadTarget(checkpoint=str(checkpoint), embed_key=embed_key)
    with pytest.raises(DataError, match=refusal):
        load_target(config, FakeStage(tmp_path / "stage", {}))


def test_a_target_of_which_nothing_is_measured_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_copy(_config: Any) -> Probe:
        raise DataError("no small copy of this llama can be made")

    monkeypatch.setattr("ops.load_target.run.probe_config", no_copy)
    monkeypatch.setattr("ops.lib.target.measure.free_memory", lambda: 1)
    stage = FakeStage(tmp_path / "stage", {})
    load_target(LoadTarget(checkpoint=str(any_checkpoint("llama", tmp_path / "llama"))), stage)
    unmeasured, nothing = stage.warnings
    assert unmeasured.startswith("the weights are not measured: in float32 they take ")
    assert "nothing was measured of this llama: wrong states and answers of it are not noticed" == nothing
    assert [] == kept_probes(tmp_path / "stage" / "out")


def test_twelve_are_tried_always_and_sixty_in_all() -> None:
    assert 12 == len(OFTEN) and 60 <= len({*OFTEN, *OTHERS})


def without(settings: HeadSettings) -> Callable[[Any], HeadSettings]:
    return lambda _config: settings


def test_a_wrong_scale_of_the_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_copy(config_of("granite"))
    assert () == probe_target(target).failed
    monkeypatch.setattr("ops.lib.target.model.head_settings", without(HeadSettings()))
    [failed] = probe_target(target).failed
    assert HEAD == failed.name
    assert failed.difference == pytest.approx(7.0)  # eight times as large


def test_a_soft_cap_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_copy(config_of("gemma2") | {"final_logit_softcapping": 1.0})
    monkeypatch.setattr("ops.lib.target.model.head_settings", without(HeadSettings()))
    assert [HEAD] == [check.name for check in probe_target(target).failed]


def scaled(factor: float) -> Callable[[Any], float]:
    return lambda config: factor * embedding_scale(config)


def test_a_wrong_scale_of_the_embedding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_copy(config_of("gemma3_text"))
    assert () == probe_target(target).failed
    monkeypatch.setattr(probes, "embedding_scale", scaled(1 / 8))  # the root of 64 left out
    probe = probe_target(target)
    assert [EMBEDDING] == [check.name for check in probe.failed]
    assert 7 / 8 == pytest.approx(probe.failed[0].difference)
    monkeypatch.setattr(probes, "embedding_scale", scaled(1.005))
    assert {EMBEDDING} == probe_target(target).failed_names


def test_states_of_another_layer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_early(self: Target) -> torch.nn.ModuleList:
        layers = self.model.get_decoder().layers
        return torch.nn.ModuleList([layers[0], *layers[:-1]])

    target = small_copy(config_of("llama"))
    monkeypatch.setattr(Target, "decoder_layers", property(one_early))
    [failed] = probe_target(target).failed
    assert LAYERS == failed.name
    assert "no draft can be fed by it" in failed.sentence


def test_states_that_later_tokens_change_are_found() -> None:
    target = small_copy(config_of("gemma3_text") | {"use_bidirectional_attention": True})
    [failed] = probe_target(target).failed
    assert LAYERS == failed.name


def test_a_crop_that_keeps_what_was_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Rows.advance
    monkeypatch.setattr(Rows, "advance", lambda rows, kept_B: advance(rows, kept_B + 1))
    failed = probe_target(small_copy(config_of("llama"))).failed
    assert [BLOCKS, SPECULATION] == [check.name for check in failed]
    assert "2 of 2 answers are others" in failed[1].sentence


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_a_state_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("ops.lib.target.verify.roll_back", lambda cache, saved, accepted: False)
    failed = probe_target(small_copy(config_of(kind))).failed
    assert failed and {BLOCKS, SPECULATION} >= {check.name for check in failed}


def test_a_target_of_other_rows_is_warned_of_and_verifies_drafts() -> None:
    probe = probe_config(config_of("nanochat"))
    assert [EMBEDDING] == [check.name for check in probe.failed]
    assert probe.warning.startswith(
        "measured on a small random copy: it does not hold that what enters its first layer are rows of its embedding "
        "times a scale (they differ by "
    )
    assert probe.warning.endswith("a draft's inputs are not the target's")
    assert "" == probe.refusal == probe.unverified


def test_measurements_of_before_the_check_of_the_embedding_are_read(tmp_path: Path) -> None:
    names = ("layers", "head", "padding", "blocks", "speculation")
    checks = [{"name": name, "holds": True, "difference": 0.0, "reason": ""} for name in names]
    write_json(tmp_path / MEASURED, {"probes": [{"on": "the weights", "checks": checks, "seconds": 1.5}]})
    [probe] = kept_probes(tmp_path)
    assert () == probe.failed
    assert list(names) == [name for name, _, _ in probe.rows()]


def test_a_target_without_its_layers_is_refused_and_one_that_cannot_verify_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = any_checkpoint("llama", tmp_path / "llama")

    def loaded(name: str, *checks: Check) -> FakeStage:
        monkeypatch.setattr("ops.load_target.run.probe_config", lambda config: Probe("a copy", checks, 0.1))
        stage = FakeStage(tmp_path / name, {})
        load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
        return stage

    stage = loaded("copy refused", Check(LAYERS, False, 0.25))
    assert "differ by 25.0%" in stage.warnings[0]  # the weights decide
    monkeypatch.setattr("ops.lib.target.measure.free_memory", lambda: 1)
    with pytest.raises(DataError, match=r"llama cannot be a target, measured on a copy: .* \(they differ by 25.0%"):
        loaded("refused", Check(LAYERS, False, 0.25))
    monkeypatch.undo()
    stage = loaded("warned", Check(LAYERS, True, 0.0), Check(BLOCKS, False, 0.5, "of 3 tokens"))
    assert [
        "measured on a copy: it does not hold that blocks through its cache, accepted in part, give what single "
        "tokens give (of 3 tokens; they differ by 50.0% of the largest value): capture and training are possible, "
        "but evaluate is not"
    ] == stage.warnings
    out = tmp_path / "warned" / "out"
    copied, weights = kept_probes(out)
    assert ("a copy", "the weights") == (copied.on, weights.on)
    assert ALL == [check.name for check in weights.checks] and () == weights.failed
    context = PlanContext(launch=Launch(), inputs={}, artifact=out, root=tmp_path, free_disk=0, identity="0" * 64)
    shown = estimate(LoadTarget(checkpoint=str(checkpoint)), context).notes
    assert (f"warning: {copied.warning}", "measured on the weights: all 6 checks hold") == shown
    titles = [section.title for section in report(out)]
    assert ["target", "measured on a copy", "measured on the weights"] == titles
    assert "measurements.json" not in read_json(out / "target.json")


HELD, OTHER_INPUTS, BROKEN = (
    Probe("a copy", tuple(Check(name, name != failed) for name in ALL), 0.1) for failed in ("", EMBEDDING, BLOCKS)
)


@pytest.mark.parametrize(
    ("wrong", "copy", "tried", "holds"),
    [(1, HELD, 2, True), (1, OTHER_INPUTS, 2, True), (1, BROKEN, 1, False), (1, None, 1, False), (9, HELD, 3, False)],
)
def test_weights_of_which_more_fails_than_of_the_copy_are_tried_with_other_texts(
    monkeypatch: pytest.MonkeyPatch, wrong: int, copy: Probe | None, tried: int, holds: bool
) -> None:
    texts: list[list[int]] = []

    def exchanged(target: Target, samples: Any, plain: Any) -> list[Speculated]:
        texts.append(samples[0].input_ids.tolist())
        found = speculated_answers(target, samples, plain)
        return [(tokens, 0.5) for tokens, _ in found] if len(texts) <= wrong else found

    monkeypatch.setattr("ops.lib.target.probe.speculated_answers", exchanged)
    probe = probe_weights(small_copy(config_of("llama")), copy)
    assert ([] if holds else [BLOCKS]) == [check.name for check in probe.failed]
    assert tried == len(texts) == len({tuple(text) for text in texts})
    assert WEIGHTS == probe.on


def test_weights_that_take_too_long_are_tried_in_part_and_the_copy_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = any_checkpoint("llama", tmp_path / "llama")
    monkeypatch.setattr("ops.load_target.run.probe_config", lambda _config: BROKEN)
    stage = FakeStage(tmp_path / "stage", {})
    load_target(LoadTarget(checkpoint=str(checkpoint), measure_minutes=0), stage)
    said = "of its weights only layers, head and embedding are measured: all checks take about 0 minutes"
    assert f"info: {said}" in capsys.readouterr().out
    copy, weights = kept_probes(tmp_path / "stage" / "out")
    assert [LAYERS, HEAD, EMBEDDING] == [check.name for check in weights.checks] and () == weights.failed
    assert [(passes, 5) for passes in range(1, 6)] == stage.progressed
    found = TargetStated.read(tmp_path / "stage" / "out", "0" * 64)
    assert copy.unverified == found.verifying_mistake != ""


def test_the_time_of_a_turn_covers_its_passes_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_copy(config_of("gemma2"))
    tokens: list[int] = []
    target.model.get_decoder().layers[0].register_forward_pre_hook(
        lambda _layer, args: tokens.append(args[0].shape[0] * args[0].shape[1])
    )
    assert () == probe_target(target).failed
    assert PASSES * 0.7 < len(tokens) <= PASSES and TOKENS * 0.7 < sum(tokens) <= TOKENS
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0, 1})
    assert [3, 1, 0] == [measured_turns(size, 30) for size in (1_000_000_000, 15_000_000_000, 70_000_000_000)]
    assert "all checks take about 112 minutes on this CPU" in shortened(70_000_000_000, 30)


def test_the_passes_over_the_weights_are_the_progress_of_load_target(tmp_path: Path) -> None:
    stage = FakeStage(tmp_path / "stage", {})
    load_target(LoadTarget(checkpoint=str(any_checkpoint("llama", tmp_path / "llama"))), stage)
    done = [passes for passes, _ in stage.progressed]
    assert {PASSES} == {total for _, total in stage.progressed}
    assert [*range(1, len(done) + 1)] == done and PASSES / 2 < len(done) <= PASSES  # fewer in batches


def test_checks_are_named_before_they_begin() -> None:
    told: list[str] = []
    assert () == probe_config(config_of("phi3"), told.append).failed
    assert [LAYERS, HEAD, EMBEDDING, PADDING, SPECULATION, LENGTHS] == told  # the last but one gives BLOCKS too


def test_weights_that_are_no_target_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_copy(config_of("granite"))
    monkeypatch.setattr("ops.lib.target.model.head_settings", without(HeadSettings()))
    turns: list[int] = []
    original = probes._texts

    def counted(target: Target, turn: int) -> list[list[int]]:
        turns.append(turn)
        return original(target, turn)

    monkeypatch.setattr(probes, "_texts", counted)
    assert "measured on the weights" in probe_weights(target, HELD).refusal
    assert [0] == turns


@pytest.mark.filterwarnings("ignore:.*fast path is not available")
def test_a_nemotron_h_as_its_files_are_is_not_evaluated() -> None:
    file = config_of("nemotron_h")
    kinds = "M-M*M-" + "M-" * 20
    file |= {"hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds)}
    del file["layers_block_type"]
    assert "M-M*" == small_config(file)["hybrid_override_pattern"]
    probe = probe_config(file)
    assert [BLOCKS, SPECULATION] == [check.name for check in probe.failed]
    assert "blocks through its cache, accepted in part, give what single tokens give" in probe.unverified


@pytest.mark.filterwarnings("ignore:.*fast path is not available")
@pytest.mark.parametrize(
    ("kind", "only_mamba", "reason"),
    [
        ("granitemoehybrid", {"layer_types": ["mamba"] * 40}, "its cache cannot be put back to where it was"),
        ("bamba", {"attn_layer_indices": None}, "to only contain LinearAttention"),
    ],
)
def test_a_hybrid_that_has_mamba_layers_only_is_not_evaluated(
    kind: str, only_mamba: dict[str, Any], reason: str
) -> None:
    probe = probe_config(config_of(kind) | only_mamba)
    assert {BLOCKS, SPECULATION} <= {check.name for check in probe.failed}
    assert reason in probe.unverified


def test_a_limit_without_end_is_read_as_transformers_saves_it() -> None:
    made = AutoConfig.for_model("granitemoehybrid", **PUBLISHED["granitemoehybrid"])
    file = with_defaults(json.loads(made.to_json_string(use_diff=False)))
    assert [0.0, {"__float__": "Infinity"}] == file["time_step_limit"]
    assert [0.0, float("inf")] == small_config(file)["time_step_limit"]
    assert (0.0, float("inf")) == small_copy(file).model.config.time_step_limit
    tagged = {"other": {"__float__": "unknown"}, "more": [{"__float__": "-Infinity"}, {"a": 1, "b": "NaN"}]}
    assert {**tagged, "more": [-float("inf"), {"a": 1, "b": "NaN"}]} == with_floats(tagged)


def test_a_copy_with_experts_runs_in_float64() -> None:
    target = small_copy(config_of("mixtral"), dtype=torch.float64)
    assert torch.float64 == target.embed_weight.dtype
    assert () == probe_target(target).failed


def test_types_without_layers_are_refused_by_their_source_and_none_that_a_draft_can_be_fed_by() -> None:
    without = {"gpt2", "gptj", "falcon", "bloom", "mpt", "rwkv", "xlstm", "bert"}
    assert without == {kind for kind in (*OFTEN, *OTHERS, *PROBED, *NOT, *without) if lacks_layers(kind)}


def test_what_cannot_be_made_small_is_said() -> None:
    with pytest.raises(DataError, match="no small copy of this nemotron can be made: "):
        probe_of_copy({**config_of("nemotron"), "num_key_value_heads": None})


def test_whatever_a_class_raises_is_said_and_no_traceback() -> None:
    with pytest.raises(DataError, match="no small copy of this reformer can be made: AssertionError: "):
        probe_config(config_of("reformer"))
    with pytest.raises(DataError, match="no small copy of this blt can be made: KeyError: 'num_hidden_layers'"):
        probe_of_copy({"model_type": "blt"})


def test_a_check_that_raises_anything_fails_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_arguments: Any) -> Any:
        raise AssertionError("not such a length")

    target = small_copy(config_of("llama"))
    monkeypatch.setattr(probes, "_padding", wrong)
    monkeypatch.setattr(probes, "speculated_answers", wrong)
    failed = probe_target(target).failed
    assert [PADDING, BLOCKS, SPECULATION] == [check.name for check in failed]
    assert {"AssertionError: not such a length"} == {check.reason for check in failed}


def test_a_target_whose_pad_token_is_that_of_its_class_is_measured_and_loaded(tmp_path: Path) -> None:
    checkpoint = any_checkpoint("phi3", tmp_path / "phi3", vocab_size=32_064)
    file = checkpoint / "config.json"
    config = {name: value for name, value in read_json(file).items() if not name.endswith("_token_id")}
    write_json(file, config)
    load_target(LoadTarget(checkpoint=str(checkpoint)), FakeStage(tmp_path / "stage", {}))
    assert [()] * 2 == [probe.failed for probe in kept_probes(tmp_path / "stage" / "out")]


def test_what_a_library_prints_is_no_part_of_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text('print("a line of a library")\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert () == probe_of_copy(config_of("llama")).failed


@pytest.mark.parametrize("field", ["image_token_id", "image_token_index", "eos_token_id"])
def test_ordinary_tokens_are_those_that_the_config_does_not_name(field: str) -> None:
    target = small_copy(config_of("llama"))
    assert 77 in ordinary_tokens(target)
    setattr(target.model.config, field, 77)
    assert 77 not in ordinary_tokens(target)


def test_the_whole_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_model: torch.nn.Module) -> None:
        raise ImportError("\nA model requires\n  the timm library")

    monkeypatch.setattr("ops.lib.target.small_copy._make_lively", lacking)
    with pytest.raises(DataError, match=r"can be made: ImportError: A model requires the timm library$"):
        small_copy(config_of("llama"))


def test_layers_that_share_keys_are_tried() -> None:
    config = config_of("gemma4_text")
    assert 0 == small_config(config)["num_kv_shared_layers"]
    config |= {"num_kv_shared_layers": 20}
    small = small_config(config)
    assert (12, 6) == (small["num_hidden_layers"], small["num_kv_shared_layers"])
    assert set(small["layer_types"][:6]) == set(small["layer_types"][6:]) == set(config["layer_types"])
    target = small_copy(config)
    assert 6 == sum(layer.self_attn.is_kv_shared_layer for layer in target.decoder_layers)
    assert () == probe_target(target).failed


def test_a_small_copy_has_every_kind_of_layer_and_a_short_window() -> None:
    small = small_config(config_of("gemma3_text"))
    assert {"full_attention", "sliding_attention"} == set(small["layer_types"])
    assert (6, 8, 64) == (small["num_hidden_layers"], small["sliding_window"], small["hidden_size"])
    assert small_config(config_of("qwen3"))["model_type"] in QWEN


def phi_with_ranges() -> dict[str, Any]:
    """A config.json as Phi-3.5's: angles of its RoPE change behind 4,096 tokens."""
    file = {name: value for name, value in config_of("phi3").items() if name != "rope_parameters"}
    half = file["hidden_size"] // file["num_attention_heads"] // 2
    factors = {"short_factor": [1.0 + 0.01 * k for k in range(half)], "long_factor": [1.0 + k for k in range(half)]}
    rope = {"rope_scaling": {"type": "longrope", **factors}, "rope_theta": 10000.0}
    return file | rope | {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}


def test_a_rope_that_follows_the_longest_text_of_a_batch_is_found_and_right_within_its_first_range() -> None:
    probe = probe_config(phi_with_ranges())
    assert [LENGTHS] == [check.name for check in probe.failed]
    assert probe.is_usable and 4096 == probe.failed[0].limit
    assert (
        "texts of up to 4,096 tokens are right; a longer one changes shorter ones of its batch (they" in probe.warning
    )
    assert probe == Probe.from_json(probe.to_json())
    assert "" == probe.refusal == probe.unverified


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (phi_with_ranges(), 4096),
        ({"rope_parameters": {"full_attention": {"rope_type": "su", "original_max_position_embeddings": 64}}}, 64),
        ({"max_position_embeddings": 2048, **DYNAMIC}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "of tomorrow"}}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 2048}, None),
    ],
)
def test_the_first_range_of_a_rope_is_read_from_its_config(config: dict[str, Any], limit: int | None) -> None:
    assert limit == rope_limit(config)
    if limit is not None:
        assert limit == context_length(config)


def test_a_text_beyond_the_first_range_is_refused_by_its_sample() -> None:
    target = small_copy(phi_with_ranges(), rope_range=11)
    assert (1, 11) == target.inputs([sample_of([7] * 11)]).input_ids.shape
    with pytest.raises(DataError, match=r"sample trial: 12 tokens, and beyond 11 the target's RoPE .* max_length = 11"):
        target.inputs([sample_of([7] * 11), sample_of([7] * 12)])


@pytest.mark.parametrize(
    ("kind", "lacking", "fields", "expected"),
    [
        (
            "gemma3_text",
            "layer_types",
            {"sliding_window_pattern": 6, "num_hidden_layers": 34},
            {"layer_types": [*["sliding_attention"] * 5, "full_attention"]},
        ),
        (
            "qwen2",
            "layer_types",
            {"use_sliding_window": True, "max_window_layers": 28, "num_hidden_layers": 32, "sliding_window": 4096},
            {"layer_types": [*["full_attention"] * 4, "sliding_attention"], "sliding_window": 8},
        ),
        (
            "gemma3_text",
            "",
            {"layer_types": [*["sliding_attention"] * 24, *["full_attention"] * 2]},
            {"layer_types": [*["sliding_attention"] * 4, "full_attention"]},
        ),
        ("qwen3_moe", "", {"mlp_only_layers": [20, 21]}, {"mlp_only_layers": [4], "num_hidden_layers": 5}),
    ],
)
def test_a_kind_of_layer_is_copied_wherever_it_stands(
    kind: str, lacking: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    file = {name: value for name, value in config_of(kind).items() if name != lacking}
    small = small_config(file | fields)
    assert expected == {name: small[name] for name in expected}


@pytest.mark.parametrize("tied", [False, True])
def test_a_bias_of_the_head_that_settings_do_not_know_is_found(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    target = small_copy(config_of("phi") | {"tie_word_embeddings": tied})
    assert tied == (target.head_weight is target.embed_weight)
    assert HEAD not in probe_target(target).failed_names
    monkeypatch.setattr("ops.lib.target.model.head_settings", without(HeadSettings()))
    assert {HEAD} == probe_target(target).failed_names


def test_the_bias_of_every_product_is_that_of_the_head_too() -> None:
    target = small_copy(config_of("ernie4_5_moe") | {"use_bias": True})
    assert 0 < float(target.model.lm_head.bias.abs().max())
    assert HEAD not in probe_target(target).failed_names


def test_a_head_whose_logits_are_all_equal_is_refused() -> None:
    probe = probe_target(small_copy(config_of("gemma2") | {"final_logit_softcapping": 0.0}))
    assert HEAD in probe.failed_names and "its logits are " in probe.refusal


def test_a_soft_cap_of_nothing_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = any_checkpoint("gemma2", tmp_path / "gemma2", final_logit_softcapping=0.0)
    equal = "final_logit_softcapping is 0, which makes all logits equal: set it to null"
    assert equal in missing_here(LoadTarget(checkpoint=str(checkpoint)))["checkpoint"]
    with pytest.raises(DataError, match=equal):
        load_target(LoadTarget(checkpoint=str(checkpoint)), FakeStage(tmp_path / "stage", {}))


def test_ends_of_another_width_than_the_states_are_refused() -> None:
    probe = probe_target(small_copy(config_of("opt") | {"word_embed_proj_dim": 512}))
    assert "rows of its embedding have 32 numbers, and its states 64" in probe.refusal


def described(folder: Path, kind: str, **fields: Any) -> TargetModel:
    """A target artifact, with a bias of the head that is not zero."""
    model = any_checkpoint(kind, folder / "model", **fields)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.bias"] = torch.linspace(-1, 1, 400)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    write_target_json(folder, describe_target(model, 7, [3]), {})
    return TargetModel(folder, "0" * 64)


@pytest.mark.parametrize("tied", [False, True])
def test_the_bias_of_a_head_is_read_from_its_file_also_beside_a_tied_one(tmp_path: Path, tied: bool) -> None:
    _, head = frozen_ends(described(tmp_path, "phi", tie_word_embeddings=tied))
    assert head.bias_V is not None
    assert torch.equal(torch.linspace(-1, 1, 400), head.bias_V)


def test_a_stored_bias_of_a_head_without_one_is_refused(tmp_path: Path) -> None:
    unknown = r"the files hold lm_head\.bias, a bias of the head that dflow does not know"
    with pytest.raises(DataError, match=unknown):
        described(tmp_path, "llama")
    assert re.search(unknown, missing_here(LoadTarget(checkpoint=str(tmp_path / "model")))["checkpoint"])


def test_a_head_without_its_bias_is_refused(tmp_path: Path) -> None:
    checkpoint = any_checkpoint("phi", tmp_path / "phi")
    assert {} == missing_here(LoadTarget(checkpoint=str(checkpoint), mask_token_id=7))
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["lm_head.bias"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    lacking = "the head of this model has a bias, and no tensor can be it; copy the files again"
    assert lacking in missing_here(LoadTarget(checkpoint=str(checkpoint), mask_token_id=7))["checkpoint"]
    with pytest.raises(DataError, match=lacking):
        describe_target(checkpoint, 7, [3])


def test_a_probe_says_in_a_line_what_is_possible() -> None:
    def verdict(*failed: Check) -> str:
        names = {check.name for check in failed}
        held = (Check(name, True) for name in (LAYERS, PADDING, BLOCKS, SPECULATION) if name not in names)
        return Probe(COPY, (*held, *failed), 0.1).verdict

    wrong = {name: Check(name, False, 0.5) for name in (LAYERS, PADDING, BLOCKS)}
    assert "it can be a target" == verdict()
    assert "it cannot be a target" == verdict(wrong[LAYERS], wrong[BLOCKS])
    assert "it can be a target, one text at a time" == verdict(wrong[PADDING])
    limited = Check(LENGTHS, False, 0.5, limit=256)
    assert "possible, for texts of up to 256 tokens: capture, training, export" in verdict(limited, wrong[BLOCKS])


class TinyMemory:
    """Hooks of layers that ask for more memory than there is, from the given pass on."""

    def __init__(self, ask: Callable[[], Any], passes: int = 0) -> None:
        self.ask, self.passes = ask, passes

    def __call__(self, *_: Any) -> None:
        self.passes -= 1
        if self.passes < 0:
            self.ask()


def out_of_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


ASKS = [lambda: torch.empty(2**60), lambda: bytearray(2**62), out_of_gpu_memory]
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError, RuntimeError)


@pytest.mark.parametrize("ask", ASKS, ids=["cpu", "python", "gpu"])
@pytest.mark.parametrize("passes", [0, 3, 7, 20])
def test_a_lack_of_memory_in_any_check_is_raised_and_no_verdict(ask: Callable[[], Any], passes: int) -> None:
    target = small_copy(config_of("llama"))
    target.decoder_layers[1].register_forward_pre_hook(TinyMemory(ask, passes))
    with pytest.raises(OUT_OF_MEMORY) as raised:
        probe_target(target)
    assert lacks_memory(raised.value)


@pytest.mark.parametrize("passes", [0, 21], ids=["token by token", "in blocks"])
def test_a_lack_of_memory_while_a_cache_is_tried_makes_no_slower_way_the_right_one(passes: int) -> None:
    target = small_copy(config_of("gemma3_text"))
    hook = target.decoder_layers[1].register_forward_pre_hook(TinyMemory(ASKS[0], passes))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        verification_of(target)
    hook.remove()
    assert Verification.BATCH == verification_of(target)


def test_a_lack_of_memory_for_a_copy_says_what_to_do_and_is_no_reason_against_the_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("opt") | {"max_position_embeddings": 2**40}
    said = "out of memory while measuring a small random copy of the target, which is no verdict on the target: free"
    with pytest.raises(MemoryError, match=said):
        probe_config(config)
    asked = {"config": config, "directory": None, "minutes": 0}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    measure.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [] == found["probes"] and found["notes"][0].startswith(f"nothing was measured on a copy: {said}")


def test_a_probe_that_is_killed_names_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr("ops.lib.target.probed.module_command", lambda _name: killed)
    with pytest.raises(DataError, match="ended by signal 9; perhaps this machine ran out of memory: free some"):
        probe_of_copy(config_of("llama"))


def test_a_lack_of_memory_for_the_weights_fails_load_target_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(directory: Path, info: Any) -> Target:
        target = from_directory(directory, info)
        target.decoder_layers[0].register_forward_pre_hook(TinyMemory(ASKS[0]))
        return target

    from_directory = Target.from_directory
    monkeypatch.setattr(Target, "from_directory", loaded)
    with pytest.raises(MemoryError, match=r"measuring the weights of the target, .*: free .*launch\.memory"):
        load_target(
            LoadTarget(checkpoint=str(any_checkpoint("llama", tmp_path / "llama"))), FakeStage(tmp_path / "s", {})
        )
