"""Tiny targets with an MTP head of seeded weights, and the formulas of that head in float64, without caches.

The reference is written from SGLang's and vLLM's sources, and uses nothing of transformers' classes.

S tokens, M hidden size, H heads, G key/value heads, D head size, R rotated dimensions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from any_targets import any_checkpoint
from attrs import frozen
from family_checkpoints import make_checkpoint, picture, token_sample
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu, softmax

from ops.lib.data.files import read_json
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.chain import ChainRows
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.drafts.decoding.decode_options import ChainUse
from ops.lib.drafts.decoding.mtp import MtpHead
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.target.model import Target
from ops.lib.vision.family_config import text_part, with_defaults
from ops.lib.vision.processor import load_processor

NEW, BLOCK = 12, 4
USE = ChainUse(BLOCK)
NEXT = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": False,
}


def mtp_checkpoint(name: str, folder: Path, noise: float = 1.0) -> Path:
    """A tiny checkpoint with an MTP head. name: "qwen3_5", "qwen3_5_moe", or "qwen3_next", whose files have
    each expert for itself. noise: as of `add_mtp`.
    """
    if name == "qwen3_next":
        return add_mtp(any_checkpoint(name, folder, **NEXT), noise, single_experts=True)
    return add_mtp(make_checkpoint(name, folder, tie_word_embeddings=False, num_hidden_layers=4), noise)


def add_mtp(checkpoint: Path, noise: float = 1.0, seed: int = 5, single_experts: bool = False) -> Path:
    """Add an MTP head of random weights, whose proposals depend on all tokens before.

    noise: a factor of what layers of target and head add to their input, of the head's norms and of all of its fc but
    the part that keeps the embedding. Without noise both map a token to the next one alike, so the head is perfect.
    """
    file, text = checkpoint / "model.safetensors", text_of(checkpoint)
    random = torch.Generator().manual_seed(seed)
    tensors = {name: noise * each if _is_last(name) else each for name, each in load_file(file).items()}
    for name, shape in mtp_shapes(text, single_experts).items():
        spread = 0.1 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        made = spread * torch.randn(shape, generator=random)
        if name.startswith("pre_fc_norm") or name == "norm.weight" or name == "fc.weight" or _is_last(name):
            made = noise * made
        tensors[f"mtp.{name}"] = made
    size = text["hidden_size"]
    tensors["mtp.fc.weight"] += torch.eye(size, 2 * size)
    save_file(tensors, file, metadata={"format": "pt"})
    return checkpoint


def _is_last(name: str) -> bool:
    """Whether a weight is the last of what a layer adds to the residual stream."""
    return any(part in name for part in ("o_proj", "out_proj", "down_proj"))


def text_of(checkpoint: Path) -> dict[str, Any]:
    return dict(text_part(with_defaults(read_json(checkpoint / "config.json"))))


def mtp_shapes(text: Mapping[str, Any], single_experts: bool) -> dict[str, tuple[int, ...]]:
    M, H, G, D = (text[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (M,),
        "post_attention_layernorm.weight": (M,),
        "self_attn.q_proj.weight": (2 * H * D, M),
        "self_attn.k_proj.weight": (G * D, M),
        "self_attn.v_proj.weight": (G * D, M),
        "self_attn.o_proj.weight": (M, H * D),
        "self_attn.q_norm.weight": (D,),
        "self_attn.k_norm.weight": (D,),
    }
    E = text.get("num_experts")
    if not E:
        layer |= _mlp("mlp.", M, text["intermediate_size"])
    else:
        W = text["moe_intermediate_size"]
        layer |= {"mlp.gate.weight": (E, M), "mlp.shared_expert_gate.weight": (1, M)}
        layer |= _mlp("mlp.shared_expert.", M, text["shared_expert_intermediate_size"])
        if single_experts:
            for expert in range(E):
                layer |= _mlp(f"mlp.experts.{expert}.", M, W)
        else:
            layer |= {"mlp.experts.gate_up_proj": (E, 2 * W, M), "mlp.experts.down_proj": (E, M, W)}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        "fc.weight": (M, 2 * M),
        **{f"{name}.weight": (M,) for name in norms},
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
    }


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def mtp_target(checkpoint: Path) -> tuple[Target, MtpHead]:
    """The target, which does not stop at EOS, and its head."""
    text = text_of(checkpoint)
    info = {"hidden_size": text["hidden_size"], "num_layers": text["num_hidden_layers"], "eos_token_ids": []}
    target = Target.from_directory(checkpoint, info)
    return target, MtpHead.load(target, checkpoint)


def prompts_of(checkpoint) -> list[TokenSample]:
    """A text, and where the target sees also a prompt with two images."""
    processor = load_processor(str(checkpoint))
    samples = [token_sample(processor, "Describe it, then count what can be seen.", name="text")]
    if processor.sees:
        pictures = [picture(24, 16), picture(16, 32, seed=1)]
        samples.append(token_sample(processor, "And these?", images=pictures, name="images"))
    return samples


def corrected(
    target: Target, head: MtpHead, sample: TokenSample, monkeypatch: pytest.MonkeyPatch
) -> tuple[Decoded, Decoded, list[list[int]]]:
    """The plain answer, the speculative one, and the head's proposals, of which 0, 1, ... were replaced by right tokens
    in turn, so that blocks are accepted in every part.
    """
    (plain,) = decode_plain_batch(target, [sample], DecodeSettings(NEW + BLOCK))
    length = len(sample.prompt().input_ids)
    proposals: list[list[int]] = []
    propose = ChainRows.propose

    def kept(self: ChainRows, *given: Any) -> Proposal:
        proposal = propose(self, *given)
        right, place = len(proposals) % BLOCK, self.rows.longest - length + 1
        proposals.append(proposal.tokens_BD[0].tolist())
        tokens = [*plain.tokens[place : place + right], *proposals[-1][right:]]
        return Proposal(torch.tensor([tokens]))

    with monkeypatch.context() as patch:
        patch.setattr(ChainRows, "propose", kept)
        (answer,) = decode_speculative_batch(target, head, [sample], DecodeSettings(NEW), USE)
    return plain, answer, proposals


@frozen(eq=False)
class Reference:
    """An MTP head by its formulas. weights: by their names in the files, without "mtp."."""

    weights: Mapping[str, Tensor]
    text: Mapping[str, Any]
    embed: Tensor
    head: Tensor

    @classmethod
    def of(cls, checkpoint: Path, target: Target) -> Reference:
        stored = load_file(checkpoint / "model.safetensors")
        own = {name.removeprefix("mtp."): each.double() for name, each in stored.items() if name.startswith("mtp.")}
        return cls(own, text_of(checkpoint), target.embed_weight.double(), target.head_weight.double())

    def proposals(self, following: Tensor, states: Tensor, positions: Tensor, count: int) -> list[int]:
        """The proposals behind an anchor.

        following: the target's inputs of all tokens but the first, the anchor's last, [S, M]. states: the target's
        states of all tokens before the anchor, [S, M]. positions: of these tokens, [3, S].
        """
        columns = [self.joined(*pair) for pair in zip(following.double(), states.double(), strict=True)]
        tokens: list[int] = []
        for _ in range(count):
            out = self.layer(torch.stack(columns), positions)
            tokens.append(int((self.head @ out).argmax()))
            columns.append(self.joined(self.embed[tokens[-1]], out))
            positions = torch.cat((positions, positions[:, -1:] + 1), dim=1)
        return tokens

    def joined(self, embedded: Tensor, state: Tensor) -> Tensor:
        embedded, state = self.norm("pre_fc_norm_embedding", embedded), self.norm("pre_fc_norm_hidden", state)
        return self.weights["fc.weight"] @ torch.cat((embedded, state))

    def norm(self, name: str, value: Tensor) -> Tensor:
        scale = (value.pow(2).mean(-1, keepdim=True) + self.text["rms_norm_eps"]).rsqrt()
        return value * scale * (1 + self.weights[f"{name}.weight"])

    def layer(self, x: Tensor, positions: Tensor) -> Tensor:
        """The normed output at the last column."""
        x = x + self.attention(self.norm("layers.0.input_layernorm", x), positions)
        x = x[-1:]
        x = x + self.mlp(self.norm("layers.0.post_attention_layernorm", x))
        return self.norm("norm", x)[0]

    def attention(self, x: Tensor, positions: Tensor) -> Tensor:
        H, G, D = (self.text[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        named = "layers.0.self_attn"
        q, gate = (x @ self.weights[f"{named}.q_proj.weight"].T).view(len(x), H, 2 * D).split(D, dim=-1)
        k = (x @ self.weights[f"{named}.k_proj.weight"].T).view(len(x), G, D)
        v = (x @ self.weights[f"{named}.v_proj.weight"].T).view(len(x), G, D)
        q = self.turned(self.norm(f"{named}.q_norm", q), positions)
        k = self.turned(self.norm(f"{named}.k_norm", k), positions)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.zeros_like(q)
        for head in range(H):
            group = head // (H // G)
            scores = (q[:, head] @ k[:, group].T * D**-0.5).masked_fill(later, -torch.inf)
            mixed[:, head] = softmax(scores, dim=-1) @ v[:, group]
        return (mixed * gate.sigmoid()).flatten(1) @ self.weights[f"{named}.o_proj.weight"].T

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Heads [S, H, D], of which the first R dimensions are rotated, by the axes of mRoPE in turn."""
        rope = self.text["rope_parameters"]
        R = int(x.shape[-1] * rope.get("partial_rotary_factor", 1))
        sections = rope.get("mrope_section", [R // 2, 0, 0])
        axes = [next((a for a in (1, 2) if i % 3 == a and i < 3 * sections[a]), 0) for i in range(R // 2)]
        frequency = torch.tensor([rope["rope_theta"] ** (-2 * i / R) for i in range(R // 2)], dtype=torch.float64)
        angle = (positions[axes].T.double() * frequency)[:, None]
        a, b = x[..., : R // 2], x[..., R // 2 : R]
        turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.cat((*turned, x[..., R:]), dim=-1)

    def mlp(self, x: Tensor) -> Tensor:
        if "layers.0.mlp.gate.weight" not in self.weights:
            return self.gated("layers.0.mlp.", x)
        router = softmax(x @ self.weights["layers.0.mlp.gate.weight"].T, dim=-1)
        shared = (x @ self.weights["layers.0.mlp.shared_expert_gate.weight"].T).sigmoid()
        out = shared * self.gated("layers.0.mlp.shared_expert.", x)
        for place, row in enumerate(router):
            best = row.topk(self.text["num_experts_per_tok"])
            for share, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
                out[place] += share * self.expert(expert, x[place])
        return out

    def expert(self, number: int, x: Tensor) -> Tensor:
        prefix = "layers.0.mlp.experts."
        if f"{prefix}gate_up_proj" not in self.weights:
            return self.gated(f"{prefix}{number}.", x)
        gate, up = (self.weights[f"{prefix}gate_up_proj"][number] @ x).chunk(2)
        return self.weights[f"{prefix}down_proj"][number] @ (silu(gate) * up)

    def gated(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T


@torch.inference_mode()
def whole_pass(target: Target, sample: TokenSample, answer: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The target's inputs [S, M], states behind its final norm [S, M] and positions [3, S], of a prompt and an answer
    in one pass without a cache.
    """
    prompt = sample.prompt()
    inputs = target.inputs([_longer(prompt, answer)])
    decoder, kept = target.model.get_decoder(), {}
    handles = [
        decoder.layers[0].register_forward_pre_hook(
            lambda _, args, given: kept.update(x=args[0] if args else given["hidden_states"]), with_kwargs=True
        ),
        decoder.norm.register_forward_hook(lambda _, args, out: kept.update(h=out)),
        decoder.rotary_emb.register_forward_pre_hook(
            lambda _, args, given: kept.update(p=args[1] if len(args) > 1 else given["position_ids"]), with_kwargs=True
        ),
    ]
    target.forward(inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    positions = kept["p"]
    positions = positions[:, 0] if positions.ndim == 3 else positions.expand(3, -1)
    return kept["x"][0], kept["h"][0], positions


def _longer(prompt: TokenSample, answer: Sequence[int]) -> TokenSample:
    ids = torch.cat((prompt.input_ids, torch.tensor(list(answer), dtype=torch.int64)))
    return attrs.evolve(prompt, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))


def anchors_of(answer: Decoded) -> list[int]:
    """The place of each step's anchor in an answer that is as long as its steps gave."""
    places = [0]
    for accepted in answer.accepted[:-1]:
        places.append(places[-1] + accepted + 1)
    return places
