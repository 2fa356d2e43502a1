"""Starts the other hosts of a stage by srun, inside a Slurm allocation."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from attrs import frozen

from dsl.errors import StageError
from executor.system.supervisor import child_environment, module_command
from executor.system.symlinks import appended


@frozen
class Allocation:
    """The allocation of this process's Slurm job; hosts by Slurm's names."""

    job: str
    hosts: tuple[str, ...]

    @classmethod
    def current(cls) -> Allocation | None:
        """None outside Slurm. Raises StageError where Slurm's own commands do not answer."""
        job = os.environ.get("SLURM_JOB_ID")
        if not job:
            return None
        command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
        try:
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except FileNotFoundError as error:
            raise StageError(
                f"SLURM_JOB_ID = {job} is set, but scontrol is not installed; unset the variable, or install Slurm"
            ) from error
        except subprocess.CalledProcessError as error:
            raise StageError(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from error
        return cls(job, tuple(output.split()))

    def this_host(self) -> str:
        """Raises StageError where this machine is not part of the allocation."""
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        here = next((host for host in self.hosts if host.partition(".")[0] == name.partition(".")[0]), None)
        if here is None:
            raise StageError(
                f"this machine, {name}, is not part of the Slurm allocation {self.job} "
                f"({', '.join(self.hosts)}), and rank 0 runs where dflow runs: start dflow by sbatch, or by "
                "`srun --nodes=1 --ntasks=1 --overlap dflow run ...`"
            )
        return here

    def start_agents(self, hosts: int, store: Path, folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start `dflow agent` on that many other hosts, for one stage; output of srun and the agents goes to the log.

        Raises StageError where the allocation has fewer hosts.
        """
        here = self.this_host()
        if hosts > len(self.hosts) - 1:
            raise StageError(f"{too_few(hosts + 1, len(self.hosts))}; {more_hosts(hosts + 1)}")
        agent = module_command("executor.cli", "agent", "--store", str(store), "--stage", str(folder))
        cpus = os.environ.get("SLURM_CPUS_ON_NODE")  # by default a step gets one CPU of each host
        command = [
            "srun",
            f"--nodes={hosts}",
            f"--ntasks={hosts}",
            "--ntasks-per-node=1",
            f"--exclude={here}",
            "--overlap",
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            "--kill-on-bad-exit=0",
            *agent,
        ]
        with appended(log) as output:
            try:
                return subprocess.Popen(
                    command,
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,  # Ctrl-C reaches only the executor
                )
            except FileNotFoundError as error:
                raise StageError(f"SLURM_JOB_ID = {self.job} is set, but srun is not installed") from error


def hosts_allocated() -> int | None:
    """Number of hosts of the Slurm allocation, from the environment only; None outside Slurm."""
    if not os.environ.get("SLURM_JOB_ID"):
        return None
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)


def too_few(requested: int, available: int) -> str:
    hosts = "host" if available == 1 else "hosts"
    return f"needs {requested} hosts, but the Slurm allocation {os.environ['SLURM_JOB_ID']} has {available} {hosts}"


def more_hosts(requested: int) -> str:
    return f"request more from Slurm (sbatch --nodes={requested}), or set a smaller nnodes"
