"""The reference of the training step against loops: over tokens, over pairs of positions, over slots."""

import math

import attrs
import pytest
import torch
from draft_cases import MASK, random_case, reference_gradients
from reference_draft import reference_block

from dsl.errors import DataError
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.reference import reference_hidden, reference_step, visible
from ops.lib.drafts.losses.slots import block_weights

LAYERS = ("full_attention", "sliding_attention")
LOSSES = [
    {"kind": "dflash"},
    {"kind": "dflash", "gamma": 2.5},
    {"kind": "focal", "focal_gamma": 1.5},
    {"kind": "kl"},
    {"kind": "l1"},
    {"kind": "lk"},
    {"kind": "nla"},
    {"kind": "dpace", "dpace_alpha": 0.3},
]
# With theta = 16 the frequencies are powers of two, the same in float32 and float64.
EXACT = {"rope_theta": 16.0, "head_dim": 8, "rope_scaling": None}


def hidden_of(case):
    return reference_hidden(case.weights, case.config, case.embed_VM, case.samples)


def step_of(case, **loss):
    return reference_step(case.weights, case.config, case.embed_VM, case.head_VM, case.samples, **loss)


def alone(case, sample, anchor=None):
    """The case with one of its samples, or one of its blocks, only."""
    if anchor is not None:
        sample = attrs.evolve(sample, anchors_A=torch.tensor([anchor]))
    return attrs.evolve(case, samples=(sample,))


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"block_size": 5, "num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True},
        {"block_size": 7, "num_attention_heads": 2, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    ],
)
@pytest.mark.parametrize("window", [2, 4, 9])
def test_a_block_equals_the_draft_computed_token_by_token(config, window):
    case = random_case(3, samples=2, anchors=5, layer_types=LAYERS, sliding_window=window, **EXACT, **config)
    serving, K = to_serving(case.config), case.config.block_size
    expected = []
    for sample in case.samples:
        for anchor in sample.anchors_A.tolist():
            token_ids = [int(sample.input_ids_S[anchor])] + [MASK] * (K - 1)
            expected.append(
                reference_block(serving, case.weights, sample.features_SF, case.embed_VM[token_ids], anchor)
            )
    torch.testing.assert_close(hidden_of(case), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_mask_equals_a_loop_over_slots_and_keys(seed, window):
    case = random_case(seed)
    K = case.config.block_size
    keys = [("context", i, j) for i, sample in enumerate(case.samples) for j in range(len(sample.input_ids_S))]
    blocks = [(i, anchor) for i, sample in enumerate(case.samples) for anchor in sample.anchors_A.tolist()]
    slots = [((i, anchor), i, anchor + k) for i, anchor in blocks for k in range(K)]
    expected = []
    for block, sample, position in slots:
        row = []
        for owner, its_sample, place in keys + slots:
            in_context = owner == "context" and its_sample == sample and place < block[1]
            near = window is None or 0 <= position - place < window
            row.append((in_context or owner == block) and near)
        expected.append(row)
    assert expected == visible(case.samples, K, window).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_packed_samples_equal_every_block_by_itself(seed):
    case = random_case(seed, samples=3)
    blocks = [
        hidden_of(alone(case, sample, anchor))[0] for sample in case.samples for anchor in sample.anchors_A.tolist()
    ]
    assert case.anchors > 0
    torch.testing.assert_close(hidden_of(case), torch.stack(blocks), rtol=1e-12, atol=1e-12)


def slow_losses(case, kind, gamma=None, focal_gamma=2.0, dpace_alpha=0.5):
    """Numerator and denominator of a loss, slot by slot with Python's numbers, and the correct and seen slots."""
    K = case.config.block_size
    numerator, denominator, correct, seen = 0.0, 0.0, [0] * K, [0] * K
    decay = block_weights(K, gamma).tolist()
    for sample in case.samples:
        for anchor in sample.anchors_A.tolist():
            hidden_KM = hidden_of(alone(case, sample, anchor))[0]
            ces = []
            for k in range(1, K):
                place = anchor + k
                if place >= len(sample.input_ids_S) or not sample.loss_mask_S[place]:
                    break
                logits, label = (case.head_VM @ hidden_KM[k]).tolist(), int(sample.input_ids_S[place])
                log_p = [logit - math.log(sum(map(math.exp, logits))) for logit in logits]
                p = math.exp(log_p[label])
                seen[k] += 1
                correct[k] += logits.index(max(logits)) == label
                ces.append(-log_p[label])
                value = -log_p[label]
                if kind == "focal":
                    value *= (1 - p) ** focal_gamma
                if kind in ("kl", "l1", "lk", "nla"):
                    theirs = (case.head_VM @ sample.teacher_SM[place - 1]).tolist()
                    total = sum(map(math.exp, theirs))
                    value = slow_distance(
                        kind, [math.exp(t) / total for t in theirs], [math.exp(ours) for ours in log_p]
                    )
                if kind != "dpace":
                    numerator += decay[k] * value
                    denominator += decay[k]
            if kind == "dpace" and ces:
                q = [(1 - dpace_alpha) * math.exp(-ce) + dpace_alpha for ce in ces]
                for j, ce in enumerate(ces):
                    numerator += sum(math.prod(q[: m + 1]) for m in range(j, len(ces))) * ce
                denominator += 1
    return numerator, denominator, correct, seen


def slow_distance(kind, target, draft):
    """The distance of two distributions, computed token by token."""
    pairs = list(zip(target, draft, strict=True))
    divergence = sum(p * math.log(p / q) for p, q in pairs)
    difference = sum(abs(p - q) for p, q in pairs)
    overlap = sum(min(p, q) for p, q in pairs)
    blend = math.exp(-3 * overlap)
    lk = blend * divergence + (1 - blend) * difference / 2
    return {"kl": divergence, "l1": difference, "lk": lk, "nla": -math.log(overlap)}[kind]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
@pytest.mark.parametrize("seed", [1, 2, 5])
def test_the_losses_equal_loops_over_slots(seed, loss):
    case = random_case(seed, samples=2)
    numerator, denominator, correct, seen = slow_losses(case, **loss)
    step = step_of(case, **loss)
    assert sum(seen) > 0
    assert (step.correct_K.tolist(), step.seen_K.tolist()) == (correct, seen)
    assert step.denominator == pytest.approx(denominator, rel=1e-6)
    assert float(step.numerator) == pytest.approx(numerator, rel=1e-6)
    assert float(step.loss) == pytest.approx(numerator / denominator, rel=1e-6)


def test_holes_end_a_block_and_slots_behind_the_end_have_no_weight():
    case = random_case(0, samples=1, anchors=1, block_size=6)
    sample = attrs.evolve(
        case.samples[0],
        features_SF=case.samples[0].features_SF[:1].repeat(12, 1),
        input_ids_S=torch.arange(12) % MASK,
        loss_mask_S=torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool),
    )
    inside = [sum(step_of(alone(case, sample, anchor)).seen_K.tolist()) for anchor in (0, 2, 5, 8, 10)]
    assert inside == [3, 1, 5, 3, 1]
    assert step_of(alone(case, sample, 8)).seen_K.tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_every_parameter_has_a_gradient(loss):
    case = random_case(7, samples=3, anchors=8, block_size=5, layer_types=LAYERS, attention_bias=True, **EXACT)
    _, gradients = reference_gradients(case, **loss)
    assert set(case.weights) == set(gradients)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name


@pytest.mark.parametrize(
    "loss",
    [loss for loss in LOSSES if loss["kind"] not in ("lk", "dpace")],
    ids=lambda loss: "-".join(map(str, loss.values())),
)
def test_the_gradient_is_the_slope_of_the_loss(loss):
    case = random_case(4, samples=2, anchors=3, block_size=4, num_hidden_layers=1)
    _, gradients = reference_gradients(case, **loss)
    generator = torch.Generator().manual_seed(0)
    direction = {name: torch.randn(w.shape, generator=generator).double() * 1e-5 for name, w in case.weights.items()}
    ends = [
        step_of(attrs.evolve(case, weights={n: w + sign * direction[n] for n, w in case.weights.items()}), **loss).loss
        for sign in (1, -1)
    ]
    slope = sum(float((direction[name] * gradient).sum()) for name, gradient in gradients.items())
    assert float(ends[0] - ends[1]) / 2 == pytest.approx(slope, rel=1e-5)


def test_no_gradient_goes_through_the_blend_of_lk():
    """It is that of the divergence and of half of l1, each slot's with its own share."""
    case = random_case(4, samples=1, anchors=1, block_size=2)
    parts = {kind: reference_gradients(case, kind=kind) for kind in ("lk", "kl", "l1")}
    overlap = 1 - float(parts["l1"][0].loss.detach()) / 2
    blend = math.exp(-3 * overlap)
    for name, gradient in parts["lk"][1].items():
        expected = blend * parts["kl"][1][name] + (1 - blend) / 2 * parts["l1"][1][name]
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_no_gradient_goes_through_the_weights_of_dpace():
    case = random_case(4, samples=2, anchors=3, block_size=2)
    step, gradients = reference_gradients(case, kind="dpace", dpace_alpha=0.5)
    # With one slot the weight is (1 - alpha) p + alpha, and without its slope the gradient is that weight times CE's.
    total = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for sample in case.samples:
        for anchor in sample.anchors_A.tolist():
            one, slopes = reference_gradients(alone(case, sample, anchor))
            weight = 0.5 * math.exp(-float(one.loss.detach())) + 0.5
            for name, slope in slopes.items():
                total[name] += weight * slope / step.denominator
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, total[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_without_an_anchor_the_loss_and_all_gradients_are_zero(loss):
    step, gradients = reference_gradients(random_case(1, samples=2, anchors=0), **loss)
    assert (float(step.loss.detach()), step.denominator, int(step.seen_K.sum())) == (0, 0, 0)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


def test_one_anchor_at_the_very_start_has_no_context():
    case = random_case(2, samples=1, block_size=3)
    sample = attrs.evolve(case.samples[0], loss_mask_S=torch.ones_like(case.samples[0].loss_mask_S))
    step, gradients = reference_gradients(alone(case, sample, 0))
    assert step.loss > 0
    assert torch.equal(gradients["fc.weight"], torch.zeros_like(gradients["fc.weight"]))
    assert gradients["layers.0.self_attn.v_proj.weight"].abs().max() > 0


def test_float32_stays_near_float64():
    case = random_case(6, samples=3, anchors=9)
    exact, near = step_of(case), step_of(case.to(torch.float32))
    assert float(near.loss) == pytest.approx(float(exact.loss), rel=1e-4)
    assert step_of(case.to(torch.bfloat16)).loss.isfinite()


@pytest.mark.parametrize("kind", ["kl", "l1", "lk", "nla"])
def test_a_distance_from_the_target_asks_for_a_teacher(kind):
    case = random_case(1, samples=1, anchors=1)
    with pytest.raises(DataError, match="needs the target's final hidden states"):
        step_of(alone(case, attrs.evolve(case.samples[0], teacher_SM=None)), kind=kind)


def test_random_cases_hold_all_that_a_step_must_cope_with():
    cases = [random_case(seed) for seed in range(60)]
    samples = [(case, sample) for case in cases for sample in case.samples]
    blocks = [(case, sample, anchor) for case, sample in samples for anchor in sample.anchors_A.tolist()]
    configs = [case.config for case in cases]
    assert {config.block_size for config in configs} == set(range(2, 17))
    assert {config.num_attention_heads // config.num_key_value_heads for config in configs} >= {1, 2, 3, 4}
    assert {len(set(config.layer_types)) for config in configs} == {1, 2}
    assert {config.slides for config in configs} == {True, False}
    assert {(config.rope_scaling or {}).get("rope_type") for config in configs} == {None, "linear", "yarn"}
    assert {case.anchors for case in cases} >= {0, 1}
    assert any(anchor == 0 for _, _, anchor in blocks)
    assert any(anchor + case.config.block_size > len(sample.input_ids_S) for case, sample, anchor in blocks)
    assert any(len(case.samples) > 1 and not all(len(s.anchors_A) for s in case.samples) for case in cases)
    assert any(not sample.loss_mask_S[anchor:].all() for _, sample, anchor in blocks)


def test_a_random_case_depends_on_its_seed_alone():
    first, again, other = random_case(5), random_case(5), random_case(6)
    assert first.config == again.config
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in first.weights)
    assert float(step_of(first).loss) == float(step_of(again).loss) != float(step_of(other).loss)
