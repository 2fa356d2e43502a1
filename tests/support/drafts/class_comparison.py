"""Drafts as their published classes compute them beside dflow: hidden states and proposed tokens of one block.

Where both compute one function they differ by rounding only: by about 1e-15 in float64, and in float32 by about 1e-6
relative to the largest state.

P slots that predict a token, M hidden size
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from attrs import frozen
from published_drafts import Published
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ops.artifacts import Draft
from ops.lib.drafts.algorithms import ReadsContext, part_of
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.decoding.sampling import GreedyChoice

ANCHOR = 7
ABSOLUTE_IN_FLOAT64, RELATIVE_IN_FLOAT32 = 1e-12, 2e-6


def assert_equal(published: Published, made: Draft, context: int = 19) -> None:
    """Assert that both drafts give the same hidden states and tokens in a block, in float32 and in float64.

    States are compared in all slots that predict a token.
    """
    theirs, ours = blocks(published, made, torch.float32, context)
    relative = largest_difference(theirs, ours) / float(theirs.hidden_PM.abs().max())
    assert theirs.tokens == ours.tokens
    theirs, ours = blocks(published, made, torch.float64, context)
    absolute = largest_difference(theirs, ours)
    assert theirs.tokens == ours.tokens
    print(f"largest difference: {absolute:.1e} in float64, {relative:.1e} of the largest in float32")
    assert absolute <= ABSOLUTE_IN_FLOAT64
    assert relative <= RELATIVE_IN_FLOAT32


@frozen(eq=False)
class Block:
    """A block's hidden states, and the tokens that are proposed from them."""

    hidden_PM: Tensor
    tokens: list[int]


def largest_difference(one: Block, other: Block) -> float:
    """The largest absolute difference between the hidden states of two blocks."""
    assert one.hidden_PM.shape == other.hidden_PM.shape
    return float((one.hidden_PM - other.hidden_PM).abs().max())


class Widened(TorchDispatchMode):
    """A mode that computes in float64 where code names float32, as the norms and ropes of transformers do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def blocks(published: Published, made: Draft, dtype: torch.dtype, context: int = 19) -> tuple[Block, Block]:
    """The block of the published class and that of dflow, for the same weights and inputs, all exact in float32."""
    own = load_draft(made.path, dtype=dtype)
    config = own.config
    generator = torch.Generator().manual_seed(3)
    layers, sizes = range(config.num_target_layers), (config.vocab_size, config.hidden_size)
    features = {layer: torch.randn(context, config.hidden_size, generator=generator).to(dtype) for layer in layers}
    embed, head = torch.randn(2, *sizes, generator=generator).to(dtype)
    block = torch.stack([embed[ANCHOR], *[embed[config.mask_token_id]] * (config.layout().queries - 1)])
    linear = nn.Linear(*reversed(sizes), bias=False)
    linear.weight = nn.Parameter(head)
    published.model.to(dtype)
    with torch.no_grad(), Widened() if dtype == torch.float64 else nullcontext():
        joined = torch.cat([features[layer] for layer in published.layer_ids], dim=1)
        expected = published.slots(joined, block)[published.first :]
        around = (embed, joined) if published.reads_context else ()
        theirs = Block(expected, published.tokens(expected, ANCHOR, linear, *around).tolist())
    with torch.no_grad():
        joined = torch.cat([features[layer] for layer in config.target_layer_ids], dim=1)
        found = own.propose(block[0], embed[config.mask_token_id], own.context_kv(joined, torch.arange(context)))
        propose = part_of(config.algorithm, "model:propose")
        context = BlockContext(embed, own.context_feature(joined[-1:]), torch.tensor([True]))
        around = (context,) if isinstance(config.algorithm, ReadsContext) else ()
        proposal = propose(own, found[None], found[None] @ head.T, torch.tensor([ANCHOR]), GreedyChoice(), *around)
    return theirs, Block(found, proposal.tokens_BD[0].tolist())
