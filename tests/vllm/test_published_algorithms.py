"""Exports of DFlash2 and DSpark as the published classes read them: the same tensors, hidden states and proposals.

Of speculators 0.9.0 and of z-lab's dflash 0.1.0; a test is skipped where its class is not installed.
"""

from __future__ import annotations

import published_drafts
import pytest
import torch
from class_comparison import assert_equal
from elsewhere_cases import BEYOND_PLAIN, asked, proposed, written_draft
from published_drafts import ENDS_OF_SPECULATORS

from ops.artifacts import Draft
from ops.lib.data.files import read_json


@pytest.mark.parametrize("name", BEYOND_PLAIN)
def test_speculators_class_computes_and_proposes_what_dflow_does(tmp_path, name):
    pytest.importorskip("speculators", reason="not installed: speculators")
    from speculators import SpeculatorModel

    draft, given = written_draft(tmp_path / "export", BEYOND_PLAIN[name]), asked()
    model = SpeculatorModel.from_pretrained(str(tmp_path / "export" / "speculators"))
    loaded = model.state_dict()
    assert [] == [name for name, tensor in draft.state_dict().items() if not torch.equal(tensor, loaded[name])]
    assert {name.split(".")[0] for name in loaded.keys() - draft.state_dict().keys()} <= ENDS_OF_SPECULATORS
    model.config.transformer_layer_config._attn_implementation = "eager"
    assert_equal(published_drafts.speculators_model(model), Draft(path=tmp_path / "export", digest=""))
    hidden, tokens = proposed(draft, given)
    assert tokens != (hidden @ given.head_VM.T).argmax(-1).tolist()


@pytest.mark.parametrize("name", [name for name in BEYOND_PLAIN if name.startswith("dflash2")])
def test_z_labs_class_computes_and_proposes_what_dflow_does(tmp_path, name):
    pytest.importorskip("dflash", reason="not installed: dflash")
    from dflash.model import DFlash2DraftModel

    written_draft(tmp_path / "export", BEYOND_PLAIN[name])
    _, loading = DFlash2DraftModel.from_pretrained(tmp_path / "export", output_loading_info=True)
    names = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert {name: [] for name in names} == {name: sorted(loading[name]) for name in names}
    assert_equal(published_drafts.z_lab(tmp_path / "export"), Draft(path=tmp_path / "export", digest=""))


@pytest.mark.parametrize("name", BEYOND_PLAIN)
def test_what_speculators_saves_again_is_what_was_exported(tmp_path, name):
    """Nothing that is written means something else to its class, or is dropped by it."""
    pytest.importorskip("speculators", reason="not installed: speculators")
    from speculators import SpeculatorModelConfig

    written_draft(tmp_path / "export", BEYOND_PLAIN[name])
    directory = tmp_path / "export" / "speculators"
    SpeculatorModelConfig.from_pretrained(str(directory)).save_pretrained(str(tmp_path / "again"))
    exported, again = (read_json(folder / "config.json") for folder in (directory, tmp_path / "again"))
    for field in exported.keys() - {"transformer_layer_config", "speculators_config"}:
        assert exported[field] == again[field]
