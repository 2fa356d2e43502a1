"""The processes that this one starts: none outlives it, however it ends.

    python -m executor.system.supervisor FD GRACE COMMAND...

is the guard of a ChildGroup: it runs the command in its own process group. FD is the reading end of a pipe whose only
writer is the process that asked for the command, so the pipe breaks when that one ends, also by SIGKILL, or lets go.
Then everything in the group is asked to stop, and killed GRACE seconds later. A command that ends by itself decides how
the guard ends: with its exit code, or by its signal.

A process of dflow's own that starts no others needs no guard: it calls `end_with_parent`. Stages are started by the
forkserver, see launchers/forkserver.py, and what leaves a stage's group is found by its mark, see stage_mark.py.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import IO, NamedTuple, Self

from dsl.imports import PROJECT

GONE = 70  # the exit code of a process whose parent is gone
GRACE_S = 10.0
POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # prctl(2)
LIBC = ctypes.CDLL(None)


class Finished(NamedTuple):
    """How a module's process ended. code: its exit code, minus the number of the signal that killed it, or None where
    it took longer than within_s.
    """

    code: int | None
    output: str
    errors: str
    within_s: float

    @property
    def reason(self) -> str:
        """Of an end that was not good: the last line of its errors, or its exit code or signal."""
        lines = self.errors.strip().splitlines()
        if self.code is None:
            return f"it took longer than {self.within_s:g} s"
        return lines[-1] if lines and self.code > 0 else f"it {exit_text(self.code)}"


class ChildGroup:
    """A command and all that it starts, in a process group of its own that never outlives this process.

    environment: the whole of it, as `child_environment` makes it. files: further descriptors that the command gets.
    grace_s: how long what is asked to stop may take; 0: it is killed at once.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        *,
        output: int | IO[bytes] = subprocess.DEVNULL,
        errors: int | IO[bytes] = subprocess.STDOUT,
        files: Sequence[int] = (),
        grace_s: float = GRACE_S,
    ) -> None:
        self._grace_s = grace_s
        self._code: int | None = None
        life_line, self._held = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*module_command("executor.system.supervisor", str(life_line), str(grace_s)), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(life_line, *files),
                process_group=0,
            )
        finally:
            os.close(life_line)
        self._descriptor = os.pidfd_open(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ended_within(self, seconds: float | None) -> bool:
        """Whether the command has ended, waiting for it so long, or without a limit."""
        return self._code is not None or bool(select.select([self._descriptor], [], [], seconds)[0])

    def lines(self) -> Iterator[str]:
        """Of its output, where that is subprocess.PIPE, until it closes it."""
        for line in self.process.stdout or ():
            yield line.decode(errors="replace")

    def close(self) -> int:
        """End what still runs, and return the exit code, or minus the signal's number.

        Until it is waited for, the group is its own: nobody else can be killed.
        """
        if self._code is None:
            os.close(self._held)
            if self._grace_s:
                self.ended_within(None)
            os.killpg(self.process.pid, signal.SIGKILL)
            self._code = self.process.wait()
            os.close(self._descriptor)
            if self.process.stdout is not None:
                self.process.stdout.close()
        return self._code


def run_module(module: str, *arguments: str, within_s: float) -> Finished:
    """Run a module of dflow's own to its end. Nothing that it started is left, nor keeps anybody waiting."""
    import tempfile

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = module_command(module, *arguments)
        with ChildGroup(command, child_environment(), output=output, errors=errors, grace_s=0) as group:
            is_late = not group.ended_within(within_s)
        code = None if is_late else group.close()
        return Finished(code, _text(output), _text(errors), within_s)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def module_command(module: str, *arguments: str) -> list[str]:
    """For an environment as `child_environment` makes it."""
    return [sys.executable, "-m", module, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's, in which dflow's own modules are found: no `ops` in the working directory shadows theirs."""
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", **variables}


def end_with_parent(parent: int) -> None:
    """Be killed by the kernel when the thread ends that started this process; at once where its process is gone.

    parent: its process id.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(GONE)


def exit_text(code: int) -> str:
    """How a process ended, as the end of a sentence about it."""
    return f"was {killed(code)}" if code < 0 else f"ended with exit code {code}"


def killed(code: int) -> str:
    """What a negative exit code says."""
    if code == -signal.SIGKILL:
        return "killed (signal 9); perhaps this machine ran out of memory"
    return f"killed by signal {-code} ({signal.Signals(-code).name})"


def guard(life_line: int, grace_s: float, command: Sequence[str]) -> int:
    """The command's exit code, where it ends by itself."""
    # A handler, not SIG_IGN: the command would inherit that.
    signal.signal(signal.SIGTERM, _stay)
    os.set_inheritable(life_line, False)
    child = subprocess.Popen(command, close_fds=False)
    while child.poll() is None:
        if select.select([life_line], [], [], POLL_S)[0]:
            os.killpg(0, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
            os.killpg(0, signal.SIGKILL)
    if child.returncode < 0:
        with suppress(OSError):  # SIGKILL, which nobody can handle
            signal.signal(-child.returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -child.returncode)
    return child.returncode


def _stay(number: int, frame: FrameType | None) -> None:
    """The signal is for the rest of the group."""


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
