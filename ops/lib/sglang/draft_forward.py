"""Compares SGLang's draft class with dflow's: hidden states of the same context and block.

The context's keys and values go through the worker's own code into the draft's cache, and the block through the
draft's model runner, as in serving: weights, RoPE, masks and windows are all SGLang's.

    T context tokens, F = layers * hidden size, M hidden size, K block size
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from torch import Tensor

from ops.lib.data.batching import padded_length
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.sglang.adapter import adapter
from ops.lib.sglang.dflash_worker import DflashEngine
from ops.lib.sglang.runtime import clear_pools

SHARES_OF_BLOCK = (0.5, 1, 2)  # of context, so that it is shorter and longer than a block
LONG_CONTEXT = 40


@frozen
class ForwardDifference:
    """The difference between SGLang's and dflow's forward pass of a draft, for one context and block.

    difference: the largest of any hidden state, relative to the largest state. rounding: the same for dflow's own pass
    in the engine's dtype against float32, 0 in float32.
    """

    name: str
    difference: float
    rounding: float


def compare_forward(engine: DflashEngine, draft: DraftModel, lengths: Sequence[int]) -> list[ForwardDifference]:
    """Compare the hidden states of a block's predicting slots between SGLang and dflow, with random features.

    draft: dflow's, in float32 on the CPU, with the weights that the engine serves. lengths: the contexts' lengths.
    """
    generator = torch.Generator().manual_seed(0)
    width = len(draft.config.target_layer_ids) * draft.config.hidden_size
    differences = []
    for length in lengths:
        features_TF = torch.randn(length, width, generator=generator)
        anchor = int(torch.randint(0, draft.config.vocab_size, (), generator=generator))
        theirs = sglang_hidden(engine, features_TF, anchor, draft.config).float().cpu()
        embeds = _embeddings(engine, [anchor, draft.config.mask_token_id]).float().cpu()
        ours = _hidden(draft, features_TF, embeds)
        rounded = _hidden(draft, features_TF, embeds, engine.dtype)
        scale = max(1.0, float(ours.abs().max()))
        differences.append(
            ForwardDifference(
                f"{describe(draft.config)}, context {length}",
                float((theirs - ours).abs().max()) / scale,
                float((rounded - ours).abs().max()) / scale,
            )
        )
    return differences


def context_lengths(config: DraftConfig, longest: int) -> list[int]:
    """Context lengths that show all kinds of attention: below and above a block and a window, at most `longest`."""
    lengths = {1, LONG_CONTEXT, *(int(share * config.block_size) for share in SHARES_OF_BLOCK)}
    if config.slides and config.sliding_window is not None:
        lengths |= {config.sliding_window - 1, config.sliding_window + config.block_size}
    return sorted(length for length in lengths if 1 <= length <= longest)


def describe(config: DraftConfig) -> str:
    """A short description of the config's forward pass."""
    windows = sum(config.window(layer) is not None for layer in range(config.num_hidden_layers))
    window = f", {windows} with a window of {config.sliding_window}" if windows else ""
    return f"{config.num_hidden_layers} layers{window}, block {config.block_size}"


@torch.inference_mode()
def sglang_hidden(engine: DflashEngine, features_TF: Tensor, anchor: int, config: DraftConfig) -> Tensor:
    """The states [K - 1, M] of SGLang's draft, after its final norm, for one block after the context."""
    worker, runner, layout = engine.worker, engine.worker.own.draft_model_runner, config.layout()
    length, device = len(features_TF), runner.device
    total = length + layout.queries
    slots = runner.token_to_kv_pool_allocator.alloc(padded_length(total, runner.page_size))[:total].to(torch.int64)
    requests = torch.ones(1, dtype=torch.int64, device=device)  # row 0 is for padding
    runner.req_to_token_pool.req_to_token[1, :total] = slots.to(runner.req_to_token_pool.req_to_token.dtype)
    positions = torch.arange(total, device=device)
    try:
        worker.write_context(features_TF.to(device, engine.dtype), slots[:length], positions[:length])
        ids = torch.tensor([anchor] + [config.mask_token_id] * (layout.queries - 1), device=device)
        prefix = torch.tensor([length], device=device)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=1,
            input_ids=ids,
            req_pool_indices=requests,
            seq_lens=prefix,
            out_cache_loc=slots[length:],
            seq_lens_sum=total,
            seq_lens_cpu=torch.tensor([total], dtype=torch.int32),
            positions=positions[length:],
            input_embeds=_embeddings(engine, ids.tolist()),
            spec_algorithm=worker.algorithm,
            spec_info=worker.own._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=layout.queries,
        )
        adapter().bind_slots(forward_batch, runner)
        return runner.forward(forward_batch).logits_output.hidden_states[layout.first :]
    finally:
        clear_pools(engine.target.model_runner)


@torch.inference_mode()
def _hidden(draft: DraftModel, features_TF: Tensor, embeds: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The states of dflow's draft for one block, computed in dtype, as float32 [K - 1, M]."""
    context = draft.context_kv(features_TF.to(dtype), torch.arange(len(features_TF)))
    anchor_M, mask_M = embeds.to(dtype)
    return draft.propose(anchor_M, mask_M, context).float()


def _embeddings(engine: DflashEngine, ids: list[int]) -> Tensor:
    """The rows [len(ids), M] of the target's embedding in SGLang."""
    embed = engine.target.model_runner.model.get_input_embeddings()
    return embed(torch.tensor(ids, device=engine.worker.own.draft_model_runner.device))
