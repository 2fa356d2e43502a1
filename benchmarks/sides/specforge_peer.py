"""SpecForge's own steps of DFlash and DSpark (PyPI, version 0.2.0), which this interpreter must be able to import.

Its training models, mask, losses and metrics as they are: `OnlineDFlashModel` and `OnlineDSparkModel` (0.1 ce + 0.9 l1
and the confidence head), the logits in chunks of 128 blocks under activation checkpointing. On a GPU that means
FlexAttention under its block mask, which is its default, on a CPU SDPA under its dense mask. It has no DFlash2. Same
sizes, weights, features, tokens and anchors as on the other sides; its DSpark predicts a token in every slot, so that
a block of it is one shorter.
"""

from __future__ import annotations

import argparse

import torch
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.dspark import DSparkDraftModel
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from benchmarks.sides import measured
from benchmarks.sides.problem import GAMMA, Problem, Sizes, final_hidden
from benchmarks.sides.qwen3 import qwen3_config

CLASSES = {"dflash": (OnlineDFlashModel, DFlashDraftModel), "dspark": (OnlineDSparkModel, DSparkDraftModel)}


def make_step(problem: Problem, arguments: argparse.Namespace) -> measured.Step:
    """The step of SpecForge; `--chunk` has no effect."""
    sizes, is_dspark = problem.sizes, arguments.algorithm == "dspark"
    model_class, draft_class = CLASSES[arguments.algorithm]
    attention = "flex_attention" if problem.features_SF.is_cuda else "sdpa"
    config = _config(sizes, arguments, attention)
    with problem.features_SF.device:  # as on our side
        draft = draft_class(config).to(problem.features_SF).train()
    missing, unexpected = draft.load_state_dict(problem.weights, strict=False)
    if unexpected or (missing and not is_dspark):
        raise ValueError(f"SpecForge's model has other weights: missing {missing}, unexpected {unexpected}")
    head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False, device="meta")
    head.weight = nn.Parameter(problem.head_VM, requires_grad=False)
    model = model_class(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=nn.Embedding.from_pretrained(problem.embed_VM),
        mask_token_id=sizes.mask_token_id,
        block_size=config.block_size,
        attention_backend=attention,
        num_anchors=sizes.anchors,
        loss_decay_gamma=GAMMA,
    )
    anchors_1A = problem.anchors_A[None]
    model._sample_anchor_positions = lambda *_: (anchors_1A, torch.ones_like(anchors_1A, dtype=torch.bool))
    own = {"target_last_hidden_states": final_hidden(problem)[None]} if is_dspark else {}

    def run() -> tuple[float, int]:
        loss, accuracy, metrics = model(
            input_ids=problem.ids_S[None],
            hidden_states=problem.features_SF[None],
            loss_mask=problem.loss_mask_S[None].to(problem.features_SF.dtype),
            **own,
        )
        loss.backward()
        return float(loss.detach()), round(float(accuracy * metrics["accuracy_denom"]))

    def gradients() -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in draft.named_parameters() if parameter.grad is not None}

    return measured.Step(run, gradients, draft.zero_grad)


def _config(sizes: Sizes, arguments: argparse.Namespace, attention: str) -> Qwen3Config:
    nest = {"target_layer_ids": list(range(1, sizes.target_layers + 1)), "mask_token_id": sizes.mask_token_id}
    if arguments.algorithm == "dspark":
        nest |= {
            "projector_type": "dspark",
            "markov_rank": measured.rank_of(sizes, arguments.rank),
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    return qwen3_config(
        sizes,
        attention,
        block_size=sizes.block - (arguments.algorithm == "dspark"),
        num_target_layers=sizes.target_layers + 3,
        dflash_config=nest,
    )


if __name__ == "__main__":
    measured.main(make_step)
