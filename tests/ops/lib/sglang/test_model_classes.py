"""What is read of the installed SGLang's model classes, here from sources of every form that they have.

`tests/sglang/test_sglang_other_targets.py` compares the reading with the classes of a real SGLang.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from any_targets import any_checkpoint
from attrs import evolve

from dsl.errors import DataError
from dsl.op import Ref
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.sglang_targets import capture_note, check_config
from ops.check_export.conflicts import conflicts
from ops.check_export.op import CheckExport
from ops.check_export.run import engine_sentence, serves_target
from ops.export_draft.card import with_served_tag
from ops.lib.forecasts import TargetStated
from ops.lib.sglang import model_classes
from ops.lib.sglang.model_classes import not_run, served_class, unserved
from ops.tools.init.target import read_target
from ops.tools.init.text import about_serving

SOURCES = {
    "llama": """
class LlamaForCausalLM(nn.Module):
    def set_dflash_layers_to_capture(self, layer_ids):
        self.model.layers_to_capture = [k + 1 for k in layer_ids]
    def load_weights(self, weights):
        for name, weight in weights:
            if name.endswith(".weight_scale_inv"):
                name = name.replace(".weight_scale_inv", ".weight_scale")
class Phi3ForCausalLM(LlamaForCausalLM):
    pass
EntryClass = [
    LlamaForCausalLM,
    Phi3ForCausalLM,
]
""",
    "mistral": """
from sglang.srt.models.llama import LlamaForCausalLM as Base
class MistralForCausalLM(Base):
    pass
EntryClass = MistralForCausalLM
""",
    "qwen2": """
class Qwen2ForCausalLM(nn.Module):
    def set_eagle3_layers_to_capture(self, layer_ids=None): ...
EntryClass = Qwen2ForCausalLM
""",
    "qwen3_vl": """
class Plain(nn.Module): ...
class Qwen3VLForConditionalGeneration(nn.Module):
    def __init__(self, config, quant_config=None, language_model_cls=Plain):
        if config.encoder_only:
            self.model = None
        else:
            self.model = language_model_cls(config=config)
    def set_dflash_layers_to_capture(self, layer_ids):
        self.model.set_dflash_layers_to_capture([k + 1 for k in layer_ids])
EntryClass = Qwen3VLForConditionalGeneration
""",
    "qwen3_5": """
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
class Keeping(nn.Module):
    def load_weights(self, weights):
        for name, weight in weights:
            if name.endswith(".weight_scale_inv") and self.quant_config.weight_block_size is None:
                name = name.replace(".weight_scale_inv", ".weight_scale")
    def set_dflash_layers_to_capture(self, layers): ...
class Qwen3_5ForConditionalGeneration(Qwen3VLForConditionalGeneration):
    def __init__(self, config, quant_config=None, language_model_cls=Keeping):
        super().__init__(config, quant_config, language_model_cls)
EntryClass = [Qwen3_5ForConditionalGeneration]
""",
    "seeing": """
class SeeingForConditionalGeneration(nn.Module):
    def set_dflash_layers_to_capture(self, layers): ...
    def load_weights(self, weights):
        self.language_model.load_weights(weights)
class LoadingForConditionalGeneration(nn.Module):
    def set_dflash_layers_to_capture(self, layers): ...
    def load_weights(self, weights): ...
EntryClass = [SeeingForConditionalGeneration, LoadingForConditionalGeneration]
""",
    "olmo2": """
class Olmo2ForCausalLM(nn.Module): ...
EntryClass = Olmo2ForCausalLM
""",
    "no_entry": "class LostForCausalLM(nn.Module): ...",
}
OPTIONS = CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), backend="sglang")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "architectures": ["LlamaForCausalLM"],
}


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with these sources, which fails if it is imported.

    Whoever imported SGLang before, in vain, left `tests/sglang` as a package of this name.
    """
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    folder = tmp_path / "engine" / "sglang"
    (folder / "srt" / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    for name, source in SOURCES.items():
        (folder / "srt" / "models" / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path / "engine"))
    monkeypatch.setattr(model_classes, "installed_version", lambda: "0.5.23")


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("architectures", "name", "way"),
    [
        (["LlamaForCausalLM"], "LlamaForCausalLM", "hook"),
        (["Phi3ForCausalLM"], "Phi3ForCausalLM", "hook"),
        (["MistralForCausalLM"], "MistralForCausalLM", "hook"),
        (["Qwen2ForCausalLM"], "Qwen2ForCausalLM", "patch"),
        (["Qwen3VLForConditionalGeneration"], "Qwen3VLForConditionalGeneration", "patch"),
        (["Qwen3_5ForConditionalGeneration"], "Qwen3_5ForConditionalGeneration", "hook"),
        (["Olmo2ForCausalLM"], "Olmo2ForCausalLM", "none"),
        (["LostForCausalLM"], "", "none"),
        (["LostForCausalLM", "LlamaForCausalLM"], "LlamaForCausalLM", "hook"),
        ([], "", "none"),
    ],
)
def test_a_class_is_found_by_its_entry_and_its_methods_by_their_lineage(architectures, name, way):
    found = served_class({"architectures": architectures})
    assert found is not None
    assert (name, way) == (found.name, found.way)
    assert "sglang" not in sys.modules


@pytest.mark.usefixtures("sglang")
def test_a_plan_says_how_a_target_is_captured_and_refuses_one_that_is_not():
    check_config(LLAMA, OPTIONS)
    assert "SGLang 0.5.23 captures and serves it as its LlamaForCausalLM, by its own hook" == capture_note(LLAMA)
    patched = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert "by a method that dflow adds" in str(capture_note(patched))
    uncompared = str(capture_note(LLAMA | {"model_type": "iquestcoder"}))
    assert "not compared with transformers yet; to compare them: dflow doctor FILE --backends" in uncompared
    with pytest.raises(
        DataError,
        match=r"^the target's model_type is olmo2: SGLang 0.5.23 keeps no hidden states of layers in its "
        r'Olmo2ForCausalLM, so it serves no draft for it: use backend = "huggingface"$',
    ):
        check_config(LLAMA | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}, OPTIONS)
    with pytest.raises(
        DataError,
        match=r'the target \(llama\) has a vision tower, of which only .* run in SGLang: use backend = "huggingface"',
    ):
        check_config(LLAMA | {"vision_config": {"depth": 2}}, OPTIONS)


BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
ONE_SCALE = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("architecture", "loses"),
    [
        ("LlamaForCausalLM", True),
        ("Phi3ForCausalLM", True),
        ("MistralForCausalLM", True),
        ("Qwen2ForCausalLM", False),
        ("Qwen3_5ForConditionalGeneration", False),
    ],
)
def test_fp8_blocks_are_refused_for_a_class_that_loses_their_scales_with_what_remains(architecture, loses):
    config = LLAMA | {"architectures": [architecture]}
    assert not_run(config) is None
    assert not_run(config | ONE_SCALE) is None
    options = evolve(OPTIONS, dtype="bfloat16")
    if not loses:
        check_config(config | BLOCKS, options)
        return
    with pytest.raises(
        DataError,
        match=r"^the target's model_type is llama, with scales of FP8 blocks \(weight_scale_inv\), which SGLang 0.5.23 "
        rf"does not load in its {architecture}, so its states are no numbers; it runs the checkpoint that this one was "
        r'made from: use backend = "huggingface"$',
    ):
        check_config(config | BLOCKS, options)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("architecture", "text", "loses"),
    [
        ("SeeingForConditionalGeneration", {"model_type": "llama"}, True),
        ("SeeingForConditionalGeneration", {"model_type": "other", "architectures": ["MistralForCausalLM"]}, True),
        ("SeeingForConditionalGeneration", {"model_type": "qwen2"}, False),
        ("SeeingForConditionalGeneration", None, False),
        ("LoadingForConditionalGeneration", {"model_type": "llama"}, False),
    ],
)
def test_fp8_blocks_are_refused_for_a_wrapper_that_loads_its_text_by_a_class_that_loses_their_scales(
    architecture, text, loses
):
    config = {"model_type": "seeing", "architectures": [architecture], "text_config": text}
    assert unserved(config) is None
    said = unserved(config | BLOCKS)
    assert (said is not None) is loses
    if said is not None:
        assert f"does not load in its {architecture}, so its states are no numbers" in said


@pytest.mark.usefixtures("sglang")
def test_the_gate_says_which_class_serves_the_target_and_a_plan_refuses_to_require_one_that_does_not():
    gate = CheckExport(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), report=Ref("d"))
    olmo = LLAMA | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    assert "captures and serves it as its LlamaForCausalLM" in engine_sentence(gate, LLAMA)
    assert "so it serves no draft for it" in engine_sentence(gate, olmo)
    assert "was not checked" in engine_sentence(evolve(gate, live="off"), olmo)
    target = TargetStated(config=olmo)
    draft_only = {"draft": None, "report": None, "target": target, "tokens": None}
    assert {} == conflicts(gate, draft_only)
    (mistake,) = conflicts(evolve(gate, live="required"), draft_only).values()
    assert mistake.startswith("the target's model_type is olmo2: SGLang 0.5.23 keeps no hidden states of layers")
    assert mistake.endswith('; "auto" skips the stage')
    seeing = TargetStated(config=LLAMA | {"vision_config": {"depth": 2}})
    (mistake,) = conflicts(evolve(gate, live="required"), draft_only | {"target": seeing}).values()
    assert "the target (llama) has a vision tower" in mistake
    assert {} == conflicts(gate, draft_only | {"target": seeing})
    assert "the target (llama) has a vision tower" in engine_sentence(gate, seeing.config)


@pytest.mark.usefixtures("sglang")
def test_only_the_card_of_a_target_that_is_known_to_be_served_has_the_tag_of_sglang():
    gate = CheckExport(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), report=Ref("d"))
    olmo = LLAMA | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    assert serves_target(gate, LLAMA)
    assert not serves_target(evolve(gate, live="off"), LLAMA)
    assert not serves_target(gate, olmo)
    assert not serves_target(gate, LLAMA | {"vision_config": {"depth": 2}})
    card = "---\ntags:\n- dflash\n- draft-model\n---\n\n- draft-model\n"
    tagged = "---\ntags:\n- dflash\n- draft-model\n- sglang\n---\n\n- draft-model\n"
    assert tagged == with_served_tag(card) == with_served_tag(tagged)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "SGLang 0.5.23 captures and serves it as its LlamaForCausalLM"),
        (
            {"architectures": ["Olmo2ForCausalLM"]},
            "SGLang 0.5.23 keeps no hidden states of layers in its Olmo2ForCausalLM, so",
        ),
        ({"vision_config": {"depth": 2}}, "the target (llama) has a vision tower, of which only Qwen's are run"),
    ],
)
def test_init_says_of_the_target_itself_whether_sglang_serves_it(tmp_path, change, said):
    checkpoint = any_checkpoint("llama", tmp_path / "llama")
    target = evolve(read_target(str(checkpoint)), config=LLAMA | change)
    (line,) = about_serving(target)
    assert line.startswith(f"target: {said}")


def test_init_says_of_a_target_that_vllm_serves_no_draft_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(model_classes, "models_folder", lambda: None)
    target = read_target(str(any_checkpoint("llama", tmp_path / "llama")))
    assert ["target: whether SGLang serves it is read from the installed one, and none is here (docs/targets.md)"] == (
        about_serving(target)
    )
    lines = about_serving(evolve(target, config=LLAMA | {"model_type": "lfm2"}))
    assert 2 == len(lines) and lines[1].startswith("target: vLLM serves no draft for a target of the type lfm2, whose")


def test_without_sglang_nothing_is_said_of_its_classes(monkeypatch):
    monkeypatch.setattr(model_classes, "models_folder", lambda: None)
    assert served_class(LLAMA) is None
    assert capture_note(LLAMA) is None
    check_config(LLAMA, OPTIONS)
