"""Which of SGLang's server arguments a capture may be given, and why not the others. Loads neither torch nor sglang."""

from __future__ import annotations

from collections.abc import Mapping

OURS = "the capture sets it"
CHUNKS = "a prompt cut into chunks would keep the states of its last chunk alone"
PREFIXES = "tokens of a prefix that is found in a cache are not computed, so their states would be missing"
GRAPHS = "a recorded graph replays kernels without the code that keeps the states"
LATER = "the results of a pass would come with a later one, and the states are read at once"
PARTS = "each rank would hold the states of some layers or tokens only; give launch.nproc ranks and tp_degree instead"
DRAFTS = "a capture runs the target alone, without a draft"
BLIND = "images would not be seen"
SPLIT = "prefill and decoding in different servers have no place in one process"
STATES = "the capture itself says which states a pass returns"
ORDER = "it moves what deepstack adds behind the states that are kept, unlike in serving"

# name -> why; the reasons above say what would go wrong with the captured states.
FIXED: Mapping[str, str] = {
    "model_path": "it is the node's target",
    "tokenizer_path": "tokens come from tokenize_chat",
    "skip_tokenizer_init": "tokens come from tokenize_chat",
    "trust_remote_code": "load_target says it",
    "revision": "load_target says it",
    "device": "launch.device says it",
    "base_gpu_id": "launch says it: each rank has its own GPU",
    "dtype": "the node's own dtype says it",
    "tp_size": "the node's own tp_degree says it",
    "context_length": "it is that of the longest sample",
    "max_total_tokens": "batch_tokens says it",
    "max_prefill_tokens": "batch_tokens says it",
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
    "disable_piecewise_cuda_graph": GRAPHS,
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
}
FIXED_FAMILIES: Mapping[str, str] = {"cuda_graph": GRAPHS, "speculative_": DRAFTS, "disaggregation_": SPLIT}


def refused_args(names: Mapping[str, object]) -> list[str]:
    """One line for each name that must not be given, with the reason."""
    lines = []
    for name in names:
        family = next((reason for prefix, reason in FIXED_FAMILIES.items() if name.startswith(prefix)), None)
        reason = FIXED.get(name, family)
        if reason is not None:
            lines.append(f"{name} cannot be given: {reason}")
    return lines
