"""Why a stage failed: which of its ranks failed first, and its cause.

When a rank dies, others follow: their collectives fail, their parent sends them SIGTERM, and they exit.
They often report before the rank that died. So lost connections rank last as causes, whatever their time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import attrs
from attrs import frozen

from executor.launchers.stage_contract import RankExit, RankResult
from executor.system.os_errors import is_full
from executor.system.supervisor import GONE, exit_text, killed

# How a rank ends because another failed, or a process above it: its parent's SIGTERM, its own SIGALRM, a collective
# library's SIGABRT, its own exit without a parent.
SECONDARY_EXITS = {-signal.SIGTERM, -signal.SIGALRM, -signal.SIGABRT, GONE}
EXIT_DELAY_S = 1.0
KILLED, NO_RESULT, DISK_FULL, TIMEOUT = signal.SIGKILL.name, "no result", "disk full", "timeout"
HOST_LOST, NOT_RUN = "host lost", "not run"
DFLOW = "dflow"
SMALLER = "reduce its memory use by a smaller batch (neutral fields do not change the key)"
# The first row that contains a name of the failure applies; the last row has none and fits all.
HINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"),
        f"the GPU's memory is full: {SMALLER}, or use more GPUs with launch; `dflow plan` shows what a node needs",
    ),
    (
        (DISK_FULL, "SIGBUS"),
        "the disk is full: free space there (`dflow du` shows disk use of the store, `dflow gc` removes what nothing "
        "uses); finished work is kept",
    ),
    (
        ("MemoryError", KILLED),
        f"this machine ran out of memory, or the process was killed (see `dmesg`): {SMALLER}; launch.memory "
        "keeps other nodes from running beside it",
    ),
    ((DFLOW,), "report it with the traceback above; the other nodes are not affected"),
    (
        (TIMEOUT,),
        "raise launch.timeout, or find in the log what it waits for; a resumable op continues from its last checkpoint",
    ),
    (
        (HOST_LOST,),
        "`dflow doctor --ray HOST:PORT` checks all hosts of a cluster; bring that one back or leave it out, and resume",
    ),
    (
        (NOT_RUN, "dsl.errors.ClusterError"),
        "`dflow doctor --ray HOST:PORT` checks a cluster and all its hosts; docs/cluster.md says what they need",
    ),
    (("ModuleNotFoundError",), "install the missing module into the environment of dflow"),
    (
        ("dsl.errors.TransientError",),
        "a service outside this machine kept failing; resume when it works again, or raise launch.retries",
    ),
    (
        ("dsl.errors.DataError",),
        "fix the data or change the setting named in the message; finished work is kept",
    ),
    (
        ("dsl.errors.ConfigError", "dsl.errors.PipelineError"),
        "change the value named in the message, in the pipeline file or by -s NODE.FIELD=VALUE",
    ),
    (
        ("dsl.errors.LeaseLost",),
        "another process works, or worked, on this node: end the process named in the message, then resume",
    ),
    (("dsl.errors.StoreError",), "check that the store is writable and that only dflow changes it"),
    (
        ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"),
        "a compiled library crashed: see the last lines of the log; PYTHONFAULTHANDLER=1 makes Python report where",
    ),
    ((NO_RESULT,), "the process ended itself, for example by sys.exit: see the last lines of the log"),
    ((), "fix the code, see the traceback"),
)
# Added to the last hint where the op is resumable.
ADOPT = "; then `{resume} --adopt` continues from its saved work"


@frozen
class Failure:
    """Why a node failed. text: "Class: message", or the meaning of the exit code; names: the qualified names of the
    error's class and its bases, or another name in HINTS; rank: the one that failed, of several; trace: the lines of
    the traceback, if any.
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
        """For an error that is a bug of dflow."""
        return cls(f"a bug in dflow: {type(error).__name__}: {error}", (DFLOW,))

    def is_any_of(self, names: Sequence[str]) -> bool:
        return not set(names).isdisjoint(self.names)

    def hint(self, resume: str, *, resumable: bool = False) -> str:
        """What the user can do about it. resume: the command that continues the run; resumable: whether the op can
        continue from saved work.
        """
        names, hint = next((names, hint) for names, hint in HINTS if not names or self.is_any_of(names))
        return f"{hint}{ADOPT.format(resume=resume)}" if resumable and not names else hint


def class_names(error: BaseException) -> tuple[str, ...]:
    """Qualified names of an error's class and of its bases, without "builtins."."""
    return tuple(
        f"{ancestor.__module__}.{ancestor.__qualname__}".removeprefix("builtins.") for ancestor in type(error).__mro__
    )


def cause_of(
    results: Sequence[RankResult | None], exits: Sequence[RankExit], hosts: Sequence[str] = ()
) -> Failure | None:
    """The error of the rank that failed first, with the ranks that ended after it; None where no rank failed.

    results: in the order of the ranks. hosts: of each rank, where there are several. Times of different hosts are
    compared by their clocks.
    """
    ends = _ends(results, exits, hosts)
    if not ends:
        return None
    first = min(ends, key=lambda end: (end.is_secondary, end.time)).failure
    unfinished = {rank for rank, result in enumerate(results) if result is None or result.status != "done"}
    others = sorted(unfinished - {first.rank})
    if not others:
        return first
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return attrs.evolve(first, text=f"{first.text} ({ranks} ended after it)")


def only_lost_connections(results: Sequence[RankResult | None], exits: Sequence[RankExit] = ()) -> bool:
    """Whether no rank reports an error other than lost connections to others."""
    return all(end.is_secondary for end in _ends(results, exits))


def ended_by(code: int | None) -> Failure:
    """The failure of a stage that ended without a result, by its exit code; None where nobody saw it end."""
    if code is None:
        return Failure("its processes have ended, and nobody saw how", (KILLED,))
    if code < 0:
        return Failure(killed(code), (_signal_name(code),))
    return Failure(f"the process ended with exit code {code} and without a result", (NO_RESULT,))


@frozen
class _End:
    """How a rank failed; is_secondary: apparently because another rank had failed before."""

    time: float
    is_secondary: bool
    failure: Failure


def _ends(results: Sequence[RankResult | None], exits: Sequence[RankExit], hosts: Sequence[str] = ()) -> list[_End]:
    ends = []
    names_of = [f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}" for rank in range(len(results))]
    for rank, result in enumerate(results):
        error = None if result is None else result.error
        if error is not None:
            where = f" ({names_of[rank]})" if len(results) > 1 else ""
            failure = Failure(f"{error.name}{where}: {error.message}", error.names, rank, error.trace)
            ends.append(_End(error.time, error.lost_connection, failure))
    for rank_exit in exits:
        rank, code, result = rank_exit.rank, rank_exit.code, results[rank_exit.rank]
        # A rank may be killed after its work, while it waits for the others to leave together.
        if result is None or (result.status != "failed" and code < 0):
            text = f"{names_of[rank]} {exit_text(code)}{' and without a result' * (code >= 0)}"
            names = (_signal_name(code),) if code < 0 else (NO_RESULT,)
            # The parent of the ranks notes an exit late: date a kill before whatever it may have caused.
            ends.append(_End(rank_exit.time - EXIT_DELAY_S, code in SECONDARY_EXITS, Failure(text, names, rank)))
    return ends


def _signal_name(code: int) -> str:
    return signal.Signals(-code).name
