"""What SGLang's workers for drafts need on a CPU: the gates opened, and plain indexing in place of triton kernels.

Only what was seen to fail without its patch is here. The arithmetic stays SGLang's own: its draft model, its worker,
its verification.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

from import_hooks import after_import


class DflashOnCpu:
    """The platform as the argument checks of speculative decoding see it: one that offers DFLASH on a CPU."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return (algorithm, backend) == ("DFLASH", "torch_native")

    def get_default_speculative_draft_attention_backend(self, _algorithm: str) -> str:
        return "torch_native"


class OnAGpu:
    """The server's arguments, as they would be on a GPU."""

    device = "cuda"

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arguments, name)


@after_import("sglang.srt.arg_groups.speculative_hook")
def open_the_gate(hook: ModuleType) -> None:
    """DFLASH is refused on a CPU when the server's arguments are made."""
    hook.current_platform = DflashOnCpu(hook.current_platform)


@after_import("sglang.srt.arg_groups.speculative_hook")
def open_the_gate_of_dspark(hook: ModuleType) -> None:
    """So is DSPARK, by the name of the device alone; the rest of these checks is SGLang's."""
    handle, view = hook._handle_dspark, hook.resolving_view

    def on_a_gpu(server_args: Any) -> Any:
        return OnAGpu(view(server_args))

    def handle_dspark(server_args: Any) -> None:
        hook.resolving_view = on_a_gpu
        try:
            handle(server_args)
        finally:
            hook.resolving_view = view

    hook._handle_dspark = handle_dspark


@after_import("sglang.srt.arg_groups.choices")
def let_the_draft_attend_natively(choices: ModuleType) -> None:
    """The draft's attention would fall back to a CUDA backend."""
    choices.add_draft_attention_backend_choices(["torch_native"])


@after_import("sglang.srt.mem_cache.allocation")
def write_slots_by_indexing(allocation: ModuleType) -> None:
    """A triton kernel writes the cache slots of every request's next tokens into its row."""

    def assign(
        req_pool_indices: Any,
        req_to_token: Any,
        start_offset: Any,
        end_offset: Any,
        out_cache_loc: Any,
        batch_size: int,
    ) -> None:
        taken = 0
        for request in range(batch_size):
            start, end = int(start_offset[request]), int(end_offset[request])
            slots = out_cache_loc[taken : taken + end - start]
            req_to_token[int(req_pool_indices[request]), start:end] = slots.to(req_to_token.dtype)
            taken += end - start

    allocation.assign_req_to_token_pool_func = assign


@after_import("sglang.kernels.ops.speculative.cache_locs")
def read_slots_by_indexing(cache_locs: ModuleType) -> None:
    """A triton kernel reads the cache slots of the block that is to be verified."""

    def assign(
        *,
        req_pool_indices: Any,
        req_to_token: Any,
        start_offset: Any,
        end_offset: Any,
        batch_size: int,
        draft_token_num: int,
        device: Any,
    ) -> Any:
        import torch

        rows = [
            req_to_token[int(req_pool_indices[request]), int(start_offset[request]) : int(end_offset[request])]
            for request in range(batch_size)
        ]
        return torch.cat(rows).to(torch.int64)

    cache_locs.assign_extend_cache_locs_func = assign


@after_import("sglang.kernels.ops.kvcache.cache_move")
def move_nothing(cache_move: ModuleType) -> None:
    """Making a pool warms a triton kernel up that moves cache rows; DFLASH's blocks are chains and move none."""

    def copy_all(
        _pointers: Any, _strides: Any, target: Any, source: Any, locations: int, _upper: int, _config: Any
    ) -> None:
        if (target[:locations] != source[:locations]).any():
            raise NotImplementedError("moving rows of the key and value cache has no stand-in on a CPU")

    cache_move.copy_all_layer_kv_cache_func = copy_all


@after_import("sglang.srt.layers.attention.torch_native_backend")
def attend_to_a_verified_block(backend: ModuleType) -> None:
    """In a verification seq_lens counts the prefix alone and the lengths of the extension are missing."""
    forward_extend = backend.TorchNativeAttnBackend.forward_extend

    def forward(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *others: Any, **options: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            prefix = forward_batch.seq_lens
            forward_batch = copy.copy(forward_batch)
            forward_batch.extend_prefix_lens = prefix
            forward_batch.extend_seq_lens = prefix.new_full(prefix.shape, forward_batch.spec_info.draft_token_num)
            forward_batch.seq_lens = prefix + forward_batch.extend_seq_lens
        return forward_extend(self, q, k, v, layer, forward_batch, *others, **options)

    backend.TorchNativeAttnBackend.forward_extend = forward


@after_import("sglang.srt.speculative.dflash_worker_v2")
@after_import("sglang.srt.speculative.dspark_components.dspark_worker_v2")
def record_no_stream(_worker: ModuleType) -> None:
    """A tensor on the CPU belongs to no stream."""
    import torch

    record_stream = torch.Tensor.record_stream

    def record(self: Any, stream: Any) -> None:
        if self.device.type != "cpu":
            record_stream(self, stream)

    torch.Tensor.record_stream = record  # type: ignore[method-assign]


@after_import("sglang.srt.model_executor.model_runner")
def keep_the_draft_in_its_dtype(model_runner: ModuleType) -> None:
    """A draft's input embeddings are cast to bfloat16, whatever its weights are."""
    extend_kwargs = model_runner.ModelRunner._extend_forward_kwargs

    def kwargs(self: Any, forward_batch: Any, pp_proxy_tensors: Any) -> dict[str, Any]:
        made: dict[str, Any] = extend_kwargs(self, forward_batch, pp_proxy_tensors)
        if forward_batch.input_embeds is not None:
            made["input_embeds"] = forward_batch.input_embeds
        return made

    model_runner.ModelRunner._extend_forward_kwargs = kwargs


@after_import("sglang.srt.models.dflash")
def turn_heads_natively_in_bfloat16(dflash: ModuleType) -> None:
    """In bfloat16 a triton kernel norms and turns queries and keys at once; the other path does it step by step."""
    make = dflash.DFlashAttention.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.use_table_qk_norm_rope = False

    dflash.DFlashAttention.__init__ = init


@after_import("sglang.srt.models.dspark")
def write_the_context_step_by_step_in_bfloat16(dspark: ModuleType) -> None:
    """So do keys and values of DSPARK's context, whose other path is that of other dtypes."""
    dspark.DSparkDraftMixin._fused_kv_write_bundle = lambda _self, _pool: None
