"""Tiny EAGLE-3 drafts of seeded weights in a published folder's form, and their formulas in float64, without caches.

The reference is written from SGLang's source, and uses nothing of transformers' classes.

S tokens, M hidden size, H heads, G key/value heads, D head size, N draft vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, silu, softmax

from ops.lib.data.files import read_json, write_json
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.eagle3 import Eagle3Head
from ops.lib.target.model import Target

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
M, V = 32, 400  # of the targets of family_checkpoints
LAYER_IDS = (0, 2, 5)


def eagle3_folder(
    folder: Path,
    tokens: Sequence[int] | None = None,
    has_embedding: bool = False,
    ids: Sequence[int] | None = LAYER_IDS,
    seed: int = 3,
    hidden_size: int = M,
    vocab_size: int = V,
    **changes: Any,
) -> Path:
    """Write a draft of random weights, whose proposals depend on all tokens before.

    tokens: of the target, one for each of the draft's, ascending; None: the draft has no head, and takes the target's.
    has_embedding: whether it has one of its own. ids: of the layers that it reads; None: config.json names none.
    changes: fields of config.json.
    """
    folder.mkdir()
    config: dict[str, Any] = {**CONFIG, "hidden_size": hidden_size, "vocab_size": vocab_size, **changes}
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True}
    config["draft_vocab_size"] = None if tokens is None else len(tokens)
    size, width, heads, of_keys, D = (
        config[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (size, (3 if ids is None else len(ids)) * size),
        "midlayer.input_layernorm": (size,),
        "midlayer.hidden_norm": (size,),
        "midlayer.post_attention_layernorm": (size,),
        "midlayer.self_attn.q_proj": (heads * D, 2 * size),
        "midlayer.self_attn.k_proj": (of_keys * D, 2 * size),
        "midlayer.self_attn.v_proj": (of_keys * D, 2 * size),
        "midlayer.self_attn.o_proj": (size, heads * D),
        "midlayer.mlp.gate_proj": (width, size),
        "midlayer.mlp.up_proj": (width, size),
        "midlayer.mlp.down_proj": (size, width),
        "norm": (size,),
    }
    if tokens is not None:
        shapes["lm_head"] = (len(tokens), size)
    if has_embedding:
        shapes["embed_tokens"] = (vocab_size, size)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        spread = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        tensors[f"{name}.weight"] = (len(shape) == 1) + spread * torch.randn(shape, generator=random)
    if tokens is not None:
        mapped = torch.tensor(list(tokens))
        tensors["d2t"] = mapped - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, mapped, True)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.inference_mode()
def read_by_the_draft(
    target: Target, sample: TokenSample, answer: Sequence[int], layer_ids: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a prompt and an answer in one pass without a cache: tokens [S], the inputs of the target's first layer [S, M],
    and the inputs of the layers behind each of `layer_ids`, joined [S, F].
    """
    ids = torch.cat((sample.prompt().input_ids, torch.tensor(list(answer), dtype=torch.int64)))
    whole = attrs.evolve(sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    kept: dict[int, Tensor] = {}
    handles = [
        target.decoder_layers[place].register_forward_pre_hook(
            lambda _, args, given, place=place: kept.update({place: (args or [given["hidden_states"]])[0][0]}),
            with_kwargs=True,
        )
        for place in (0, *(each + 1 for each in layer_ids))
    ]
    target.forward(target.inputs([whole]), use_cache=False)
    for handle in handles:
        handle.remove()
    return ids, kept[0], torch.cat([kept[each + 1] for each in layer_ids], dim=-1)


@frozen(eq=False)
class Reference:
    """A draft by its formulas. weights: by their names in the folder. embed: the draft's own embedding, or the
    target's. head: the same.
    """

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    embed: Tensor
    head: Tensor

    @classmethod
    def of(cls, folder: Path, target: Target) -> Reference:
        stored = {name: each.double() for name, each in load_file(folder / "model.safetensors").items()}
        embed = stored.get("embed_tokens.weight", target.embed_weight.double())
        head = stored.get("lm_head.weight", target.head_weight.double())
        return cls(stored, read_json(folder / "config.json"), embed, head)

    def chain(self, following: Tensor, features: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """The proposals behind an anchor, and the draft's logits [N] for each.

        following: embedded tokens, all but the first, the anchor's last, [S, M]. features: of all tokens before the
        anchor, [S, F].
        """
        embeds, states = following.double(), features.double() @ self.weights["fc.weight"].T
        tokens: list[int] = []
        logits: list[Tensor] = []
        for _ in range(count):
            out = self.layer(embeds, states)[-1:]
            logits.append((self.norm("norm", out) @ self.head.T)[0])
            best = int(logits[-1].argmax())
            tokens.append(best + int(self.weights["d2t"][best]) if "d2t" in self.weights else best)
            embeds, states = torch.cat((embeds, self.embed[tokens[-1:]])), torch.cat((states, out))
        return tokens, logits

    def norm(self, name: str, value: Tensor) -> Tensor:
        scale = (value.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return value * scale * self.weights[f"{name}.weight"]

    def layer(self, embeds: Tensor, states: Tensor) -> Tensor:
        halves = self.norm("midlayer.input_layernorm", embeds), self.norm("midlayer.hidden_norm", states)
        x = states + self.attention(torch.cat(halves, dim=-1))
        y = self.norm("midlayer.post_attention_layernorm", x)
        gate, up, down = (self.weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(y @ gate.T) * (y @ up.T)) @ down.T

    def attention(self, x: Tensor) -> Tensor:
        H, G, D = (self.config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (
            (x @ self.weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(x), heads, D)
            for name, heads in (("q", H), ("k", G), ("v", G))
        )
        q, k = self.turned(q), self.turned(k)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.zeros_like(q)
        for head in range(H):
            group = head // (H // G)
            scores = (q[:, head] @ k[:, group].T * D**-0.5).masked_fill(later, -torch.inf)
            mixed[:, head] = softmax(scores, dim=-1) @ v[:, group]
        return mixed.flatten(1) @ self.weights["midlayer.self_attn.o_proj.weight"].T

    def turned(self, heads: Tensor) -> Tensor:
        """Queries or keys [S, H, D], turned by their places."""
        D = heads.shape[-1]
        speeds = self.config["rope_theta"] ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * speeds
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def fit(head: Eagle3Head, target: Target, samples: Sequence[TokenSample], plain: Sequence[Decoded], steps: int) -> None:
    """Train a draft to propose the target's answers, by its first two passes over each text."""
    texts = []
    for sample, answer in zip(samples, plain, strict=True):
        ids, inputs, features = read_by_the_draft(target, sample, answer.tokens, head.layer_ids)
        texts.append((ids.clone(), inputs.clone(), features.clone()))
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for ids, inputs, features in texts:
            count = len(ids) - 3
            mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
            _, states, rope = head.known(torch.cat((inputs, features), dim=-1)[None, :count], torch.arange(count)[None])
            for later in range(2):
                embedded = inputs[None, 1 + later : 1 + later + count]
                states = head(embedded, states, rope, mask, None)
                logits = head.logits(target, states[0])
                loss = loss + cross_entropy(logits, ids[2 + later : 2 + later + count])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    head.requires_grad_(False)
