"""Which of SGLang's server arguments a capture accepts, and why not the others. Loads neither torch nor sglang.

SGLang has more than 500 of them; those named here exist in every supported version. Those in ALLOWED choose kernels,
number formats and memory, and do not change what a pass computes; everything else is refused, because its effect on the
captured states is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsl.errors import did_you_mean

# name -> the type of its value
ALLOWED: Mapping[str, type] = {
    # kernels of attention, of the vision tower's, of linear attention, of experts and of matrices in few bits
    "attention_backend": str,
    "prefill_attention_backend": str,
    "mm_attention_backend": str,
    "linear_attn_backend": str,
    "linear_attn_prefill_backend": str,
    "mamba_backend": str,
    "moe_runner_backend": str,
    "moe_a2a_backend": str,
    "fp8_gemm_runner_backend": str,
    "fp4_gemm_runner_backend": str,
    "bf16_gemm_backend": str,
    "disable_flashinfer_autotune": bool,
    "enable_deterministic_inference": bool,
    # number formats
    "quantization": str,
    "kv_cache_dtype": str,
    "mamba_ssm_dtype": str,
    # memory
    "mem_fraction_static": float,
    "page_size": int,
    "max_mamba_cache_size": int,
    "mamba_full_memory_ratio": float,
    "cpu_offload_gb": int,
    "offload_group_size": int,
    "offload_num_in_group": int,
    "offload_prefetch_step": int,
    "offload_mode": str,
    "weight_loader_disable_mmap": bool,
    "weight_loader_prefetch_checkpoints": bool,
    # ranks that share a model
    "ep_size": int,
    "disable_custom_all_reduce": bool,
    "log_level": str,
}

OURS = "the capture sets it"
CHUNKS = "a prompt cut into chunks would keep only the states of its last chunk"
PREFIXES = "tokens of a cached prefix are not computed, so their states would be missing"
GRAPHS = "a recorded graph replays kernels without the code that stores the states"
LATER = "the results of a pass would arrive with a later one, but the states are read immediately"
PARTS = "each rank would hold the states of only some layers or tokens; set launch.nproc and tp_degree instead"
DRAFTS = "a capture runs only the target, without a draft"
BLIND = "images would not be seen"
SPLIT = "prefill and decoding cannot be in different servers, since a capture is one process"
STATES = "the capture itself sets which states a pass returns"
ORDER = "it adds deepstack's features after the captured states, unlike in serving"

WEIGHTS = "weights other than the checkpoint's, or random ones, would silently replace them"
IMAGES = "tokenize_chat prepares the images"

# name -> reason: the effect on the captured states.
FIXED: Mapping[str, str] = {
    "model_path": "it is the node's target",
    "tokenizer_path": "tokens come from tokenize_chat",
    "skip_tokenizer_init": "tokens come from tokenize_chat",
    "trust_remote_code": "set by load_target",
    "revision": "set by load_target",
    "device": "set by launch.device",
    "base_gpu_id": "set by launch: each rank has its own GPU",
    "dtype": "set by the node's own dtype",
    "tp_size": "set by the node's own tp_degree",
    "context_length": "it is that of the longest sample",
    "max_total_tokens": "set by batch_tokens",
    "max_prefill_tokens": "set by batch_tokens",
    "max_running_requests": OURS,
    "is_embedding": OURS,
    "chunked_prefill_size": CHUNKS,
    "enable_dynamic_chunking": CHUNKS,
    "enable_mixed_chunk": CHUNKS,
    "disable_radix_cache": PREFIXES,
    "enable_hierarchical_cache": PREFIXES,
    "enable_lmcache": PREFIXES,
    "enable_flexkv": PREFIXES,
    "disable_cuda_graph": GRAPHS,
    "disable_prefill_cuda_graph": GRAPHS,
    "disable_decode_cuda_graph": GRAPHS,
    "enable_torch_compile": GRAPHS,
    "disable_overlap_schedule": LATER,
    "enable_two_batch_overlap": LATER,
    "enable_single_batch_overlap": LATER,
    "pp_size": PARTS,
    "dp_size": PARTS,
    "dcp_size": PARTS,
    "attn_cp_size": PARTS,
    "moe_dp_size": PARTS,
    "dwdp_size": PARTS,
    "nnodes": PARTS,
    "node_rank": PARTS,
    "enable_prefill_cp": PARTS,
    "enable_dp_attention": PARTS,
    "enable_layernorm_sp": PARTS,
    "enable_attn_tp_input_scattered": PARTS,
    "enable_multimodal": BLIND,
    "language_only": BLIND,
    "language_model_only": BLIND,
    "encoder_only": BLIND,
    "enable_return_hidden_states": STATES,
    "return_hidden_states_mode": STATES,
    "rl_on_policy_target": ORDER,
    "load_format": WEIGHTS,
    "model_loader_extra_config": WEIGHTS,
    "json_model_override_args": WEIGHTS,
    "custom_weight_loader": WEIGHTS,
    "enable_lora": WEIGHTS,
    "image_processor_backend": IMAGES,
    "mm_process_config": IMAGES,
    "enable_prefix_mm_cache": PREFIXES,
    "enable_mm_global_cache": PREFIXES,
}
FIXED_FAMILIES: Mapping[str, str] = {
    "cuda_graph": GRAPHS,
    "speculative_": DRAFTS,
    "disaggregation_": SPLIT,
    "hicache_": PREFIXES,
    "lora_": WEIGHTS,
}

# (name, value) -> reason, for names that are otherwise allowed
FIXED_VALUES: Mapping[tuple[str, str], str] = {
    ("moe_a2a_backend", value): "it opens ports to the whole network" for value in ("nixl", "mooncake")
}


def refused_args(given: Mapping[str, object]) -> list[str]:
    """The reasons why arguments are refused, by name or by value, one line for each."""
    return [line for name, value in given.items() if (line := _refused(name, value))]


def _refused(name: str, value: object) -> str | None:
    plain = name.lstrip("-").replace("-", "_")  # as on SGLang's command line
    family = next((reason for prefix, reason in FIXED_FAMILIES.items() if plain.startswith(prefix)), None)
    reason = FIXED.get(plain, family)
    if reason is not None:
        return f"{name} is not allowed: {reason}"
    if plain not in ALLOWED:
        near = did_you_mean(plain, list(ALLOWED))
        return f"{name} is not among the allowed ones{f', {near}' if near else ''}: {', '.join(ALLOWED)}"
    if plain != name:
        return f"write {name} as {plain}"
    wanted = ALLOWED[name]
    fits = isinstance(value, int | float) if wanted is float else isinstance(value, wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        return f"{name}: expected {wanted.__name__}, got {value!r}"
    why = FIXED_VALUES.get((name, str(value)))
    return why and f"{name} cannot be {value!r}: {why}"
