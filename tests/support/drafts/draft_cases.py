"""Random training steps from a seed: a draft's config and weights, the target's ends, and samples with anchors.

A fast step is compared with `ops.lib.drafts.backbone.reference` on them. Everything is small, float64 and on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from ops.lib.drafts.backbone.config import FULL_ATTENTION, SLIDING_ATTENTION, DraftConfig, to_serving
from ops.lib.drafts.backbone.reference import Sample, Step, reference_step
from ops.lib.drafts.backbone.sizes import expected_shapes
from ops.lib.drafts.losses.slots import draw_anchors
from ops.lib.target.embedding_and_head import AnyHead, Head
from ops.lib.target.head_settings import PLAIN, HeadSettings

HIDDEN, VOCAB, MASK, FEATURE_LAYERS = 8, 13, 12, 2
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (6, 2), (4, 4))
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"partial_rotary_factor": 0.5},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
)


@frozen(eq=False)
class Case:
    """A draft and packed samples, with all that a reference step needs.

    weights: the tensors of the serving contract. Every sample has a teacher, for the KL loss. target, bias_V: the
    weights that the target's logits are computed from.
    """

    config: DraftConfig
    weights: Mapping[str, Tensor]
    embed_VM: Tensor
    head_VM: Tensor
    samples: tuple[Sample, ...]
    target: HeadSettings = PLAIN
    bias_V: Tensor | None = None

    def head(self, device: torch.device | str = "cpu") -> AnyHead:
        """The target's head as a training uses it."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device)
        return Head.of_target(self.head_VM.to(device), self.target, bias_V).beside(self.config.head_settings)

    @property
    def anchors(self) -> int:
        return sum(len(sample.anchors_A) for sample in self.samples)

    def to(self, dtype: torch.dtype) -> Case:
        """The case with the same numbers, rounded to dtype."""
        samples = tuple(
            attrs.evolve(sample, features_SF=sample.features_SF.to(dtype), teacher_SM=sample.teacher_SM.to(dtype))
            for sample in self.samples
        )
        weights = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        ends = (self.embed_VM.to(dtype), self.head_VM.to(dtype))
        return Case(self.config, weights, *ends, samples, self.target, bias_V)


def random_case(seed: int, *, samples: int | None = None, anchors: int | None = None, **config: Any) -> Case:
    """Packed samples of ragged lengths with random anchors, holes in the mask and blocks over the end.

    samples: how many. anchors: how many in the whole case, 0 included; random unless given. config: fields of the
    DraftConfig that are not left to chance.
    """
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    draft = random_config(chance, config)
    count = chance.randint(1, 4) if samples is None else samples
    drawn = tuple(_sample(chance, generator, seed, index, draft) for index in range(count))
    if anchors is not None:
        drawn = _with_anchors(drawn, anchors)
    weights = random_weights(draft, generator)
    ends = (torch.randn(draft.vocab_size, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    return Case(draft, weights, *ends, drawn)


def random_config(chance: random.Random, fixed: Mapping[str, Any]) -> DraftConfig:
    """A random DraftConfig: blocks of 2 to 16, grouped heads, full and sliding layers, plain or scaled RoPE, biases."""
    layers = chance.randint(1, 3)
    heads, kv_heads = chance.choice(HEADS)
    kinds = tuple(chance.choice((FULL_ATTENTION, SLIDING_ATTENTION)) for _ in range(layers))
    values = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": chance.choice((4, 8)),
        "intermediate_size": 12,
        "vocab_size": VOCAB,
        "block_size": max(chance.randint(2, 16), getattr(fixed.get("algorithm"), "taps", 2)),
        "mask_token_id": MASK,
        "target_layer_ids": tuple(range(FEATURE_LAYERS)),
        "num_target_layers": FEATURE_LAYERS + 2,
        "max_position_embeddings": 64,
        "rope_theta": chance.choice((100.0, 10000.0)),
        "layer_types": kinds,
        "sliding_window": chance.randint(2, 12),
        "attention_bias": chance.random() < 0.25,
    }
    values |= chance.choice(ROPES)
    if "num_hidden_layers" in fixed and "layer_types" not in fixed:
        values["layer_types"] = ()
    elif "layer_types" in fixed:
        values["num_hidden_layers"] = len(fixed["layer_types"])
    return DraftConfig(**values | fixed)


def random_weights(config: DraftConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Random tensors of the serving contract, float64; norms around 1, the others large enough to matter."""
    weights = {}
    for name, shape in expected_shapes(to_serving(config)).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
        weights[name] = noise + 1 if name.endswith("norm.weight") else noise
    return weights


def _sample(chance: random.Random, generator: torch.Generator, seed: int, index: int, draft: DraftConfig) -> Sample:
    length = chance.randint(2, 24)
    loss_mask_S = torch.arange(length) >= chance.randint(0, length // 2)
    if chance.random() < 0.5:
        loss_mask_S &= torch.rand(length, generator=generator) > 0.2
    features_SF = torch.randn(length, FEATURE_LAYERS * HIDDEN, generator=generator, dtype=torch.float64)
    return Sample(
        features_SF=features_SF,
        input_ids_S=torch.randint(0, MASK, (length,), generator=generator),
        loss_mask_S=loss_mask_S,
        anchors_A=draw_anchors(loss_mask_S, chance.randint(0, 6), seed=seed, epoch=0, sample=index),
        teacher_SM=torch.randn(length, HIDDEN, generator=generator, dtype=torch.float64),
    )


def _with_anchors(samples: tuple[Sample, ...], anchors: int) -> tuple[Sample, ...]:
    """The samples with this many anchors, dealt to the samples' ends first; the masks are opened for them."""
    dealt = []
    for sample in samples:
        length = len(sample.input_ids_S)
        here = min(anchors, length - 1)
        anchors -= here
        positions = torch.arange(length - 1 - here, length - 1)
        mask = sample.loss_mask_S.clone()
        mask[positions] = mask[positions + 1] = True
        dealt.append(attrs.evolve(sample, anchors_A=positions, loss_mask_S=mask))
    if anchors:
        raise ValueError(f"{anchors} anchors too many for these samples")
    return tuple(dealt)


def reference_gradients(case: Case, **loss: Any) -> tuple[Step, dict[str, Tensor]]:
    """The reference's step, and the gradient of its loss for every weight; `loss`: as in `reference_step`."""
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in case.weights.items()}
    ends = (case.embed_VM, case.head_VM)
    target = {"teacher": case.target, "teacher_bias_V": case.bias_V}
    step = reference_step(weights, case.config, *ends, case.samples, **target, **loss)
    gradients = torch.autograd.grad(step.loss, list(weights.values()), materialize_grads=True)
    return step, dict(zip(weights, gradients, strict=True))
