"""Losses and steps through heads with a scale, a soft cap or a bias, against autograd of plain formulas in float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from draft_cases import VOCAB, random_case, reference_gradients
from step_cases import assert_equal_steps

from dsl.errors import ConfigError
from ops.lib.drafts.backbone.config import from_serving, to_serving
from ops.lib.drafts.backbone.contract import embedding_warnings
from ops.lib.drafts.backbone.reference import reference_slot_losses
from ops.lib.drafts.backbone.speculators import unwritable
from ops.lib.drafts.dflash.config import Dflash
from ops.lib.drafts.dflash2.config import Dflash2, Dflash2Options
from ops.lib.drafts.dspark.config import Dspark, DsparkOptions
from ops.lib.drafts.losses import comparison as comparison_module
from ops.lib.drafts.losses import head as head_module
from ops.lib.drafts.losses.candidates import best_tokens, token_logits
from ops.lib.drafts.losses.comparison import compare, compare_and_sum
from ops.lib.drafts.losses.head import Bias, head_cross_entropy_and_best
from ops.lib.drafts.losses.loss import Loss, slot_losses
from ops.lib.drafts.losses.tiled_softmax import fusible_sweep, sweep_values, torch_sweep
from ops.lib.target.embedding_and_head import Head, of_teacher
from ops.lib.target.head_settings import PLAIN, HeadSettings, embedding_scale
from ops.load_draft.read_config import ReadDraft, with_embedding_scale

KINDS = ("dflash", "kl", "l1", "lk", "nla")
HIDDEN, RANK = 24, 5
SCALED, CAPPED = HeadSettings(scale=0.0625), HeadSettings(soft_cap=3.0)
BOTH, BIASED = HeadSettings(scale=1.7, soft_cap=2.0), HeadSettings(scale=0.5, soft_cap=4.0, bias=True)
# The draft's settings, and the target's.
SIDES = {
    "scale of both": (SCALED, SCALED),
    "cap of both": (CAPPED, CAPPED),
    "scale and cap": (BOTH, BOTH),
    "a plain draft beside a capped target": (PLAIN, CAPPED),
    "a capped draft beside a plain target": (CAPPED, PLAIN),
    "two caps": (HeadSettings(scale=0.4, soft_cap=5.0), BOTH),
    "a target with a bias": (PLAIN, HeadSettings(bias=True)),
    "a target with all": (BOTH, BIASED),
    "a bias on both sides": (BIASED, BIASED),
}


@pytest.fixture(params=[torch_sweep, lambda *given: fusible_sweep(sweep_values, *given)], ids=["torch", "fusible"])
def small_tiles(request, monkeypatch):
    monkeypatch.setattr(head_module, "choose_head", lambda device: ("chosen by the test", request.param))
    monkeypatch.setattr(head_module, "_tile", lambda _device: (16, 64))
    monkeypatch.setattr(comparison_module, "rows_at_once", lambda _device, _vocabulary: 16)
    monkeypatch.setattr(comparison_module, "CAST", 64)


class Problem:
    """Random slots in float64, and the plain formulas of their logits."""

    def __init__(self, sides: tuple[HeadSettings, HeadSettings], rows: int = 40, vocabulary: int = 130):
        generator = torch.Generator().manual_seed(rows)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.draft, self.target = sides
        self.hidden, self.teacher = draw(rows, HIDDEN).requires_grad_(), draw(rows, HIDDEN)
        self.latent, self.table = draw(rows, RANK).requires_grad_(), draw(vocabulary, RANK).requires_grad_()
        self.weight, self.bias, self.upstream = draw(vocabulary, HIDDEN), draw(vocabulary), draw(rows)
        self.labels = torch.randint(vocabulary, (rows,), generator=generator)
        self.head = Head.of_target(self.weight, self.target, self.bias).beside(self.draft)

    def plain(self, states: torch.Tensor, settings: HeadSettings) -> torch.Tensor:
        logits = states @ self.weight.T + (self.bias if settings.bias else 0)
        logits = logits * settings.scale
        return logits if settings.soft_cap is None else settings.soft_cap * torch.tanh(logits / settings.soft_cap)

    def expected(self, kind: str, biased: bool) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Losses, gradients, and whether the best token is the label."""
        logits = self.plain(self.hidden, self.draft) + (self.latent @ self.table.T if biased else 0)
        values = reference_slot_losses(kind, logits, self.labels, self.plain(self.teacher, self.target))
        gradients = torch.autograd.grad((values * self.upstream).sum(), self.leaves(biased))
        return values.detach(), list(gradients), logits.argmax(-1) == self.labels

    def leaves(self, biased: bool) -> list[torch.Tensor]:
        return [self.hidden, self.latent, self.table] if biased else [self.hidden]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_losses_and_gradients_equal_the_plain_formulas(small_tiles, kind, sides, alike, biased):
    problem = Problem(sides)
    alike_W = None
    if alike:
        alike_W = torch.arange(40) % 7
        problem.teacher = problem.teacher[alike_W]
    expected, gradients, correct = problem.expected(kind, biased)
    bias = Bias(problem.latent, problem.table) if biased else None
    found = slot_losses(kind, problem.hidden, problem.head, problem.labels, problem.teacher, bias, alike_W=alike_W)
    close(found.values_W.detach(), expected)
    assert found.correct_W.tolist() == correct.tolist()
    for actual, gradient in zip(
        torch.autograd.grad((found.values_W * problem.upstream).sum(), problem.leaves(biased)), gradients, strict=True
    ):
        close(actual, gradient)


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_the_sum_of_an_objective_has_the_gradients_of_the_comparison(small_tiles, sides):
    problem = Problem(sides)
    given = (problem.hidden, problem.head, problem.labels, problem.teacher, Bias(problem.latent, problem.table))

    def objective(found, slots):
        return (problem.upstream[slots] * (found.ce_W + found.kl_W + found.l1_W)).sum()

    total, _ = compare_and_sum(*given, objective)
    found = compare(*given)
    expected = (problem.upstream * (found.ce_W + found.kl_W + found.l1_W)).sum()
    close(total, expected)
    pairs = (torch.autograd.grad(each, problem.leaves(True)) for each in (total, expected))
    for actual, gradient in zip(*pairs, strict=True):
        close(actual, gradient)


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_candidates_have_the_logits_of_the_plain_formula(small_tiles, sides):
    problem = Problem(sides)
    logits = problem.plain(problem.hidden, problem.draft)
    expected = logits.topk(4)
    values, tokens = best_tokens(problem.hidden, problem.head, 4)
    close(values, expected.values.detach())
    assert tokens.tolist() == expected.indices.tolist()
    assert head_cross_entropy_and_best(problem.hidden, problem.head, problem.labels, 4)[2].tolist() == tokens.tolist()
    found = token_logits(problem.hidden, problem.head, tokens)
    close(found.detach(), values)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad((found * upstream).sum(), problem.hidden)[0]
    close(actual, torch.autograd.grad((logits.gather(1, tokens) * upstream).sum(), problem.hidden)[0])
    of_target = problem.plain(problem.teacher, problem.target)
    assert best_tokens(problem.teacher, of_teacher(problem.head), 1)[1][:, 0].tolist() == of_target.argmax(1).tolist()


def test_a_plain_head_is_its_weight():
    weight = torch.randn(5, 3)
    assert Head.of_target(weight, PLAIN).beside(PLAIN) is weight
    assert isinstance(Head.of_target(weight, CAPPED).beside(PLAIN), Head)


def test_float32_stays_near_float64(small_tiles):
    problem = Problem((BOTH, BIASED))
    head = Head(problem.weight.float(), BOTH, BIASED, problem.bias.float())
    for kind in KINDS:
        expected, (gradient,), _ = problem.expected(kind, False)
        hidden = problem.hidden.detach().float().requires_grad_()
        found = slot_losses(kind, hidden, head, problem.labels, problem.teacher.float())
        (actual,) = torch.autograd.grad((found.values_W * problem.upstream.float()).sum(), hidden)
        assert float((found.values_W.detach() - expected).norm() / expected.norm()) < 1e-5
        assert float((actual - gradient).norm() / gradient.norm()) < 1e-5


ENDS = {"input_embedding_scale": 3.0, "output_multiplier": 0.6, "final_logit_softcapping": 2.5}
DFLASH2 = Dflash2(taps=2, group=4, rank=3, candidates=4)
STEPS = {
    "dflash": ({}, ENDS, Loss()),
    "dflash, kl": ({}, ENDS, Loss(kind="kl")),
    "dflash, focal": ({}, ENDS, Loss(kind="focal")),
    "dflash, dpace": ({}, ENDS, Loss(kind="dpace")),
    "dflash2": ({"algorithm": DFLASH2}, ENDS, Loss(own=Dflash2Options())),
    "dflash2, kl to the target's token": (
        {"algorithm": DFLASH2},
        ENDS,
        Loss(kind="kl", own=Dflash2Options(label="target")),
    ),
    "dspark": (
        {"algorithm": Dspark(rank=3)},
        {"input_embedding_scale": 3.0},
        Loss(own=DsparkOptions(rank=3)),
    ),
}


@pytest.mark.parametrize(("config", "ends", "loss"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("target", [BOTH, BIASED])
def test_whole_steps_equal_the_reference(config, ends, loss, target):
    for seed in range(3):
        case = random_case(seed, samples=3, **config, **ends)
        bias_V = torch.linspace(-2, 2, VOCAB, dtype=torch.float64)
        assert_equal_steps(attrs.evolve(case, target=target, bias_V=bias_V), loss, anchor_chunk=2)


def test_each_of_the_three_changes_the_step():
    plain = random_case(3, samples=3)
    before = reference_gradients(plain)[0].loss
    for name, value in ENDS.items():
        changed = attrs.evolve(plain, config=attrs.evolve(plain.config, **{name: value}))
        assert reference_gradients(changed)[0].loss != before


SIZE = 64
TARGETS = {  # its config, and what SGLang and vLLM are warned of with a draft that was trained as new ones are
    "llama": ({"model_type": "llama"}, set()),
    "gemma2": ({"model_type": "gemma2"}, {"SGLang", "vLLM"}),
    "gemma3": ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, {"vLLM"}),
    "gemma4": ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}, {"vLLM"}),
    "gemma4_text": ({"model_type": "gemma4_text"}, set()),
    "granite": ({"model_type": "granite", "embedding_multiplier": 12.0}, {"SGLang", "vLLM"}),
}


def with_size(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    return (
        {**config, "text_config": {**text, "hidden_size": SIZE}}
        if text is not config
        else {**text, "hidden_size": SIZE}
    )


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("algorithm", [Dflash(), DFLASH2, Dspark(rank=3)])
def test_an_engine_that_would_embed_otherwise_is_named(kind, algorithm):
    given, named = TARGETS[kind]
    target = with_size(given)
    draft = attrs.evolve(random_case(1, algorithm=algorithm).config, input_embedding_scale=embedding_scale(target))
    found = embedding_warnings(to_serving(draft), target)
    scaled_by_vllm = {"vLLM"} if kind == "gemma4_text" else set()  # times the field, which DFlash2 reads too
    assert found.keys() == ((named - {"vLLM"}) | scaled_by_vllm if algorithm == DFLASH2 else named)
    plain = embedding_warnings(to_serving(attrs.evolve(draft, input_embedding_scale=1.0)), target)
    assert plain.keys() == ({"SGLang"} if kind.startswith(("gemma3", "gemma4")) else set()) | scaled_by_vllm
    assert all("fewer are accepted" in text for text in (*found.values(), *plain.values()))


def test_a_config_holds_only_what_is_not_plain_and_gives_it_back():
    for algorithm in (Dflash(), DFLASH2):
        draft = random_case(1, algorithm=algorithm).config
        assert not ENDS.keys() & to_serving(draft)["dflash_config"].keys()
        assert attrs.evolve(draft, **ENDS) == from_serving(to_serving(attrs.evolve(draft, **ENDS)))
    dspark = attrs.evolve(random_case(1, algorithm=Dspark(rank=3)).config, input_embedding_scale=3.0)
    assert dspark == from_serving(to_serving(dspark))


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_and_caps_are_above_zero(name, value):
    with pytest.raises(ConfigError, match=f"{name}: must be above 0"):
        attrs.evolve(random_case(1).config, **{name: value})


def test_dspark_takes_neither_multiplier_nor_cap():
    draft = random_case(1, algorithm=Dspark(rank=3)).config
    for name in ("output_multiplier", "final_logit_softcapping"):
        with pytest.raises(ConfigError, match=f"{name}: engines add DSpark's bias to the plain product"):
            attrs.evolve(draft, **{name: 2.0})


def test_the_format_of_speculators_refuses_what_vllm_would_not_read():
    plain = random_case(1, layer_types=("full_attention",), partial_rotary_factor=1.0).config
    plain2 = attrs.evolve(plain, algorithm=DFLASH2, block_size=max(plain.block_size, 2))
    capped = {"final_logit_softcapping": 2.0}
    assert [] == list(unwritable(plain)) == list(unwritable(plain2)) == list(unwritable(attrs.evolve(plain, **capped)))
    assert ["output_multiplier"] == [why.split()[0] for why in unwritable(attrs.evolve(plain2, **capped))]
    assert ["input_embedding_scale:"] == [
        why.split()[0] for why in unwritable(attrs.evolve(plain, input_embedding_scale=8.0))
    ]


def test_a_scale_that_a_published_file_leaves_open_is_that_of_sglang():
    read = ReadDraft(publisher="z-lab", config=random_case(1).config, assumed={}, notes=(), layer_order=())
    for kind, scale in (("llama", None), ("gemma2", 1.0), ("gemma3", 8.0), ("granite", 1.0)):
        found = with_embedding_scale(read, {}, with_size(TARGETS[kind][0]))
        assert found.config.input_embedding_scale == (scale or 1.0)
        assert found.assumed == ({} if scale is None else {"input_embedding_scale": scale})
    written = {"dflash_config": {"input_embedding_scale": 1.0}}
    assert with_embedding_scale(read, written, with_size(TARGETS["gemma3"][0])) == read


def test_the_weight_with_its_bias_is_made_once_for_a_draft_and_its_teacher():
    problem = Problem((BOTH, BIASED))
    head = Head.of_target(problem.weight.float(), BIASED, problem.bias.float())
    beside = head.beside(BOTH)
    assert isinstance(beside, Head)
    teacher = of_teacher(beside)
    assert isinstance(teacher, Head)
    assert beside.weight_VX is teacher.weight_VX is head.weight_VX
    assert torch.equal(head.weight_VX[:, : head.weight_VM.shape[1]], head.weight_VM)
