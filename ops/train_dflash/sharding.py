"""The draft sharded over the ranks by FSDP2."""

from __future__ import annotations

import warnings

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from ops.dflash.model import DraftModel


def shard_model(model: DraftModel, flat: DeviceMesh) -> None:
    """Shard the draft over all ranks, as one unit, with FSDP2; gradients are averaged over all ranks.

    Weights are gathered and gradients reduced in the dtype of the master weights; layers cast when they compute.
    The draft is gathered once per step and its gradients reduced once, however many passes a step takes: micro-batches
    and chunks of anchors differ in number between ranks, and so must not communicate.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(model, mesh=flat, reshard_after_forward=False, mp_policy=policy)
    # context_kv returns transposed views; nothing writes into them, which is what FSDP2 warns of on every rank.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for method in ("context_kv", "forward_blocks"):
        register_fsdp_forward_method(model, method)
