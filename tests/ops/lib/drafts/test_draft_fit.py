"""A draft that does not fit its target, or whose files are damaged, is refused in words before anything is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from evaluate_cases import make_draft, run_evaluate, small_draft

from dsl.errors import ConfigError, DataError
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import check_draft_fits, to_serving, unfit_fields
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.target.model import Target

OTHERS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"hidden_size": 64}, {"hidden_size": "64, and the target's is 128"}),
    ({"vocab_size": 800}, {"vocab_size": "800, and the target's is 600"}),
    ({"num_target_layers": 6, "target_layer_ids": (1, 3)}, {"num_target_layers": "6, and the target's is 8"}),
    (
        {"num_target_layers": 12, "target_layer_ids": (1, 7)},
        {
            "num_target_layers": "12, and the target's is 8",
            "target_layer_ids": "[1, 7], and the target has 0..6 to read",
        },
    ),
]


@pytest.fixture(scope="module")
def loaded(target) -> Target:
    return Target.load(target)


@pytest.mark.parametrize(("changed", "wrong"), OTHERS)
def test_each_field_that_does_not_fit_the_target_is_named_and_what_to_do(loaded, changed, wrong):
    other = evolve(small_draft(loaded), **changed)
    assert wrong == unfit_fields(other, loaded.info)
    with pytest.raises(DataError, match=r"does not fit the target: .*; give train_dflash, export_draft and evaluate"):
        check_draft_fits(other, loaded.info)


def test_a_draft_of_the_target_s_shape_fits(loaded):
    fits = small_draft(loaded)
    assert {} == unfit_fields(fits, loaded.info) == unfit_fields(evolve(fits, target_layer_ids=(0, 6)), loaded.info)
    check_draft_fits(fits, loaded.info)


@pytest.mark.parametrize(("changed", "wrong"), OTHERS)
def test_an_evaluation_refuses_a_draft_of_another_target(loaded, target, tokens, tmp_path, changed, wrong):
    draft = make_draft(evolve(small_draft(loaded), **changed), tmp_path)
    with pytest.raises(DataError, match="the draft does not fit the target: ") as caught:
        run_evaluate(tmp_path / "eval", draft, target, tokens)
    assert [] == [name for name, what in wrong.items() if f"{name} {what}" not in str(caught.value)]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"", "model.safetensors is damaged: "),
        ("model.safetensors", 200, "model.safetensors is damaged: "),
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", r"config.json:1:2: not valid JSON: "),
        ("config.json", b"[]", "config.json: not a JSON object but a list"),
        ("config.json", b'{"a": "\xff"}', "config.json: not valid UTF-8: "),
    ],
)
def test_damaged_files_of_a_draft_are_named(loaded, tmp_path: Path, name, content, told):
    file = make_draft(small_draft(loaded), tmp_path).path / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(whole[:content] if isinstance(content, int) else content)
    with pytest.raises(DataError, match=told):
        load_draft(tmp_path)


def test_a_mask_token_of_null_is_named_where_the_draft_is_evaluated(loaded, target, tokens, tmp_path):
    draft = make_draft(small_draft(loaded), tmp_path)
    serving = read_json(draft.path / "config.json")
    assert serving == to_serving(small_draft(loaded))
    serving["dflash_config"]["mask_token_id"] = None
    write_json(draft.path / "config.json", serving)
    with pytest.raises(ConfigError, match=r"dflash_config.mask_token_id: must be a number, got null"):
        run_evaluate(tmp_path / "eval", draft, target, tokens)
