"""The draft's forward pass: what a block sees, RoPE, dtypes, and the config."""

import attrs
import pytest
import torch
from case_reader import hidden_of_blocks
from draft_chain import HIDDEN, VOCAB, tiny_config
from reference_draft import reference_block
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dsl.errors import ConfigError
from ops.lib.drafts.backbone.config import from_serving, to_serving
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.rope import rope_frequencies, rotate, rotation


def random_model(config, seed=0):
    model = DraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + (parameter.ndim == 1))
    return model.double()


def random_block(seed=0, length=12):
    """Features of one sample, and the embeddings of two anchors and of the mask token."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(length, 2 * HIDDEN, generator=generator).double()
    return features, *torch.randn(3, HIDDEN, generator=generator).double().split((2, 1))


@pytest.mark.parametrize("sliding", [False, True])
def test_a_block_in_training_equals_the_same_block_proposed_at_decoding(sliding):
    kinds = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3} if sliding else {}
    model = random_model(tiny_config(**kinds))
    features, anchors, (mask,) = random_block()
    trained = hidden_of_blocks(model, features, anchors, mask, [5, 9])
    for block, anchor in enumerate((5, 9)):
        # The context grows piece by piece, as tokens are accepted.
        positions = torch.arange(anchor)
        first, rest = (
            model.context_kv(features[:anchor][part], positions[part]) for part in (slice(2), slice(2, None))
        )
        kv = [(torch.cat((k, a), -2), torch.cat((v, b), -2)) for (k, v), (a, b) in zip(first, rest, strict=True)]
        proposed = model.propose(anchors[block], mask, kv)
        torch.testing.assert_close(proposed, trained[block, 1:], rtol=1e-10, atol=1e-12)


def test_the_anchors_own_feature_and_later_ones_are_invisible_and_the_one_before_is_not():
    model = random_model(tiny_config())
    features, anchors, (mask,) = random_block(1)
    before = hidden_of_blocks(model, features, anchors, mask, [5, 9])
    changed = features.clone()
    changed[5:] += 1
    after = hidden_of_blocks(model, changed, anchors, mask, [5, 9])
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])
    changed = features.clone()
    changed[4] += 1
    assert not torch.allclose(before[0], hidden_of_blocks(model, changed, anchors, mask, [5, 9])[0])


def test_blocks_do_not_see_each_other_and_slots_of_a_block_see_all_of_it():
    model = random_model(tiny_config())
    features, anchors, (mask,) = random_block(2)
    before = hidden_of_blocks(model, features, anchors, mask, [5, 6])
    changed = anchors.clone()
    changed[1] += 1
    after = hidden_of_blocks(model, features, changed, mask, [5, 6])
    assert torch.equal(before[0], after[0])
    assert all(not torch.allclose(before[1, k], after[1, k]) for k in range(4))


def test_a_block_at_the_very_start_sees_only_itself():
    config = tiny_config()
    model = random_model(config)
    features, anchors, (mask,) = random_block(3)
    hidden = hidden_of_blocks(model, features, anchors[:1], mask, [0])
    weights = dict(model.named_parameters())
    embeds = torch.stack([anchors[0], *[mask] * 3])
    expected = reference_block(to_serving(config), weights, torch.zeros(0, 2 * HIDDEN).double(), embeds, 0)
    torch.testing.assert_close(hidden[0], expected, rtol=1e-5, atol=1e-6)


def test_float32_master_weights_compute_in_the_dtype_of_the_inputs_and_get_float32_gradients():
    model = random_model(tiny_config()).float()
    features, anchors, (mask,) = (x.to(torch.bfloat16) for x in random_block())
    hidden = hidden_of_blocks(model, features, anchors, mask, [5, 9])
    hidden.float().square().sum().backward()
    assert hidden.dtype == torch.bfloat16
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    exact = hidden_of_blocks(model, features.float(), anchors.float(), mask.float(), [5, 9])
    assert (hidden.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
)
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rope_turns_heads_as_transformers_does(scaling, partial):
    """A part of a head as it turns a head of that size; the rest of it passes."""
    config = tiny_config(rope_scaling=scaling, partial_rotary_factor=partial)
    parameters, size = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}, int(8 * partial)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(hidden_size=HIDDEN, head_dim=size, max_position_embeddings=128, rope_parameters=parameters)
    )
    x_SHD = torch.randn(20, 3, 8)
    positions = torch.arange(40, 60)
    cos, sin = theirs(x_SHD, positions[None])
    part = x_SHD[..., :size].transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(part, part, cos, sin)
    frequencies, scale = rope_frequencies(config)
    turned = rotate(x_SHD, *rotation(frequencies, scale, positions, torch.float32))
    torch.testing.assert_close(turned[..., :size], expected[0].transpose(0, 1))
    assert torch.equal(x_SHD[..., size:], turned[..., size:])


def test_bfloat16_weights_keep_the_rope_frequencies_exact():
    model = DraftModel(tiny_config())
    exact = model.frequencies.clone()
    assert torch.equal(model.to(torch.bfloat16).frequencies, exact)


def test_the_serving_config_gives_the_draft_config_back():
    config = tiny_config(rope_scaling={"rope_type": "linear", "factor": 2.0}, partial_rotary_factor=0.5)
    assert from_serving(to_serving(config)) == config


def test_all_mistakes_of_a_draft_config_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        tiny_config(
            block_size=1,
            mask_token_id=VOCAB,
            target_layer_ids=(3, 1, 1),
            layer_types=("full_attention", "chunked_attention"),
            rope_scaling={"rope_type": "longrope"},
            num_attention_heads=3,
            partial_rotary_factor=0.1,
            positions="mrope",
        )
    fields = [line.strip().split(":")[0] for line in str(caught.value).splitlines()[1:]]
    assert fields == [
        "num_attention_heads",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "target_layer_ids",
        "layer_types",
        "rope_scaling",
        "partial_rotary_factor",
        "positions",
    ]


def test_a_serving_config_without_fields_names_them():
    data = to_serving(tiny_config())
    del data["head_dim"], data["dflash_config"]["mask_token_id"]
    with pytest.raises(ConfigError, match=r"head_dim: is missing\n  dflash_config\.mask_token_id: is missing"):
        from_serving(data)


def test_initial_weights_depend_on_the_seed_alone():
    config = tiny_config()
    drafts = []
    for seed in (0, 0, 1):
        torch.rand(3)  # the global generator must not matter
        model = DraftModel(config)
        model.initialise(seed)
        drafts.append(model.fc.weight.detach().clone())
    assert torch.equal(drafts[0], drafts[1])
    assert not torch.equal(drafts[0], drafts[2])


def test_a_config_with_attention_bias_gives_biases():
    names = DraftModel(attrs.evolve(tiny_config(), attention_bias=True)).state_dict()
    assert "layers.1.self_attn.o_proj.bias" in names
