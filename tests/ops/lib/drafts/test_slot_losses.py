"""The losses of slots, with and without a bias head, against their formulas over all logits in float64."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from dsl.errors import DataError
from ops.lib.drafts.backbone.reference import reference_slot_losses
from ops.lib.drafts.losses import comparison as comparison_module
from ops.lib.drafts.losses import head as head_module
from ops.lib.drafts.losses import whole_rows
from ops.lib.drafts.losses.comparison import compare, compare_and_sum
from ops.lib.drafts.losses.head import Bias, head_cross_entropy, head_kl
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.drafts.losses.loss import slot_losses, value_of
from ops.lib.drafts.losses.tiled_softmax import fusible_sweep, sweep_values, torch_sweep
from ops.lib.kernels.device import compiled

KINDS = ("dflash", "kl", "l1", "lk", "nla")
HIDDEN, RANK = 24, 5
SHAPES = [(1, 2), (7, 13), (40, 130), (33, 257)]  # in tiles of 16 x 64: one and many of each


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(head_module, "_tile", lambda _device: (16, 64))
    monkeypatch.setattr(comparison_module, "rows_at_once", lambda _device, _vocabulary: 16)
    monkeypatch.setattr(comparison_module, "CAST", 64)


class Problem:
    """Random slots, in float64 unless given; `bias` has a table and latents, `upstream` is the loss's gradient."""

    def __init__(self, rows, vocabulary, dtype=torch.float64, scale=0.6, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, by=1.0):
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * by).to(dtype)

        self.hidden, self.teacher = draw(rows, HIDDEN, by=scale), draw(rows, HIDDEN, by=scale)
        self.head, self.upstream = draw(vocabulary, HIDDEN), draw(rows)
        self.latent, self.table = draw(rows, RANK), draw(vocabulary, RANK)
        self.labels = torch.randint(vocabulary, (rows,), generator=generator)

    def leaves(self, biased, dtype=None):
        given = (self.hidden, self.latent, self.table) if biased else (self.hidden,)
        return [tensor.to(dtype or tensor.dtype, copy=True).requires_grad_() for tensor in given]

    def logits(self, leaves):
        """The logits of draft and target, all of them, in float64."""
        logits = leaves[0] @ self.head.double().T
        if len(leaves) > 1:
            logits = logits + leaves[1] @ leaves[2].T
        return logits, self.teacher.double() @ self.head.double().T

    def fast(self, kind, biased, **options):
        """The losses, and the gradients."""
        leaves = self.leaves(biased)
        bias = Bias(*leaves[1:]) if biased else None
        found = slot_losses(kind, leaves[0], self.head, self.labels, self.teacher, bias, **options)
        found.values_W.backward(self.upstream.to(found.values_W.dtype))
        return found, [leaf.grad for leaf in leaves]

    def summed(self, kinds, alike=None, objective=None, leaves=None):
        """The weighted sum of these losses of all slots, by the function that makes the gradients with them."""
        leaves = leaves or self.leaves(True)

        def mixed(found, slots):
            return sum((self.upstream[slots] * value_of(kind, found)).sum() for kind in kinds)

        teacher = self.teacher if needs_teacher(kinds[-1]) else None
        bias = Bias(*leaves[1:])
        given = (leaves[0], self.head, self.labels, teacher, bias)
        return compare_and_sum(*given, objective or mixed, alike_W=alike)[0]

    def slow(self, kind, biased):
        """The losses, whether the best token is the label, and the gradients, by the formulas."""
        leaves = self.leaves(biased, torch.float64)
        logits, teacher = self.logits(leaves)
        values = reference_slot_losses(kind, logits, self.labels, teacher)
        values.backward(self.upstream.double())
        return values.detach(), logits.argmax(-1) == self.labels, [leaf.grad for leaf in leaves]

    def assert_equal(self, kind, biased, on_values, on_gradients, **options):
        """The differences, relative to the size of what is compared, are below these bounds."""
        found, gradients = self.fast(kind, biased, **options)
        values, correct, expected = self.slow(kind, biased)
        assert correct.tolist() == found.correct_W.tolist()
        assert relative(found.values_W.detach(), values) < on_values
        for actual, gradient in zip(gradients, expected, strict=True):
            assert relative(actual, gradient) < on_gradients


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_losses_and_gradients_are_those_of_all_logits(small_tiles, kind, biased, rows, vocabulary):
    Problem(rows, vocabulary).assert_equal(kind, biased, 1e-12, 1e-12)


@pytest.mark.parametrize("with_overlap", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_near_float64_also_with_the_overlap(kind, biased, with_overlap):
    Problem(70, 1500, dtype=torch.float32).assert_equal(kind, biased, 1e-6, 3e-6, with_overlap=with_overlap)


@pytest.mark.parametrize("sweep", [torch_sweep, functools.partial(fusible_sweep, sweep_values)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sweep_gives_the_same_losses(small_tiles, monkeypatch, kind, biased, sweep):
    monkeypatch.setattr(head_module, "choose_head", lambda _device: ("chosen by the test", sweep))
    monkeypatch.setattr(
        comparison_module, "choose_rows", lambda device, _, product: whole_rows.TorchRows(device, product)
    )
    Problem(40, 130, dtype=torch.float32).assert_equal(kind, biased, 1e-6, 3e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_multiplied_and_summed_in_float32_on_the_cpu(small_tiles, kind, biased):
    problem = Problem(40, 130, dtype=torch.bfloat16)
    problem.assert_equal(kind, biased, 1e-6, 5e-3)
    found, gradients = problem.fast(kind, biased)
    assert torch.float32 == found.values_W.dtype
    assert {torch.bfloat16} == {gradient.dtype for gradient in gradients}


@pytest.mark.parametrize("biased", [False, True])
def test_the_overlap_is_that_of_the_formula_and_has_no_gradient(small_tiles, biased):
    problem = Problem(40, 130)
    logits, teacher = problem.logits(problem.leaves(biased))
    expected = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1).detach()
    for kind in (*KINDS, "focal", "dpace"):
        overlap = problem.fast(kind, biased, with_overlap=True)[0].overlap_W
        assert not overlap.requires_grad
        torch.testing.assert_close(overlap, expected, rtol=1e-12, atol=0)
    l1 = problem.fast("l1", biased)[0].values_W.detach()
    torch.testing.assert_close(expected, 1 - l1 / 2, rtol=1e-12, atol=1e-15)
    assert problem.fast("l1", biased)[0].overlap_W is None


def test_a_mix_of_losses_takes_one_backward_pass_for_all(small_tiles):
    problem = Problem(40, 130)
    leaves, expected_leaves = problem.leaves(True), problem.leaves(True)
    found = compare(leaves[0], problem.head, problem.labels, problem.teacher, Bias(*leaves[1:]))
    mixed = 0.1 * found.ce_W + 0.9 * found.l1_W + 0.3 * found.kl_W - 0.2 * found.overlap_W.log()
    logits, teacher = problem.logits(expected_leaves)
    parts = [reference_slot_losses(kind, logits, problem.labels, teacher) for kind in ("dflash", "l1", "kl", "nla")]
    expected = sum(weight * part for weight, part in zip((0.1, 0.9, 0.3, 0.2), parts, strict=True))
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=0)
    mixed.backward(problem.upstream)
    expected.backward(problem.upstream)
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert relative(leaf.grad, expected_leaf.grad) < 1e-12


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_sum_is_that_of_the_losses_and_its_gradients_are_theirs(small_tiles, rows, alike):
    problem = Problem(rows, 130)
    numbers = None
    if alike:  # slots that predict the token of the same position, in any order
        numbers = torch.randint(5, (rows,), generator=torch.Generator().manual_seed(1)) * 3
        problem.teacher, problem.labels = problem.teacher[numbers % rows], problem.labels[numbers % rows]
    kinds = ["dflash", "l1", "lk", "nla", "kl"]
    leaves, expected_leaves = problem.leaves(True), problem.leaves(True)
    total = problem.summed(kinds, alike=numbers, leaves=leaves)
    logits, teacher = problem.logits(expected_leaves)
    parts = [reference_slot_losses(kind, logits, problem.labels, teacher) for kind in kinds]
    expected = (problem.upstream * sum(parts)).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    (total * 0.3).backward()
    (expected * 0.3).backward()
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert relative(leaf.grad, expected_leaf.grad) < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(problem.summed(kinds, alike=numbers), expected, rtol=1e-12, atol=0)


def test_an_objective_may_bend_the_losses_and_a_sum_is_not_differentiated_twice(small_tiles):
    problem = Problem(40, 130)
    leaves, expected_leaves = problem.leaves(True), problem.leaves(True)
    total = problem.summed(["l1"], leaves=leaves, objective=lambda found, _: (found.ce_W * found.overlap_W**2).sum())
    logits, teacher = problem.logits(expected_leaves)
    ce, l1 = (reference_slot_losses(kind, logits, problem.labels, teacher) for kind in ("dflash", "l1"))
    (ce * (1 - l1 / 2) ** 2).sum().backward()
    total.backward(retain_graph=True)
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert relative(leaf.grad, expected_leaf.grad) < 1e-12
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["kl", "l1", "lk", "nla"])
def test_equal_distributions_have_no_loss_and_no_gradient(small_tiles, kind, biased, dtype):
    problem = Problem(40, 130, dtype=dtype)
    problem.teacher = problem.hidden
    problem.latent = torch.zeros_like(problem.latent)
    found, gradients = problem.fast(kind, biased, with_overlap=True)
    rounding = 4 * torch.finfo(dtype).eps
    assert float(found.values_W.detach().abs().max()) <= (0 if kind in ("kl", "l1") else rounding)
    assert 1 - rounding < float(found.overlap_W.min())
    assert 1 >= float(found.overlap_W.max())
    assert [0.0] * len(gradients) == [float(gradient.abs().max()) for gradient in gradients]


def test_a_slope_comes_in_the_dtype_of_products_rounded_once():
    problem = Problem(40, 130, dtype=torch.float32)
    slopes = []
    for product in (torch.float32, torch.bfloat16):
        rows = whole_rows.TorchRows(torch.device("cpu"), product)
        draft, teacher = (
            rows.normalised(x @ problem.head.T, problem.labels) for x in (problem.hidden, problem.teacher)
        )
        above_R, below_R = rows.distances(draft, teacher, None)[2:].float()
        weights = whole_rows.Weights(problem.upstream, problem.upstream, problem.upstream, above_R, below_R)
        slopes.append(rows.slope(draft, teacher, None, problem.labels, weights))
    assert torch.bfloat16 == slopes[1].dtype
    assert torch.equal(slopes[0].bfloat16(), slopes[1])


def test_a_token_that_both_hold_equally_probable_adds_nothing_to_the_slope_of_l1():
    hidden = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    found = slot_losses("l1", hidden, torch.eye(3, dtype=torch.float64), torch.tensor([2]), teacher)
    found.values_W.sum().backward()
    q = hidden.detach().softmax(-1)[0]
    lean = float(q[1] - q[0])
    expected = [q[0] * (-1 - lean), q[1] * (1 - lean), q[2] * (0 - lean)]
    assert pytest.approx(2 * lean) == float(found.values_W.detach())
    torch.testing.assert_close(hidden.grad[0], torch.stack(expected), rtol=1e-14, atol=0)


def test_distributions_without_any_overlap_have_finite_losses_and_gradients():
    hidden = torch.tensor([[2000.0, 0.0]], requires_grad=True)
    for kind, expected in (("l1", 2.0), ("lk", 4000.0), ("nla", 87.3), ("kl", 4000.0)):
        hidden.grad = None
        found = slot_losses(kind, hidden, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([0]), -hidden.detach())
        found.values_W.sum().backward()
        assert expected == pytest.approx(float(found.values_W.detach()), rel=1e-3)
        assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_slots_give_no_values_and_gradients_of_zero(kind, biased):
    found, gradients = Problem(0, 130).fast(kind, biased, with_overlap=True)
    assert (0,) == found.values_W.shape == found.correct_W.shape == found.overlap_W.shape
    shapes = [(0, HIDDEN), (0, RANK), (130, RANK)]
    assert shapes[: len(gradients)] == [tuple(gradient.shape) for gradient in gradients]
    assert 0.0 == sum(float(gradient.abs().sum()) for gradient in gradients)


def test_the_best_token_is_that_of_the_corrected_logits_and_of_equal_ones_the_first(small_tiles):
    best = [0, 3, 63, 64, 128]
    head, table = torch.zeros(200, 1), torch.zeros(200, 1)
    head[150], table[best] = 1.0, 2.0
    for latent, right in ((0.0, 150), (1.0, best[0])):
        labels = torch.tensor([*best, 150, 7])
        bias = Bias(torch.full((len(labels), 1), latent), table)
        for kind in ("dflash", "l1"):
            found = slot_losses(kind, torch.ones(len(labels), 1), head, labels, torch.zeros(len(labels), 1), bias)
            assert [label == right for label in labels.tolist()] == found.correct_W.tolist()


def test_an_almost_certain_label_keeps_its_digits_with_a_bias():
    problem = Problem(64, 1100, dtype=torch.float32)
    problem.table, problem.latent = problem.table * 0.1, problem.latent * 0.1
    problem.hidden = problem.head[problem.labels] * 1.2 + 0.1 * problem.hidden
    found, (gradient, *_) = problem.fast("dflash", True)
    expected, _, (expected_gradient, *_) = problem.slow("dflash", True)
    certain = (expected > 1e-9) & (expected < 1e-4)
    assert 10 < int(certain.sum())
    assert 2e-5 > float(((found.values_W.detach() - expected) / expected)[certain].abs().max())
    errors = (gradient - expected_gradient).norm(dim=1) / expected_gradient.norm(dim=1)
    assert 2e-5 > float(errors[certain].max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_that_is_not_finite_has_such_a_loss_and_harms_no_other(small_tiles, kind, bad):
    problem = Problem(3, 130, dtype=torch.float32)
    for place in ("hidden", "latent"):
        given = {"hidden": problem.hidden.clone(), "latent": problem.latent.clone()}
        given[place][1] = bad
        bias = Bias(given["latent"], problem.table)
        found = slot_losses(kind, given["hidden"], problem.head, problem.labels, problem.teacher, bias)
        assert [True, False, True] == found.values_W.isfinite().tolist()


def test_without_a_bias_cross_entropy_and_divergence_are_those_of_the_plain_head_to_the_bit():
    problem = Problem(70, 1500, dtype=torch.float32)
    given = (problem.head, problem.labels)
    for kind in ("dflash", "dpace", "focal", "kl"):
        found, (gradient,) = problem.fast(kind, biased=False)
        hidden = problem.hidden.clone().requires_grad_()
        if needs_teacher(kind):
            values, correct = head_kl(hidden, problem.teacher, *given)
        else:
            values, correct = head_cross_entropy(hidden, *given)
        values.backward(problem.upstream)
        assert torch.equal(values, found.values_W) and torch.equal(correct, found.correct_W)
        assert torch.equal(hidden.grad, gradient)


@pytest.mark.parametrize("kind", ["kl", "l1", "lk", "nla"])
def test_a_distance_without_a_teacher_is_refused(kind):
    problem = Problem(3, 13)
    with pytest.raises(DataError, match=f'the loss "{kind}" needs the target'):
        slot_losses(kind, problem.hidden, problem.head, problem.labels)
    with pytest.raises(DataError, match="needs the target"):
        slot_losses("dflash", problem.hidden, problem.head, problem.labels, with_overlap=True)


@pytest.mark.parametrize("label", [-1, 130])
def test_a_label_outside_the_vocabulary_is_refused(label):
    problem = Problem(3, 130)
    problem.labels[1] = label
    with pytest.raises(IndexError, match="do not fit a vocabulary of 130"):
        problem.fast("l1", biased=True)


class Sizes(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and the rows of all matrix products with M columns."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.rows += args[-2].shape[0] * (HIDDEN in (*args[-2].shape, *args[-1].shape))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize(("kind", "products"), [("dflash", 3), ("kl", 5), ("l1", 5), ("lk", 5), ("nla", 5)])
def test_no_tensor_is_larger_than_some_rows_or_an_input_and_the_wide_products_are_those_in_the_docs(
    small_tiles, kind, products
):
    problem = Problem(160, 640)
    with Sizes() as sizes:
        problem.fast(kind, biased=True)
    sides = 1 if kind == "dflash" else 2
    assert max(sides * 16 * 640, 640 * HIDDEN) == sizes.largest
    assert products * 160 == sizes.rows


@pytest.mark.parametrize(("kind", "products"), [("dflash", 2), ("l1", 3), ("lk", 3)])
def test_a_sum_makes_its_gradients_from_the_logits_of_the_losses(small_tiles, kind, products):
    problem = Problem(160, 640)
    with Sizes() as sizes:
        problem.summed([kind]).backward()
    assert sizes.largest <= 2 * 16 * 640
    assert products * 160 == sizes.rows
    if products == 3:
        with Sizes() as sizes:
            problem.summed([kind], alike=torch.arange(160) // 4).backward()
        assert 2 * 160 + 40 == sizes.rows


def test_a_part_of_the_head_that_is_not_trained_takes_no_product(small_tiles):
    problem = Problem(16, 64)
    for trained, products in ((0, 2), (1, 1), (2, 1)):
        leaves = [leaf.requires_grad_(place == trained) for place, leaf in enumerate(problem.leaves(True))]
        found = slot_losses("dflash", leaves[0], problem.head, problem.labels, None, Bias(*leaves[1:]))
        with Sizes() as sizes:
            found.values_W.sum().backward()
        assert products * 16 == sizes.rows
        assert [place == trained for place in range(3)] == [leaf.grad is not None for leaf in leaves]


def sum_of_alike_slots(rows, vocabulary):
    """Pairs of slots with the same row of the target, by the function that makes gradients with the losses."""
    problem = Problem(rows, vocabulary)
    numbers = (torch.arange(rows) + 1) * 2 // 3
    problem.teacher, problem.labels = problem.teacher[numbers], problem.labels[numbers]
    leaves, expected_leaves = problem.leaves(True), problem.leaves(True)
    problem.summed(["lk"], alike=numbers, leaves=leaves).backward()
    logits, teacher = problem.logits(expected_leaves)
    (problem.upstream * reference_slot_losses("lk", logits, problem.labels, teacher)).sum().backward()
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert relative(leaf.grad, expected_leaf.grad) < 1e-12


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_what_cuda_compiles_of_a_comparison_gives_the_same_and_is_not_compiled_again(small_tiles, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    names = ("normaliser", "row_gaps", "distance_sums", "row_slope")
    functions = {name: compiled(getattr(whole_rows, name), fullgraph=True) for name in names}
    monkeypatch.setattr(whole_rows, "_on", lambda _device, function: functions[function.__name__])
    before = counters["stats"]["unique_graphs"]
    kinds = [("l1", False), ("lk", True), ("dflash", True)]
    for rows, vocabulary in ((64, 64), (1, 64), (64, 65), (1, 65)):
        for kind, biased in kinds:
            Problem(rows, vocabulary).assert_equal(kind, biased, 1e-12, 1e-12)
        sum_of_alike_slots(rows, vocabulary)
    graphs = counters["stats"]["unique_graphs"] - before
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 7, 63, 65, 200):
            for vocabulary in (65, 200, 320):
                for kind, biased in kinds:
                    Problem(rows, vocabulary).assert_equal(kind, biased, 1e-12, 1e-12)
                sum_of_alike_slots(rows, vocabulary)
    assert graphs == counters["stats"]["unique_graphs"] - before
    torch._dynamo.reset()
