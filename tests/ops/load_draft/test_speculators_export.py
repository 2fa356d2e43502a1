"""An export in speculators' format is read back as the draft that was exported."""

from __future__ import annotations

import pytest
import torch
from draft_forms import LAYERS
from safetensors.torch import load_file
from speculators_cases import SHAPES, written
from test_load_draft import load, target  # noqa: F401 (a fixture)

from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.load import load_draft as load_serving


@pytest.mark.parametrize("name", SHAPES)
def test_an_import_of_the_folder_is_the_same_draft(name, tmp_path, target):  # noqa: F811
    config, tensors = written(tmp_path / "export", **SHAPES[name])
    made = load(tmp_path / "stage", tmp_path / "export" / "speculators", target)
    own = load_serving(made.path)
    assert config == own.config
    found = load_file(made.path / "model.safetensors")
    assert tensors.keys() == found.keys()
    assert [] == [name for name, tensor in tensors.items() if not torch.equal(tensor, found[name])]
    imported = read_json(made.path / "config.json")["dflow"]["imported"]
    assert ("speculators", {"num_target_layers": LAYERS}) == (imported["publisher"], imported["assumed"])
