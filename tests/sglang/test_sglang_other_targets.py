"""States of targets beyond Qwen, captured by SGLang's own model code, against those of transformers.

And what SGLang's source says of its classes, against the classes: the reading decides what plan, load and gate say.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Mapping

import pytest
import sglang.srt.configs as sglang_configs
from any_targets import any_checkpoint
from capture_cases import FAMILIES
from family_checkpoints import token_sample
from other_targets import CASES, other_checkpoint
from sglang.srt.models.registry import ModelRegistry
from torch import Tensor

from dsl.errors import DataError
from dsl.imports import PROJECT
from dsl.op import Ref
from ops.capture_targets.backend import forward_batch
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.sglang_targets import COMPARED, capture_note, check_config
from ops.lib.sglang.layers import WITHOUT_RESIDUAL
from ops.lib.sglang.model_classes import EAGLE_SETTER, SETTER, architectures, models_folder, served_class
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.sglang.serve_command import CONVOLUTION_TYPES, PATCHED_CLASSES, PATCHED_TYPES
from ops.lib.sglang.version import installed_version
from ops.lib.target.model import Target, describe_target, read_config
from ops.lib.vision import config_classes
from ops.lib.vision.processor import load_processor

LAYER_IDS = (0, 1, 3)
TEXTS = {"a short text": ("What is it?", "It is red."), "a long text": ("And now, what can one see there?", "A dog.")}
KINDS = [pytest.param(kind, marks=pytest.mark.slow if case.slow else ()) for kind, case in CASES.items()]
OPTIONS = CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), backend="sglang")


def distance(ours: Tensor, theirs: Tensor, width: int) -> float:
    """The largest distance of a token's state of one layer, relative to its norm."""
    a, b = (states.view(len(states), -1, width) for states in (ours, theirs))
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


@pytest.mark.parametrize("kind", KINDS)
def test_states_equal_those_of_transformers_and_the_layer_before_would_be_seen(kind, tmp_path, show):
    checkpoint, tolerance = other_checkpoint(kind, tmp_path / kind), CASES[kind].tolerance
    config = read_config(checkpoint)
    check_config(config, OPTIONS)
    assert str(capture_note(config)).startswith(f"SGLang {installed_version()} captures and serves it as its ")
    processor = load_processor(str(checkpoint))
    samples = [token_sample(processor, *text, name=name) for name, text in TEXTS.items()]
    ours = Target.from_directory(checkpoint, describe_target(checkpoint, 5, (2,)))
    expected = [forward_batch(ours, [sample], LAYER_IDS, final_hidden=True) for sample in samples]
    features, finals = [each[0][0] for each in expected], [each[1][0] for each in expected]
    with SglangRuntime.start(checkpoint, device="cpu", dtype="float32", pool_tokens=512, context_length=200) as runtime:
        assert served_class(config).name == type(runtime.model).__name__
        assert len(samples) == len(next(iter(runtime._passes(samples))))  # one batch
        together = runtime.states(samples, LAYER_IDS, final_hidden=True)
        before = runtime.capture(samples, [layer_id - 1 for layer_id in LAYER_IDS[1:]])
    width = ours.hidden_size
    difference = max(distance(one[0], each, width) for one, each in zip(together, features, strict=True))
    off = min(distance(one, each[:, width:], width) for one, each in zip(before, features, strict=True))
    of_final = max(distance(one[1], each, width) for one, each in zip(together, finals, strict=True))
    show(f"{kind}: {difference:.1e}, final {of_final:.1e}, tolerance {tolerance:.0e}; the layer before {off:.2f}")
    assert difference <= tolerance
    assert of_final <= tolerance
    assert off >= 100 * tolerance


def test_gemma_3s_own_setter_keeps_states_without_their_residual(tmp_path, show):
    """Why dflow's has the layers return sums: without that, the draft would silently be fed by something else."""
    checkpoint = other_checkpoint("gemma3_text", tmp_path / "gemma3")
    sample = token_sample(load_processor(str(checkpoint)), "What is it?", name="text")
    ours = Target.from_directory(checkpoint, describe_target(checkpoint, 5, (2,)))
    (expected,) = forward_batch(ours, [sample], LAYER_IDS)[0]
    with SglangRuntime.start(checkpoint, device="cpu", dtype="float32", pool_tokens=512, context_length=200) as runtime:
        assert type(runtime.model).__name__ in WITHOUT_RESIDUAL
        (right,) = runtime.capture([sample], LAYER_IDS)
        for hook in runtime.model._hooks_of_sums:
            hook.remove()
        runtime.model.set_eagle3_layers_to_capture(list(LAYER_IDS))
        with runtime.prepared([_request(runtime, sample)], _full()) as (_batch, forward_batch_of):
            wrong = runtime.runner.forward(forward_batch_of).logits_output.hidden_states
    assert distance(right, expected, ours.hidden_size) < 1e-5
    measured = distance(wrong, expected, ours.hidden_size)
    show(f"gemma3_text, without the residual: {measured:.2f}")
    assert measured > 0.5


def _request(runtime, sample):
    from ops.lib.sglang.requests import make_request

    return make_request(sample, sample.input_ids, runtime.vision)


def _full():
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    return CaptureHiddenMode.FULL


def test_every_text_target_that_is_said_to_be_compared_is_compared_here():
    of_qwen35 = {"qwen3_5_text", "qwen3_5_moe_text"}  # test_sglang_qwen35.py
    assert COMPARED == {*FAMILIES, *CASES, *of_qwen35}


def test_what_is_read_of_a_class_is_what_the_imported_class_has():
    """Of two wrappers too whose own method calls one that their decoder lacks, or has."""
    read = {name: served_class({"architectures": [name]}).way for name in architectures(models_folder())}
    imported = {name: ModelRegistry.models[name] for name in read if name in ModelRegistry.models}
    assert len(imported) > 200
    for name, found in imported.items():
        own = [has_by_itself(found, setter) for setter in (SETTER, EAGLE_SETTER)]
        if name in ("Qwen3VLForConditionalGeneration", "Cosmos3ForConditionalGeneration"):
            assert ("patch", True) == (read[name], own[0])
        else:
            assert read[name] == ("hook" if own[0] else "patch" if own[1] else "none"), name
        assert "hook" != read[name] or hasattr(found, "get_input_embeddings"), name  # which dflow adds to patched ones
    assert {"hook", "patch", "none"} == set(read.values())
    assert "hook" == read["Qwen3VLMoeForConditionalGeneration"] == read["MistralForCausalLM"]


def has_by_itself(found: type, name: str) -> bool:
    """Whether SGLang wrote the class with this method; a capture may have added one, or EAGLE-3's by this name."""
    method = getattr(found, name, None)
    return method is not None and method.__name__ == name and method.__module__.startswith("sglang.")


def types_kept_by(*ways: str) -> set[str]:
    """The types of transformers whose class in the installed SGLang keeps the inputs of layers in one of these ways."""
    return {
        kind
        for table in auto_tables()
        for kind, name in table.items()
        if served_class({"architectures": [name]}).way in ways
    }


def auto_tables() -> list[Mapping[str, str]]:
    """Type -> class of a language model and of one that sees, in transformers."""
    return [
        config_classes._auto_table("modeling_auto", name) for name in (config_classes.CAUSAL, config_classes.IMAGE_TEXT)
    ]


def test_the_types_that_need_dflows_launcher_are_those_that_the_installed_classes_lack_something_for():
    found = types_kept_by("patch")
    corrected = {"qwen3_5_text", "qwen3_5_moe_text"} if installed_version() == "0.5.21" else set()
    assert found | corrected == PATCHED_TYPES[installed_version()]


def test_all_other_classes_that_lack_something_are_listed_or_are_no_targets():
    lacking = {
        name for name in architectures(models_folder()) if served_class({"architectures": [name]}).way == "patch"
    }
    of_types = {name for table in auto_tables() for kind, name in table.items() if kind in types_kept_by("patch")}
    others = lacking - of_types
    drafts = {name for name in others if name.endswith(("MTP", "NextN", "Eagle"))}
    no_head, any_model = "EmbeddingGemmaModel", "MindSporeForCausalLM"
    assert others - drafts - {no_head, any_model} == PATCHED_CLASSES


def test_the_types_whose_convolution_state_has_a_dtype_are_those_of_the_installed_configs():
    """Of the served types that transformers has; SGLang's config of a type has the name of that of transformers."""
    keeping = {
        name
        for module in pkgutil.iter_modules(sglang_configs.__path__)
        for name, found in vars(importlib.import_module(f"{sglang_configs.__name__}.{module.name}")).items()
        if hasattr(found, "mamba2_cache_params")
    }
    served = types_kept_by("hook", "patch")
    names = config_classes._auto_table("auto_mappings", "CONFIG_MAPPING_NAMES")
    found = {kind for kind in served if names.get(kind) in keeping}
    wrappers = {"qwen3_5", "qwen3_5_moe"}  # of text models that keep one
    assert found | wrappers == CONVOLUTION_TYPES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Olmo2ForCausalLM"]}, r"keeps no hidden states of layers in its Olmo2ForCausalLM"),
        ({"architectures": ["OwnForCausalLM"]}, "has no model class of its own for it"),
        ({"architectures": None}, "has no model class of its own for it"),
        (
            {"vision_config": {"depth": 2}},
            r"\(llama\) has a vision tower, of which only Qwen's are run in SGLang",
        ),
    ],
)
def test_a_target_without_such_a_class_is_refused_with_the_other_backend(tmp_path, changes, reason):
    config = read_config(any_checkpoint("llama", tmp_path / "llama"))
    with pytest.raises(DataError, match=f'{reason}.*use backend = "huggingface"'):
        check_config(json.loads(json.dumps(config | changes)), OPTIONS)


def test_the_table_in_the_docs_is_that_of_the_installed_classes():
    text = (PROJECT / "docs" / "targets.md").read_text()
    rows = re.findall(r"^\| .*? \| `(\w+)` \| (hook|patch)[^|]* \|", text, re.MULTILINE)
    assert {kind for kind, _way in rows} == set(CASES)
    names = config_classes._auto_table("modeling_auto", config_classes.CAUSAL)
    assert dict(rows) == {kind: served_class({"architectures": [names[kind]]}).way for kind in CASES}
