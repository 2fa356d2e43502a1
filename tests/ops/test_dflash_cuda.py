"""The engine on a GPU: what the tests on a CPU cannot reach. Each against a slow float64 reference or the CPU."""

from __future__ import annotations

import attrs
import pytest
import torch
from attention_cases import attended, error
from attention_cases import random_case as attention_case
from batch_cases import draft_for_family, family_case
from case_reader import CPU, CaseReader, drawn_samples, fast_step, make_engine
from draft_cases import random_case, reference_gradients

from ops.dflash.attention import choose_attention, dense_attention, flex_attention
from ops.dflash.config import FULL_ATTENTION, SLIDING_ATTENTION
from ops.dflash.decode import decode_plain, decode_speculative
from ops.dflash.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.dflash.head import add_product
from ops.dflash.loss import Loss
from ops.train_dflash.batches import Place, idle_batch, prepare
from ops.train_dflash.staging import Direct

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*fast path is not available"),
]
CUDA = torch.device("cuda")
KINDS = (SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION)


def place_on(device, dtype=torch.float32):
    return Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=device, dtype=dtype)


@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize(("K", "G", "R", "D"), [(16, 2, 4, 128), (10, 3, 1, 64), (8, 1, 4, 16)])
def test_flex_attention_has_the_values_and_gradients_of_the_dense_mask(K, G, R, D, window):
    case = attention_case(8, K=K, G=G, R=R, D=D, window=window)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(flex_attention, case, torch.bfloat16, "cuda")) < 5e-2


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 128), (torch.float32, 8)])
def test_what_flex_attention_does_not_take_goes_through_the_dense_mask(dtype, head_dim):
    case = attention_case(9, K=8, D=head_dim, window=12)
    shape = random_case(0, head_dim=head_dim).config
    name, attend = choose_attention(CUDA, shape, dtype)
    assert name.startswith("dense")
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(attend, case, dtype, "cuda")) < (1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "kl"])
def test_a_step_with_sliding_windows_and_heads_of_128_stays_near_the_float64_reference(kind, compiled):
    case = random_case(5, samples=3, head_dim=128, layer_types=KINDS)
    reference, expected = reference_gradients(case, kind=kind)
    options = {"device": CUDA, "compiled": compiled, "anchor_chunk": 4}
    value, gradients, _ = fast_step(case.to(torch.float32), Loss(kind=kind), **options)
    assert value == pytest.approx(float(reference.loss.detach()), rel=1e-3)
    off = sum(float((gradients[name] - gradient).norm()) ** 2 for name, gradient in expected.items()) ** 0.5
    size = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
    assert off < 5e-3 * size


def test_measuring_gives_the_loss_and_the_right_slots_of_the_cpu():
    case = random_case(6, samples=4, head_dim=16, layer_types=KINDS).to(torch.float32)
    found = []
    for device in (CPU, CUDA):
        batch = prepare(CaseReader(case), drawn_samples(case), place_on(device))
        found.append(make_engine(case, Loss(), device=device, compiled=device == CUDA).measure(batch))
    on_cpu, on_gpu = found
    assert float(on_gpu.loss) == pytest.approx(float(on_cpu.loss), rel=1e-3)
    assert on_cpu.slots_W.tolist() == on_gpu.slots_W.cpu().tolist()
    assert int((on_cpu.correct_W != on_gpu.correct_W.cpu()).sum()) <= 1  # two logits may be nearly alike


def test_a_step_does_not_wait_for_the_device_once_it_is_compiled():
    case = random_case(3, samples=4, head_dim=16, layer_types=KINDS).to(torch.float32)
    engine = make_engine(case, Loss(), device=CUDA, compiled=True, anchor_chunk=3)
    batch = prepare(CaseReader(case), drawn_samples(case), place_on(CUDA))
    engine.train(batch, 1.0)
    engine.measure(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.train(batch, 1.0)
        engine.measure(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_after_one_step_and_one_measurement_nothing_is_compiled_again():
    torch._dynamo.reset()
    case = random_case(3, samples=4, head_dim=16, layer_types=KINDS).to(torch.float32)
    engine = make_engine(case, Loss(), device=CUDA, compiled=True)
    drawn = drawn_samples(case)
    batches = [prepare(CaseReader(case), samples, place_on(CUDA)) for samples in (drawn, drawn[:1], drawn[1:])]
    batches.append(idle_batch(case.config.block_size, CaseReader(case).width, place_on(CUDA)).send(Direct(CUDA))[0])
    engine.train(batches[0], 1.0)
    engine.measure(batches[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for chunk in (None, 3):
            for batch in batches:
                attrs.evolve(engine, anchor_chunk=chunk).train(batch, 1.0)
                attrs.evolve(engine, anchor_chunk=chunk).measure(batch)


def test_the_products_that_add_to_a_wider_sum_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    sum_RM, p_RC, head_CM = (torch.randn(shape, generator=generator) for shape in ((300, 64), (300, 520), (520, 64)))
    p_RC, head_CM = p_RC.bfloat16(), head_CM.bfloat16()
    on_gpu = sum_RM.cuda()
    before = on_gpu.data_ptr()
    add_product(on_gpu, p_RC.cuda(), head_CM.cuda())
    add_product(sum_RM, p_RC, head_CM)
    assert before == on_gpu.data_ptr()
    torch.testing.assert_close(on_gpu.cpu(), sum_RM, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_decoding_on_a_gpu_gives_the_answers_of_the_cpu(name, tmp_path):
    target, samples = family_case(name, tmp_path)
    draft = draft_for_family()
    plain = [decode_plain(target, sample, 8) for sample in samples]
    target.model.to(CUDA)
    on_gpu = attrs.evolve(target, device=CUDA)
    settings = DecodeSettings(8)
    answers = [
        [decode_plain(on_gpu, sample, 8) for sample in samples],
        decode_plain_batch(on_gpu, samples, settings),
        [decode_speculative(on_gpu, draft.to(CUDA), sample, 8) for sample in samples],
        decode_speculative_batch(on_gpu, draft.to(CUDA), samples, settings),
    ]
    for found in answers:
        for expected, answer in zip(plain, found, strict=True):
            upto = next((place for place, margin in enumerate(expected.margins) if margin < 1e-3), len(expected.tokens))
            assert expected.tokens[:upto] == answer.tokens[:upto]
