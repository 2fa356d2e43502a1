"""Why a stage failed: which of its ranks failed first, and its cause.

When a rank dies, others follow: their collectives fail, their parent sends them SIGTERM, and they exit.
They often report before the rank that died. So lost connections rank last as causes, whatever their time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import attrs
from attrs import frozen

from dsl.files import is_full
from dsl.finding import Finding, Node
from executor.launchers.stage_contract import RankExit, RankResult
from executor.system.supervisor import GONE, exit_text, killed

# How a rank ends because another failed, or a process above it: its parent's SIGTERM, its own SIGALRM, a collective
# library's SIGABRT, its own exit without a parent.
SECONDARY_EXITS = {-signal.SIGTERM, -signal.SIGALRM, -signal.SIGABRT, GONE}
EXIT_DELAY_S = 1.0
KILLED, NO_RESULT, DISK_FULL, TIMEOUT = signal.SIGKILL.name, "no result", "disk full", "timeout"
HOST_LOST, NOT_RUN = "host lost", "not run"
DFLOW = "dflow"
TRANSIENT, CODE = "transient", "code"  # kinds
TRANSIENT_ERROR = "dsl.errors.TransientError"
SMALLER = "reduce its memory use by a smaller batch (neutral fields do not change the key)"
# code, names, advice. The first row with a name of the failure applies; the last one has none and fits all.
KINDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "GPU memory full",
        ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"),
        f"the GPU's memory is full: {SMALLER}, or use more GPUs with launch; `dflow plan` shows what a node needs",
    ),
    (
        "disk full",
        (DISK_FULL, "SIGBUS"),
        "the disk is full: free space there (`dflow gc --usage` shows disk use of the store, `dflow gc` removes what "
        "nothing uses); finished work is kept",
    ),
    (
        "killed",
        ("MemoryError", KILLED),
        f"this machine ran out of memory, or the process was killed (see `dmesg`): {SMALLER}; launch.memory "
        "keeps other nodes from running beside it",
    ),
    ("bug in dflow", (DFLOW,), "report it with the traceback above; the other nodes are not affected"),
    (
        "timeout",
        (TIMEOUT,),
        "raise launch.timeout, or find in the log what it waits for; a resumable op continues from its last checkpoint",
    ),
    (
        HOST_LOST,
        (HOST_LOST,),
        "`dflow doctor --ray HOST:PORT` checks all hosts of a cluster; bring that one back or leave it out, and resume",
    ),
    (
        "not run",
        (NOT_RUN, "dsl.errors.ClusterError"),
        "`dflow doctor --ray HOST:PORT` checks a cluster and all its hosts; docs/cluster.md says what they need",
    ),
    ("missing module", ("ModuleNotFoundError",), "install the missing module into the environment of dflow"),
    (
        TRANSIENT,
        (TRANSIENT_ERROR,),
        "a service outside this machine kept failing; resume when it works again, or raise launch.retries",
    ),
    (
        "target",
        ("ops.load_target.run.UnfitTarget",),
        "choose another target: docs/targets.md names what one needs, `dflow doctor --target DIR` lists what fails",
    ),
    (
        "data",
        ("dsl.errors.DataError",),
        "fix the data or change the setting named in the message; finished work is kept",
    ),
    (
        "setting",
        ("dsl.errors.ConfigError", "dsl.errors.PipelineError"),
        "change the value named in the message, in the pipeline file or by -s NODE.FIELD=VALUE",
    ),
    (
        "lease lost",
        ("dsl.errors.LeaseLost",),
        "another process works, or worked, on this node: end the process named in the message, then resume",
    ),
    ("store", ("dsl.errors.StoreError",), "check that the store is writable and that only dflow changes it"),
    (
        "crashed",
        ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"),
        "a compiled library crashed: see the last lines of the log; PYTHONFAULTHANDLER=1 makes Python report where",
    ),
    (
        NO_RESULT,
        (NO_RESULT,),
        "the process ended itself, for example by sys.exit: see the last lines of the log",
    ),
    (CODE, (), "fix the code, see the traceback"),
)


def failure(text: str, names: Sequence[str] = (), transient: Sequence[str] = ()) -> Finding:
    """The failure of a node, with advice for the user.

    text: "Class: message", or the meaning of the exit code. names: qualified names of the error's class and bases, or
    another name in KINDS. transient: names of errors after which the op is tried again.
    """
    own = set(names)
    code, _, advice = next(row for row in KINDS if not row[1] or own.intersection(row[1]))
    return Finding(text, advice=advice, code=TRANSIENT if own.intersection((TRANSIENT_ERROR, *transient)) else code)


def failure_of(error: BaseException, transient: Sequence[str] = ()) -> Finding:
    return failure(f"{type(error).__name__}: {error}", error_names(error), transient)


def bug_of_dflow(error: BaseException) -> Finding:
    return failure(f"a bug in dflow: {type(error).__name__}: {error}", (DFLOW,))


def is_transient(found: Finding) -> bool:
    """Whether a failure is one after which the node is tried again."""
    return found.code in (TRANSIENT, HOST_LOST)


def of_node(found: Finding, node_id: str, *, retries: int, resume: str, resumable: bool) -> Finding:
    """The failure of a node that is not tried again, with advice.

    resume: the command that continues the run. resumable: whether the op can continue from saved work.
    """
    tried = f" (after {retries} {'retry' if retries == 1 else 'retries'})" if retries else ""
    adopt = f"; then `{resume} --adopt` continues from its saved work" if resumable and found.code == CODE else ""
    return attrs.evolve(found, where=Node(node_id), what=found.what + tried, advice=found.advice + adopt)


def error_names(error: BaseException) -> tuple[str, ...]:
    """The qualified names of an error's class and bases, without "builtins."; DiskFull first if the disk is full."""
    names = tuple(
        f"{ancestor.__module__}.{ancestor.__qualname__}".removeprefix("builtins.") for ancestor in type(error).__mro__
    )
    return (DISK_FULL, *names) if is_full(error) else names


@frozen
class RankFailure:
    """The failure of a rank. text, names: what `failure` takes. trace: lines of the traceback, if any.

    is_secondary: whether another rank's earlier failure apparently caused it.
    """

    rank: int
    text: str
    names: tuple[str, ...]
    time: float
    is_secondary: bool
    trace: tuple[str, ...] = ()


def first_failed(
    results: Sequence[RankResult | None],
    exits: Sequence[RankExit],
    hosts: Sequence[str] = (),
    ranks: int | None = None,
) -> RankFailure | None:
    """The rank that failed first; its text also names the ranks that ended after it. None where no rank failed.

    results: in the order of the ranks, followed by the workers of a pool. hosts: the host of each, if there are
    several. ranks: the number of ranks; None: there is no pool. Times of different hosts are compared by their own
    clocks.
    """
    failed = _failed(results, exits, hosts, ranks)
    if not failed:
        return None
    first = min(failed, key=lambda each: (each.is_secondary, each.time))
    unfinished = {rank for rank, result in enumerate(results[:ranks]) if result is None or result.status != "done"}
    others = sorted(unfinished - {first.rank})
    if not others:
        return first
    ended = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    return attrs.evolve(first, text=f"{first.text} ({ended} ended after it)")


def only_lost_connections(results: Sequence[RankResult | None], exits: Sequence[RankExit] = ()) -> bool:
    """Whether all failed ranks merely lost their connections to other ranks."""
    return all(each.is_secondary for each in _failed(results, exits))


def ended_by(code: int | None) -> Finding:
    """The failure of a stage that ended without a result. code: its exit code, None where nobody saw it end."""
    if code is None:
        return failure("its processes have ended, and nobody saw how", (KILLED,))
    if code < 0:
        return failure(killed(code), (_signal_name(code),))
    return failure(f"the process ended with exit code {code} and without a result", (NO_RESULT,))


def _failed(
    results: Sequence[RankResult | None],
    exits: Sequence[RankExit],
    hosts: Sequence[str] = (),
    ranks: int | None = None,
) -> list[RankFailure]:
    failed = []
    own = len(results) if ranks is None else ranks
    names_of = [f"rank {rank}" if rank < own else f"pool worker {rank - own}" for rank in range(len(results))]
    names_of = [f"{name} on {host}" for name, host in zip(names_of, hosts, strict=True)] if hosts else names_of
    for rank, result in enumerate(results):
        error = None if result is None else result.error
        if error is not None:
            where = f" ({names_of[rank]})" if len(results) > 1 else ""
            text = f"{error.name}{where}: {error.message}"
            failed.append(RankFailure(rank, text, error.names, error.time, error.lost_connection, error.trace))
    for rank_exit in exits:
        rank, code, result = rank_exit.rank, rank_exit.code, results[rank_exit.rank]
        # A rank may be killed after its work, while it waits for the others to leave together.
        if result is None or (result.status != "failed" and code < 0):
            text = f"{names_of[rank]} {exit_text(code)}{' and without a result' * (code >= 0)}"
            names = (_signal_name(code),) if code < 0 else (NO_RESULT,)
            # The parent of the ranks notes an exit late: date a kill before whatever it may have caused.
            failed.append(RankFailure(rank, text, names, rank_exit.time - EXIT_DELAY_S, code in SECONDARY_EXITS))
    return failed


def _signal_name(code: int) -> str:
    return signal.Signals(-code).name
