"""Drafts of others, written by hand and by their own code, as their published classes compute them and as dflow does
once they are imported; and dflow's exports, as the classes of z-lab and speculators compute them.

Skipped where a class is not installed: ModelOpt is beside dflow, `make test-vllm` installs z-lab's and speculators'.
SpecForge and DeepSpec need other versions of libraries than dflow, or are on no index; their sources on PYTHONPATH are
enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published_drafts
import pytest
import torch
from class_comparison import assert_equal, blocks, largest_difference
from draft_forms import DFLASH2, FORMS, LLAMA3, OF_TENSORS, SLIDING, YARN, tensors_of, write_form
from published_drafts import ENDS_OF_SPECULATORS
from safetensors.torch import save_file
from saved_drafts import SAVED
from speculators_cases import SHAPES, written
from test_load_draft import PLAIN_SHAPE, load, target  # noqa: F401 (a fixture)

from ops.artifacts import Draft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.dflash2.config import Dflash2

# Read otherwise than by z-lab's class, on purpose: a share of the heads that engines honour; a window by ModelOpt's own
# keys, which it does not read; and those that it cannot load.
NOT_BY_Z_LAB = {
    "z-lab, a partial rotary of the training",
    "z-lab, a partial rotary with yarn",
    "z-lab, rope by kind of layer, all the same",
    "ModelOpt, windows",
    "ModelOpt, windows by is_causal",
    "z-lab, no num_target_layers",
    "z-lab, ids and num_target_layers left open",
}
CLASSES = {
    "SpecForge": published_drafts.specforge,
    "DeepSpec": published_drafts.deepspec,
    "ModelOpt": published_drafts.modelopt,
}
NOT_IN_Z_LAB = ("DSpark", "LiLiCorr")  # of which its class computes the plain part only; vLLM's has both
BY_Z_LAB = [
    name
    for name, form in FORMS.items()
    if form.publisher not in ("speculators", "DeepSpec")
    and name not in NOT_BY_Z_LAB
    and not any(algorithm in name for algorithm in NOT_IN_Z_LAB)
]


@pytest.mark.parametrize("name", BY_Z_LAB)
def test_z_labs_class_computes_what_is_imported(name, target, tmp_path):  # noqa: F811
    form = FORMS[name]
    write_form(form, tmp_path / "source", target.path)
    made = load(tmp_path / "stage", tmp_path / "source", target, **form.fields)
    assert_equal(published_drafts.z_lab(tmp_path / "source"), made)


@pytest.mark.parametrize("name", [name for name in FORMS if name.split(",")[0] in CLASSES and "windows" not in name])
def test_the_publishers_class_computes_what_is_imported(name, target, tmp_path):  # noqa: F811
    form = FORMS[name]
    write_form(form, tmp_path / "source", target.path)
    made = load(tmp_path / "stage", tmp_path / "source", target, **form.fields)
    assert_equal(CLASSES[name.split(",")[0]](tmp_path / "source"), made)


@pytest.mark.parametrize(
    "name", [name for name, form in FORMS.items() if form.publisher == "speculators" and "sliding" not in name]
)
def test_the_class_of_speculators_computes_what_is_imported(name, target, tmp_path):  # noqa: F811
    form = FORMS[name]
    write_form(form, tmp_path / "source", target.path)
    made = load(tmp_path / "stage", tmp_path / "source", target)
    assert_equal(published_drafts.speculators(form.config, tmp_path / "source"), made)


@pytest.mark.parametrize("name", SAVED)
def test_what_a_publishers_own_code_saves_is_read_as_its_class_computes_it(name, target, tmp_path):  # noqa: F811
    published = SAVED[name](tmp_path / "source", target.path)
    assert_equal(published, load(tmp_path / "stage", tmp_path / "source", target))


def export(folder: Path, **shape: Any) -> Draft:
    """A serving directory of random weights."""
    folder.mkdir()
    write_json(folder / "config.json", to_serving(DraftConfig(**PLAIN_SHAPE | shape)))
    tensors = tensors_of(**{name: shape[name] for name in OF_TENSORS if name in shape})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Draft(path=folder, digest="")


EXPORTS = SHAPES | {
    "a sliding and a full layer": {"layer_types": SLIDING["layer_types"], "sliding_window": 6},
    "DFlash2": DFLASH2,
    "DFlash2 of three taps": {"algorithm": Dflash2(taps=3, group=2, rank=8, candidates=8)},
}


@pytest.mark.parametrize("name", EXPORTS)
def test_z_labs_class_computes_what_is_exported(name, tmp_path):
    made = export(tmp_path / "export", **EXPORTS[name])
    assert_equal(published_drafts.z_lab(made.path), made)


def test_z_labs_class_rotates_whole_heads_where_an_export_rotates_a_part(tmp_path):
    """So partial_rotary_factor is a decision of load_draft's user, and 1 in every training of dflow."""
    part = export(tmp_path / "part", partial_rotary_factor=0.5)
    assert largest_difference(*blocks(published_drafts.z_lab(part.path), part, torch.float32)) > 0.01
    assert_equal(published_drafts.z_lab(part.path), export(tmp_path / "whole"))


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_z_labs_class_does_not_run_where_a_scaled_rope_rotates_a_part(scaling, tmp_path):
    made = export(tmp_path / "export", partial_rotary_factor=0.5, rope_scaling=scaling)
    with pytest.raises(RuntimeError, match="The size of tensor a"):
        blocks(published_drafts.z_lab(made.path), made, torch.float32)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "windows"])
def test_the_class_of_speculators_computes_what_is_exported(name, target, tmp_path):  # noqa: F811
    pytest.importorskip("speculators", reason="not installed: speculators")
    from speculators import SpeculatorModel
    from speculators.models.dflash import DFlashDraftModel

    config, tensors = written(tmp_path / "export", **SHAPES[name])
    model = SpeculatorModel.from_pretrained(str(tmp_path / "export" / "speculators"))
    assert isinstance(model, DFlashDraftModel)
    loaded = model.state_dict()
    assert [] == [name for name, tensor in tensors.items() if not torch.equal(tensor, loaded[name])]
    assert {name.split(".")[0] for name in loaded.keys() - tensors.keys()} <= ENDS_OF_SPECULATORS
    settings = model.config
    assert (config.block_size, False) == (settings.block_size, settings.sample_from_anchor)
    assert config.block_size - 1 == settings.speculators_config.proposal_methods[0].speculative_tokens
    settings.transformer_layer_config._attn_implementation = "eager"
    made = load(tmp_path / "stage", tmp_path / "export" / "speculators", target)
    assert_equal(published_drafts.speculators_model(model), made)


@pytest.mark.parametrize("name", SHAPES)
def test_what_speculators_saves_again_is_what_was_exported(name, tmp_path):
    """Nothing that is written means something else to its class, or is dropped by it."""
    pytest.importorskip("speculators", reason="not installed: speculators")
    from speculators import SpeculatorModelConfig

    written(tmp_path / "export", **SHAPES[name])
    directory = tmp_path / "export" / "speculators"
    SpeculatorModelConfig.from_pretrained(str(directory)).save_pretrained(str(tmp_path / "again"))
    exported, again = (read_json(folder / "config.json") for folder in (directory, tmp_path / "again"))
    assert exported == within(exported, again)


def within(part, whole):
    """The part of `whole` at the keys of `part`."""
    if isinstance(part, dict):
        return {key: within(value, whole[key]) for key, value in part.items()}
    if isinstance(part, list) and len(part) == len(whole):
        return [within(one, other) for one, other in zip(part, whole, strict=True)]
    return whole
