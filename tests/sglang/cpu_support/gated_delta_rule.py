"""Linear attention of Qwen3.5 and Qwen3-Next in plain torch: what SGLang computes with triton kernels, token by token.

LFM2 takes the convolution alone, without an activation.

The layer is a gated delta rule (arXiv 2412.06464): queries, keys and values pass a short causal convolution; then every
value head keeps a matrix S [V, K], which forgets by a factor, and in which the value stored under the key is replaced:

    S <- exp(g) S;   S <- S + beta (v - S k) k^T;   output = S q / sqrt(K)

with unit q and k, g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). Both the convolution's last inputs and S
are kept per request in a slot of a pool. Signatures are those of the kernels as SGLang calls them; what it does not
pass for these models is refused and not ignored.

    N requests of a batch, T their tokens in a row, H key heads, G value heads, K and V their sizes,
    C channels of the convolution, W its width, D draft tokens, L layers, P slots of a pool
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NO_SLOT = -1  # of a row that only fills up a batch


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, q | k | v | z] and [T, b | a] -> qkv [T, C], z [T, G, V], b [T, G], a [T, G]."""
    values = value_heads * value_size
    qkv, z = qkvz.split([2 * key_heads * key_size + values, values], dim=-1)
    b, a = ba.split(value_heads, dim=-1)
    return qkv.contiguous(), z.reshape(-1, value_heads, value_size), b.contiguous(), a.contiguous()


def split_interleaved_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3-Next's: the same of [T, H (q | k | v | z)] and [T, H (b | a)], a group of each key head after the other."""
    values = value_heads // key_heads
    parts = qkvz.view(len(qkvz), key_heads, -1).split([key_size, key_size, *[values * value_size] * 2], dim=-1)
    q, k, v, z = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in ba.view(len(ba), key_heads, -1).split(values, dim=-1))
    return torch.cat([q, k, v], dim=-1), z.view(-1, value_heads, value_size), b, a


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g (a logarithm) and beta, float32 [1, T, G] each."""
    g = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def gated_norm(x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float, **how: Any) -> Tensor:
    """RMS norm of x [T * G, V], times silu(z); z may be [T, G, V]."""
    _refuse(bias is not None or how.pop("group_size") is not None, "a bias or groups")
    expected = {"norm_before_gate": True, "is_rms_norm": True, "activation": "swish"}
    _refuse(how != expected, f"{how}")
    normed = functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * functional.silu(z.reshape(x.shape).float())).to(x.dtype)


def rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str, eps: float, **how: Any) -> Tensor:
    """Qwen3-Next's: RMS norm of x [T * G, V], times silu(g)."""
    _refuse(bias is not None or activation not in ("silu", "swish") or any(how.values()), f"{activation}, {how}")
    normed = functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * functional.silu(g.reshape(x.shape).float())).to(x.dtype)


def sigmoid_times(x: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """x [T, H * K] times sigmoid(gate); the gate may be [T, H, K]."""
    gated = x * gate.reshape(x.shape).sigmoid()
    return x.copy_(gated) if inplace else gated


def convolve_sequences(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None,
    pad_slot_id: int = NO_SLOT,
) -> Tensor:
    """The convolution of whole sequences [C, T], side by side; the slots [P, C, W - 1] keep the last inputs of each."""
    _refuse(pad_slot_id != NO_SLOT, "another mark of empty rows")
    out = torch.empty_like(x)
    for row, (slot, part) in _requests(cache_indices, query_start_loc):
        history = conv_states[slot].to(x.dtype) if has_initial_state[row] else x.new_zeros(conv_states[slot].shape)
        out[:, part], windows = _convolve(x[:, part], history, weight, bias, activation)
        conv_states[slot] = windows[-1].to(conv_states.dtype)
    return out


def convolve_steps(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    pad_slot_id: int = NO_SLOT,
    **tree: Any,
) -> Tensor:
    """The convolution of the next token [N, C], or of the next D [N, C, D], of every request.

    intermediate_conv_window [P, D, C, W - 1] gets what the slot would hold after each of them.
    """
    _refuse(any(value is not None for value in tree.values()) or pad_slot_id != NO_SLOT, "a tree of drafts")
    steps = x[..., None] if x.ndim == 2 else x
    out = torch.empty_like(steps)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot == NO_SLOT:
            continue
        out[row], windows = _convolve(steps[row], conv_state[slot].to(x.dtype), weight, bias, activation)
        conv_state[slot] = windows[-1].to(conv_state.dtype)
        if intermediate_conv_window is not None:
            kept = intermediate_conv_window[int(intermediate_state_indices[row])]
            for step, window in enumerate(windows):
                kept[step] = window.to(kept.dtype)
    return out.reshape(x.shape)


def delta_rule_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    inplace_update: bool,
) -> tuple[Tensor, None, None]:
    """Whole sequences: q, k [1, T, H, K], v [1, T, G, V]; the slots [P, G, V, K] go on from what they hold."""
    _refuse(head_first or not use_qk_l2norm_in_kernel or not inplace_update, "another layout or no normalisation")
    out = torch.empty_like(v)
    for _, (slot, part) in _requests(initial_state_indices, cu_seqlens):
        arguments = (tensor[0, part] for tensor in (q, k, v, g, beta))
        out[0, part], states = delta_rule(*arguments, initial_state[slot])
        initial_state[slot] = states[-1].to(initial_state.dtype)
    return out, None, None


def delta_rule_packed_step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> None:
    """The next token of every request, from qkv [N, C] as it leaves the convolution, into out [N, 1, G, V]."""
    heads, value_size, key_size = initial_state.shape[1:]
    _refuse(not use_qk_l2norm_in_kernel or scale != key_size**-0.5, "another scale or no normalisation")
    keys = (mixed_qkv.shape[-1] - heads * value_size) // 2
    q, k, v = mixed_qkv.split([keys, keys, heads * value_size], dim=-1)
    g, beta = gates(A_log, a, b, dt_bias)
    for row, slot in enumerate(ssm_state_indices.tolist()):
        if slot == NO_SLOT:
            out[row] = 0
            continue
        out[row], states = delta_rule(
            q[row].view(1, -1, key_size),
            k[row].view(1, -1, key_size),
            v[row].view(1, heads, value_size),
            g[0, row : row + 1],
            beta[0, row : row + 1],
            initial_state[slot],
        )
        initial_state[slot] = states[-1].to(initial_state.dtype)


def delta_rule_steps(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """The next tokens of every request, [1, T, ...]; verification changes no slot but keeps the state after each token.

    intermediate_states_buffer [P, D, G, V, K] gets those states.
    """
    unknown = is_kda or retrieve_parent_token is not None or (softplus_beta, softplus_threshold) != (1.0, 20.0)
    _refuse(unknown or not use_qk_l2norm_in_kernel, "another gate, a tree of drafts or no normalisation")
    g, beta = gates(A_log, a, b, dt_bias)
    out = torch.empty_like(v)
    for row, (slot, part) in _requests(initial_state_indices, cu_seqlens):
        arguments = (tensor[0, part] for tensor in (q, k, v, g, beta))
        out[0, part], states = delta_rule(*arguments, initial_state_source[slot])
        if not disable_state_update:
            initial_state_source[slot] = states[-1].to(initial_state_source.dtype)
        if intermediate_states_buffer is not None:
            kept = intermediate_states_buffer[int(intermediate_state_indices[row])]
            kept[: len(states)] = torch.stack(states).to(kept.dtype)
    return out


def delta_rule(
    q_THK: Tensor, k_THK: Tensor, v_TGV: Tensor, g_TG: Tensor, beta_TG: Tensor, state_GVK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The recurrence above for one sequence: outputs [T, G, V] and the state after each token, in float32."""
    repeats = v_TGV.shape[1] // q_THK.shape[1]
    q_TGK = _unit(q_THK).repeat_interleave(repeats, dim=1) * q_THK.shape[-1] ** -0.5
    k_TGK = _unit(k_THK).repeat_interleave(repeats, dim=1)
    state, states, outputs = state_GVK.float(), [], []
    for q, k, v, g, beta in zip(q_TGK, k_TGK, v_TGV.float(), g_TG, beta_TG, strict=True):
        state = state * g.exp()[:, None, None]
        error = v - torch.einsum("gvk,gk->gv", state, k)
        state = state + torch.einsum("gv,gk->gvk", beta[:, None] * error, k)
        outputs.append(torch.einsum("gvk,gk->gv", state, q))
        states.append(state)
    return torch.stack(outputs).to(v_TGV.dtype), states


def accept_states(
    dst: Tensor,
    src: Tensor,
    dst_indices_raw: Tensor,
    step_indices_raw: Tensor,
    src_indices_raw: Tensor | None = None,
) -> None:
    """dst[:, slot of request i] = src[:, i, step of request i], unless the step is negative.

    dst [L, P, ...] are the slots of all layers, src [L, P, D, ...] what was kept after each draft token. SGLang 0.5.23
    passes rows of src too, which only pipelines use.
    """
    _refuse(src_indices_raw is not None, "rows that are not those of the requests")
    for row, (slot, step) in enumerate(zip(dst_indices_raw.tolist(), step_indices_raw.tolist(), strict=True)):
        if step >= 0 and slot >= 0:
            dst[:, slot] = src[:, row, step].to(dst.dtype)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _convolve(
    x_CT: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """The causal convolution of each channel after a history [C, W - 1], and the histories after each token."""
    _refuse(activation not in (None, "silu", "swish"), f"the activation {activation}")
    width = weight.shape[1]
    inputs = torch.cat([history, x_CT], dim=1)
    out = (inputs.unfold(1, width, 1) * weight[:, None]).sum(dim=-1)
    if bias is not None:
        out = out + bias[:, None]
    return functional.silu(out) if activation else out, inputs.unfold(1, width - 1, 1)[:, 1:].transpose(0, 1)


def _requests(slots: Tensor, starts: Tensor) -> Iterator[tuple[int, tuple[int, slice]]]:
    """Row, slot and place in the row of tokens, of each request that is one and has tokens."""
    bounds = starts.tolist()
    for row, slot in enumerate(slots.tolist()):
        if slot != NO_SLOT and bounds[row] < bounds[row + 1]:
            yield row, (slot, slice(bounds[row], bounds[row + 1]))


def _refuse(unknown: bool, what: str) -> None:
    if unknown:
        raise NotImplementedError(f"the stand-in for SGLang's linear attention does not know {what}")
