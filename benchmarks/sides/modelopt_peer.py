"""ModelOpt's own steps of DFlash, DFlash2, DSpark and LiLiCorr (PyPI, version 0.48.0rc1), which this interpreter must
be able to import.

Its training model as `mtsp.convert` makes it, for stored features; mask, losses and metrics as they are, with the
coefficients of its recipes. It takes as many layers of the target as the draft has, so its first projection is replaced
by the one for the others' features. Same sizes, weights, features, tokens and anchors as on the other sides; its DSpark
predicts a token in every slot, so that it predicts a 15th more of them: a context must hold whole blocks.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of plugins for libraries that are not here
    import modelopt.torch.speculative as mtsp
from transformers import Qwen3ForCausalLM

from benchmarks.sides import measured
from benchmarks.sides.problem import GAMMA, Problem, Sizes, final_hidden
from benchmarks.sides.qwen3 import qwen3_config

TERMS = {
    "dflash": {},
    "dflash2": {},
    "dspark": {"dflash_ce_loss_alpha": 0.1, "dflash_l1_loss_alpha": 0.9, "dflash_confidence_head_alpha": 1.0},
    "lilicorr": {"dflash_lilicorr_w_ce": 0.25, "dflash_lilicorr_w_margin": 0.0, "dflash_lilicorr_w_pen": 0.25},
}


def make_step(problem: Problem, arguments: argparse.Namespace) -> measured.Step:
    """The step of ModelOpt; `--chunk` has no effect."""
    sizes, algorithm = problem.sizes, arguments.algorithm
    config = {
        "dflash_offline": True,
        "dflash_block_size": sizes.block,
        "dflash_num_anchors": sizes.anchors,
        "dflash_self_logit_distillation": False,
        "dflash_loss_objective": "decay",
        "dflash_loss_decay_factor": GAMMA,
        "dflash_mask_token_id": sizes.mask_token_id,
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": _architecture(sizes, algorithm, arguments.rank),
        **TERMS[algorithm],
    }
    with problem.features_SF.device:
        model = Qwen3ForCausalLM(_target(sizes)).to(problem.features_SF)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(problem.embed_VM)
        model.lm_head.weight.copy_(problem.head_VM)
    mtsp.convert(model, [("dflash", config)])
    draft = model.dflash_module
    draft.fc = nn.Linear(sizes.features, sizes.hidden, bias=False).to(problem.features_SF)  # see the head of this file
    missing, unexpected = draft.load_state_dict(problem.weights, strict=False)
    if unexpected or (missing and algorithm == "dflash"):
        raise ValueError(f"ModelOpt's model has other weights: missing {missing}, unexpected {unexpected}")
    anchors_1A = problem.anchors_A[None]
    model._sample_anchor_positions = lambda *_: (anchors_1A, torch.ones_like(anchors_1A, dtype=torch.bool))
    captured = {
        "aux_hidden_states": problem.features_SF[None],
        "base_model_hidden_states": final_hidden(problem)[None],
    }
    model.train()

    def run() -> tuple[float, int]:
        found = model(
            input_ids=problem.ids_S[None],
            base_model_outputs=captured,
            loss_mask=problem.loss_mask_S[None].to(problem.features_SF.dtype),
        )
        found.loss.backward()
        slots = len(problem.anchors_A) * (sizes.block - 1)
        return float(found.loss.detach()), round(found.train_acc[0][0] * slots)

    def gradients() -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in draft.named_parameters() if parameter.grad is not None}

    return measured.Step(run, gradients, draft.zero_grad)


def _target(sizes: Sizes):
    """The config of a target with these ends, whose layers the conversion deletes."""
    config = qwen3_config(sizes, "eager")
    config.num_hidden_layers = 1
    config.num_orig_hidden_layers = sizes.target_layers + 3
    config.tie_word_embeddings = False
    return config


def _architecture(sizes: Sizes, algorithm: str, rank: int | None) -> dict[str, object]:
    rank = measured.rank_of(sizes, rank)
    own: dict[str, dict[str, object]] = {
        "dflash": {},
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": rank, "selector_top_k": 16},
        "dspark": {"markov_rank": rank, "markov_head_type": "vanilla", "use_confidence_head": True},
        "lilicorr": {
            "lilicorr_candidate_topk": 8,
            "lilicorr_hidden_size": 4 * rank,
            "lilicorr_num_layers": 2,
            "lilicorr_num_heads": min(8, 4 * rank),
            "lilicorr_mlp_ratio": 2.0,
            "lilicorr_factor_dim": 4 * rank,
            "lilicorr_vector_eps": 1e-4,
            "lilicorr_logit_scale": 8.0,
        },
    }
    return {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "target_layer_ids": list(range(1, sizes.layers + 1)),
        "projector_type": algorithm,
        **own[algorithm],
    }


if __name__ == "__main__":
    measured.main(make_step)
