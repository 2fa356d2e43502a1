"""Every algorithm's fast step against its slow reference, and where it starts."""

from __future__ import annotations

import re

import pytest
import torch
from attrs import evolve
from case_reader import fast_step, hidden_of_blocks, make_engine
from draft_cases import random_case
from rounding import assert_equal_within_rounding
from step_cases import assert_equal_steps

from dsl.errors import ConfigError
from ops.lib.drafts.backbone.config import from_serving, to_serving
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.dflash.config import Dflash
from ops.lib.drafts.dflash2.config import Dflash2, Dflash2Options
from ops.lib.drafts.dflash2.model import _Convolved, convolved
from ops.lib.drafts.dspark.config import Dspark, DsparkOptions
from ops.lib.drafts.lilicorr.config import Lilicorr, LilicorrOptions
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.drafts.losses.loss import Loss
from ops.lib.sglang.serve_command import DraftOption, Served, launch_command

KINDS = ("dflash", "dpace", "focal", "kl", "lk", "nla", "l1")
CASES = {
    "dflash": (Dflash(), None),
    "dflash2": (Dflash2(taps=2, group=4, rank=6, candidates=4), Dflash2Options(base=0.7, selector=1.3)),
    "dflash2, three taps": (Dflash2(taps=3, group=8, rank=3, candidates=2), Dflash2Options()),
    "dflash2, as speculators": (Dflash2(group=4, rank=4, candidates=4), Dflash2Options(label="target")),
    "dflash2, as AutoModel": (Dflash2(group=4, rank=4, candidates=4), Dflash2Options(missing="skip")),
    "dspark": (Dspark(rank=3), DsparkOptions()),
    "dspark, masks first": (Dspark(rank=5, sample_from_anchor=False), DsparkOptions(base=0.5, confidence=0.3)),
    "dspark without a teacher": (
        Dspark(rank=4, confidence_head=False),
        DsparkOptions(base=1, l1=0, confidence_head=False),
    ),
    "lilicorr": (
        Lilicorr(candidates=4, width=6, layers=2, heads=2, factors=5, logit_scale=3.0),
        LilicorrOptions(base=0.7, cross_entropy=0.6, hinge=0.4, margin=1.0, regret=0.3),
    ),
    "lilicorr with convolutions": (
        Lilicorr(candidates=8, width=8, layers=1, heads=1, factors=3, mlp_ratio=1.5, taps=2, group=4),
        LilicorrOptions(),
    ),
    "lilicorr without a teacher": (
        Lilicorr(candidates=1, width=4, layers=1, heads=2, factors=4),
        LilicorrOptions(hinge=0.5, regret=0),
    ),
}


@pytest.fixture(params=CASES)
def chosen(request):
    """An algorithm, and the terms of its loss."""
    return CASES[request.param]


@pytest.mark.parametrize("seed", range(7))
def test_random_steps_equal_the_reference(chosen, seed):
    algorithm, own = chosen
    assert_equal_steps(random_case(seed, algorithm=algorithm), Loss(kind=KINDS[seed], own=own))


@pytest.mark.parametrize("name", ["lilicorr", "lilicorr with convolutions"])
def test_the_lattices_gradients_equal_those_of_the_slow_loop_to_twelve_digits(name):
    algorithm, own = CASES[name]
    case = random_case(3, samples=2, block_size=4, num_hidden_layers=1, algorithm=algorithm)
    assert_equal_steps(case, Loss(own=own), rtol=1e-12)


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_every_block_size_equals_the_reference(chosen, block_size):
    algorithm, own = chosen
    block_size = max(block_size, getattr(algorithm, "taps", 2))
    case = random_case(block_size, samples=3, block_size=block_size, algorithm=algorithm)
    assert_equal_steps(case, Loss(own=own))


def test_chunks_and_recomputed_layers_change_nothing(chosen):
    algorithm, own = chosen
    case = random_case(7, samples=3, algorithm=algorithm)
    assert_equal_steps(case, Loss(own=own), anchor_chunk=2)
    assert_equal_steps(case, Loss(own=own), activation_checkpointing=True, anchor_chunk=3)


def test_the_config_goes_through_its_serving_form(chosen):
    config = random_case(1, algorithm=chosen[0]).config
    assert config == from_serving(to_serving(config))
    assert to_serving(config)["architectures"] == [config.algorithm.architecture]


@pytest.mark.parametrize(("slots", "taps"), [(6, 2), (6, 3), (1, 2), (2, 4), (5, 1)])
def test_the_convolution_that_keeps_its_inputs_is_the_plain_one_with_its_gradients(slots, taps):
    generator = torch.Generator().manual_seed(0)
    shapes = (3, slots, 8), (taps, 8), (3, slots, taps, 2)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    upstream = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    found = []
    for function in (convolved, _Convolved.apply):
        total = function(*given)
        gradients = torch.autograd.grad(total, given, upstream)
        found.append((total.detach(), *gradients))
    for plain, kept in zip(*found, strict=True):
        torch.testing.assert_close(plain, kept, rtol=1e-13, atol=1e-13)
    assert_equal_within_rounding(found[0][0], found[1][0])


def test_the_forms_of_the_selectors_loss_differ_where_a_label_is_no_candidate_only():
    def losses(candidates):
        algorithm = Dflash2(group=4, rank=4, candidates=candidates)
        case = random_case(5, samples=3, block_size=6, vocab_size=16, algorithm=algorithm)
        return {
            (label, missing): fast_step(case, Loss(own=Dflash2Options(base=0, label=label, missing=missing)))[0]
            for label in ("data", "target")
            for missing in ("replace", "skip")
        }

    few, all_tokens = losses(2), losses(16)
    assert 4 == len(set(few.values()))
    for label in ("data", "target"):
        assert few[label, "skip"] < few[label, "replace"]
        assert all_tokens[label, "skip"] == all_tokens[label, "replace"]


@pytest.mark.parametrize("name", ["dflash2", "dspark, masks first"])
def test_a_draft_starts_as_plain_dflash_of_the_same_seed(name):
    case = random_case(4, samples=3)
    plain, own = (
        DraftModel(evolve(case.config, algorithm=algorithm)).double() for algorithm in (Dflash(), CASES[name][0])
    )
    hidden = []
    for model in (plain, own):
        model.initialise(3)
        engine = make_engine(evolve(case, config=model.config, weights=model.state_dict()), Loss(own=CASES[name][1]))
        hidden.append(hidden_of_blocks(engine.model, *block_inputs(case)))
    assert_equal_within_rounding(*hidden)


@pytest.mark.parametrize(("taps", "first"), [(1, 2), (2, 3), (3, 4), (6, 6)])
def test_slots_that_read_mask_slots_alone_are_projected_once_in_the_first_layer(taps, first):
    case = random_case(1, samples=3, block_size=6, algorithm=Dflash2(taps=taps, group=4, candidates=4))
    engine = make_engine(case, Loss(own=Dflash2Options()))
    slots = []
    for layer in engine.model.layers:
        layer.attention_conv.kernel_projection.register_forward_hook(
            lambda _, given, __: slots.append(given[0].shape[1])
        )
    hidden_of_blocks(engine.model, *block_inputs(case))
    assert [first, *[6] * (len(engine.model.layers) - 1)] == slots


def block_inputs(case):
    sample = next(sample for sample in case.samples if len(sample.anchors_A))
    anchors = sample.anchors_A.tolist()
    embeds = case.embed_VM[sample.input_ids_S[sample.anchors_A]]
    return sample.features_SF, embeds, case.embed_VM[case.config.mask_token_id], anchors


@pytest.mark.parametrize("candidates", [3, 12])
def test_candidates_that_sglang_cannot_walk_are_refused(candidates):
    reason = f"must be a power of two, or SGLang's walk on CUDA cannot start{{}} {candidates}"
    with pytest.raises(ConfigError, match=re.escape("dflash2.candidates (selector_top_k): " + reason.format(", got"))):
        random_case(1, vocab_size=16, algorithm=Dflash2(group=4, candidates=candidates))
    with pytest.raises(ValueError, match=re.escape("'candidates' " + reason.format(":"))):
        Dflash2Options(candidates=candidates)


def test_an_objective_without_a_term_is_refused():
    with pytest.raises(ValueError, match="base = 0 and selector = 0 leave nothing to train for"):
        Dflash2Options(base=0, selector=0)
    with pytest.raises(ValueError, match="base = 0 and l1 = 0 without a confidence head leave nothing to train for"):
        DsparkOptions(base=0, l1=0, confidence_head=False)


def test_convolutions_read_no_more_slots_than_a_block_has():
    assert 3 == random_case(1, block_size=3, algorithm=Dflash2(taps=3, group=4, candidates=4)).config.algorithm.taps
    with pytest.raises(ConfigError, match=r"dflash2\.taps \(conv_kernel_size\): 4 slots of a block of 3"):
        random_case(1, block_size=3, algorithm=Dflash2(taps=4, group=4, candidates=4))


def test_sizes_that_do_not_fit_are_named_as_in_a_pipeline_and_as_served():
    with pytest.raises(ConfigError) as error:
        random_case(1, algorithm=Dflash2(group=3, candidates=16))
    assert [
        "dflash2.group (conv_group_size): 3 does not divide hidden_size = 8",
        "dflash2.candidates (selector_top_k): 16 of a vocabulary of 13",
    ] == [line.strip() for line in str(error.value).splitlines()[1:]]
    with pytest.raises(ConfigError, match=r"dspark\.rank \(markov_rank\): must be at least 1, got 0"):
        random_case(1, algorithm=Dspark(rank=0))


def test_a_confidence_head_is_always_trained():
    with pytest.raises(ValueError, match="confidence = 0 trains no confidence head: set confidence_head = false"):
        DsparkOptions(l1=0, confidence=0)
    needed = {
        (l1, has_head): DsparkOptions(base=1, l1=l1, confidence_head=has_head).needs_teacher
        for l1 in (0, 0.9)
        for has_head in (True, False)
    }
    assert [key for key, is_needed in needed.items() if not is_needed] == [(0, False)]
    assert needs_teacher("kl", DsparkOptions(base=1, l1=0, confidence=0, confidence_head=False))


def test_no_start_is_dead():
    """Whatever is zero at the start has a gradient, or gets one once its partner has moved."""
    for name, (algorithm, own) in CASES.items():
        case = random_case(4, samples=3, block_size=6, algorithm=algorithm)
        model = DraftModel(case.config).double()
        model.initialise(0)
        moved = set()
        weights = dict(model.state_dict())
        for _ in range(2):
            _, gradients, _ = fast_step(evolve(case, weights=weights), Loss(own=own))
            moved |= {name for name, gradient in gradients.items() if gradient.abs().max() > 0}
            weights = {name: weights[name] - 0.1 * gradients[name] for name in weights}
        assert set(weights) - moved == set(), name


@pytest.mark.parametrize("name", ["dflash2", "dspark", "dspark, masks first", "lilicorr"])
def test_the_command_of_a_server_names_the_algorithm_and_counts_verified_tokens(name):
    config = random_case(1, algorithm=CASES[name][0], block_size=6).config
    draft = DraftOption(path=".", block_size=config.block_size, algorithm=config.algorithm.engine)
    served = Served(model_type="qwen3", vision=False, dtype="bfloat16", image_backend=None, pixels={})
    command = launch_command("target", served, draft)
    assert ("DSPARK" if "dspark" in name else "DFLASH") == command[command.index("--speculative-algorithm") + 1]
    assert "6" == command[command.index("--speculative-num-draft-tokens") + 1]
    assert (5 if "dspark" in name else 6) == to_serving(config)["block_size"]
