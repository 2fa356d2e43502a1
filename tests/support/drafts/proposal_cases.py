"""`propose` of an algorithm beside the `scores` of its reference, and a target whose answers drafts guess by chance."""

from __future__ import annotations

import torch
from batch_cases import draft_for_family

from ops.lib.drafts.algorithms import ReadsContext, part_of
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.decoding.sampling import GreedyChoice
from ops.lib.target.model import Target

FAVOURED, SIZE = range(20, 24), 12.0
PRECISION = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05}  # of a score, as a share of the largest


def draft_with_noise(algorithm: object, seed: int = 1) -> DraftModel:
    """A random draft; the tensors of its algorithm have normally distributed weights, and so change many tokens."""
    draft = draft_for_family(algorithm=algorithm)
    plain = {name for name, _ in draft_for_family().named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if name not in plain:
                weight.add_(torch.randn(weight.shape, generator=generator))
    return draft


def favour_few_tokens(target: Target) -> None:
    """Change the head so that four tokens are likely, and random drafts have many proposals accepted.

    Their logits have a standard deviation of SIZE, those of the other tokens 0.1.
    """
    with torch.no_grad():
        head_VM = target.head_weight
        pair_2M = torch.randn(2, head_VM.shape[1], generator=torch.Generator().manual_seed(1))
        head_VM.mul_(0.1 / head_VM.std())
        head_VM[list(FAVOURED)] = torch.cat((pair_2M, -pair_2M)) * SIZE * head_VM.shape[1] ** -0.5


def assert_proposes_by_its_reference(draft: DraftModel, rows: int, dtype: torch.dtype) -> None:
    """Assert that every proposed token has the reference's best score after the tokens before it, up to rounding."""
    draft = draft.to(dtype)
    config, generator = draft.config, torch.Generator().manual_seed(rows)
    hidden_BDM = torch.randn(rows, config.block_size - 1, config.hidden_size, generator=generator).to(dtype)
    head_VM = torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(dtype)
    anchors_B = torch.randint(0, config.vocab_size, (rows,), generator=generator)
    propose, scores = (part_of(config.algorithm, place) for place in ("model:propose", "reference:scores"))
    last_BM = torch.randn(rows, config.hidden_size, generator=generator).to(dtype)

    def around(row: slice) -> tuple[BlockContext, ...]:
        reads = isinstance(config.algorithm, ReadsContext)
        return (BlockContext(head_VM, last_BM[row], torch.ones(rows, dtype=torch.bool)[row]),) if reads else ()

    with torch.inference_mode():
        given = (draft, hidden_BDM, hidden_BDM @ head_VM.T, anchors_B, GreedyChoice())
        tokens_BD = propose(*given, *around(slice(None))).tokens_BD
        for row, (anchor, tokens) in enumerate(zip(anchors_B.tolist(), tokens_BD.tolist(), strict=True)):
            given = (config, draft.state_dict(), hidden_BDM[row], head_VM)
            for place, token in enumerate(tokens):
                scores_V = scores(*given, [anchor, *tokens[:place]], *around(slice(row, row + 1)))
                room = PRECISION[dtype] * scores_V[scores_V.isfinite()].abs().max()
                assert scores_V[token] >= scores_V.max() - room, f"token {place + 1} of {tokens}"
