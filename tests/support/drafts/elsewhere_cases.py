"""Drafts of the algorithms beyond plain DFlash as an export writes them, and what dflow proposes with each.

V vocabulary, M hidden size, D proposals
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen
from draft_chain import HIDDEN, MASK, VOCAB
from draft_forms import IDS, LAYERS, SIZES
from safetensors.torch import save_file

from ops.export_draft.run import write_speculators
from ops.lib.data.files import write_json
from ops.lib.drafts.algorithms import Algorithm, part_of
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.speculators import Verifier
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark

BEYOND_PLAIN: dict[str, Algorithm] = {
    "dflash2": Dflash2(taps=2, group=4, rank=6, candidates=8),
    "dflash2, three taps": Dflash2(taps=3, group=8, rank=4, candidates=8),
    "dspark": Dspark(rank=6),
    "dspark, no confidence": Dspark(rank=6, confidence_head=False),
    "dspark, masks first": Dspark(rank=6, sample_from_anchor=False),
}
HEADS = ("candidate_selector", "markov_head", "confidence_head")
CONTEXT = 19


@frozen(eq=False)
class Asked:
    """A context, an anchor, and the target's embedding and head. features: of every layer, each [CONTEXT, M]."""

    features: dict[int, torch.Tensor]
    embed_VM: torch.Tensor
    head_VM: torch.Tensor
    anchor: int


def asked() -> Asked:
    generator = torch.Generator().manual_seed(3)
    features = {layer: torch.randn(CONTEXT, HIDDEN, generator=generator) for layer in range(LAYERS)}
    embed_VM, head_VM = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    return Asked(features, embed_VM, head_VM, anchor=3)


def written_draft(folder: Path, algorithm: Algorithm, **changes) -> DraftModel:
    """A random draft whose weights all matter, written to folder/ for serving and to folder/speculators/."""
    shape = {"block_size": 5, "mask_token_id": MASK, "target_layer_ids": IDS, "num_target_layers": LAYERS}
    config = DraftConfig(**SIZES | shape | {"algorithm": algorithm} | changes)
    draft, generator = DraftModel(config), torch.Generator().manual_seed(5)
    draft.initialise(0)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            noise = 1.0 if name.partition(".")[0] in HEADS else 0.3
            weight.add_(torch.randn(weight.shape, generator=generator) * noise)
    folder.mkdir(parents=True)
    save_file(draft.state_dict(), folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", to_serving(config))
    write_speculators(folder, config, "float32", Verifier(None, ("Qwen3ForCausalLM",)))
    return draft.eval()


@torch.no_grad()
def proposed(draft: DraftModel, asked: Asked) -> tuple[torch.Tensor, list[int]]:
    """Propose a block with dflow: its hidden states [D, M] and tokens."""
    joined = torch.cat([asked.features[layer] for layer in draft.config.target_layer_ids], dim=1)
    anchor_M, mask_M = asked.embed_VM[[asked.anchor, MASK]]
    hidden_DM = draft.propose(anchor_M, mask_M, draft.context_kv(joined, torch.arange(CONTEXT)))
    scores, tokens = part_of(draft.config.algorithm, "reference:scores"), [asked.anchor]
    for _ in hidden_DM:
        tokens.append(int(scores(draft.config, draft.state_dict(), hidden_DM, asked.head_VM, tokens).argmax()))
    return hidden_DM, tokens[1:]
