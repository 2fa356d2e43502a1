"""Our step: `ops.lib.drafts.backbone.step.Engine` on one process, as `train_dflash` builds it.

On a GPU layers are compiled, as there. Weights are float32 masters at least, cast once a step. What `train_dflash`
prepares in a thread is prepared before the step: the micro-batch on the device, and its blocks' context ranges on the
host, from which every step builds its masks again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from benchmarks.sides import measured
from benchmarks.sides.problem import SEED, Problem, Sizes, final_hidden, slot_targets
from ops.lib.drafts.algorithms import Algorithm, algorithm_class, plain
from ops.lib.drafts.attention.blocks import ContextRange, choose_attention
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Drawn
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.rope import rope_frequencies
from ops.lib.drafts.backbone.step import Engine, MicroBatch
from ops.lib.drafts.dflash2.config import Dflash2Options
from ops.lib.drafts.dspark.config import DsparkOptions
from ops.lib.drafts.lilicorr.config import LilicorrOptions
from ops.lib.drafts.losses.kinds import Terms
from ops.lib.drafts.losses.loss import Loss
from ops.lib.sequence_parallel.exchange import Alone
from ops.train_dflash.engine import weights_to_compute_with


def make_step(problem: Problem, arguments: argparse.Namespace) -> measured.Step:
    """The step in one pass over all anchors, or with `--chunk` in passes of this many."""
    own = terms(problem.sizes, arguments.algorithm, arguments.rank)
    model = draft_model(problem, sized(arguments.algorithm, own))
    loss = Loss(kind=arguments.loss or "dflash", own=own)
    engine = make_engine(model, problem, arguments.chunk, loss=loss)
    next_batch = micro_batches(problem, with_teacher=loss.needs_teacher)
    weight = float(slot_targets(problem)[1].sum(dtype=torch.float64))

    def run() -> tuple[Tensor, Tensor]:
        with engine.computing():
            outcome = engine.train(next_batch(), 1 / weight)
        return outcome.loss / weight, outcome.correct_W.sum()

    def gradients() -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in engine.model.named_parameters()}

    return measured.Step(run, gradients, engine.model.zero_grad)


def terms(sizes: Sizes, algorithm: str, rank: int | None = None) -> Terms | None:
    """The algorithm's table of train_dflash, with its defaults except for sizes; None for plain DFlash.

    LiLiCorr's width and factors are 4 times the rank: 1,024 for a hidden size of 4,096, as published.
    """
    rank = measured.rank_of(sizes, rank)
    if algorithm == "lilicorr":
        return LilicorrOptions(width=4 * rank, factors=4 * rank, heads=min(8, 4 * rank))
    options = {"dflash": None, "dflash2": Dflash2Options, "dspark": DsparkOptions}[algorithm]
    return None if options is None else options(rank=rank)


def sized(algorithm: str, own: Terms | None) -> Algorithm:
    """The algorithm with the sizes of its table."""
    made = algorithm_class(algorithm)
    return made() if own is None else made(**own.sizes())


def draft_model(problem: Problem, algorithm: Algorithm | None = None) -> DraftModel:
    """The draft with the problem's weights, in float32 at least; tensors that its algorithm adds are initialised."""
    dtype, device = problem.features_SF.dtype, problem.features_SF.device
    with device:  # a billion weights made on the CPU would take longer than the steps
        model = DraftModel(draft_config(problem.sizes, algorithm)).to(torch.promote_types(dtype, torch.float32))
    model.frequencies, model.rope_scale = rope_frequencies(model.config)  # of the host, as in a training
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Drawn):
                module.draw(torch.Generator().manual_seed(SEED), 0.02)
    model.load_state_dict({**model.state_dict(), **problem.weights})
    if device.type == "cuda":
        model.compile_layers()
    return model


def make_engine(
    model: DraftModel,
    problem: Problem,
    anchor_chunk: int | None = None,
    computing: Callable[[], Any] | None = None,
    loss: Loss | None = None,
) -> Engine:
    """The engine of a training step that computes in the problem's dtype.

    computing: a context around a step; default: one that casts the weights.
    """
    dtype, device = problem.features_SF.dtype, problem.features_SF.device
    return Engine(
        model=model,
        embed_VM=problem.embed_VM,
        head=problem.head_VM,
        loss=loss or Loss(kind="dflash"),
        attend=choose_attention(device, model.config, dtype)[1],
        exchange=Alone(),
        anchor_chunk=anchor_chunk,
        computing=computing or weights_to_compute_with(model, dtype),
    )


def micro_batches(problem: Problem, *, with_teacher: bool = False) -> Callable[[], MicroBatch]:
    """A function that returns the sequence up to its last anchor, as a new micro-batch at every call."""
    teacher_UM = teacher_rows_NK = None
    if with_teacher:
        places_AK = problem.anchors_A[:, None] + (torch.arange(problem.sizes.block) - 1).clamp(min=0).to(problem.ids_S)
        places_U, teacher_rows_NK = places_AK.clamp(max=problem.sizes.context - 1).unique(return_inverse=True)
        teacher_UM = final_hidden(problem)[places_U]
    anchors_N, last = problem.anchors_A, int(problem.anchors_A.max())
    labels_NK, weights_NK = slot_targets(problem)
    start_N, end_N = torch.zeros(len(anchors_N), dtype=torch.int64), anchors_N.cpu()
    batch = MicroBatch(
        features_tF=problem.features_SF[:last],
        positions_t=torch.arange(last, device=anchors_N.device),
        seen=(ContextRange(start_N, end_N),),
        anchor_ids_N=problem.ids_S[anchors_N],
        positions_N=anchors_N,
        labels_NK=labels_NK,
        weights_NK=weights_NK,
        teacher_UM=teacher_UM,
        teacher_rows_NK=teacher_rows_NK,
    )
    return lambda: evolve(batch, seen=(ContextRange(start_N, end_N),))


def draft_config(sizes: Sizes, algorithm: Algorithm | None = None) -> DraftConfig:
    """The draft's config at these sizes. algorithm: default: plain DFlash."""
    return DraftConfig(
        algorithm=algorithm or plain(),
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        vocab_size=sizes.vocabulary,
        block_size=sizes.block,
        mask_token_id=sizes.mask_token_id,
        target_layer_ids=tuple(range(1, sizes.target_layers + 1)),
        num_target_layers=sizes.target_layers + 3,
        max_position_embeddings=2 * sizes.context,
    )


if __name__ == "__main__":
    measured.main(make_step)
