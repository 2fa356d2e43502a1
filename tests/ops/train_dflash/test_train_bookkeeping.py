"""The average of the weights, steps that are not finite, figures of the device, and a warm start."""

import math
import time

import pytest
import torch
from draft_chain import tiny_config
from safetensors.torch import load_file, save_file
from torch import nn

from dsl.errors import DataError
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import load_weights
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.training.nonfinite import NonFinite
from ops.lib.training.weights import Ema
from ops.train_dflash.hardware import Stopwatch, matmul_peak, peak_memory

CPU = torch.device("cpu")


def test_the_average_follows_the_recursion_with_its_warm_up():
    model = nn.Linear(2, 3)
    ema = Ema(model, decay=0.3)
    expected = model.weight.detach().double()
    for step in range(6):
        with torch.no_grad():
            model.weight.add_(step + 1.0)
        ema.update()
        decay = min(0.3, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
    torch.testing.assert_close(ema.weights["weight"].double(), expected, rtol=1e-6, atol=0)
    assert 6 == ema.updates


def test_the_model_holds_the_average_inside_and_its_own_weights_after_an_error_too():
    model = nn.Linear(2, 3)
    ema = Ema(model, decay=0.5)
    average = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    own = model.weight.detach().clone()
    with pytest.raises(KeyError), ema.swapped():
        assert torch.equal(average, model.weight)
        raise KeyError
    assert torch.equal(own, model.weight)
    assert torch.equal(average, ema.weights["weight"])


def test_a_training_of_which_no_step_was_applied_has_failed_and_one_of_few_is_warned_of(tmp_path):
    counters = {"nonfinite_steps": 2}
    with pytest.raises(DataError) as caught:
        NonFinite(3, tmp_path, counters).check_applied(5, 0)
    assert str(caught.value).startswith(
        "the weights are untrained: 5 of 5 steps were skipped (2 with a loss or gradient that is not finite and 3 "
        "without a token to learn from); lower lr"
    )
    assert None is NonFinite(3, tmp_path, counters).check_applied(200, 198)
    warning = NonFinite(3, tmp_path, counters).check_applied(199, 197)
    assert warning.startswith(
        "2 of 199 steps were skipped (2 with a loss or gradient that is not finite); lower lr, raise"
    )
    anchorless = NonFinite(3, tmp_path, {}).check_applied(10, 9)
    assert anchorless.startswith(
        "1 of 10 steps were skipped (1 without a token to learn from); give every sample an answer"
    )


def test_steps_that_are_not_finite_are_skipped_and_counted_until_too_many_follow_each_other(tmp_path):
    counters = {}
    policy = NonFinite(3, tmp_path, counters)
    assert policy.accepts(1, 2.0, 1.0, lambda: [4])
    assert not policy.accepts(2, math.nan, 1.0, lambda: [5])
    assert not policy.accepts(3, 1.0, math.inf, lambda: [6])
    assert policy.accepts(4, 1.0, 0.0, lambda: [7])
    assert {"nonfinite_steps": 2, "nonfinite_steps_in_a_row": 0} == counters
    assert not policy.accepts(5, math.nan, math.nan, lambda: ["a", "b"])
    assert not policy.accepts(6, math.nan, math.nan, lambda: ["c"])
    with pytest.raises(DataError) as caught:
        policy.accepts(7, math.nan, 0.5, lambda: ["d", "e"])
    assert str(caught.value).splitlines() == [
        "step 7: loss nan and gradient norm 0.5 are not finite; samples of the step (split train): ['d', 'e']; the "
        f"last checkpoint in {tmp_path} is kept. Look for non-finite values in these samples, or lower lr",
        "3 consecutive steps were skipped; before this one:",
        "  step 5, samples ['a', 'b']",
        "  step 6, samples ['c']",
    ]
    assert 5 == counters["nonfinite_steps"]


def test_a_resumed_training_goes_on_counting_and_lists_only_the_steps_it_knows(tmp_path):
    counters = {"nonfinite_steps": 4, "nonfinite_steps_in_a_row": 1}
    with pytest.raises(DataError, match="step 9") as caught:
        NonFinite(2, tmp_path, counters).accepts(9, math.nan, 1.0, lambda: [0])
    assert ["2 consecutive steps were skipped"] == str(caught.value).splitlines()[1:]
    policy = NonFinite(3, tmp_path, {"nonfinite_steps_in_a_row": 1})
    assert not policy.accepts(8, math.nan, 1.0, lambda: [3])
    with pytest.raises(DataError, match="step 9") as caught:
        policy.accepts(9, math.nan, 1.0, lambda: [0])
    expected = ["3 consecutive steps were skipped; before this one:", "  step 8, samples [3]"]
    assert expected == str(caught.value).splitlines()[1:]
    with pytest.raises(DataError, match="step 1: "):
        NonFinite(1, tmp_path, {}).accepts(1, math.nan, 1.0, lambda: [0])


def test_the_peak_is_measured_once_and_memory_is_that_of_the_process():
    peak = matmul_peak(CPU, torch.float32)
    assert 1e8 < peak < 1e14
    assert peak == matmul_peak(CPU, torch.float32)
    assert matmul_peak.cache_info().hits >= 1
    assert 50e6 < peak_memory(CPU) < 1e12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_and_the_memory_of_a_gpu():
    device = torch.device("cuda")
    assert 1e12 < matmul_peak(device, torch.bfloat16) < 1e16
    assert peak_memory(device) >= 3 * 2 * 8192**2


def test_a_stopwatch_gives_the_share_of_the_time_since_the_last_call(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    watch = Stopwatch()

    def slow_items():
        for item in range(2):
            clock[0] += 3
            yield item

    got = []
    for item in watch.over(slow_items()):
        got.append(item)
        clock[0] += 1
    assert [0, 1] == got
    assert 6 / 8 == watch.share()
    clock[0] += 5
    assert 0 == watch.share()


@pytest.fixture
def exported(tmp_path):
    """A directory as export_draft writes it, in bfloat16."""
    model = DraftModel(tiny_config())
    model.initialise(3)
    folder = tmp_path / "draft"
    folder.mkdir()
    write_json(folder / "config.json", to_serving(tiny_config(), "bfloat16"))
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_warm_start_takes_the_weights_of_an_exported_draft_in_the_dtype_of_the_masters(exported):
    model = DraftModel(tiny_config())
    load_weights(model, exported)
    stored = load_file(exported / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.float32 == parameter.dtype
        assert torch.equal(stored[name].float(), parameter)


def test_a_directory_that_holds_no_whole_draft_is_refused_by_what_is_wrong(exported):
    model = DraftModel(tiny_config())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    file = exported / "model.safetensors"
    weights = load_file(file)
    fc = weights.pop("fc.weight")
    save_file(weights | {"fc.bias": fc, "norm.weight": torch.ones(3)}, file)
    with pytest.raises(DataError) as caught:
        load_weights(model, exported)
    assert str(caught.value).splitlines()[1:] == [
        "  fc.weight is missing",
        "  fc.bias is unexpected",
        "  norm.weight must be [16], got [3]",
    ]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match="is damaged"):
        load_weights(model, exported)
    file.unlink()
    with pytest.raises(DataError, match=r"no model\.safetensors; a warm start needs"):
        load_weights(model, exported)
    assert read_json(exported / "config.json")["dtype"] == "bfloat16"
    for expected, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(expected, parameter)
