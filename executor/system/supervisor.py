"""Child processes that never outlive this one, however it ends.

    python -m executor.system.supervisor FD GRACE COMMAND...

is the guard of a ChildGroup: it runs the command in its own process group. FD is the read end of a pipe whose only
writer is the process that started the group, so the pipe breaks when that one ends, also by SIGKILL, or closes it.
Then the whole group gets SIGTERM, and SIGKILL GRACE seconds later. If the command ends on its own,
the guard ends with the same exit code or signal.

A module of dflow needs no guard: a Child has the kernel kill it when its parent is gone (`end_with_parent`). So a stage
is started; processes that it starts and that outlive it are found by its mark, see stage_mark.py.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

from dsl.imports import child_environment, module_command

GONE = 70  # the exit code of a process whose parent is gone
GRACE_S = 10.0
POLL_S = 0.2
GROUP_ENDS_WITHIN_S = 1.0
GROUP_POLL_S = 0.02
PARENT = "DFLOW_PARENT"  # the process id of the one that started a Child
ENDING = (signal.SIGTERM, signal.SIGINT)
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
PR_SET_PDEATHSIG = 1  # prctl(2)
LIBC = ctypes.CDLL(None)


class Finished(NamedTuple):
    """The end of a module's process. code: its exit code, or minus a signal's number.

    None: it took longer than within_s seconds.
    """

    code: int | None
    output: str
    errors: str
    within_s: float

    @property
    def reason(self) -> str:
        """The reason why the process failed: the last line of its errors, or its exit code or signal."""
        lines = self.errors.strip().splitlines()
        if self.code is None:
            return f"it took longer than {self.within_s:g} s"
        return lines[-1] if lines and self.code > 0 else f"it {exit_text(self.code)}"


class ChildGroup:
    """A command and all processes that it starts, in a process group that never outlives this process.

    environment: complete, see `child_environment`. files: further descriptors that the command inherits. grace_s:
    seconds between SIGTERM and SIGKILL; 0 for an immediate SIGKILL.
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

    def __exit__(self, *_error: object) -> None:
        self.close()

    def ended_within(self, seconds: float | None) -> bool:
        """Wait for the command, and return whether it has ended within `seconds`; None: no limit."""
        return self._code is not None or bool(select.select([self._descriptor], [], [], seconds)[0])

    def lines(self) -> Iterator[str]:
        """The lines of the command's output as they come, if that is subprocess.PIPE."""
        for line in self.process.stdout or ():
            yield line.decode(errors="replace")

    def close(self) -> int:
        """End the whole group, and return the command's exit code, or minus a signal's number.

        The group's id stays its own until its guard process is waited for, so no other process can be killed.
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


class Child:
    """A module of dflow in its own process group, which the kernel kills when the starting thread ends.

    The module's `main` calls `begin_as_child` first. The process inherits only its input, by default the null device,
    and its output. When it has ended, the rest of its group is killed. One thread waits; any thread may send signals.

    environment: as in ChildGroup. output: a descriptor for stdout and stderr.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        input: int = subprocess.DEVNULL,
    ) -> None:
        self.code: int | None = None  # the exit code, or minus the signal's number; None while it runs
        self._lock = threading.Lock()
        # A stop signal that arrives before the child has its handlers stays pending: the mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._process = subprocess.Popen(
                module_command(module, *arguments),
                env={**environment, PARENT: str(os.getpid())},
                stdin=input,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid
        self._descriptor = os.pidfd_open(self.pid)

    def ended_within(self, seconds: float | None) -> bool:
        """Wait for the process and the rest of its group; returns whether both ended within `seconds`.
        None: no limit.
        """
        if self.code is None and select.select([self._descriptor], [], [], seconds)[0]:
            self._end_group()
        return self.code is not None

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        """Send a signal to the process; does nothing once it was waited for, as another may have its id by then."""
        with self._lock, suppress(ProcessLookupError, PermissionError):
            if self.code is None:
                (os.killpg if whole_group else os.kill)(self.pid, number)

    def _end_group(self) -> None:
        """Send SIGTERM to the rest of the process's group, SIGKILL after a while, and then wait for the process."""
        self.signal(signal.SIGTERM, whole_group=True)
        deadline = time.monotonic() + GROUP_ENDS_WITHIN_S
        while _has_others(self.pid) and time.monotonic() < deadline:
            time.sleep(GROUP_POLL_S)
        self.signal(signal.SIGKILL, whole_group=True)
        with self._lock:
            self.code = self._process.wait()
            os.close(self._descriptor)


def begin_as_child() -> None:
    """Tie this process to its parent, and reset its signals to a fresh interpreter's, except ENDING.

    The signals in ENDING stay blocked until the caller has installed handlers.
    """
    end_with_parent(int(os.environ[PARENT]))
    for number in signal.valid_signals() - {*PYTHON_IGNORES, signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ENDING)


def _has_others(group: int) -> bool:
    """Whether a process group has members besides its leader."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    return any(_is_in(pid, group) for pid in pids if pid != group)


def _is_in(pid: int, group: int) -> bool:
    """Whether a process belongs to the group and has not ended."""
    try:
        if os.getpgid(pid) != group:
            return False
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run_module(module: str, *arguments: str, within_s: float, go_on: Callable[[], None] | None = None) -> Finished:
    """Run a module of dflow to its end; processes that it leaves behind are killed.

    go_on: called a few times a second; an error from it ends the process.
    """
    import tempfile

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = module_command(module, *arguments)
        with ChildGroup(command, child_environment(), output=output, errors=errors, grace_s=0) as group:
            deadline = time.monotonic() + within_s
            while not group.ended_within(POLL_S if go_on else within_s) and time.monotonic() < deadline:
                if go_on is not None:
                    go_on()
            is_late = not group.ended_within(0)
        code = None if is_late else group.close()
        return Finished(code, _text(output), _text(errors), within_s)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends; exit at once if the parent is gone.

    parent: the parent's process id.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(GONE)


def exit_text(code: int) -> str:
    """A phrase on how a process ended, such as "ended with exit code 1"."""
    return f"was {killed(code)}" if code < 0 else f"ended with exit code {code}"


def killed(code: int) -> str:
    """A phrase on the signal that killed a process. code: its negative exit code."""
    if code == -signal.SIGKILL:
        return "killed (signal 9); perhaps this machine ran out of memory"
    return f"killed by signal {-code} ({signal.Signals(-code).name})"


def guard(life_line: int, grace_s: float, command: Sequence[str]) -> int:
    """Run a command and guard its process group: it ends when the life line closes. Returns the exit code."""
    # The signal is for the rest of the group. A handler, not SIG_IGN: the command would inherit that.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
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


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
