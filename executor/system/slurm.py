"""Inside a Slurm allocation the other hosts of a stage are started by srun."""

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
    """What the job that this process is in may use; hosts by Slurm's names."""

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
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except FileNotFoundError as error:
            raise StageError(
                f"SLURM_JOB_ID = {job} is set, but there is no scontrol here; unset it, or install it"
            ) from error
        except subprocess.CalledProcessError as error:
            raise StageError(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from error
        return cls(job, tuple(said.split()))

    def this_host(self) -> str:
        """Raises StageError where this machine is not one of the allocation's."""
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        here = next((host for host in self.hosts if host.partition(".")[0] == name.partition(".")[0]), None)
        if here is None:
            raise StageError(
                f"this machine, {name}, is none of the hosts of the Slurm allocation {self.job} "
                f"({', '.join(self.hosts)}), and rank 0 runs where dflow runs: start dflow by sbatch, or by "
                "`srun --nodes=1 --ntasks=1 --overlap dflow run ...`"
            )
        return here

    def start_agents(self, hosts: int, store: Path, folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """`dflow agent` on that many other hosts, for one stage; what srun and the agents print goes to the log.

        Raises StageError where the allocation has fewer.
        """
        here = self.this_host()
        if hosts > len(self.hosts) - 1:
            raise StageError(f"{too_few(hosts + 1, len(self.hosts))}; {more_hosts(hosts + 1)}")
        agent = module_command("executor.cli", "agent", "--store", str(store), "--stage", str(folder))
        cpus = os.environ.get("SLURM_CPUS_ON_NODE")  # unless told, a step gets one of each host's CPUs
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
                    process_group=0,  # Ctrl-C is the executor's alone
                )
            except FileNotFoundError as error:
                raise StageError(f"SLURM_JOB_ID = {self.job} is set, but there is no srun here") from error


def hosts_allocated() -> int | None:
    """How many hosts the Slurm allocation has, by the environment alone; None outside Slurm."""
    if not os.environ.get("SLURM_JOB_ID"):
        return None
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)


def too_few(asked: int, there: int) -> str:
    hosts = "host" if there == 1 else "hosts"
    return f"asks for {asked} hosts, but the Slurm allocation {os.environ['SLURM_JOB_ID']} has {there} {hosts}"


def more_hosts(asked: int) -> str:
    return f"ask Slurm for more (sbatch --nodes={asked}), or set a smaller nnodes"
