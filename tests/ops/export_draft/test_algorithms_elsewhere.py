"""Exports of DFlash2 and DSpark as the published classes read them: the same tensors, hidden states and proposals.

Skipped where a class is not installed: pip install --no-deps dflash==0.1.0 speculators==0.9.0
hs-connectors==0.9.0, and openai loguru pydantic-settings beside them, with what they need.
"""

from __future__ import annotations

import pytest
import torch
from elsewhere_cases import BEYOND_PLAIN, CONTEXT, asked, proposed, written_draft

from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.speculators_contract import speculators_mistakes
from ops.lib.drafts.backbone.speculators_format import Verifier, to_speculators

WITHIN = 1e-5
OF_THE_TARGET = {"embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"}


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
    folder, weights = tmp_path / "export" / "speculators", tmp_path / "export" / "model.safetensors"
    expected = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
    assert expected.items() <= read_json(folder / "config.json").items()
    verifier = Verifier(None, ("Qwen3ForCausalLM",))
    assert [] == speculators_mistakes(folder, draft.config, "float32", verifier, weights)
    write_json(folder / "config.json", to_speculators(draft.config, "float32", verifier) | {"selector_top_k": 4})
    (mistake,) = speculators_mistakes(folder, draft.config, "float32", verifier, weights)
    assert "speculators/config.json: selector_top_k must be 5, got 4" == mistake.what


@pytest.mark.parametrize("name", BEYOND_PLAIN)
def test_speculators_class_computes_and_proposes_what_dflow_does(tmp_path, name):
    pytest.importorskip("speculators", reason="not installed: speculators")
    from speculators import SpeculatorModel

    draft, given = written_draft(tmp_path / "export", BEYOND_PLAIN[name]), asked()
    model = SpeculatorModel.from_pretrained(str(tmp_path / "export" / "speculators")).eval()
    loaded = model.state_dict()
    assert [] == [name for name, tensor in draft.state_dict().items() if not torch.equal(tensor, loaded[name])]
    assert {name.split(".")[0] for name in loaded.keys() - draft.state_dict().keys()} <= OF_THE_TARGET
    hidden, tokens = proposed(draft, given)
    found = by_speculators(model, given)[0 if model.config.sample_from_anchor else 1 :]
    print(f"largest difference: {(hidden - found).abs().max():.1e}")
    torch.testing.assert_close(hidden, found, atol=WITHIN, rtol=0)
    assert tokens == tokens_by_speculators(model, found, given)
    assert tokens != (hidden @ given.head_VM.T).argmax(-1).tolist()


@torch.no_grad()
def by_speculators(model, given) -> torch.Tensor:
    """Hidden states of all slots by speculators' class."""
    model.config.transformer_layer_config._attn_implementation = "eager"
    # Its feature k is the input of the target's layer k.
    joined = torch.cat([given.features[layer - 1] for layer in model.config.aux_hidden_state_layer_ids], dim=1)[None]
    ids = [given.anchor] + [model.config.mask_token_id] * (model.config.block_size - 1)
    hidden = given.embed_VM[ids][None]
    positions = torch.arange(CONTEXT + len(ids))[None]
    context = model.hidden_norm(model.fc(joined))
    for layer in model.layers:
        hidden = layer(
            hidden_states=hidden,
            target_hidden=context,
            attention_mask=None,
            position_ids=positions,
            use_cache=False,
            position_embeddings=model.rotary_emb(context, positions),
        )
    return model.norm(hidden)[0]


@torch.no_grad()
def tokens_by_speculators(model, hidden_DM, given) -> list[int]:
    """Greedily, with its own heads."""
    tokens = [given.anchor]
    for hidden_M in hidden_DM:
        logits, before = (hidden_M @ given.head_VM.T)[None, None], torch.tensor([[tokens[-1]]])
        if hasattr(model, "candidate_selector"):
            candidates = logits.topk(model.candidate_selector.top_k, dim=-1).indices
            scores = model.candidate_selector.score_candidates(logits, hidden_M[None, None], before, candidates)
            tokens.append(int(candidates[0, 0, scores[0, 0].argmax()]))
        else:
            bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden_M[None, None])
            tokens.append(int((logits + bias).argmax()))
    return tokens[1:]


@pytest.mark.parametrize("name", [name for name in BEYOND_PLAIN if name.startswith("dflash2")])
def test_z_labs_class_computes_and_proposes_what_dflow_does(tmp_path, name):
    pytest.importorskip("dflash", reason="not installed: dflash")
    from dflash.model import DFlash2DraftModel

    draft, given = written_draft(tmp_path / "export", BEYOND_PLAIN[name]), asked()
    model, told = DFlash2DraftModel.from_pretrained(tmp_path / "export", dtype=torch.float32, output_loading_info=True)
    assert [] == sorted(told["missing_keys"]) == sorted(told["unexpected_keys"]) == sorted(told["mismatched_keys"])
    hidden, tokens = proposed(draft, given)
    ids = [given.anchor] + [model.mask_token_id] * (model.block_size - 1)
    with torch.no_grad():
        found = model.eval()(
            target_hidden=torch.cat([given.features[layer] for layer in model.target_layer_ids], dim=1)[None],
            noise_embedding=given.embed_VM[ids][None],
            position_ids=torch.arange(CONTEXT + len(ids))[None],
        )[:, 1:]
        path, _, _ = model.propose(found, torch.tensor([given.anchor]), lambda states: states @ given.head_VM.T, 0)
    print(f"largest difference: {(hidden - found[0]).abs().max():.1e}")
    torch.testing.assert_close(hidden, found[0], atol=WITHIN, rtol=0)
    assert tokens == path[0].tolist()


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
