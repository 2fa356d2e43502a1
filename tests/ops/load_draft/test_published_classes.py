"""The forms of others' drafts, as their published classes compute them and as dflow does once they are imported; and
dflow's export in speculators' format, as its class computes it.

Skipped where a class is not installed: pip install --no-deps dflash==0.1.0 speculators==0.9.0
hs-connectors==0.9.0, and openai loguru pydantic-settings beside them, with what they need.
"""

from __future__ import annotations

import pytest
import torch
from draft_chain import HIDDEN
from draft_forms import FORMS, write_form
from safetensors.torch import load_file
from speculators_cases import SHAPES, written
from test_load_draft import IDS, MASK, load, target  # noqa: F401 (a fixture)

from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.load import load_draft as load_serving

CONTEXT, WITHIN = 19, 2e-6
# Read otherwise than by the class, on purpose: a share of the heads that engines honour; a window by ModelOpt's own
# keys, which it does not read; and those that it cannot load.
NOT_BY_CLASS = {
    "z-lab, a partial rotary of the training",
    "z-lab, rope by kind of layer, all the same",
    "ModelOpt, windows",
    "ModelOpt, windows by is_causal",
    "z-lab, no num_target_layers",
    "z-lab, ids and num_target_layers left open",
}


def inputs(layers: int = 8) -> tuple[dict[int, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Features by layer, and the embeddings of the anchor and of the mask token."""
    generator = torch.Generator().manual_seed(3)
    features = {layer: torch.randn(CONTEXT, HIDDEN, generator=generator) for layer in range(layers)}
    anchor, mask = torch.randn(2, HIDDEN, generator=generator)
    return features, anchor, mask


def ours(made) -> torch.Tensor:
    """Hidden states of slots 1.. by dflow."""
    model = load_serving(made.path)
    features, anchor, mask = inputs()
    joined = torch.cat([features[layer] for layer in model.config.target_layer_ids], dim=1)
    with torch.no_grad():
        return model.propose(anchor, mask, model.context_kv(joined, torch.arange(CONTEXT)))


def largest_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    assert expected.shape == found.shape
    return float((expected - found).abs().max())


@pytest.mark.parametrize(
    "name", [name for name, form in FORMS.items() if form.publisher != "speculators" and name not in NOT_BY_CLASS]
)
def test_z_labs_class_computes_what_is_imported(name, target, tmp_path):  # noqa: F811
    dflash = pytest.importorskip("dflash", reason="not installed: dflash")
    form = FORMS[name]
    write_form(form, tmp_path / "source", target.path)
    found = ours(load(tmp_path / "stage", tmp_path / "source", target, **form.fields))
    model, loading = dflash.DFlashDraftModel.from_pretrained(
        tmp_path / "source", dtype=torch.float32, output_loading_info=True
    )
    if loading["missing_keys"]:
        pytest.skip(f"the class does not load this form: {sorted(loading['missing_keys'])[:3]}")
    features, anchor, mask = inputs()
    block = torch.stack([anchor, *[mask] * len(found)])
    with torch.no_grad():
        expected = model.eval()(
            target_hidden=torch.cat([features[layer] for layer in model.target_layer_ids], dim=1)[None],
            noise_embedding=block[None],
            position_ids=torch.arange(CONTEXT + len(block))[None],
        )[0, 1:]
    difference = largest_difference(expected, found)
    print(f"largest difference: {difference:.1e}")
    assert difference <= WITHIN


@pytest.mark.parametrize(
    "name", [name for name, form in FORMS.items() if form.publisher == "speculators" and "sliding" not in name]
)
def test_the_class_of_speculators_computes_what_is_imported(name, target, tmp_path):  # noqa: F811
    pytest.importorskip("speculators", reason="not installed: speculators")
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    form = FORMS[name]
    write_form(form, tmp_path / "source", target.path)
    made = load(tmp_path / "stage", tmp_path / "source", target)
    found = ours(made)
    config = DFlashSpeculatorConfig(**{key: value for key, value in form.config.items() if key != "auto_map"})
    config.speculators_config.verifier.name_or_path = None  # nothing is asked of the hub
    config.transformer_layer_config._attn_implementation = "eager"
    model = DFlashDraftModel(config)
    state = load_file(tmp_path / "source" / "model.safetensors")
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert [] == unexpected
    assert {name.split(".")[0] for name in missing} <= ENDS_OF_SPECULATORS
    assert (list(IDS), MASK) == (sorted(layer - 1 for layer in config.aux_hidden_state_layer_ids), config.mask_token_id)
    difference = largest_difference(by_speculators(model, len(found)), found)
    print(f"largest difference: {difference:.1e}")
    assert difference <= WITHIN


ENDS_OF_SPECULATORS = {"embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"}  # the target's


def by_speculators(model, proposals: int) -> torch.Tensor:
    """Hidden states of slots 1.. by speculators' class."""
    features, anchor, mask = inputs()
    # Its feature k is the input of the target's layer k.
    joined = torch.cat([features[layer - 1] for layer in model.config.aux_hidden_state_layer_ids], dim=1)[None]
    block = torch.stack([anchor, *[mask] * proposals])[None]
    positions = torch.arange(CONTEXT + block.shape[1])[None]
    with torch.no_grad():
        context = model.hidden_norm(model.fc(joined))
        rotation = model.rotary_emb(context, positions)
        hidden = block
        for layer in model.eval().layers:
            hidden = layer(
                hidden_states=hidden,
                target_hidden=context,
                attention_mask=None,
                position_ids=positions,
                use_cache=False,
                position_embeddings=rotation,
            )
        return model.norm(hidden)[0, 1:]


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
    found = ours(load(tmp_path / "stage", tmp_path / "export" / "speculators", target))
    difference = largest_difference(by_speculators(model, len(found)), found)
    print(f"largest difference: {difference:.1e}")
    assert difference <= WITHIN


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
