"""Why a stage failed: of all its ranks the one that failed first, and its cause.

A rank that dies takes others along: their collectives fail, their parent sends them SIGTERM, and they end themselves.
They report what they saw, often before the one that died could. So lost connections come last, whatever their time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from attrs import frozen

from executor.launchers.stage_contract import RankExit, RankResult
from executor.system.os_errors import is_full
from executor.system.supervisor import exit_text, killed

# What a rank dies of because of others: SIGTERM of its parent, SIGALRM of its own, SIGABRT of a communication library.
TAKEN_ALONG = {-signal.SIGTERM, -signal.SIGALRM, -signal.SIGABRT}
SEEN_WITHIN_S = 1.0
KILLED, NO_RESULT, DISK_FULL, TIMEOUT, HOST_LOST = signal.SIGKILL.name, "no result", "disk full", "timeout", "host lost"
DFLOW = "dflow"
SMALLER = "let it take less: a smaller batch (fields marked neutral change no key)"
# The first row that has a name of the failure counts; the last one has none and fits all.
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"),
        f"the GPU's memory is full: {SMALLER}, or more GPUs by launch; `dflow plan` tells what a node needs",
    ),
    (
        (DISK_FULL, "SIGBUS"),
        "the disk is full: free space there (`dflow du` shows what lies in the store, `dflow gc` removes what nothing "
        "uses); nothing that was finished is lost",
    ),
    (
        ("MemoryError", KILLED),
        f"this machine's memory was full, or somebody killed the process (`dmesg` tells): {SMALLER}; launch.memory "
        "keeps other nodes from running beside it",
    ),
    ((DFLOW,), "report it with the traceback that was shown; the other nodes do without this one"),
    ((TIMEOUT,), "raise launch.timeout, or find in the log what it waits for; a resumable op goes on where it was"),
    ((HOST_LOST,), "see to that host and its agent's output, start `dflow agent` there again, and resume"),
    (("ModuleNotFoundError",), "install the missing module into the environment that dflow runs in"),
    (
        ("dsl.errors.TransientError",),
        "something outside this machine failed, and went on failing; resume when it is back, or raise launch.retries",
    ),
    (
        ("dsl.errors.DataError",),
        "mend the data or change the setting that the message names; what was finished before is kept",
    ),
    (
        ("dsl.errors.ConfigError", "dsl.errors.PipelineError"),
        "change the value that the message names in the pipeline file",
    ),
    (
        ("dsl.errors.LeaseLost",),
        "another process works, or worked, on this node: end what the message names, then resume",
    ),
    (("dsl.errors.StoreError",), "see that the store can be written and that nothing but dflow changes it"),
    (
        ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"),
        "a compiled library crashed: the log's last lines tell which; PYTHONFAULTHANDLER=1 makes Python say where",
    ),
    ((NO_RESULT,), "something ended the process from inside, sys.exit say: the log tells what it did last"),
    ((), "mend the code, by the traceback"),
)
# To the last hint, where the op is resumable.
ADOPT = "; then `dflow resume {run} --adopt` takes up the work that it had saved"


@frozen
class Failure:
    """Why a node failed. text: "Class: message", or what the exit code says; names: the qualified names of the error's
    class and of its bases, or what stands for one in HINTS; rank: of several the one that failed; trace: the lines of
    its traceback, if it has one.
    """

    text: str
    names: tuple[str, ...] = ()
    rank: int | None = None
    trace: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        names = class_names(error)
        return cls(f"{type(error).__name__}: {error}", (DISK_FULL, *names) if is_full(error) else names)

    @classmethod
    def of_dflow(cls, error: BaseException) -> Failure:
        """Of an error that dflow never raises on purpose."""
        return cls(f"a mistake in dflow itself: {type(error).__name__}: {error}", (DFLOW,))

    def is_any_of(self, names: Sequence[str]) -> bool:
        return not set(names).isdisjoint(self.names)

    def hint(self, run: str, *, resumable: bool = False) -> str:
        """What the user can do about it. resumable: the op is, so that work of the run can be taken up."""
        names, hint = next((names, hint) for names, hint in HINTS if not names or self.is_any_of(names))
        return f"{hint}{ADOPT.format(run=run)}" if resumable and not names else hint


def class_names(error: BaseException) -> tuple[str, ...]:
    """Qualified names of an error's class and of its bases, "builtins." left out."""
    return tuple(
        f"{ancestor.__module__}.{ancestor.__qualname__}".removeprefix("builtins.") for ancestor in type(error).__mro__
    )


def cause_of(
    results: Sequence[RankResult | None], exits: Sequence[RankExit], hosts: Sequence[str] = ()
) -> Failure | None:
    """The error of the rank that failed first, with the ranks that ended after it; None where no rank failed.

    results: in the order of the ranks. hosts: of each rank, where there are several. Which of two hosts was first is
    decided by their clocks.
    """
    ends = _ends(results, exits, hosts)
    if not ends:
        return None
    first = min(ends, key=lambda end: (end.taken_along, end.time))
    unfinished = {rank for rank, result in enumerate(results) if result is None or result.status != "done"}
    others = sorted(unfinished - {first.rank})
    if not others:
        return Failure(first.cause, first.names, first.rank, first.trace)
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return Failure(f"{first.cause} ({ranks} ended after it)", first.names, first.rank, first.trace)


def only_taken_along(results: Sequence[RankResult | None], exits: Sequence[RankExit] = ()) -> bool:
    """Whether no rank reports an error but lost connections to others."""
    return all(end.taken_along for end in _ends(results, exits))


def ended_by(code: int | None) -> Failure:
    """What is known of a stage that ended without a result: its exit code; None where nobody saw it end."""
    if code is None:
        return Failure("the forkserver, which starts the stages, was killed, and this stage with it", (KILLED,))
    if code < 0:
        return Failure(killed(code), (_signal_name(code),))
    return Failure(f"the process ended with exit code {code} and without a result", (NO_RESULT,))


@frozen
class _End:
    """How a rank failed; taken_along: by another one that had failed before, as far as can be seen."""

    rank: int
    time: float
    taken_along: bool
    cause: str
    names: tuple[str, ...]
    trace: tuple[str, ...] = ()


def _ends(results: Sequence[RankResult | None], exits: Sequence[RankExit], hosts: Sequence[str] = ()) -> list[_End]:
    ends = []
    names_of = [f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}" for rank in range(len(results))]
    for rank, result in enumerate(results):
        error = None if result is None else result.error
        if error is not None:
            where = f" ({names_of[rank]})" if len(results) > 1 else ""
            cause = f"{error.name}{where}: {error.message}"
            ends.append(_End(rank, error.time, error.lost_connection, cause, error.names, error.trace))
    for seen in exits:
        rank, code, result = seen.rank, seen.code, results[seen.rank]
        # A rank may be killed after its work, while it waits for the others to leave together.
        if result is None or (result.status != "failed" and code < 0):
            # Seen after it happened, by torchrun in whole seconds: make a kill older than what it may have caused.
            when = seen.time - SEEN_WITHIN_S
            names = (_signal_name(code),) if code < 0 else (NO_RESULT,)
            ends.append(
                _End(
                    rank,
                    when,
                    code in TAKEN_ALONG,
                    f"{names_of[rank]} {exit_text(code)}{' and without a result' * (code >= 0)}",
                    names,
                )
            )
    return ends


def _signal_name(code: int) -> str:
    return signal.Signals(-code).name
