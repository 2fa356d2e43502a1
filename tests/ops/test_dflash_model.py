"""The draft's forward pass and gradients against the token-by-token reference in float64."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from draft_chain import HIDDEN, MASK, VOCAB, tiny_config
from reference_draft import reference_block
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dsl.errors import ConfigError
from ops.dflash.anchors import block_labels, block_tokens, block_weights, draw_anchors, slot_weights
from ops.dflash.config import from_serving, to_serving
from ops.dflash.loss import dflash_loss
from ops.dflash.model import DraftModel
from ops.dflash.rope import rope_frequencies, rotate, rotation


def random_model(config, seed=0):
    model = DraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 + (parameter.ndim == 1))
    return model.double()


def packed_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [7, 11, 9]
    masks = [torch.arange(length) >= 3 for length in lengths]
    masks[2][6] = False
    return {
        "lengths": lengths,
        "masks": masks,
        "ids": [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths],
        "features": [torch.randn(length, 2 * HIDDEN, generator=generator).double() for length in lengths],
        "anchors": [draw_anchors(mask, 3, seed=0, epoch=0, sample=i) for i, mask in enumerate(masks)],
        "embed": torch.randn(VOCAB, HIDDEN, generator=generator).double(),
        "head": torch.randn(VOCAB, HIDDEN, generator=generator).double(),
    }


def fast_loss(model, batch, weights_K):
    blocks = zip(batch["ids"], batch["anchors"], strict=True)
    K = len(weights_K)
    tokens = torch.cat([block_tokens(ids, anchors, K, MASK) for ids, anchors in blocks])
    blocks = zip(batch["ids"], batch["anchors"], strict=True)
    labels = torch.cat([block_labels(ids, anchors, K) for ids, anchors in blocks])
    blocks = zip(batch["masks"], batch["anchors"], strict=True)
    weights = torch.cat([slot_weights(mask, anchors, weights_K) for mask, anchors in blocks])
    features = torch.cat(batch["features"])
    hidden = model.forward_blocks(features, batch["lengths"], batch["embed"][tokens], batch["anchors"])
    chosen = weights > 0
    loss, _ = dflash_loss(hidden[chosen], batch["head"], labels[chosen], weights[chosen].double())
    return loss / weights.sum(dtype=torch.float64)


def slow_loss(config, weights, batch, weights_K):
    total, denominator = 0, 0
    for ids, mask, features, anchors in zip(
        batch["ids"], batch["masks"], batch["features"], batch["anchors"], strict=True
    ):
        for anchor in anchors.tolist():
            embeds = torch.stack([batch["embed"][int(ids[anchor])]] + [batch["embed"][MASK]] * (len(weights_K) - 1))
            hidden = reference_block(config, weights, features, embeds, anchor)
            for k in range(1, len(weights_K)):
                if anchor + k >= len(ids) or not mask[anchor + k]:
                    break
                logits = batch["head"] @ hidden[k]
                total = total + weights_K[k].double() * F.cross_entropy(logits[None], ids[anchor + k][None])
                denominator += float(weights_K[k])
    return total / denominator


@pytest.mark.parametrize("partial_rotary_factor", [1.0, 0.5])
def test_loss_and_all_gradients_equal_the_float64_reference(partial_rotary_factor):
    config = tiny_config(partial_rotary_factor=partial_rotary_factor)
    model, batch, weights_K = random_model(config), packed_batch(), block_weights(config.block_size)
    fast = fast_loss(model, batch, weights_K)
    fast.backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    slow = slow_loss(to_serving(config), weights, batch, weights_K)
    slow.backward()
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - weights[name].grad).norm() / weights[name].grad.norm()
        assert difference < 1e-5, name  # the angles of RoPE are float32


def test_float32_stays_near_the_float64_reference():
    config = tiny_config()
    model, batch, weights_K = random_model(config), packed_batch(), block_weights(config.block_size)
    exact = fast_loss(model, batch, weights_K)
    batch |= {"features": [x.float() for x in batch["features"]]}
    batch |= {"embed": batch["embed"].float(), "head": batch["head"].float()}
    torch.testing.assert_close(fast_loss(model.float(), batch, weights_K), exact, rtol=1e-5, atol=0)


def test_a_block_in_training_equals_the_same_block_proposed_at_decoding():
    config = tiny_config()
    model, batch = random_model(config), packed_batch()
    K = config.block_size
    tokens = [block_tokens(i, a, K, MASK) for i, a in zip(batch["ids"], batch["anchors"], strict=True)]
    trained = model.forward_blocks(
        torch.cat(batch["features"]), batch["lengths"], batch["embed"][torch.cat(tokens)], batch["anchors"]
    ).split([len(a) for a in batch["anchors"]])
    for sample, anchors in enumerate(batch["anchors"]):
        for block, anchor in enumerate(anchors.tolist()):
            # The context grows piece by piece, as tokens are accepted.
            context = model.context_features(batch["features"][sample][:anchor])
            first, rest = (
                model.context_kv(context[part], torch.arange(anchor)[part]) for part in (slice(2), slice(2, None))
            )
            kv = [(torch.cat((k, a), -2), torch.cat((v, b), -2)) for (k, v), (a, b) in zip(first, rest, strict=True)]
            embeds = batch["embed"][tokens[sample][block]]
            proposed = model.propose(embeds, torch.arange(anchor, anchor + K), kv)
            torch.testing.assert_close(proposed, trained[sample][block], rtol=1e-10, atol=1e-12)


def forward_one(model, features, embeds, anchors):
    return model.forward_blocks(features, [len(features)], embeds, [torch.tensor(anchors)])


def test_the_anchors_own_feature_and_later_ones_are_invisible_and_the_one_before_is_not():
    model = random_model(tiny_config())
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(12, 2 * HIDDEN, generator=generator).double()
    embeds = torch.randn(2, 4, HIDDEN, generator=generator).double()
    before = forward_one(model, features, embeds, [5, 9])
    changed = features.clone()
    changed[5:] += 1
    after = forward_one(model, changed, embeds, [5, 9])
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])
    changed = features.clone()
    changed[4] += 1
    assert not torch.allclose(before[0], forward_one(model, changed, embeds, [5, 9])[0])


def test_blocks_do_not_see_each_other_and_slots_of_a_block_see_all_of_it():
    model = random_model(tiny_config())
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(12, 2 * HIDDEN, generator=generator).double()
    embeds = torch.randn(2, 4, HIDDEN, generator=generator).double()
    before = forward_one(model, features, embeds, [5, 6])
    embeds = embeds.clone()
    embeds[1, 3] += 1
    after = forward_one(model, features, embeds, [5, 6])
    assert torch.equal(before[0], after[0])
    assert all(not torch.allclose(before[1, k], after[1, k]) for k in range(4))


def test_a_block_at_the_very_start_sees_only_itself():
    config = tiny_config()
    model = random_model(config)
    embeds = torch.randn(1, 4, HIDDEN).double()
    hidden = forward_one(model, torch.randn(5, 2 * HIDDEN).double(), embeds, [0])
    weights = dict(model.named_parameters())
    expected = reference_block(to_serving(config), weights, torch.zeros(0, 2 * HIDDEN).double(), embeds[0], 0)
    torch.testing.assert_close(hidden[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
)
def test_rope_turns_heads_as_transformers_does(scaling):
    config = tiny_config(rope_scaling=scaling)
    parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(hidden_size=HIDDEN, head_dim=8, max_position_embeddings=128, rope_parameters=parameters)
    )
    x_SHD = torch.randn(20, 3, 8)
    positions = torch.arange(40, 60)
    cos, sin = theirs(x_SHD, positions[None])
    expected, _ = apply_rotary_pos_emb(x_SHD.transpose(0, 1)[None], x_SHD.transpose(0, 1)[None], cos, sin)
    frequencies, scale = rope_frequencies(config)
    turned = rotate(x_SHD, *rotation(frequencies, scale, positions, torch.float32))
    torch.testing.assert_close(turned, expected[0].transpose(0, 1))


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
    with pytest.raises(ConfigError, match=r"lacks head_dim, dflash_config\.mask_token_id"):
        from_serving(data)


def test_the_loss_through_the_frozen_head_equals_cross_entropy_with_its_gradient(monkeypatch):
    monkeypatch.setattr("ops.dflash.loss.CHUNK", 3)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (8,), generator=generator)
    weights = torch.rand(8, generator=generator, dtype=torch.float64)
    loss, correct = dflash_loss(hidden, head, labels, weights)
    (fast,) = torch.autograd.grad(loss * 3, hidden)
    logits = hidden @ head.T
    slow_value = (weights * F.cross_entropy(logits, labels, reduction="none")).sum()
    (slow,) = torch.autograd.grad(slow_value * 3, hidden)
    torch.testing.assert_close(loss, slow_value)
    torch.testing.assert_close(fast, slow)
    assert correct.tolist() == (logits.argmax(-1) == labels).tolist()


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
