"""The samples of a `draft_cases.Case` as what batches.pack reads, and the fast step over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from draft_cases import Case
from torch import Tensor

from ops.lib.drafts.attention.blocks import ContextRange, choose_attention
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.step import Engine, Slots
from ops.lib.drafts.losses.loss import Loss, denominator
from ops.lib.drafts.losses.slots import block_labels, block_weights, slot_weights
from ops.lib.sequence_parallel.exchange import Alone, Exchange
from ops.train_dflash.batches import Drawn, MicroBatch, Place, States, pack
from ops.train_dflash.staging import Direct

CPU = torch.device("cpu")


def prepare(reader: States, samples: Sequence[Drawn], place: Place, *, with_teacher: bool = False) -> MicroBatch:
    """The micro-batch of these samples on the place's device, complete on return."""
    batch, _ = pack(reader, samples, place, with_teacher=with_teacher).send(Direct(place.device))
    return batch


class CaseReader:
    """A reader of a case's samples, with the methods of FeatureReader that preparing a micro-batch calls."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.width = case.samples[0].features_SF.shape[1]

    def features(self, index: int, first: int, last: int) -> Tensor:
        return self.case.samples[index].features_SF[first:last]

    def final_hidden(self, index: int, first: int, last: int) -> Tensor:
        return self.case.samples[index].teacher_SM[first:last]


def drawn_samples(case: Case) -> list[Drawn]:
    """The case's samples that have an anchor."""
    K = case.config.block_size
    return [
        Drawn(
            index=index,
            length=len(sample.input_ids_S),
            anchors_A=sample.anchors_A,
            anchor_ids_A=sample.input_ids_S[sample.anchors_A],
            labels_AK=block_labels(sample.input_ids_S, sample.anchors_A, K),
            weights_AK=slot_weights(sample.loss_mask_S, sample.anchors_A, block_weights(K)),
        )
        for index, sample in enumerate(case.samples)
        if len(sample.anchors_A)
    ]


def make_engine(
    case: Case,
    loss: Loss,
    exchange: Exchange | None = None,
    compiled: bool = False,
    device: torch.device = CPU,
    **options,
) -> Engine:
    model = DraftModel(case.config).to(device, case.head_VM.dtype)
    model.load_state_dict(case.weights)
    if compiled:
        model.compile_layers()
    return Engine(
        model=model,
        embed_VM=case.embed_VM.to(device),
        head=case.head(device),
        loss=loss,
        attend=choose_attention(device, case.config, case.head_VM.dtype)[1],
        exchange=exchange or Alone(),
        **options,
    )


def fast_step(
    case: Case, loss: Loss, micro_batches: Sequence[Sequence[int]] | None = None, **options
) -> tuple[float, dict[str, Tensor], list[Slots]]:
    """Loss, gradients by name and outcomes of one step on one process; micro_batches: places in drawn_samples."""
    drawn = drawn_samples(case)
    engine = make_engine(case, loss, **options)
    total = sum(denominator(loss, sample.weights_AK) for sample in drawn)
    device = options.get("device", CPU)
    place = Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=device, dtype=case.head_VM.dtype)
    outcomes = []
    for places in micro_batches or ([range(len(drawn))] if drawn else []):
        batch = prepare(CaseReader(case), [drawn[p] for p in places], place, with_teacher=loss.needs_teacher)
        outcomes.append(engine.train(batch, 1 / total))
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.cpu()
        for name, parameter in engine.model.named_parameters()
    }
    return sum(float(slots.loss) for slots in outcomes) / (total or 1), gradients, outcomes


def hidden_of_blocks(
    model: DraftModel, features_SF: Tensor, anchor_embeds_NM: Tensor, mask_embed_M: Tensor, anchors: Sequence[int]
) -> Tensor:
    """Hidden states [N, K, M] of all slots of blocks in one sample."""
    anchors_N = torch.tensor(anchors)
    seen = ContextRange(torch.zeros_like(anchors_N), anchors_N)
    _, chosen = choose_attention(CPU, model.config, features_SF.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, k_GTD: Tensor, v_GTD: Tensor, window: int | None) -> Tensor:
        return chosen(q, k, v, k_GTD, v_GTD, seen, window)

    K = model.config.layout().queries
    context = model.context_kv(features_SF, torch.arange(len(features_SF)))
    rows_W = torch.arange(len(anchors) * K)
    hidden_WM = model.forward_blocks(anchor_embeds_NM, mask_embed_M, anchors_N, context, attend, rows_W)
    return hidden_WM.view(len(anchors), K, -1)
