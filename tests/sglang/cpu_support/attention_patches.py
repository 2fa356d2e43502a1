"""What the attention of some targets needs: latent attention (DeepSeek, GLM-4.7-Flash), and sinks (gpt-oss)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from import_hooks import after_import


@after_import("sglang.srt.models.deepseek_common.attention_backend_handler")
def attend_to_latents(handler: ModuleType) -> None:
    """A prefill would use keys and values of every head, which attention in plain torch looks for in the pool of
    latents; SGLang's other way, that of decoding, reads that pool.
    """
    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)


@after_import("sglang.srt.layers.rotary_embedding.factory")
def turn_latent_heads(factory: ModuleType) -> None:
    """On a CPU, latent attention takes scaled RoPE only; plain RoPE is that of other attention."""
    wrapper = factory.get_rope_wrapper

    def get_rope(*arguments: Any, rope_scaling: Any = None, device: str | None = None, **options: Any) -> Any:
        if rope_scaling is None:
            return factory.get_rope(*arguments, **options)
        return wrapper(*arguments, rope_scaling=rope_scaling, device=device, **options)

    factory.get_rope_wrapper = get_rope


@after_import("sglang.srt.arg_groups.model_hook")
def let_sinks_attend_natively(hook: ModuleType) -> None:
    """gpt-oss is refused with attention in plain torch, which SGLang wrote without sinks; see below."""
    backends_of = hook.attention_backends_of

    def backends(view: Any) -> tuple[Any, ...]:
        return tuple("triton" if name == "torch_native" else name for name in backends_of(view))

    hook.attention_backends_of = backends


@after_import("sglang.srt.layers.attention.torch_native_backend")
def attend_with_sinks(backend: ModuleType) -> None:
    """A sink of each head takes its share of the softmax; the rest of the pass is SGLang's."""
    import torch

    plain = backend.scaled_dot_product_attention

    def with_sinks(sinks_H: torch.Tensor) -> Any:
        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_mask: torch.Tensor | None,
            enable_gqa: bool,
            scale: float,
            is_causal: bool,
        ) -> torch.Tensor:
            repeats = query.shape[1] // key.shape[1]
            scores = query @ key.repeat_interleave(repeats, dim=1).transpose(-1, -2) * scale
            if is_causal:
                attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            if attn_mask is not None:
                scores = scores.masked_fill(~attn_mask, -torch.inf)
            sinks = sinks_H.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
            return weights @ value.repeat_interleave(repeats, dim=1)

        return attend

    def accept_sinks(name: str) -> None:
        forward = getattr(backend.TorchNativeAttnBackend, name)

        def forward_with_sinks(self: Any, *arguments: Any, sinks: torch.Tensor | None = None, **options: Any) -> Any:
            backend.scaled_dot_product_attention = plain if sinks is None else with_sinks(sinks)
            try:
                return forward(self, *arguments, **options)
            finally:
                backend.scaled_dot_product_attention = plain

        setattr(backend.TorchNativeAttnBackend, name, forward_with_sinks)

    for name in ("forward_extend", "forward_decode"):
        accept_sinks(name)
