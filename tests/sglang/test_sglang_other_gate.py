"""Drafts of targets beyond Qwen in SGLang's own DFLASH worker, and the gate: answers, accepted lengths, differences."""

from __future__ import annotations

import importlib
import re

import attrs
import pytest
import torch
from dflash_cases import LAYERS, NEW_TOKENS, Case, changed, make_case
from fake_stage import FakeStage
from other_targets import CASES, other_checkpoint
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration
from sglang.srt.models.llama4 import Llama4ForCausalLM
from sglang.srt.models.mllama4 import Llama4ForConditionalGeneration

from dsl.errors import DataError
from dsl.finding import block
from dsl.imports import PROJECT
from dsl.op import Ref
from ops.artifacts import Draft, Report
from ops.check_export.live import check_live
from ops.check_export.op import CheckExport
from ops.check_export.run import serve
from ops.check_export.served_prompts import Prompt
from ops.evaluate.statistics import acceptance_length
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.contract import embedding_warnings
from ops.lib.sglang.dflash_worker import DflashEngine
from ops.lib.sglang.layers import add_missing_setter
from ops.lib.sglang.model_classes import EAGLE_SETTER, SETTER
from ops.lib.sglang.requests import VisionTokens, make_request

QUICK = ("llama", "gemma3_text", "gemma4_text", "qwen2", "qwen2_moe", "gpt_oss", "deepseek_v3", "lfm2")
SERVED = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in CASES]
STATES = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
REFS = {name: Ref(name) for name in ("draft", "target", "tokens", "report")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """By model type, a tiny target with drafts of three qualities; each is made once."""
    made: dict[str, Case] = {}

    def case(kind: str) -> Case:
        if kind not in made:
            made[kind] = make_case(
                kind, tmp_path_factory.mktemp(kind), images=False, make=other_checkpoint, noise=CASES[kind].noise
            )
        return made[kind]

    return case


@pytest.fixture
def live(tmp_path):
    """The live stage with a draft, beside dflow's own decoding with it."""

    def run(case: Case, draft: Draft):
        (tmp_path / "report").mkdir(exist_ok=True)
        write_json(tmp_path / "report" / "report.json", {"dtype": "float32", "tie_margin": 1e-3})
        expected = case.reference(draft.path)
        prompts = [
            Prompt(prompt, plain.tokens, answer.accepted, NEW_TOKENS)
            for prompt, plain, answer in zip(case.prompts, case.plain, expected, strict=True)
        ]
        inputs = {"target": case.target, "draft": draft, "report": Report(tmp_path / "report", "report")}
        stage = FakeStage(tmp_path / "stage", inputs)
        result = check_live(draft.path, case.checkpoint, prompts, CheckExport(**REFS), stage)
        print(f"{acceptance_length(expected, 1, 0).tau:.2f}, {result.details}, {len(result.mistakes)} mistakes")
        return result

    return run


def told(result) -> str:
    return "\n".join(map(block, result.mistakes))


@pytest.mark.parametrize("kind", SERVED)
def test_accepted_lengths_of_every_step_are_those_of_evaluate(cases, live, kind, capsys):
    case = cases(kind)
    result = live(case, case.drafts["noisy"])
    with capsys.disabled():
        print(f"\n{kind}: {result.details}, forward {max(result.forward.values()):.1e}, ties {result.ties}", end="")
    assert () == result.mistakes, told(result)
    assert len(case.prompts) == len(result.answers)
    assert result.details["feature_distance"] <= 10 * CASES[kind].tolerance
    assert max(result.forward.values()) < 1e-5


@pytest.mark.parametrize(
    ("wrapper", "language_model"),
    [(Gemma3ForConditionalGeneration, Gemma3ForCausalLM), (Llama4ForConditionalGeneration, Llama4ForCausalLM)],
)
def test_a_wrapper_that_gets_eagle_3s_method_shows_the_worker_its_embedding_and_head(wrapper, language_model):
    """Without them the server starts, and dies at the first draft; Qwen2-MoE above is a class without the first."""
    model = _without_init(type(wrapper.__name__, (wrapper,), {}))  # a class of its own, as methods are added to it
    text = model.language_model = _without_init(language_model)
    text.model, text.lm_head = torch.nn.Module(), torch.nn.Linear(4, 8)
    text.model.embed_tokens = torch.nn.Embedding(8, 4)
    assert not hasattr(model, "lm_head")
    assert add_missing_setter(model)
    assert model.get_input_embeddings() is text.model.embed_tokens
    assert model.lm_head is text.lm_head


def _without_init(kind):
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    return model


def test_the_table_in_the_docs_says_equal_of_the_families_that_are_served_here():
    text = (PROJECT / "docs" / "targets.md").read_text()
    text = text.split("## Which targets SGLang captures and serves")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .*? \| `(\w+)` \| .* \| ([^|]+) \|$", text, re.MULTILINE)
    assert {kind for kind, served in rows if served.startswith("equal, 5 of 5")} == set(CASES)


def test_the_gate_names_features_without_their_residual(cases, live, monkeypatch):
    """Gemma 3 as SGLang itself would serve it, if it took EAGLE-3's method for DFLASH's."""
    case = cases("gemma3_text")
    monkeypatch.setattr(Gemma3ForCausalLM, SETTER, getattr(Gemma3ForCausalLM, EAGLE_SETTER), raising=False)
    said = told(live(case, case.drafts["noisy"]))
    for layer_id in LAYERS:
        assert f"the draft gets states for layer {layer_id} that differ by" in said


def test_the_gate_sees_convolution_states_that_lose_accepted_tokens(cases, live, monkeypatch):
    """Of LFM2; the features of the answer are wrong then, and the answer itself."""
    module = importlib.import_module(STATES)
    for name in ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"):
        monkeypatch.setattr(module, name, lambda *_arguments, **_options: None)
    case = cases("lfm2")
    result = live(case, case.drafts["noisy"])
    assert result.details["equal_answers"] < len(case.prompts)
    assert result.details["feature_distance"] > 0.1
    assert "differ by" in told(result)


def test_the_gate_names_an_embedding_that_sglang_scales_and_the_training_did_not(cases, live, tmp_path):
    case = cases("gemma3_text")
    plain = changed(case.drafts["noisy"], tmp_path / "plain", input_embedding_scale=1.0)
    assert ["SGLang"] == list(
        embedding_warnings(read_json(plain / "config.json"), read_json(case.checkpoint / "config.json"))
    )
    said = told(live(case, attrs.evolve(case.drafts["noisy"], path=plain)))
    assert (
        "features and positions are correct, but the draft was trained with rows of the target's embedding times 1"
        in said
    )
    assert "SGLang would embed its tokens by rows times 8" in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["Olmo2ForCausalLM"]},
            "keeps no hidden states of layers in its Olmo2ForCausalLM, so it serves no draft for it",
        ),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"a": 1}},
            "(gemma3) has a vision tower, of which only Qwen's are run in SGLang",
        ),
    ],
)
def test_a_target_that_dflow_does_not_run_in_sglang_skips_the_live_stage_by_name(cases, tmp_path, changes, reason):
    case = cases("llama")
    target = attrs.evolve(case.target, path=tmp_path / "target")
    (tmp_path / "target" / "model").mkdir(parents=True)
    write_json(tmp_path / "target" / "model" / "config.json", read_json(case.checkpoint / "config.json") | changes)
    stage = FakeStage(tmp_path / "stage", {"target": target, "draft": case.drafts["noisy"]})
    served, skipped = serve(CheckExport(**REFS), stage, [])
    assert served is None
    assert reason in skipped


def test_images_of_another_processor_are_refused_and_a_failed_start_leaves_no_runtime(cases, monkeypatch):
    case = cases("llama")
    sample = attrs.evolve(case.prompts[0], seen={"pixel_values": torch.zeros(1, 3, 2, 2)})
    with pytest.raises(DataError, match=f"sample {sample.id}: its images were read by a processor that is not Qwen's"):
        make_request(sample, sample.input_ids, None)

    def lacking(_config):
        raise AttributeError("video_token_id")

    started = {"device": "cpu", "dtype": "float32", "pool_tokens": 256}
    with monkeypatch.context() as patch:
        patch.setattr(VisionTokens, "of", lacking)
        with pytest.raises(AttributeError, match="video_token_id"):
            DflashEngine.start(case.checkpoint, case.drafts["noisy"].path, **started)
    assert not torch.distributed.is_initialized()
