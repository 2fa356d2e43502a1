"""Why a stage failed: of all its ranks the one that failed first, and its cause.

A rank that dies takes others along: their collectives fail, torchrun sends them SIGTERM, and they end themselves. They
report what they saw, often before the one that died could. So lost connections come last, whatever their time.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

# What a rank dies of because of others: SIGTERM of torchrun, SIGALRM of its own, SIGABRT of a communication library.
TAKEN_ALONG = {-signal.SIGTERM, -signal.SIGALRM, -signal.SIGABRT}
SEEN_WITHIN_S = 1.0


def cause_of(results: Sequence[Mapping[str, Any] | None], exits: Sequence[Mapping[str, Any]]) -> str | None:
    """The error of the rank that failed first, with the ranks that ended after it; None where no rank failed.

    results are the ranks' own (see `executor.worker`), exits those that torchrun saw (see `executor.torchrun`).
    """
    ends = _ends(results, exits)
    if not ends:
        return None
    first = min(ends, key=lambda end: (end.taken_along, end.time))
    unfinished = {rank for rank, result in enumerate(results) if result is None or result["status"] != "done"}
    others = sorted(unfinished - {first.rank})
    if not others:
        return first.cause
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return f"{first.cause} ({ranks} ended after it)"


def only_taken_along(results: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether no rank reports an error but lost connections to others."""
    return all(end.taken_along for end in _ends(results, []))


def killed(code: int) -> str:
    """What a negative exit code says."""
    if code == -signal.SIGKILL:
        return "killed (signal 9); perhaps this machine ran out of memory"
    return f"killed by signal {-code} ({signal.Signals(-code).name})"


@frozen
class _End:
    """How a rank failed; taken_along: by another one that had failed before, as far as can be seen."""

    rank: int
    time: float
    taken_along: bool
    cause: str


def _ends(results: Sequence[Mapping[str, Any] | None], exits: Sequence[Mapping[str, Any]]) -> list[_End]:
    ends = []
    for rank, result in enumerate(results):
        if result is not None and result["status"] == "failed":
            where = f" (rank {rank})" if len(results) > 1 else ""
            cause = f"{result['class']}{where}: {result['message']}"
            ends.append(_End(rank, result["time"], result["lost_connection"], cause))
    for seen in exits:
        rank, code = seen["rank"], seen["code"]
        result = results[rank]
        # A rank may be killed after its work, while it waits for the others to leave together.
        if result is None or (result["status"] != "failed" and code < 0):
            # torchrun dates in whole seconds, after it looked: make a kill older than what it may have caused at once.
            when = seen["time"] - SEEN_WITHIN_S
            ends.append(_End(rank, when, code in TAKEN_ALONG, f"rank {rank} {_exit_text(code)}"))
    return ends


def _exit_text(code: int) -> str:
    return f"was {killed(code)}" if code < 0 else f"ended with exit code {code} and without a result"
