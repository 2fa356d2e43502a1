"""Losses through the frozen head against plain log_softmax in float64: values, gradients, best tokens, memory."""

import subprocess

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops.lib.drafts.losses import candidates
from ops.lib.drafts.losses import head as head_module
from ops.lib.drafts.losses.head import choose_head, head_cross_entropy, head_cross_entropy_and_best, head_kl
from ops.lib.drafts.losses.tiled_softmax import RowState, fusible_sweep, kernel_sweep, sweep_values, torch_sweep
from ops.lib.drafts.losses.whole_rows import TorchRows, choose_rows
from ops.lib.kernels import c_library

CPU = torch.device("cpu")
TILE = 512
has_compiler = pytest.mark.skipif(c_library.compiled_sweep()[1] is None, reason="no C compiler on this machine")


def fused(*arguments):
    return fusible_sweep(sweep_values, *arguments)


def by_kernel(*arguments):
    return kernel_sweep(c_library.compiled_sweep()[1], *arguments)


SWEEPS = [torch_sweep, fused, pytest.param(by_kernel, marks=has_compiler)]


@pytest.fixture(params=SWEEPS, ids=["torch", "fusible", "C"])
def sweep(request, monkeypatch):
    """Every test that takes this runs with each sweep."""
    monkeypatch.setattr(head_module, "choose_head", lambda device: ("chosen by the test", request.param))
    return request.param


def case(rows, vocabulary, hidden=24, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(vocabulary, (rows,), generator=generator)
    return draw(rows, hidden) * scale, draw(rows, hidden) * scale, draw(vocabulary, hidden), labels, draw(rows)


def plain_cross_entropy(hidden, head, labels, upstream):
    hidden = hidden.to(torch.float64, copy=True).requires_grad_()
    logits = hidden @ head.double().T
    ce = -logits.log_softmax(-1)[torch.arange(len(labels)), labels]
    ce.backward(upstream.double())
    return ce.detach(), logits.argmax(-1) == labels, hidden.grad


def plain_kl(hidden, teacher, head, labels, upstream):
    hidden = hidden.to(torch.float64, copy=True).requires_grad_()
    logits = hidden @ head.double().T
    log_teacher = (teacher.double() @ head.double().T).log_softmax(-1)
    kl = (log_teacher.exp() * (log_teacher - logits.log_softmax(-1))).sum(-1)
    kl.backward(upstream.double())
    return kl.detach(), logits.argmax(-1) == labels, hidden.grad


def run(function, hidden, *rest, upstream):
    hidden = hidden.clone().requires_grad_()
    values, correct = function(hidden, *rest)
    values.backward(upstream.to(values.dtype))
    return values.detach(), correct, hidden.grad


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


SHAPES = [(1, 700), (7, 2), (130, 512), (130, 513), (513, 1100), (1030, 1537)]


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_cross_entropy_in_float32_equals_log_softmax_in_float64(sweep, rows, vocabulary):
    hidden, _, head, labels, upstream = case(rows, vocabulary, scale=0.6)
    expected, expected_correct, expected_gradient = plain_cross_entropy(hidden, head, labels, upstream)
    actual, correct, gradient = run(head_cross_entropy, hidden, head, labels, upstream=upstream)
    assert (torch.float32, torch.float32, torch.bool) == (actual.dtype, gradient.dtype, correct.dtype)
    assert 1e-6 > relative(actual, expected)
    assert 2e-6 > relative(gradient, expected_gradient)
    assert expected_correct.tolist() == correct.tolist()


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_float64_stays_float64(sweep, rows, vocabulary):
    hidden, teacher, head, labels, upstream = case(rows, vocabulary, dtype=torch.float64)
    for function, plain, given in (
        (head_cross_entropy, plain_cross_entropy, (head, labels)),
        (head_kl, plain_kl, (teacher, head, labels)),
    ):
        expected, expected_correct, expected_gradient = plain(hidden, *given, upstream)
        actual, correct, gradient = run(function, hidden, *given, upstream=upstream)
        assert (torch.float64, torch.float64) == (actual.dtype, gradient.dtype)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)
        assert expected_correct.tolist() == correct.tolist()


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_divergence_in_float32_equals_log_softmax_in_float64(sweep, rows, vocabulary):
    hidden, teacher, head, labels, upstream = case(rows, vocabulary, scale=0.6)
    expected, expected_correct, expected_gradient = plain_kl(hidden, teacher, head, labels, upstream)
    actual, correct, gradient = run(head_kl, hidden, teacher, head, labels, upstream=upstream)
    assert (torch.float32, torch.float32) == (actual.dtype, gradient.dtype)
    assert 1e-6 > relative(actual, expected)
    assert 2e-6 > relative(gradient, expected_gradient)
    assert expected_correct.tolist() == correct.tolist()


def test_the_divergence_of_equal_distributions_and_its_gradient_are_zero(sweep):
    hidden, _, head, labels, upstream = case(40, 1100)
    actual, _, gradient = run(head_kl, hidden, hidden.clone(), head, labels, upstream=upstream)
    assert [0.0] * 40 == actual.tolist()
    assert 0.0 == float(gradient.abs().max())


def test_an_almost_certain_label_keeps_its_digits(sweep):
    hidden, _, head, labels, upstream = case(64, 1100)
    hidden = head[labels] * 1.2 + 0.1 * hidden
    expected, expected_correct, expected_gradient = plain_cross_entropy(hidden, head, labels, upstream)
    actual, correct, gradient = run(head_cross_entropy, hidden, head, labels, upstream=upstream)
    assert expected_correct.tolist() == correct.tolist()
    certain = (expected > 1e-9) & (expected < 1e-4)  # below that the reference has lost its own digits
    assert 10 < int(certain.sum())
    assert 2e-5 > float(((actual.double() - expected) / expected)[certain].abs().max())
    errors = (gradient.double() - expected_gradient).norm(dim=1) / expected_gradient.norm(dim=1)
    assert 2e-5 > float(errors[certain].max())


@pytest.fixture(params=["torch", pytest.param("C", marks=has_compiler)])
def keeps_best(request, monkeypatch):
    """Every test that takes this runs with both ways to keep the best tokens."""
    if request.param == "torch":
        monkeypatch.setattr(candidates, "compiled_keep_best", lambda: None)
    return request.param


@pytest.mark.parametrize(("vocabulary", "count"), [(3 * TILE + 5, 16), (TILE + 3, 1), (7, 7), (40, 33)])
def test_the_best_tokens_are_those_of_all_logits_and_change_nothing_else(keeps_best, vocabulary, count):
    hidden, _, head, labels, upstream = case(600, vocabulary)
    expected = (hidden.double() @ head.double().T).topk(count, dim=1).indices
    ce, correct, best = head_cross_entropy_and_best(hidden.requires_grad_(), head, labels, count)
    assert torch.equal(expected, best)
    ce.backward(upstream)
    with_best, hidden.grad = hidden.grad, None
    alone, as_correct = head_cross_entropy(hidden, head, labels)
    alone.backward(upstream)
    assert torch.equal(alone, ce) and torch.equal(as_correct, correct) and torch.equal(hidden.grad, with_best)


@pytest.mark.parametrize(("vocabulary", "count"), [(8192, 16), (4500, 16), (1100, 16), (1000, 16), (130, 1), (7, 7)])
def test_the_best_of_the_best_groups_are_the_best_of_all(vocabulary, count):
    """One logit in some groups, all 16 in one, and those behind the last whole group among them."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(40, vocabulary, generator=generator)
    logits[0, 64:80] += 9.0
    logits[1, -3:] += 9.0
    logits[2] = torch.arange(vocabulary).flip(0)
    expected = logits.topk(count, dim=1)
    values, columns = candidates.topk_by_groups(logits, count)
    assert torch.equal(expected.values, values)
    assert torch.equal(expected.indices, columns)


def test_of_many_equal_logits_the_best_of_the_best_groups_are_as_good_and_each_is_there_once():
    logits = torch.randint(4, (200, 3000), generator=torch.Generator().manual_seed(0)).float()
    values, columns = candidates.topk_by_groups(logits, 16)
    assert torch.equal(logits.topk(16, dim=1).values, values)
    assert torch.equal(logits.gather(1, columns), values)
    assert [16] * 200 == [len(set(row)) for row in columns.tolist()]


def test_the_candidates_of_a_gpus_way_are_those_of_all_logits(monkeypatch):
    hidden, _, head, labels, _ = case(600, 5000)
    monkeypatch.setattr(candidates, "compiled_keep_best", lambda: None)
    monkeypatch.setattr("torch.topk", candidates.topk_by_groups)
    monkeypatch.setattr("ops.lib.drafts.losses.head._tile", lambda _device: (300, 2048))
    expected = (hidden.double() @ head.double().T).topk(16, dim=1).indices
    assert torch.equal(expected, head_cross_entropy_and_best(hidden, head, labels, 16)[2])


def test_of_equal_tokens_the_first_is_kept_and_nan_is_none(keeps_best):
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0] * 8, [torch.nan] * 31 + [2.0]])
    best = candidates.BestTokens(2, 3, torch.float32, CPU)
    best.add(logits[:, :20].contiguous(), 100)
    best.add(logits[:, 20:].contiguous(), 120)
    assert [3.0, 3.0, 3.0] == best.values_RC[0].tolist()
    if keeps_best == "C":
        assert [101, 102, 105] == best.tokens_RC[0].tolist()
        assert (131, 2.0) == (int(best.tokens_RC[1, 0]), float(best.values_RC[1, 0]))


@pytest.mark.parametrize("function", [head_cross_entropy, head_kl])
def test_of_equal_best_tokens_the_first_is_the_best(sweep, function):
    vocabulary = 3 * TILE + 5
    best = [0, 3, TILE - 1, TILE, 2 * TILE, 3 * TILE + 4]
    head = torch.zeros(vocabulary, 2)
    head[:, 1] = torch.linspace(-1, 0.9, vocabulary)
    head[best, 0] = 1.0
    head[best, 1] = 1.0
    for first in range(len(best)):
        head[best[:first]] = 0.0
        labels = torch.tensor([*best, 7])
        hidden = torch.ones(len(labels), 2)
        given = (head, labels) if function is head_cross_entropy else (hidden.flip(1) * 0.5, head, labels)
        _, correct = function(hidden, *given)
        assert [label == best[first] for label in labels.tolist()] == correct.tolist()


def test_labels_at_the_borders_of_tiles_are_found(sweep):
    labels = torch.tensor([0, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1])
    hidden, _, head, _, upstream = case(len(labels), 2 * TILE + 2)
    for boost in (0.0, 0.5):
        pushed = hidden + boost * head[labels]
        expected, expected_correct, expected_gradient = plain_cross_entropy(pushed, head, labels, upstream)
        actual, correct, gradient = run(head_cross_entropy, pushed, head, labels, upstream=upstream)
        assert 1e-6 > relative(actual, expected)
        assert 2e-6 > relative(gradient, expected_gradient)
        assert expected_correct.tolist() == correct.tolist()


@pytest.mark.parametrize("function", [head_cross_entropy, head_kl])
def test_no_rows_give_no_values_and_an_empty_gradient(sweep, function):
    hidden, teacher, head, labels, upstream = case(0, 600)
    given = (head, labels) if function is head_cross_entropy else (teacher, head, labels)
    actual, correct, gradient = run(function, hidden, *given, upstream=upstream)
    assert ((0,), (0,), (0, 24)) == (actual.shape, correct.shape, gradient.shape)


def test_logits_of_ten_thousand_do_not_overflow(sweep):
    hidden, teacher, head, labels, upstream = case(50, 1100, scale=1000.0)
    assert 1e4 < float((hidden @ head.T).max())
    for function, plain, given in (
        (head_cross_entropy, plain_cross_entropy, (head, labels)),
        (head_kl, plain_kl, (teacher, head, labels)),
    ):
        expected, expected_correct, expected_gradient = plain(hidden, *given, upstream)
        actual, correct, gradient = run(function, hidden, *given, upstream=upstream)
        assert 1e-6 > relative(actual, expected)
        assert 2e-3 > relative(gradient, expected_gradient)  # a logit of 1e4 is known to 1e-3 in float32
        assert expected_correct.tolist() == correct.tolist()


def test_rows_whose_logits_rise_from_tile_to_tile_are_scaled_anew(sweep):
    vocabulary = 4 * TILE
    head = torch.stack((torch.linspace(-40, 40, vocabulary), torch.ones(vocabulary)), dim=1)
    hidden = torch.tensor([[1.0, 0.3], [-1.0, 0.3], [0.0, 1.0]])
    labels, upstream = torch.tensor([vocabulary - 9, 5, 17]), torch.ones(3)
    expected, _, expected_gradient = plain_cross_entropy(hidden, head, labels, upstream)
    actual, _, gradient = run(head_cross_entropy, hidden, head, labels, upstream=upstream)
    assert 1e-6 > relative(actual, expected)
    assert 2e-6 > relative(gradient, expected_gradient)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_a_row_that_is_not_finite_gives_a_loss_that_is_not_finite_and_harms_no_other(sweep, bad):
    hidden, teacher, head, labels, _ = case(3, 1100)
    sound = head_cross_entropy(hidden, head, labels)[0]
    hidden[1] = bad
    actual = head_cross_entropy(hidden, head * 10, labels)[0]
    assert [True, False, True] == actual.isfinite().tolist()
    assert [True, False, True] == head_kl(hidden, teacher, head * 10, labels)[0].isfinite().tolist()
    assert sound.isfinite().all()


def test_bf16_inputs_are_multiplied_and_summed_in_float32_on_the_cpu(sweep):
    hidden, teacher, head, labels, upstream = case(70, 1100, dtype=torch.bfloat16, scale=0.6)
    for function, plain, given in (
        (head_cross_entropy, plain_cross_entropy, (head, labels)),
        (head_kl, plain_kl, (teacher, head, labels)),
    ):
        expected, expected_correct, expected_gradient = plain(hidden, *given, upstream)
        actual, correct, gradient = run(function, hidden, *given, upstream=upstream)
        assert (torch.float32, torch.bfloat16) == (actual.dtype, gradient.dtype)
        assert 1e-6 > relative(actual, expected)
        assert 5e-3 > relative(gradient, expected_gradient)
        assert expected_correct.tolist() == correct.tolist()


@pytest.mark.parametrize("label", [-1, 700])
def test_a_label_outside_the_vocabulary_is_refused(label):
    hidden, teacher, head, labels, _ = case(3, 700)
    labels[1] = label
    for given in ((head_cross_entropy, hidden, head, labels), (head_kl, hidden, teacher, head, labels)):
        with pytest.raises(IndexError, match="do not fit a vocabulary of 700"):
            given[0](*given[1:])


class Sizes(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("function", [head_cross_entropy, head_kl])
def test_no_tensor_is_larger_than_a_tile_or_an_input(sweep, function):
    hidden, teacher, head, labels, _ = case(600, 5000)
    hidden.requires_grad_()
    given = (head, labels) if function is head_cross_entropy else (teacher, head, labels)
    with Sizes() as sizes:
        function(hidden, *given)[0].sum().backward()
    assert TILE * TILE >= sizes.largest or head.numel() == sizes.largest
    assert 600 * 5000 > 10 * sizes.largest


def test_the_products_of_the_gradient_are_left_out_where_none_is_asked_for(sweep):
    hidden, _, head, labels, _ = case(10, 1100)
    counts = []
    for needed, mode in ((False, torch.enable_grad()), (True, torch.no_grad()), (True, torch.enable_grad())):
        with Sizes() as sizes, mode:
            head_cross_entropy(hidden.clone().requires_grad_(needed), head, labels)
        counts.append(sizes.products)
    assert [3, 3, 6] == counts


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("sweep", SWEEPS[1:], ids=["fusible", "C"])
def test_a_sweep_does_what_the_one_in_torch_does(sweep, hide):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(101, (37,), generator=generator)
    states = [RowState(37, torch.float32, CPU, labels, hide) for _ in range(2)]
    for start, columns in ((0, 64), (64, 33), (97, 4)):
        logits = torch.randn(37, columns, generator=generator) * (start + 3)
        p, scale = torch_sweep(states[0], logits.clone(), start, torch.float32)
        actual_p, actual_scale = sweep(states[1], logits.clone(), start, torch.float32)
        torch.testing.assert_close(actual_p, p, rtol=4e-7, atol=1e-37)
        ones = torch.ones(37)
        torch.testing.assert_close(
            ones if actual_scale is None else actual_scale, ones if scale is None else scale, rtol=4e-7, atol=1e-37
        )
        assert states[0].best_R.tolist() == states[1].best_R.tolist()
        assert states[0].reference_R.tolist() == states[1].reference_R.tolist()
        torch.testing.assert_close(states[1].total_R, states[0].total_R, rtol=4e-7, atol=0)
    assert states[0].logit_R.tolist() == states[1].logit_R.tolist()
    assert states[0].correct_R.tolist() == states[1].correct_R.tolist()


@has_compiler
def test_the_kernels_exponential_is_right_to_the_last_digits():
    logits = torch.linspace(-86, 0, 100_000)[None]
    state = RowState(1, torch.float32, CPU, None, False)
    p, _ = by_kernel(state, logits.clone(), 0, torch.float32)
    expected = (logits.double() - logits.double().max()).exp()
    assert 2e-7 > float(((p.double() - expected) / expected).abs().max())


@pytest.fixture
def fresh_kernel():
    cached = (
        *(c_library.compiled_sweep, c_library.compiled_keep_best, c_library._sweeps),
        c_library.compiled_comparison,
    )
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_without_a_compiler_torch_does_the_sweep(fresh_kernel, monkeypatch):
    monkeypatch.setattr(c_library, "COMPILERS", ())
    monkeypatch.delenv("CC", raising=False)
    name, sweep = choose_head(CPU)
    assert ("tiles of 512 x 512, sweep: torch (no C compiler)", torch_sweep) == (name, sweep)
    assert TorchRows(CPU, torch.float32) == choose_rows(CPU, torch.float32, torch.float32)


def test_where_the_compiler_fails_torch_does_the_sweep(fresh_kernel, monkeypatch):
    monkeypatch.setenv("CC", "false")
    name, sweep = choose_head(CPU)
    assert ("tiles of 512 x 512, sweep: torch (false failed: CalledProcessError)", torch_sweep) == (name, sweep)


def test_where_the_compiler_hangs_torch_does_the_sweep(fresh_kernel, monkeypatch):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(c_library, "_compiler", lambda: ["cc"])
    monkeypatch.setattr(c_library.subprocess, "run", hang)
    assert ("cc failed: TimeoutExpired", None) == c_library.compiled_sweep()


@has_compiler
def test_the_kernel_is_chosen_on_few_threads_and_torch_on_many(monkeypatch):
    assert "tiles of 512 x 512, sweep: C (" in choose_head(CPU)[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert ("tiles of 512 x 4096, sweep: torch", torch_sweep) == choose_head(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_on_a_gpu_the_compiled_sweep_equals_log_softmax_in_float64(dtype, tolerance):
    tensors = [tensor.cuda() for tensor in case(700, 20_000, hidden=128, dtype=dtype, scale=0.3)]
    hidden, teacher, head, labels, upstream = tensors
    assert "compiled by torch" in choose_head(hidden.device)[0]
    for function, plain, given in (
        (head_cross_entropy, plain_cross_entropy, (head, labels)),
        (head_kl, plain_kl, (teacher, head, labels)),
    ):
        expected, _, expected_gradient = plain(hidden, *given, upstream)
        actual, _, gradient = run(function, hidden, *given, upstream=upstream)
        assert tolerance > relative(actual, expected)
        assert tolerance > relative(gradient, expected_gradient)
