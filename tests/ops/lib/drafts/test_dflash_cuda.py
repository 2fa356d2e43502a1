"""The engine on a GPU, against a slow float64 reference or the CPU; what a CPU can run of it runs there as well."""

from __future__ import annotations

import attrs
import pytest
import torch
from attention_cases import attended, error
from attention_cases import random_case as attention_case
from batch_cases import draft_for_family, family_case
from case_reader import CPU, CaseReader, drawn_samples, fast_step, make_engine, prepare
from draft_cases import random_case, reference_gradients

from ops.lib.drafts.attention.blocks import choose_attention, dense_attention, flex_attention
from ops.lib.drafts.backbone.config import FULL_ATTENTION, SLIDING_ATTENTION
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.drafts.losses.head import add_product
from ops.lib.drafts.losses.loss import Loss
from ops.train_dflash.batches import Place, idle_batch
from ops.train_dflash.staging import Direct

pytestmark = pytest.mark.filterwarnings("ignore:.*fast path is not available")
KINDS = (SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION)


def place_on(device, dtype=torch.float32):
    return Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=device, dtype=dtype)


@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize(("K", "G", "R", "D"), [(16, 2, 4, 128), (10, 3, 1, 64), (8, 1, 4, 16)])
def test_flex_attention_has_the_values_and_gradients_of_the_dense_mask(cuda, K, G, R, D, window):
    case = attention_case(8, K=K, G=G, R=R, D=D, window=window)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(flex_attention, case, torch.bfloat16, cuda)) < 5e-2


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 128), (torch.float32, 8)])
def test_what_flex_attention_does_not_take_goes_through_the_dense_mask(cuda, dtype, head_dim):
    case = attention_case(9, K=8, D=head_dim, window=12)
    shape = random_case(0, head_dim=head_dim).config
    name, attend = choose_attention(cuda, shape, dtype)
    assert name.startswith("dense")
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(attend, case, dtype, cuda)) < (1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "kl", "lk"])
def test_a_step_with_sliding_windows_and_heads_of_128_stays_near_the_float64_reference(device, kind, is_compiled):
    if is_compiled and device.type == "cpu":
        pytest.skip("compiling takes minutes on a CPU")
    case = random_case(5, samples=3, head_dim=128, layer_types=KINDS)
    reference, expected = reference_gradients(case, kind=kind)
    options = {"device": device, "compiled": is_compiled, "anchor_chunk": 4}
    value, gradients, _ = fast_step(case.to(torch.float32), Loss(kind=kind), **options)
    assert value == pytest.approx(float(reference.loss.detach()), rel=1e-3)
    off = sum(float((gradients[name] - gradient).norm()) ** 2 for name, gradient in expected.items()) ** 0.5
    size = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
    assert off < 5e-3 * size


def test_measuring_gives_the_loss_and_the_right_slots_of_the_cpu(device):
    case = random_case(6, samples=4, head_dim=16, layer_types=KINDS).to(torch.float32)
    found = []
    for place, is_compiled in ((CPU, False), (device, device.type == "cuda")):
        batch = prepare(CaseReader(case), drawn_samples(case), place_on(place))
        found.append(make_engine(case, Loss(), device=place, compiled=is_compiled).measure(batch))
    on_cpu, there = found
    assert float(there.loss) == pytest.approx(float(on_cpu.loss), rel=1e-3)
    assert on_cpu.slots_W.tolist() == there.slots_W.cpu().tolist()
    assert int((on_cpu.correct_W != there.correct_W.cpu()).sum()) <= 1  # two logits may be nearly alike


def test_a_step_does_not_wait_for_the_device_once_it_is_compiled(cuda):
    case = random_case(3, samples=4, head_dim=16, layer_types=KINDS).to(torch.float32)
    engine = make_engine(case, Loss(), device=cuda, compiled=True, anchor_chunk=3)
    batch = prepare(CaseReader(case), drawn_samples(case), place_on(cuda))
    engine.train(batch, 1.0)
    engine.measure(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.train(batch, 1.0)
        engine.measure(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_after_one_step_and_one_measurement_nothing_is_compiled_again(cuda):
    torch._dynamo.reset()
    case = random_case(3, samples=4, head_dim=16, layer_types=KINDS).to(torch.float32)
    engine = make_engine(case, Loss(), device=cuda, compiled=True)
    drawn = drawn_samples(case)
    batches = [prepare(CaseReader(case), samples, place_on(cuda)) for samples in (drawn, drawn[:1], drawn[1:])]
    batches.append(idle_batch(case.config.block_size, CaseReader(case).width, place_on(cuda)).send(Direct(cuda))[0])
    engine.train(batches[0], 1.0)
    engine.measure(batches[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for chunk in (None, 3):
            for batch in batches:
                attrs.evolve(engine, anchor_chunk=chunk).train(batch, 1.0)
                attrs.evolve(engine, anchor_chunk=chunk).measure(batch)


def test_the_products_that_add_to_a_wider_sum_are_those_of_float32(device):
    generator = torch.Generator().manual_seed(0)
    sum_RM, p_RC, head_CM = (torch.randn(shape, generator=generator) for shape in ((300, 64), (300, 520), (520, 64)))
    p_RC, head_CM = p_RC.bfloat16(), head_CM.bfloat16()
    found = sum_RM.to(device, copy=True)
    before = found.data_ptr()
    add_product(found, p_RC.to(device), head_CM.to(device))
    assert before == found.data_ptr()
    torch.testing.assert_close(found.cpu(), sum_RM + p_RC.float() @ head_CM.float(), rtol=1e-4, atol=1e-3)


def test_torch_has_the_product_that_adds_to_a_wider_sum_for_cuda():
    """Its signature is the same in torch 2.11 to 2.13; no device but CUDA has a kernel for it."""
    schema = torch.ops.aten.addmm.dtype_out._schema
    assert ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"] == [each.name for each in schema.arguments]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_decoding_on_a_device_gives_the_answers_of_the_cpu(device, name, tmp_path):
    target, samples = family_case(name, tmp_path)
    draft = draft_for_family()
    plain = [decode_plain(target, sample, 8) for sample in samples]
    target.model.to(device)
    moved = attrs.evolve(target, device=device)
    settings = DecodeSettings(8)
    answers = [
        [decode_plain(moved, sample, 8) for sample in samples],
        decode_plain_batch(moved, samples, settings),
        [decode_speculative(moved, draft.to(device), sample, 8) for sample in samples],
        decode_speculative_batch(moved, draft.to(device), samples, settings),
    ]
    for found in answers:
        for expected, answer in zip(plain, found, strict=True):
            upto = next((place for place, margin in enumerate(expected.margins) if margin < 1e-3), len(expected.tokens))
            assert expected.tokens[:upto] == answer.tokens[:upto]
