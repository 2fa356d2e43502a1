"""An EAGLE-3 draft: one layer that reads three layers of the target, and proposes token by token.

For the token t[i], whose states behind the layers a, b and c of the target are h_a[i], h_b[i], h_c[i], and the token
t[i + 1] after it, at the position of t[i]:

    s[i] = fc([h_a[i], h_b[i], h_c[i]])
    x[i] = s[i] + attention([input_layernorm(E t[i + 1]), hidden_norm(s[i])])
    m[i] = x[i] + mlp(post_attention_layernorm(x[i]))
    logits of t[i + 2] = H norm(m[i])

H has a row for each token of the draft's own vocabulary; d2t says by how much it differs from the target's. Behind the
anchor m[i] takes the place of s[i] (chain.py), before the last norm. E is the draft's own embedding, or the target's.
Of an image, E t is the target's input at that place. Positions count tokens, those of images too.

Source: SGLang 0.5.23, models/llama_eagle3.py, speculative/eagle_worker_v2.py (shift of tokens, positions, what is fed
back); vLLM 0.33, models/llama_eagle3.py. SGLang replaces an own embedding by the target's; vLLM does not.

B batch, P columns of a pass, M hidden size, F width of features, N draft vocabulary, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from dsl.errors import DataError
from ops.lib.data.files import read_object
from ops.lib.drafts.decoding.chain import Rope
from ops.lib.drafts.decoding.eagle3_files import (
    EMBEDDING,
    TO_TARGET,
    eagle3_mistake,
    eagle3_tensors,
    head_sizes,
    layer_ids,
    read_tensor,
)
from ops.lib.target.model import LayerInputs, Target
from ops.lib.vision.family_config import image_token_of
from ops.lib.vision.processor import LOADING_ERRORS

KEPT = (
    *("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)


class Eagle3Layer(nn.Module):
    """The layer of an EAGLE-3 draft."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn, self.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, rows, bias=False))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(3)
        )

    def forward(
        self, embedded_BPM: Tensor, states_BPM: Tensor, rope: Rope, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """The states m, [B, P, M]."""
        halves = self.input_layernorm(embedded_BPM), self.hidden_norm(states_BPM)
        mixed_BPM, _ = self.self_attn(
            torch.cat(halves, dim=-1), position_embeddings=rope, attention_mask=mask, past_key_values=cache
        )
        x_BPM = states_BPM + mixed_BPM
        return x_BPM + self.mlp(self.post_attention_layernorm(x_BPM))


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft. Its modules are named as its tensors (`eagle3_tensors`).

    layer_ids: the layers of the target that it reads. tokens_N: the target's token for each of its own; None where they
    are the same.
    """

    rotary: LlamaRotaryEmbedding
    tokens_N: Tensor | None

    def __init__(self, config: LlamaConfig, layer_ids: tuple[int, ...], rows: int | None, has_embedding: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.head_size, self.layer_ids = config.num_key_value_heads, config.head_dim, layer_ids
        self.fc = nn.Linear(len(layer_ids) * size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = None if rows is None else nn.Linear(size, rows, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if has_embedding else None

    @classmethod
    def load(cls, target: Target, directory: Path) -> Eagle3Head:
        """The draft of a folder for a loaded target, on its device and in its dtype, frozen.

        Raises DataError as `eagle3_mistake`, and for a config.json that transformers does not take.
        """
        sizes = {"hidden_size": target.hidden_size, "num_layers": target.num_layers}
        if mistake := eagle3_mistake(directory, {**sizes, "vocab_size": len(target.embed_weight)}):
            raise DataError(mistake)
        written, stored = read_object(directory / "config.json"), eagle3_tensors(directory)
        config, ids = _llama_config(directory, written), layer_ids(written, target.num_layers)
        with torch.device("meta"):
            head = cls(config, ids, written.get("draft_vocab_size"), EMBEDDING in stored)
        tensors = {}
        for name in head.state_dict():
            with safe_open(stored[name].file, framework="pt") as file:
                tensors[name] = file.get_tensor(stored[name].name).to(target.device).to(target.model.dtype)
        head.load_state_dict(tensors, assign=True)
        head.rotary = LlamaRotaryEmbedding(config).to(target.device)
        head.tokens_N = None
        if TO_TARGET in stored:
            added_N = torch.from_numpy(read_tensor(stored[TO_TARGET])).to(target.device, torch.int64)
            head.tokens_N = added_N + torch.arange(len(added_N), device=target.device)
        return head.eval().requires_grad_(False)

    @contextmanager
    def capture(self, target: Target) -> Iterator[Eagle3Inputs]:
        """Open a context in which every forward pass of the target records what the draft reads."""
        with target.capture_inputs((-1, *self.layer_ids)) as layers:
            found = Eagle3Inputs(self, layers)
            handle = target.model.register_forward_pre_hook(found.before, with_kwargs=True)
            try:
                yield found
            finally:
                handle.remove()

    def known(self, features_BPF: Tensor, positions_BP: Tensor) -> tuple[Tensor, Tensor, Rope]:
        """As of `ChainHead`; the states are those of all layers joined."""
        size = self.fc.out_features
        embedded_BPM, states_BPF = features_BPF[..., :size], features_BPF[..., size:]
        return embedded_BPM, self.fc(states_BPF), self.rotary(embedded_BPM, positions_BP)

    def embedded(self, target: Target, tokens_P: Tensor) -> Tensor:
        """As of `ChainHead`; tokens of any shape."""
        return target.embed_weight[tokens_P] if self.embed_tokens is None else self.embed_tokens(tokens_P)

    def angles(self, target: Target, positions_BP: Tensor) -> Rope:
        """As of `ChainHead`."""
        cos_BPD, sin_BPD = self.rotary(target.embed_weight, positions_BP)
        return cos_BPD, sin_BPD

    def forward(
        self, embedded_BPM: Tensor, states_BPM: Tensor, rope: Rope, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """As of `ChainHead`."""
        found_BPM: Tensor = self.layers[0](embedded_BPM, states_BPM, rope, mask, cache)
        return found_BPM

    def logits(self, target: Target, states_BM: Tensor) -> Tensor:
        """As of `ChainHead`; tokens beyond the draft's vocabulary have the lowest number."""
        normed_BM = self.norm(states_BM)
        logits_BN: Tensor = normed_BM @ target.head_weight.T if self.lm_head is None else self.lm_head(normed_BM)
        if self.tokens_N is None:
            return logits_BN
        lowest = torch.finfo(logits_BN.dtype).min
        logits_BV = logits_BN.new_full((len(logits_BN), len(target.embed_weight)), lowest)
        logits_BV[:, self.tokens_N] = logits_BN
        return logits_BV


@frozen(eq=False)
class Eagle3Inputs:
    """What an EAGLE-3 draft reads of the target's last pass. layers: the inputs of layer 0 and of those it reads."""

    head: Eagle3Head
    layers: LayerInputs
    _ids: list[Tensor] = field(factory=list, init=False)

    def before(self, _model: nn.Module, _args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """A hook before the target."""
        if not self.layers.target.is_continued:
            self._ids.clear()
        self._ids.append(given["input_ids"])

    def features(self) -> Tensor:
        """The embedded tokens, and the states of each layer, [B, P, M + layers * M]."""
        target, ids_BP, size = self.layers.target, torch.cat(self._ids, dim=1), self.head.fc.out_features
        found_BPF = self.layers.features()
        embedded_BPM = self.head.embedded(target, ids_BP)
        if (image := image_token_of(target.family.config)) is not None:
            embedded_BPM = torch.where((ids_BP == image)[..., None], found_BPF[..., :size], embedded_BPM)
        return torch.cat((embedded_BPM, found_BPF[..., size:]), dim=-1)


def _llama_config(directory: Path, written: dict[str, Any]) -> LlamaConfig:
    """The config of the layer's parts. Raises DataError where transformers refuses it."""
    heads, of_keys, size = head_sizes(written)
    kept = {name: written[name] for name in KEPT if written.get(name) is not None}
    try:
        config = LlamaConfig(**kept, num_attention_heads=heads, num_key_value_heads=of_keys, head_dim=size)
    except LOADING_ERRORS as error:
        raise DataError(f"{directory}: transformers does not take config.json: {error}") from error
    config._attn_implementation = "sdpa"
    return config
