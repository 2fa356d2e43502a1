"""MTP heads by vLLM's own class: it proposes what dflow proposes, for texts and behind images.

The whole text runs at once, so that attention needs no cache; everything else is vLLM's.
"""

from __future__ import annotations

import pytest
import torch
from mtp_cases import BLOCK, anchors_of, corrected, mtp_checkpoint, mtp_target, prompts_of, whole_pass
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Causal(nn.Module):
    """Attention over all tokens of one text, in place of that over pages of a cache."""

    def __init__(self, heads: int, of_keys: int) -> None:
        super().__init__()
        self.heads, self.of_keys = heads, of_keys

    def forward(self, q, k, v):
        q, k, v = (
            each.view(len(each), count, -1).transpose(0, 1)
            for each, count in ((q, self.heads), (k, self.of_keys), (v, self.of_keys))
        )
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)


@pytest.fixture
def checkpoint(request, tmp_path):
    return mtp_checkpoint(request.param, tmp_path / "checkpoint")


@pytest.fixture
def of_vllm(checkpoint, tmp_path):
    """vLLM's model of the head, with the checkpoint's tensors by its own loader."""
    from vllm.config import CompilationConfig, CompilationMode, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP, Qwen3_5MTP

    of_model = ModelConfig(model=str(checkpoint), dtype="float32", max_model_len=256, enforce_eager=True)
    config = VllmConfig(model_config=of_model, compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", local_rank=0, backend="gloo")
        initialize_model_parallel()
        has_experts = config.model_config.hf_text_config.model_type == "qwen3_5_moe_text"
        model = (Qwen3_5MoeMTP if has_experts else Qwen3_5MTP)(vllm_config=config, prefix="mtp")
        model.load_weights(load_file(checkpoint / "model.safetensors").items())
        for module in model.modules():
            if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
                module.quant_method.process_weights_after_loading(module)
        attention = model.model.layers[0].self_attn
        attention.attn = Causal(attention.num_heads, attention.num_kv_heads)
        yield model
    cleanup_dist_env_and_memory()


@torch.inference_mode()
def proposed(model, following, states, positions) -> list[int]:
    """Its proposals behind an anchor, as vLLM's speculator makes them. Arguments: as of `Reference.proposals`."""
    tokens: list[int] = []
    for _ in range(BLOCK - 1):
        out = model(None, positions, states, inputs_embeds=following)
        tokens.append(int(model.compute_logits(out[-1:]).argmax()))
        following = torch.cat((following, model.embed_input_ids(torch.tensor(tokens[-1:]))))
        states = torch.cat((states, out[-1:]))
        positions = torch.cat((positions, positions[:, -1:] + 1), dim=1)
    return tokens


@pytest.mark.parametrize("checkpoint", ["qwen3_5"], indirect=True)
def test_vllms_class_proposes_what_dflow_proposes(checkpoint, of_vllm, monkeypatch):
    target, head = mtp_target(checkpoint)
    for sample in prompts_of(checkpoint):
        plain, answer, found = corrected(target, head, sample, monkeypatch)
        x, h, positions = whole_pass(target, sample, plain.tokens)
        for place, proposal in zip(anchors_of(answer), found, strict=True):
            end = len(sample.prompt().input_ids) + place
            assert proposed(of_vllm, x[1 : end + 1], h[:end], positions[:, :end]) == proposal
        assert len({tuple(proposal) for proposal in found}) > len(found) // 2
