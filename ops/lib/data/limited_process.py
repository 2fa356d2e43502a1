"""Limits of CPU time and memory for what strangers' texts and files decide: a function in a process of its own, and a
limit of the memory that a piece of work in this one may add.

    python -m ops.lib.data.limited_process MODULE:FUNCTION

Python cannot interrupt a single operation, such as a power of large integers or a regular expression that backtracks.
So the kernel does: before each call, the process sets a timer of CPU time that ends it; load on the machine does not
shorten that time, and what a call leaves of it can be given to a later one. The process starts once, is kept, and ends
with its input. Requests and replies are lines of JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import IO, Any

from attrs import frozen

from dsl.errors import DataError
from dsl.imports import child_environment, import_from_source, module_command, named_function, source_of

SECONDS = 10.0  # of CPU time for each item
LEAST_S = 0.001  # a timer of 0 s would never end
PAGE = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")
MEMORY = 4 << 30  # bytes of address space, the interpreter and its libraries included

Function = Callable[[Any, Any], Any]


class Exhausted(DataError):
    """An error: an item needs more time or memory than allowed. place: the item's index in the call."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


@frozen
class Reply:
    """The function's result for an item, and the seconds of its CPU time that are left."""

    result: Any
    left: float


class LimitedProcess:
    """A process that calls function(shared, item) for items; all are plain JSON values.

    function: defined in a module, which the process imports. seconds: CPU time allowed for each item.
    """

    def __init__(self, function: Function, seconds: float = SECONDS) -> None:
        self._function, self._seconds = function, seconds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process before it is needed: its imports may take a second."""
        with self._lock:
            self._running()

    def map(self, shared: Any, items: Sequence[Any], seconds: Sequence[float] | None = None) -> list[Reply]:
        """Compute function(shared, item) for each item in the process. seconds: the time limit of each; default: its
        own.

        Raises Exhausted for the first item that needs too much time or memory.
        """
        request = _line([shared, items, seconds or [self._seconds] * len(items)])
        with self._lock:
            process, requests, answers = self._running()
            with suppress(BrokenPipeError):  # an ended process is noticed below
                requests.write(request)
                requests.flush()
            lines: list[bytes] = []
            while len(lines) < len(items):
                line = answers.readline()
                if not line.endswith(b"\n"):
                    self._process = None
                    raise Exhausted(self._why_ended(process), len(lines))
                lines.append(line)
        replies = []
        for place, line in enumerate(lines):
            fits, result, left = json.loads(line)
            if not fits:
                raise Exhausted(f"needs more than {MEMORY >> 30} GiB of memory", place)
            replies.append(Reply(result, left))
        return replies

    def _running(self) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
        """The running process with its input and output; started here if there is none."""
        process = self._process
        is_new = process is None
        if process is None:
            module, name = self._function.__module__, self._function.__name__
            process = self._process = subprocess.Popen(
                module_command(__name__, f"{module}:{name}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
            )
            atexit.register(partial(_end, process, os.getpid()))
        requests, answers = process.stdin, process.stdout
        assert requests is not None and answers is not None
        if is_new:
            file = str(sys.modules[self._function.__module__].__file__)
            requests.write(_line({file: source_of(Path(file)).decode("latin-1")}))  # the code that the key names
        return process, requests, answers

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        _end(process, os.getpid())
        if process.returncode == -signal.SIGPROF:
            return f"needs more than {self._seconds:g} s of CPU time"
        return f"ended its process with exit code {process.returncode}, see the log above"


@cache
def limited(function: Function, seconds: float = SECONDS) -> LimitedProcess:
    """The process of this function; all threads of this process share it."""
    return LimitedProcess(function, seconds)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # in a process that was forked from the owner
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    process.wait()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


@contextmanager
def memory_limit(additional: int) -> Iterator[None]:
    """Open a context that limits the memory of this process.

    Beyond its present address space and `additional` bytes, MemoryError is raised. The kernel limits the whole process,
    so use it only where no other thread works, which could get the error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not STATM.is_file():  # not Linux
        yield
        return
    limit = int(STATM.read_text().split()[0]) * PAGE + additional
    for lower in (soft, hard):
        limit = limit if lower == resource.RLIM_INFINITY else min(limit, lower)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    """The main function of the limited process: answers requests until its input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the stage decides when it stops
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    requests = sys.stdin.buffer
    import_from_source({file: text.encode("latin-1") for file, text in json.loads(requests.readline()).items()})
    function: Function = named_function(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for request in requests:
        shared, items, seconds = json.loads(request)
        for item, allowed in zip(items, seconds, strict=True):
            signal.setitimer(signal.ITIMER_PROF, max(allowed, LEAST_S))
            try:
                reply = _line([True, function(shared, item), signal.getitimer(signal.ITIMER_PROF)[0]])
            except MemoryError:
                reply = _line([False, None, 0.0])
            signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(reply)
            replies.flush()


if __name__ == "__main__":
    main()
