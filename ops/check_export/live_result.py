"""The gate's interface to SGLang: the prompts that it decodes, and the results. Does not import SGLang.

The gate calls `ops.check_export.live.check_live`, which is imported only where a supported SGLang is installed:

    check_live(draft_dir: Path, target_dir: Path, prompts: Sequence[Prompt], config: CheckExport, stage: Stage)
        -> LiveResult

draft_dir is the serving directory, target_dir the checkpoint directory (TargetModel's model/). It returns
the results, mistakes of the draft included. It raises LiveUnavailable if SGLang cannot run the check on this machine:
`live = "auto"` then reports that and continues, `live = "required"` fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Factory, frozen

from dsl.errors import DataError
from dsl.finding import Finding
from ops.lib.data.token_shards import TokenSample


class LiveUnavailable(DataError):
    """SGLang is installed but cannot serve a draft of this kind on this machine, whatever the draft."""


@frozen
class Prompt:
    """A prompt of the evaluation. tokens: the target's greedy answer, its first token and EOS included.

    accepted: draft tokens that `evaluate` accepted in each verification step, those after EOS included.
    max_new_tokens: where `evaluate` stopped, counted after the first token.
    """

    sample: TokenSample
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    max_new_tokens: int


@frozen
class ServedPrompt:
    """The result of SGLang's worker for a prompt; tokens and accepted are counted as in Prompt."""

    id: str
    category: str
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]


@frozen
class LiveResult:
    """The result of SGLang's own code for the draft.

    version: of SGLang. prompts: in the order given. forward: what was compared ("3 layers, window 8, context 17") ->
    largest difference between SGLang's draft class and ours. ties: answers or steps that differ where two logits are
    closer than the tie margin, which is not a mistake. details: further figures for check.json.
    """

    version: str
    prompts: tuple[ServedPrompt, ...]
    forward: Mapping[str, float]
    ties: int = 0
    mistakes: tuple[Finding, ...] = ()
    details: Mapping[str, Any] = Factory(dict)


def nan_last(value: float) -> float:
    """Orders numbers with NaN as the largest."""
    return math.inf if math.isnan(value) else value


def largest(values: Iterable[float]) -> float:
    """The largest number, NaN if there is one."""
    return max(values, key=nan_last)
