"""Speculators' format for DFlash2 and DSpark: how blocks are counted, and which fields there are."""

from __future__ import annotations

import pytest
from elsewhere_cases import BEYOND_PLAIN, written_draft

from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.contract import REWRITE
from ops.lib.drafts.backbone.speculators import Verifier, speculators_mistakes, to_speculators


@pytest.mark.parametrize(
    ("name", "kind", "block", "speculative", "from_anchor"),
    [
        ("dflash2", "dflash2", 5, 4, False),
        ("dspark", "dspark", 4, 4, True),
        ("dspark, masks first", "dspark", 5, 4, False),
    ],
)
def test_blocks_are_counted_as_speculators_does(tmp_path, name, kind, block, speculative, from_anchor):
    written_draft(tmp_path / "export", BEYOND_PLAIN[name])
    config = read_json(tmp_path / "export" / "speculators" / "config.json")
    assert (kind, kind) == (config["speculators_model_type"], config["speculators_config"]["algorithm"])
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (block, speculative, from_anchor) == (
        config["block_size"],
        method["speculative_tokens"],
        config["sample_from_anchor"],
    )


def test_fields_of_an_algorithm_are_flat_and_wrong_ones_are_told(tmp_path):
    draft = written_draft(tmp_path / "export", BEYOND_PLAIN["dflash2"])
    path = tmp_path / "export" / "speculators" / "config.json"
    expected = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 8}
    assert expected.items() <= read_json(path).items()
    verifier = Verifier(None, ("Qwen3ForCausalLM",))
    assert [] == list(speculators_mistakes(read_json(path), draft.config, "float32", verifier))
    altered = to_speculators(draft.config, "float32", verifier) | {"selector_top_k": 4}
    (mistake,) = speculators_mistakes(altered, draft.config, "float32", verifier)
    effect = "silently computes another draft than the one that was trained: fewer tokens are accepted"
    assert str(mistake).splitlines() == [
        "speculators/config.json: selector_top_k must be 8, got 4",
        f"vLLM: {effect} ({REWRITE})",
    ]
