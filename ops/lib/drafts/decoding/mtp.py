"""A target's own MTP head as a draft: Qwen3.5's and Qwen3-Next's, one layer that proposes token by token.

For the token t[i] with the target's state h[i], behind its final norm, and the token t[i + 1] after it:

    x[i] = fc([pre_fc_norm_embedding(E t[i + 1]), pre_fc_norm_hidden(h[i])])
    m[i] = norm(layer(x[i]))        a full-attention layer of the target's own class, at the position of t[i]
    logits of t[i + 2] = H m[i]     E, H: the target's embedding and head

It is applied again to its own output m, by chain.py. Of an image, E t is the target's input at that place.

Source: SGLang 0.5.23, models/qwen3_5_mtp.py and qwen3_next_mtp.py, speculative/eagle_worker_v2.py; vLLM 0.33,
models/qwen3_5_mtp.py and qwen3_next_mtp.py, v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py (order of fc's
halves, norms; tokens and images shifted by one, positions of the target's states, the normed output fed back).

B batch, P columns of a pass, M hidden size, D rotated dimensions, V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Cache

from dsl.errors import DataError
from ops.lib.drafts.decoding.chain import Rope
from ops.lib.target.cache import decoder_config
from ops.lib.target.checkpoint_check import stored_tensors
from ops.lib.target.model import Target
from ops.lib.target.mtp_tensors import mtp_mistake
from ops.lib.vision.family_config import MTP

EXPERTS = "layers.0.mlp.experts."


class MtpHead(nn.Module):
    """An MTP head. Its modules are named as its tensors, without "mtp."."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        decoder, config = target.model.get_decoder(), deepcopy(decoder_config(target))
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config._attn_implementation = "sdpa"
        size = target.hidden_size
        self.heads, self.head_size = config.num_key_value_heads, config.head_dim
        self.fc = nn.Linear(2 * size, size, bias=False)
        norm = type(decoder.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.layers = nn.ModuleList([type(target.decoder_layers[0])(config, 0)])

    @classmethod
    def load(cls, target: Target, directory: Path) -> MtpHead:
        """The MTP head in the files of a loaded target, on its device and in its dtype, frozen.

        Raises DataError as `mtp_mistake`, and for tensors of other sizes than config.json has.
        """
        stored = stored_tensors(directory)
        if mistake := mtp_mistake(target.family.config, stored):
            raise DataError(f"{directory}: {mistake}")
        tensors = {}
        for name in sorted(name for name in stored if name.startswith(MTP)):
            with safe_open(stored[name].file, framework="pt") as file:
                tensor = file.get_tensor(name).to(target.device).to(target.model.dtype)
            tensors[name.removeprefix(MTP)] = tensor
        with torch.device("meta"):
            head = cls(target)
        try:
            head.load_state_dict(_stacked(tensors), assign=True)
        except (KeyError, RuntimeError) as error:
            raise DataError(f"{directory}: the MTP head does not fit config.json: {error}") from error
        return head.eval().requires_grad_(False)

    @contextmanager
    def capture(self, target: Target) -> Iterator[MtpInputs]:
        """Open a context in which every forward pass of the target records what the head reads."""
        found = MtpInputs()
        handles = [
            target.decoder_layers[0].register_forward_pre_hook(found.before, with_kwargs=True),
            target.model.get_decoder().norm.register_forward_hook(found.after),
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def known(self, features_BPF: Tensor, positions_BP: Tensor) -> tuple[Tensor, Tensor, Rope]:
        """As of `ChainHead`; the angles are the target's own."""
        size = self.fc.out_features
        width = (features_BPF.shape[-1] - 2 * size) // 2
        embedded_BPM, cos_BPD, sin_BPD, states_BPM = features_BPF.split((size, width, width, size), dim=-1)
        return embedded_BPM, states_BPM, (cos_BPD, sin_BPD)

    def embedded(self, target: Target, tokens_P: Tensor) -> Tensor:
        """As of `ChainHead`."""
        return target.embed_weight[tokens_P]

    def angles(self, target: Target, positions_BP: Tensor) -> Rope:
        """As of `ChainHead`."""
        cos_BPD, sin_BPD = target.model.get_decoder().rotary_emb(target.embed_weight, positions_BP)
        return cos_BPD, sin_BPD

    def logits(self, target: Target, states_BM: Tensor) -> Tensor:
        """As of `ChainHead`."""
        return states_BM @ target.head_weight.T

    def forward(
        self, embedded_BPM: Tensor, states_BPM: Tensor, rope: Rope, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """As of `ChainHead`."""
        halves = self.pre_fc_norm_embedding(embedded_BPM), self.pre_fc_norm_hidden(states_BPM)
        hidden_BPM = self.layers[0](
            self.fc(torch.cat(halves, dim=-1)), position_embeddings=rope, attention_mask=mask, past_key_values=cache
        )
        return self.norm(hidden_BPM)


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of single experts, as Qwen3-Next's files have them, as transformers stacks them."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(EXPERTS)}
    rest = {name.removeprefix(EXPERTS): tensor for name, tensor in tensors.items() if name.startswith(EXPERTS)}
    count = 1 + max((int(name.partition(".")[0]) for name in rest if name[0].isdigit()), default=-1)
    if not count:
        return tensors

    def of_each(part: str) -> list[Tensor]:
        return [rest.pop(f"{expert}.{part}.weight") for expert in range(count)]

    gates_and_ups = zip(of_each("gate_proj"), of_each("up_proj"), strict=True)
    kept[f"{EXPERTS}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gates_and_ups])
    kept[f"{EXPERTS}down_proj"] = torch.stack(of_each("down_proj"))
    return kept | {f"{EXPERTS}{name}": tensor for name, tensor in rest.items()}


@define(eq=False)
class MtpInputs:
    """What an MTP head reads of the target's last pass."""

    _newest: tuple[Tensor, ...] = field(default=(), init=False)

    def features(self) -> Tensor:
        """The inputs of the first layer, cosines, sines, and the states behind the final norm, [B, P, 2 M + 2 D]."""
        return torch.cat(self._newest, dim=-1)

    def before(self, _layer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """A hook before the first layer."""
        embedded_BPM = args[0] if args else given["hidden_states"]
        rope = (part.expand(len(embedded_BPM), -1, -1) for part in given["position_embeddings"])
        self._newest = (embedded_BPM, *rope)

    def after(self, _norm: nn.Module, _args: tuple[Any, ...], states_BPM: Tensor) -> None:
        """A hook behind the final norm."""
        self._newest = (*self._newest, states_BPM)
