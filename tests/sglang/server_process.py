"""SGLang's own HTTP server on a CPU, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import sglang_on_cpu
from attrs import frozen
from ports import free_port

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
START_S = 300  # 20 on a machine with nothing else to do


@frozen
class Server:
    """url: without a path. log: what the server printed."""

    url: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


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

    folder: for the log. Arguments given here win over those of a CPU. Fails with the log where the server ends or is
    not healthy after START_S seconds.
    """
    port, log = free_port(), folder / "server.log"
    needed = [part for name, value in ON_A_CPU.items() if name not in arguments for part in (name, value)]
    needed += [switch for switch in SWITCHES if switch not in arguments]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, *needed, *place],
            env=cpu_environment(**(environment or {})),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        wait_until_healthy(server, process)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{server.output[-4000:]}"
        try:
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise AssertionError(f"the server is not healthy after {START_S} s:\n{server.output[-4000:]}")
