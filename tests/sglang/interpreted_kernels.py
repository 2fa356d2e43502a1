"""SGLang's own kernels of linear attention, run by triton's interpreter, beside what stands in for them on a CPU.

A program of its own, because triton decides at its import whether it interprets, and because nothing may stand in for
the kernels here: `python interpreted_kernels.py` prints the largest difference of every output as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent / "cpu_support"))

import import_hooks
import platform_patches  # noqa: F401 (registers its hooks)

import_hooks.install()

import gated_delta_rule as stand_ins  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

KERNELS = "sglang.kernels.ops"
OLDEST = importlib.metadata.version("sglang") == "0.5.21"
STARTS = torch.tensor([0, 5, 6, 13], dtype=torch.int32)  # three requests
SLOTS = torch.tensor([4, 1, 2], dtype=torch.int32)
N, T, P, D = 3, 13, 6, 7  # requests, their tokens, slots, draft tokens at most
H, G, K, V, W = 2, 4, 8, 8, 4
C = 2 * H * K + G * V


@triton.jit
def exp(x):
    return tl.exp(x)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    masks_are_booleans()
    differences = {}
    for case in (projections, gates, norm, attention_gate, convolutions, recurrences, packed_step, acceptance):
        for what, (theirs, ours) in case().items():
            pairs = zip(theirs, ours, strict=True)
            differences[what] = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    print(json.dumps(differences))


def masks_are_booleans() -> None:
    """The interpreter takes boolean masks only, and products of masks with a scalar are integers to it."""
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, boolean_mask(getattr(InterpreterBuilder, name), place))


def boolean_mask(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    def called(builder: Any, *arguments: Any) -> Any:
        arguments[place].data = arguments[place].data.astype(bool)
        return function(builder, *arguments)

    return called


def kernels(name: str, before: str = "") -> ModuleType:
    """A module of SGLang's, in which the names that the interpreter does not replace by itself are replaced.

    before: its name in SGLang 0.5.21, if another.
    """
    module = importlib.import_module(f"{KERNELS}.{before if before and OLDEST else name}")
    if hasattr(module, "exp"):
        module.exp = exp
    return module


Case = dict[str, tuple[Sequence[Tensor], Sequence[Tensor]]]


def projections() -> Case:
    module = kernels("attention.triton_gdn_fused_proj")
    arguments = (torch.randn(T, C + G * V), torch.randn(T, 2 * G), H, G, K, V)
    theirs = module.fused_qkvzba_split_reshape_cat_contiguous(*arguments)
    return {"projections": (theirs, stand_ins.split_projections(*arguments))}


def gates() -> Case:
    module = kernels("attention.linear.fused_gdn_gating", before="attention.fla.fused_gdn_gating")
    arguments = (torch.randn(G), torch.randn(T, G), torch.randn(T, G), torch.randn(G))
    return {"gates": (module.fused_gdn_gating(*arguments), stand_ins.gates(*arguments))}


def norm() -> Case:
    module = kernels("attention.fla.layernorm_gated")
    module._get_sm_count = lambda _device: 1
    module.device_context = lambda _device: contextlib.nullcontext()
    how = {"eps": 1e-6, "group_size": None, "norm_before_gate": True, "is_rms_norm": True, "activation": "swish"}
    arguments = (torch.randn(T * G, V), torch.rand(V), None)
    z = torch.randn(T, G, V)
    theirs = module.layernorm_fn(*arguments, z=z, **how)
    return {"norm": ([theirs], [stand_ins.gated_norm(*arguments, z=z, **how)])}


def attention_gate() -> Case:
    module = kernels("elementwise.elementwise")
    x, gate = torch.randn(T, 2 * 32), torch.randn(T, 2, 64)[..., 32:]
    return {"attention gate": ([module.fused_sigmoid_mul(x, gate)], [stand_ins.sigmoid_times(x, gate)])}


def convolutions() -> Case:
    module = kernels("mamba.causal_conv1d_triton")
    weight, states = torch.randn(C, W), torch.randn(P, C, W - 1)
    sequences, block, step = torch.randn(T, C).T, torch.randn(N, C, 3), torch.randn(N, C)
    known = torch.tensor([True, False, True])

    def whole(function: Callable[..., Tensor]) -> list[Tensor]:
        kept = states.clone()
        options = {"has_initial_state": known, "cache_indices": SLOTS, "query_start_loc": STARTS}
        out = function(sequences, weight, None, activation="silu", conv_states=kept, seq_lens_cpu=[5, 1, 7], **options)
        return [out, kept]

    def next_tokens(function: Callable[..., Tensor], x: Tensor, keep_windows: bool) -> list[Tensor]:
        kept, windows = states.clone(), torch.zeros(P, 3, C, W - 1)
        more = {"intermediate_conv_window": windows, "intermediate_state_indices": torch.arange(N, dtype=torch.int32)}
        out = function(x, kept, weight, None, "silu", conv_state_indices=SLOTS, **(more if keep_windows else {}))
        return [out, kept, windows]

    theirs, ours = module.causal_conv1d_update, stand_ins.convolve_steps
    return {
        "convolution of sequences": (whole(module.causal_conv1d_fn), whole(stand_ins.convolve_sequences)),
        "convolution of a block": (next_tokens(theirs, block, True), next_tokens(ours, block, True)),
        "convolution of a token": (next_tokens(theirs, step, False), next_tokens(ours, step, False)),
    }


def recurrences() -> Case:
    """The kernel for whole sequences needs block pointers, which this triton lacks; a token at a time is the same."""
    name = "fused_sigmoid_gating_recurrent"
    module = kernels(f"attention.linear.{name}", before=f"attention.fla.{name}")
    q, k, v = torch.randn(1, T, H, K), torch.randn(1, T, H, K), torch.randn(1, T, G, V)
    A_log, dt_bias, a, b = torch.randn(G), torch.randn(G), torch.randn(T, G), torch.randn(T, G)
    states = torch.randn(P, G, V, K)

    def steps(function: Callable[..., Tensor], verify: bool) -> list[Tensor]:
        kept, after = states.clone(), torch.zeros(P, D, G, V, K)
        places = torch.arange(N, dtype=torch.int32)
        more = {"intermediate_states_buffer": after, "intermediate_state_indices": places, "cache_steps": D}
        out = function(
            A_log=A_log,
            dt_bias=dt_bias,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            initial_state_source=kept,
            initial_state_indices=SLOTS,
            cu_seqlens=STARTS,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            **({"disable_state_update": True, **more} if verify else {}),
        )
        return [out.reshape(v.shape), kept, after]

    def sequences() -> list[Tensor]:
        kept = states.clone()
        g, beta = stand_ins.gates(A_log, a, b, dt_bias)
        how = {"head_first": False, "use_qk_l2norm_in_kernel": True, "inplace_update": True}
        out, *_ = stand_ins.delta_rule_sequences(q, k, v, g, beta, kept, SLOTS, STARTS, **how)
        return [out, kept]

    theirs, ours = module.fused_sigmoid_gating_delta_rule_update, stand_ins.delta_rule_steps
    return {
        "recurrence": (steps(theirs, False), steps(ours, False)),
        "recurrence in a verification": (steps(theirs, True), steps(ours, True)),
        "recurrence of sequences": (steps(theirs, False)[:2], sequences()),
    }


def packed_step() -> Case:
    module = kernels("attention.fla.fused_recurrent")
    arguments = {
        "mixed_qkv": torch.randn(N, C),
        "a": torch.randn(N, G),
        "b": torch.randn(N, G),
        "A_log": torch.randn(G),
        "dt_bias": torch.randn(G),
        "scale": K**-0.5,
        "ssm_state_indices": SLOTS,
        "use_qk_l2norm_in_kernel": True,
    }
    states = torch.randn(P, G, V, K)

    def step(function: Callable[..., Any]) -> list[Tensor]:
        kept, out = states.clone(), torch.empty(N, 1, G, V)
        function(**arguments, initial_state=kept, out=out)
        return [out, kept]

    theirs = step(module.fused_recurrent_gated_delta_rule_packed_decode)
    return {"recurrence of a packed token": (theirs, step(stand_ins.delta_rule_packed_step))}


def acceptance() -> Case:
    """The functions around the two kernels insist on a GPU, so the kernels are called as they call them."""
    module = kernels("mamba.mamba_state_scatter_triton")
    layers, steps = 2, torch.tensor([2, -1, 0], dtype=torch.int32)
    states, after = torch.randn(layers, P, G, V, K), torch.randn(layers, P, D, G, V, K)
    windows, shared = torch.randn(layers, P, C, W - 1), torch.randn(layers, P, C, D + W - 2)
    sliding = shared.unfold(3, W - 1, 1).permute(0, 1, 3, 2, 4)  # [layers, P, D, C, W - 1], overlapping
    grid, size = (N, layers, triton.cdiv(max(G * V * K, C * (W - 1)), 1024)), {"BLOCK_SIZE": 1024}
    theirs = states.clone(), windows.clone()
    rows = () if OLDEST else (torch.arange(N, dtype=torch.int32),)  # of what was kept
    last = (*theirs[0].stride()[:2], P, D, P)
    module._fused_mamba_state_scatter_with_mask_kernel[grid](
        after, theirs[0], SLOTS, steps, *rows, G * V * K, *after.stride()[:3], *last, **size
    )
    last = (*theirs[1].stride()[:2], P, D, P)
    module._fused_conv_window_scatter_with_mask_kernel[grid](
        sliding, theirs[1], SLOTS, steps, *rows, C * (W - 1), W - 1, *sliding.stride(), *last, **size
    )
    ours = states.clone(), windows.clone()
    stand_ins.accept_states(ours[0], after, SLOTS, steps)
    stand_ins.accept_states(ours[1], sliding, SLOTS, steps)
    assert not any(torch.equal(new, old) for new, old in zip(ours, (states, windows), strict=True))
    return {"states of accepted tokens": (theirs, ours)}


if __name__ == "__main__":
    main()
