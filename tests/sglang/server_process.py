"""SGLang's own HTTP server on a CPU, in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import sglang_on_cpu
from http_servers import Server, running_command

ROOT = Path(__file__).parents[2]
ON_A_CPU = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--mm-attention-backend": "sdpa",
    "--sampling-backend": "pytorch",
    "--max-total-tokens": "8192",
    "--max-running-requests": "8",
    "--random-seed": "0",
    "--log-level": "warning",
}
SWITCHES = ("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup")


def cpu_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which every Python process is patched for a CPU."""
    environment = {**os.environ, **more}
    environment["PYTHONPATH"] = ":".join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    sglang_on_cpu.install(environment)
    return environment


@contextmanager
def running_server(
    folder: Path,
    arguments: Sequence[str],
    *,
    module: str = "sglang.launch_server",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`python -m module arguments` with what a CPU needs, once it is healthy; ended with all its processes.

    folder: for the log. Arguments given here win over those of a CPU.
    """
    needed = [part for name, value in ON_A_CPU.items() if name not in arguments for part in (name, value)]
    needed += [switch for switch in SWITCHES if switch not in arguments]
    command = [sys.executable, "-m", module, *arguments, *needed]
    with running_command(command, folder, cpu_environment(**(environment or {}))) as server:
        yield server
