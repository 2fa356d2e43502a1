"""Exports of DFlash2 and DSpark as the published classes read them: the same tensors, hidden states and proposals.

Of speculators 0.9.0 and of z-lab's dflash 0.1.0; a test is skipped where its class is not installed.
"""

from __future__ import annotations

import pytest
import torch
from elsewhere_cases import BEYOND_PLAIN, CONTEXT, asked, proposed, written_draft

from ops.lib.data.files import read_json

WITHIN = 1e-5
OF_THE_TARGET = {"embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"}


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
