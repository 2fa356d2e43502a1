"""What Qwen3.5 and Qwen3-Next need: their linear attention calls triton kernels, and plain torch stands in for them.

Each hook replaces functions of a module before anything imports them from it; gated_delta_rule says what they compute.
Two of the modules lie in `fla` in SGLang 0.5.21, and in `linear` in 0.5.23.
"""

from __future__ import annotations

from types import ModuleType

from import_hooks import after_import

KERNELS = "sglang.kernels.ops"


@after_import(f"{KERNELS}.attention.triton_gdn_fused_proj")
def projections(module: ModuleType) -> None:
    import gated_delta_rule

    module.fused_qkvzba_split_reshape_cat_contiguous = gated_delta_rule.split_projections
    module.fused_qkvzba_split_reshape_cat = gated_delta_rule.split_interleaved_projections


@after_import(f"{KERNELS}.mamba.causal_conv1d_triton")
def convolutions(module: ModuleType) -> None:
    import gated_delta_rule

    module.causal_conv1d_fn = gated_delta_rule.convolve_sequences
    module.causal_conv1d_update = gated_delta_rule.convolve_steps


@after_import(f"{KERNELS}.attention.fla.fused_gdn_gating")
@after_import(f"{KERNELS}.attention.linear.fused_gdn_gating")
def gating(module: ModuleType) -> None:
    import gated_delta_rule

    module.fused_gdn_gating = gated_delta_rule.gates


@after_import(f"{KERNELS}.attention.fla.chunk")
def prefill(module: ModuleType) -> None:
    import gated_delta_rule

    module.chunk_gated_delta_rule = gated_delta_rule.delta_rule_sequences


@after_import(f"{KERNELS}.attention.fla.fused_recurrent")
def decoding(module: ModuleType) -> None:
    import gated_delta_rule

    module.fused_recurrent_gated_delta_rule_packed_decode = gated_delta_rule.delta_rule_packed_step


@after_import(f"{KERNELS}.attention.fla.fused_sigmoid_gating_recurrent")
@after_import(f"{KERNELS}.attention.linear.fused_sigmoid_gating_recurrent")
def verification(module: ModuleType) -> None:
    import gated_delta_rule

    module.fused_sigmoid_gating_delta_rule_update = gated_delta_rule.delta_rule_steps


@after_import(f"{KERNELS}.attention.fla.layernorm_gated")
def output_norm(module: ModuleType) -> None:
    import gated_delta_rule

    module.layernorm_fn = gated_delta_rule.gated_norm


@after_import(f"{KERNELS}.attention.fla.fused_norm_gate")
@after_import(f"{KERNELS}.attention.linear.fused_norm_gate")
def output_norm_of_qwen3_next(module: ModuleType) -> None:
    import gated_delta_rule

    module.rms_norm_gated = gated_delta_rule.rms_norm_gated


@after_import(f"{KERNELS}.elementwise.elementwise")
def attention_gate(module: ModuleType) -> None:
    import gated_delta_rule

    module.fused_sigmoid_mul = gated_delta_rule.sigmoid_times


@after_import(f"{KERNELS}.mamba.mamba_state_scatter_triton")
def acceptance(module: ModuleType) -> None:
    """What is kept of the states after a verification; the variant for all convolutions at once falls back to it."""
    import gated_delta_rule

    module.fused_mamba_state_scatter_with_mask = gated_delta_rule.accept_states
    module.fused_conv_window_scatter_with_mask = gated_delta_rule.accept_states
    module._conv_multi_eligible = lambda pairs: False
