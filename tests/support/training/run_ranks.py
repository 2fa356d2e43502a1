"""Ranks of one host as processes of a test's own: they meet in a file, as a stage's ranks do, and open no port."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsl.stage import RENDEZVOUS
from executor.launchers.rank_processes import OTHER_RENDEZVOUS, rank_environment


def run_ranks(
    ranks: int, arguments: Sequence[str], folder: Path, timeout: float, environment: Mapping[str, str]
) -> list[int]:
    """Run `python *arguments` once per rank, until all have ended; once one has failed, the others are killed.

    Returns their exit codes. What they print is in folder / "log". Raises subprocess.TimeoutExpired.
    """
    environment = {name: value for name, value in environment.items() if name not in OTHER_RENDEZVOUS}
    environment |= {RENDEZVOUS: str(folder / "rendezvous")}
    with (folder / "log").open("wb") as log, killed_at_the_end() as processes:
        for rank in range(ranks):
            variables = {**environment, **rank_environment(rank, ranks)}
            command = [sys.executable, *arguments]
            processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + timeout
        while None in (codes := [process.poll() for process in processes]):
            if any(codes):
                break
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(arguments, timeout)
            time.sleep(0.05)
    return [process.wait() for process in processes]


@contextmanager
def killed_at_the_end() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
