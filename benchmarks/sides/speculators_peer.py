"""speculators' own DFlash step (PyPI, version 0.9.0), run by the interpreter of its own virtual environment.

Its model class, mask, loss and metrics as they are: `DFlashDraftModel` with the "ce" loss, its default for DFlash. On a
CPU that means SDPA under the dense mask of its `create_mask`, and the "eager" losses, since FlexAttention has no
backward there and its fused losses are Triton kernels; on a GPU FlexAttention under a compiled block mask, and the
fused loss. Its labels are the best tokens of the verifier's logits, which it makes in the step from the verifier's last
hidden states.
Same sizes, weights, features, tokens and anchors as on the other sides, with two differences that its design requires:
anchors in the last block_size tokens move to the last place before them, and the verifier's hidden states are
random, so that its loss is of the same kind but has another value.

`--algorithm`: its own DFlash2 (with the "ce" loss for the logits) and DSpark (0.1 ce + 1.8 tv, which is half of l1, and
the confidence head; its block_size counts slots, one less where the anchor's predicts), of the same sizes as ours.
"""

from __future__ import annotations

import argparse

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig, core
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from torch import Tensor

from benchmarks.sides import measured
from benchmarks.sides.problem import GAMMA, Problem, Sizes, final_hidden
from benchmarks.sides.qwen3 import qwen3_config

CLASSES = {
    "dflash": (DFlashSpeculatorConfig, core.DFlashDraftModel),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}
LOSSES = {"dflash": "ce", "dflash2": "ce", "dspark": '{"ce": 0.1, "tv": 1.8}'}
FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def make_step(problem: Problem, arguments: argparse.Namespace) -> measured.Step:
    """The step of speculators; `--attention` names its attention implementation, `--chunk` has no effect."""
    on_gpu = problem.features_SF.is_cuda
    sizes = problem.sizes
    model = _model(problem, arguments, arguments.attention or ("simple_flex_attention" if on_gpu else "sdpa"))
    implementation = "fused" if on_gpu else "eager"
    losses = resolve_loss_config(LOSSES[arguments.algorithm], implementation)
    own = {} if arguments.algorithm == "dflash" else {"tv_loss_fn": resolve_loss_config("tv", implementation)["tv"][0]}
    anchors_A = problem.anchors_A.clamp(max=sizes.context - sizes.block - 1)
    verifier_SM = final_hidden(problem)

    def run() -> tuple[float, int]:
        core.select_anchors = lambda *_: (anchors_A, torch.ones_like(anchors_A, dtype=torch.bool))
        _, loss, metrics = model(
            hidden_states=problem.features_SF[None],
            input_ids=problem.ids_S[None],
            loss_mask=problem.loss_mask_S[None].to(problem.features_SF.dtype),
            verifier_last_hidden_states=verifier_SM[None],
            document_ids=torch.zeros_like(problem.ids_S)[None],
            loss_config=losses,
            gamma=GAMMA,
            max_anchors=sizes.anchors,
            **own,
        )
        loss.backward()
        return float(loss.detach()), int(metrics["full_acc_sum"])

    def gradients() -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    return measured.Step(run, gradients, model.zero_grad)


def _model(problem: Problem, arguments: argparse.Namespace, attention: str) -> core.DFlashDraftModel:
    """The draft class of speculators with the problem's weights; it initialises the tensors that its algorithm adds."""
    _, model_class = CLASSES[arguments.algorithm]
    with problem.features_SF.device:  # as on our side
        model = model_class(_config(problem.sizes, arguments, attention)).to(problem.features_SF).train()
    norm = torch.ones_like(problem.features_SF[0, : problem.sizes.hidden])
    frozen = (problem.embed_VM, problem.head_VM, problem.head_VM, norm)
    given = {**problem.weights, **dict(zip(FROZEN, frozen, strict=True))}
    missing, unexpected = model.load_state_dict(given, strict=False)
    if unexpected or (missing and arguments.algorithm == "dflash"):
        raise ValueError(f"speculators' model has other weights: missing {missing}, unexpected {unexpected}")
    return model


def _config(sizes: Sizes, arguments: argparse.Namespace, attention: str) -> DFlashSpeculatorConfig:
    layers = qwen3_config(sizes, attention)
    rank = measured.rank_of(sizes, arguments.rank)
    own = {"dflash": {}, "dflash2": {"selector_rank": rank}, "dspark": {"markov_rank": rank}}
    config_class, _ = CLASSES[arguments.algorithm]
    return config_class(
        transformer_layer_config=layers,
        draft_vocab_size=sizes.vocabulary,
        block_size=sizes.block - (arguments.algorithm == "dspark"),
        aux_hidden_state_layer_ids=list(range(1, sizes.target_layers + 1)),
        mask_token_id=sizes.mask_token_id,
        **own[arguments.algorithm],
    )


if __name__ == "__main__":
    measured.main(make_step)
