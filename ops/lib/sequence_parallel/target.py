"""A target trained over ranks: FSDP2 over all of them, Ulysses among the sp ranks that share their sequences.

Every rank calls the target's own forward pass on whole sequences. Hooks then do three things: text-only batches run an
image of weight zero, so that all ranks gather and reduce the same weights; the language model gets this rank's slice
of the sequence (see target_attention.py); and the head gets only the hidden states that predict answer tokens.
One process needs only the last.

Legend: P sp_degree, B batch, S tokens, s = S / P, T answer tokens predicted in this rank's slice, M hidden size,
V vocabulary, R pixel rows
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ops.lib.sequence_parallel.degree import check_target_degree
from ops.lib.sequence_parallel.exchange import SP, Ulysses, flat_mesh, make_mesh
from ops.lib.sequence_parallel.target_attention import ULYSSES, Slice
from ops.lib.target.model import Target
from ops.lib.training.dtensors import reshard
from ops.lib.vision.batch import ModelInputs
from ops.lib.vision.families import VisionFamily
from ops.lib.vision.tensor_list import TensorList


@frozen(eq=False)
class ParallelTarget:
    """A target whose model is sharded in place; parameters are the float32 masters (float64 for float64).

    exchange: among the sp ranks of this rank's row; None for sp_degree 1. device: what batches are computed on.
    """

    target: Target
    world_size: int
    sp_rank: int
    sp_degree: int
    device: torch.device
    dtype: torch.dtype
    exchange: Ulysses | None

    @classmethod
    def make(
        cls,
        target: Target,
        *,
        world_size: int,
        rank: int,
        sp_degree: int,
        device: torch.device | str,
        dtype: torch.dtype,
        gradient_checkpointing: bool = False,
    ) -> Self:
        """Shard the target's model over all ranks; a collective, after joining the default process group.

        Layers are cast to the masters' dtype and moved to the device one by one. So a target on the CPU never lies on a
        device as a whole, nor its masters on the CPU. One process needs no group and keeps its model whole. The caller
        decides which parameters are trained. Raises ConfigError, on all ranks, for a degree that does not fit
        (degree.py).
        """
        device = torch.device(device)
        model = target.model
        check_target_degree(model.config.to_dict(), world_size=world_size, sp_degree=sp_degree)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        exchange = None
        if world_size == 1:
            model.to(device, torch.promote_types(dtype, torch.float32))
        else:
            mesh = make_mesh(world_size, sp_degree, device)
            _shard(model, flat_mesh(mesh), dtype)
            if sp_degree > 1:
                _share_sequences(target)
                exchange = Ulysses(mesh.get_group(SP))
        target.device = device
        return cls(target, world_size, rank % sp_degree, sp_degree, device, dtype, exchange)

    def answer_loss(self, inputs: ModelInputs | None) -> Tensor:
        """The summed cross-entropy of the answer tokens that this rank's slice predicts, a scalar.

        Token t is an answer token if loss_mask[t] is true and t > 0; the hidden state of t - 1 predicts it. Every rank
        must call this equally often, sp ranks of a row with the same batch. None stands for no batch: the result is 0,
        and is backpropagated like any other. To save gradients use `torch.no_grad`, not `inference_mode`, whose weights
        could not be trained afterwards.
        """
        given = _empty_sample() if inputs is None else inputs
        s = -(-given.input_ids.shape[1] // self.sp_degree)
        whole = given.widened(s * self.sp_degree).to(self.device)
        start, end = self.sp_rank * s, (self.sp_rank + 1) * s
        wanted_Bs, labels_T = wanted_tokens(whole, start, end)
        with self._hooks(whole, wanted_Bs, start, end), self._precision():
            arguments = self.target.model_arguments(whole)
            logits_TV = self.target.model(**arguments, use_cache=False).logits
        if not torch.is_grad_enabled():
            reshard(self.target.model)
        exact = torch.promote_types(logits_TV.dtype, torch.float32)
        return F.cross_entropy(logits_TV.to(exact), labels_T, reduction="sum")

    def hold(self) -> None:
        """Let the next backward passes accumulate unsharded gradients on this rank, without communication."""
        self._reduce_gradients(False)

    def release(self) -> None:
        """Announce the step's last backward pass, whose end reduces all accumulated gradients."""
        self._reduce_gradients(True)

    def _reduce_gradients(self, now: bool) -> None:
        model = self.target.model
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
            model.set_is_last_backward(now)

    @contextmanager
    def _hooks(self, inputs: ModelInputs, wanted_Bs: Tensor, start: int, end: int) -> Iterator[None]:
        """Open a context with the hooks of one forward pass; hooks of the language model run in this order."""
        model = self.target.model
        decoder = model.get_decoder()
        with ExitStack() as hooks:
            if self.world_size > 1 and self._patches and not inputs.has_images:
                hooks.callback(decoder.register_forward_pre_hook(self._see_nothing, with_kwargs=True).remove)
            if self.exchange is not None:
                part = Slice(self.exchange, self.target.family, start, end)
                hooks.callback(decoder.register_forward_pre_hook(part.cut, with_kwargs=True).remove)
            head = model.get_output_embeddings()
            hooks.callback(head.register_forward_pre_hook(lambda _, args: (args[0][wanted_Bs],)).remove)
            yield

    @property
    def _patches(self) -> bool:
        """Whether the target reads Qwen's patches; images of others are not trained on."""
        return isinstance(self.target.family, VisionFamily) and self.target.family.has_vision

    def _see_nothing(
        self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add the features of a tiny image with weight zero to a text-only batch, so that every weight has
        a gradient.
        """
        model, family = self.target.model, self.target.family
        assert isinstance(family, VisionFamily)  # only these have the hook
        merge, patch_dim = family.merge_size, family.patch_dim
        pixels_RP = torch.zeros(merge**2, patch_dim, device=self.device)
        grid = torch.tensor([[1, merge, merge]], device=self.device)
        seen = model.get_image_features(pixels_RP, grid, return_dict=True)
        nothing = 0 * torch.stack([rows.sum() for rows in family.image_features(seen)]).sum()
        return args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"] + nothing}

    def _precision(self) -> AbstractContextManager[Any]:
        """A context for the compute dtype: autocast for one process; with several, FSDP2 casts the weights itself."""
        if self.world_size > 1 or self.dtype == torch.promote_types(self.dtype, torch.float32):
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def answer_tokens(inputs: ModelInputs) -> int:
    """The number of answer tokens in a batch that `answer_loss` sums over, on all sp ranks of a row together."""
    return int(inputs.loss_mask[:, 1:].sum())


def wanted_tokens(inputs: ModelInputs, start: int, end: int) -> tuple[Tensor, Tensor]:
    """The positions of a slice that predict an answer token, bool [B, end - start], and those tokens, int64 [T].

    The shift comes before the slice: a slice's last position predicts the first token of the next one.
    """
    wanted_BS = F.pad(inputs.loss_mask[:, 1:], (0, 1))
    labels_BS = F.pad(inputs.input_ids[:, 1:], (0, 1))
    wanted_Bs = wanted_BS[:, start:end]
    return wanted_Bs, labels_BS[:, start:end][wanted_Bs]


def _empty_sample() -> ModelInputs:
    """An input of a single token without an answer."""
    one = torch.zeros(1, 1, dtype=torch.int64)
    return ModelInputs(
        input_ids=one,
        attention_mask=one + 1,
        loss_mask=one.bool(),
        pixel_values=TensorList([torch.zeros(0, 1)]),
        image_grid_thw=TensorList([torch.zeros(0, 3, dtype=torch.int64)]),
    )


def _shard(model: PreTrainedModel, flat: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard the model: each decoder layer and vision block by itself, the rest as one.

    Weights are gathered in the compute dtype, gradients reduced in the masters' dtype. Activations keep the dtypes of
    the model's own code, which has rotary angles in float32.
    """
    masters = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=masters, cast_forward_inputs=False)
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module.to(masters), mesh=flat, mp_policy=policy)
    fully_shard(model.to(masters), mesh=flat, mp_policy=policy)


def _share_sequences(target: Target) -> None:
    """Use Ulysses in the attention of the language model, but not in the vision tower: every rank runs all images."""
    parts = {"text_config": ULYSSES, "vision_config": "sdpa"}
    target.model.set_attn_implementation(parts if target.family.has_vision else ULYSSES)
