"""Sets up a training's computation: the rank's place in the mesh, the draft, and the engine around it.

Every choice that depends on the machine is made here, once, and printed: attention, head, exchange, compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsl.stage import Stage
from ops.lib.drafts.attention.blocks import choose_attention
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.load import load_weights, read_config
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.step import Engine
from ops.lib.drafts.losses.head import choose_head
from ops.lib.drafts.losses.loss import Loss
from ops.lib.drafts.losses.slots import block_weights
from ops.lib.sequence_parallel.degree import check_degree
from ops.lib.sequence_parallel.exchange import SP, Alone, Exchange, choose_exchange, flat_mesh, make_exchange, make_mesh
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.training import rank_group
from ops.lib.training.weights import WorkingWeights
from ops.train_dflash.batches import Place, Rows, States
from ops.train_dflash.inputs import Inputs, Reader
from ops.train_dflash.online import Ask, OnlineReader, OnlineSource
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.sharding import shard_model
from ops.train_dflash.staging import transfer_to
from ops.train_dflash.step import Stream


@frozen(eq=False)
class Setup:
    """The engine, and the streams of micro-batches of the splits train and val."""

    engine: Engine
    train: Stream
    val: Stream
    place: Place


def set_up(config: TrainDflash, stage: Stage, inputs: Inputs, ask: Ask | None = None, ahead: int = 0) -> Setup:
    """Set up model, target parts and data streams on this rank's device; a collective.

    ask: requests features that are captured online; None for stored ones. ahead: micro-batches that are requested
    before the one that is prepared. Raises ConfigError for a degree that does not fit.
    """
    draft = inputs.draft
    check_degree(
        world_size=stage.world_size,
        sp_degree=stage.sp_degree,
        sp_exchange=config.sp_exchange,
        query_heads=draft.num_attention_heads,
        kv_heads=draft.num_key_value_heads,
        shortest=min(inputs.train.lengths),
        pad_multiple=inputs.pad_multiple,
    )
    place = Place(
        dp_rank=stage.rank // stage.sp_degree,
        dp_size=stage.world_size // stage.sp_degree,
        sp_rank=stage.rank % stage.sp_degree,
        sp_degree=stage.sp_degree,
        device=rank_group.device_of(stage),
        dtype=getattr(torch, config.dtype),
    )
    mesh = None if stage.world_size == 1 else make_mesh(stage.world_size, stage.sp_degree, place.device)
    train = _stream(config, inputs, "train", place, ask, ahead)
    model = _model(config, stage, inputs, place, mesh)
    engine = Engine(
        model=model,
        embed_VM=inputs.embed_VM,
        head=inputs.head.beside(draft.head_settings),
        loss=train.loss,
        attend=choose_attention(place.device, draft, place.dtype)[1],
        exchange=_exchange(config, stage, inputs, train, mesh),
        anchor_chunk=config.anchor_chunk,
        activation_checkpointing=config.activation_checkpointing,
        computing=nullcontext if mesh is not None else weights_to_compute_with(model, place.dtype),
    )
    return Setup(engine, train, _stream(config, inputs, "val", place, ask, ahead), place)


def weights_to_compute_with(model: nn.Module, dtype: torch.dtype) -> Callable[[], AbstractContextManager[None]]:
    """A context for Engine.computing in one process: weights cast once a step, if the masters are wider than `dtype`.

    FSDP2 does the same for a sharded model.
    """
    wider = dtype.itemsize < next(model.parameters()).dtype.itemsize
    return WorkingWeights(model, dtype).in_place if wider else nullcontext


def _stream(config: TrainDflash, inputs: Inputs, split: str, place: Place, ask: Ask | None, ahead: int) -> Stream:
    reader = inputs.train if split == "train" else inputs.val
    return Stream(
        reader=reader,
        states=_source(reader, split, ask),
        ahead=ahead,
        draft=inputs.draft,
        weights_K=block_weights(config.block_size, config.gamma),
        num_anchors=config.num_anchors,
        loss=Loss(kind=config.loss, focal_gamma=config.focal_gamma, dpace_alpha=config.dpace_alpha, own=config.terms),
        micro_batch_tokens=config.micro_batch_tokens,
        pad_multiple=inputs.pad_multiple,
        place=place,
        transfer=transfer_to(place.device),
    )


def _source(reader: Reader, split: str, ask: Ask | None) -> Callable[[Sequence[Rows]], Callable[[], States]]:
    """A function that requests the states of rows: stored features, or features captured on request by `ask`."""
    if ask is None:
        assert isinstance(reader, FeatureReader)
        return lambda _rows: lambda: reader
    assert isinstance(reader, OnlineReader)
    return OnlineSource(ask, reader, split).ask


def _model(config: TrainDflash, stage: Stage, inputs: Inputs, place: Place, mesh: DeviceMesh | None) -> DraftModel:
    """The draft with float32 master weights (float64 for a float64 training), sharded if there are several ranks."""
    model = DraftModel(inputs.draft)
    model.initialise(config.seed or 0)
    warm_start = stage.inputs.get("warm_start")
    if warm_start is not None:
        load_weights(model, warm_start.path)
        if from_serving(read_config(warm_start.path)).layout() != inputs.draft.layout():
            stage.warn(
                f"warm_start: in the layout of this {inputs.draft.algorithm.name} draft every slot predicts another "
                "token than in the draft that it starts from, so less of that draft is of use; with algorithm = "
                '"dspark", sample_from_anchor = false keeps what the slots predict'
            )
    model.to(place.device, torch.promote_types(place.dtype, torch.float32))
    compiled = place.device.type == "cuda" if config.compile is None else config.compile
    if compiled:
        model.compile_layers()
    if mesh is not None:
        shard_model(model, flat_mesh(mesh), place.dtype)
    attention, _ = choose_attention(place.device, inputs.draft, place.dtype)
    stage.info(
        f"{_ranks(place)} on {place.device.type} in {config.dtype}; attention: {attention}; "
        f"logits: {choose_head(place.device)[0]}; layers are {'compiled' if compiled else 'not compiled'}"
    )
    return model


def _ranks(place: Place) -> str:
    """A text on how the processes share the work."""
    if place.dp_size * place.sp_degree == 1:
        return "one process"
    groups = f"{place.dp_size} group{'s' * (place.dp_size != 1)}"
    return f"{groups} of {place.sp_degree} process{'es' * (place.sp_degree != 1)} that share each sequence"


def _exchange(config: TrainDflash, stage: Stage, inputs: Inputs, train: Stream, mesh: DeviceMesh | None) -> Exchange:
    """The exchange between SP ranks, chosen by the sizes of the plan's first step, which every rank knows.

    One step suffices, since what is sent grows linearly with the sizes.
    """
    draft, degree = inputs.draft, train.place.sp_degree
    if mesh is None or degree == 1:
        return Alone()
    drawn = train.drawn(inputs.steps[0], config.seed or 0)
    samples = [sample for sample in drawn if len(sample.anchors_A)]
    name, reason = choose_exchange(
        config.sp_exchange,
        context=sum(sample.prefix for sample in samples),
        slots=sum(len(sample.anchors_A) for sample in samples) * draft.block_size,
        query_heads=draft.num_attention_heads,
        kv_heads=draft.num_key_value_heads,
        head_dim=draft.head_dim,
        degree=degree,
    )
    stage.info(f"sequence parallelism by {name}: {reason}")
    return make_exchange(name, mesh.get_group(SP))
