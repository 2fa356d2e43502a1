"""Drafts that a test damages, and what the gate says of them."""

from __future__ import annotations

import pytest
from gate_cases import check
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from ops.lib.data.files import read_json, write_json

RANDOM = "silently leaves a missing tensor with arbitrary values, and accepts about 1 token a step"
REWRITE = "write the export again"


def edit_config(inputs, change):
    path = inputs["draft"].path / "config.json"
    config = read_json(path)
    change(config)
    write_json(path, config)


def edit_tensors(inputs, change):
    path = inputs["draft"].path / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def mistakes(folder, inputs):
    """The mistakes that the gate reports, as (what, what SGLang does, remedy)."""
    with pytest.raises(DataError) as caught:
        check(folder, inputs)
    lines = str(caught.value).splitlines()[1:]
    found = [tuple(line.strip() for line in lines[start : start + 3]) for start in range(0, len(lines), 3)]
    assert {"SGLang", "what to do"} == {line.partition(":")[0] for mistake in found for line in mistake[1:]}
    return found
