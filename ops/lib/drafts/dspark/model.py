"""The bias head, the confidence head, and the tokens that are proposed with both.

B rows, D proposals, V vocabulary, R rank, M hidden size
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn
from ops.lib.drafts.backbone.model import DraftModel, Linear, table_rows
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from ops.lib.drafts.dspark.config import sizes


class Table(nn.Module):
    """A table of weights with a row for each token."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))


class MarkovHead(Drawn):
    """A head that adds a bias by the token before: w1 [V, R] is read at that token, w2 [V, R] gives the bias.

    w2 is zero at the start, so that there is no bias.
    """

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = Table(vocabulary, rank), Table(vocabulary, rank)

    def latent(self, before: Tensor, dtype: torch.dtype) -> Tensor:
        """The latent vectors [..., R] of tokens [...]."""
        return table_rows(self.markov_w1.weight, before, dtype)

    def draw(self, generator: torch.Generator, std: float) -> None:
        self.markov_w1.weight.copy_(torch.randn(self.markov_w1.weight.shape, generator=generator) * std)
        self.markov_w2.weight.zero_()


class ConfidenceHead(Drawn):
    """A head that predicts whether a proposal is accepted if those before it are, as a logit.

    It reads the slot's hidden state and its latent vector.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, latent: Tensor) -> Tensor:
        """The logit [...] that a proposal is accepted, from [..., M] and [..., R]."""
        return self.proj(torch.cat((hidden, latent), dim=-1))[..., 0]

    def draw(self, generator: torch.Generator, std: float) -> None:
        self.proj.weight.zero_()
        self.proj.bias.zero_()


def around_sublayers(config: DraftConfig) -> dict[str, Around]:
    return {}


def heads(config: DraftConfig) -> dict[str, Drawn]:
    own = sizes(config)
    found: dict[str, Drawn] = {"markov_head": MarkovHead(config.vocab_size, own.rank)}
    if own.confidence_head:
        found["confidence_head"] = ConfidenceHead(config.hidden_size, own.rank)
    return found


def markov_head(draft: nn.Module) -> MarkovHead:
    head = draft.markov_head
    assert isinstance(head, MarkovHead)
    return head


def confidence_head(draft: nn.Module) -> ConfidenceHead | None:
    head = getattr(draft, "confidence_head", None)
    assert head is None or isinstance(head, ConfidenceHead)
    return head


def propose(draft: DraftModel, hidden_BDM: Tensor, logits_BDV: Tensor, anchors_B: Tensor, choice: Choice) -> Proposal:
    """Choose tokens from left to right, each by its logits plus the bias that the token before it gives."""
    head = markov_head(draft)
    table_VR = head.markov_w2.weight.to(logits_BDV.dtype)
    tokens = [anchors_B]
    for place in range(hidden_BDM.shape[1]):
        bias_BV = head.latent(tokens[-1], logits_BDV.dtype) @ table_VR.T
        tokens.append(choice.next(logits_BDV[:, place] + bias_BV, place))
    confidence, confidence_BD = confidence_head(draft), None
    if confidence is not None:
        before_BD = torch.stack(tokens[:-1], dim=1)
        confidence_BD = confidence(hidden_BDM, head.latent(before_BD, hidden_BDM.dtype)).float().sigmoid()
    return Proposal(torch.stack(tokens[1:], dim=1), confidence_BD)
