"""`dflow agent`: offer this host to stages that run on several hosts."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from dsl.errors import StageError
from executor.commands.arguments import add_store, open_store
from executor.launchers.host_folder import HostFolder
from executor.launchers.joining import Offers, join_stage
from executor.records.run_record import Record
from executor.scheduler.stop_signal import StopSignal
from executor.store.artifact_store import Store
from executor.system.output import FAILED, OK, print_lines

POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    parser.add_argument("--once", action="store_true", help="exit when the first run that it worked for is over")
    parser.add_argument(
        "--stage",
        type=Path,
        metavar="FOLDER",
        help="join only this stage; srun starts agents this way in a Slurm allocation",
    )


def main(options: argparse.Namespace) -> int:
    store = open_store(options)
    stop = StopSignal(lambda: None)
    with stop.caught():
        agent = Agent(store, stop)
        if options.stage is not None:
            return agent.work_for(HostFolder(options.stage))
        return agent.wait_for_work(once=options.once)


class Agent:
    """Joins one stage at a time."""

    def __init__(self, store: Store, stop: StopSignal) -> None:
        self._store = store
        self._stop = stop
        self._run = ""
        self._is_disconnected = False  # from the run's executor

    def wait_for_work(self, *, once: bool) -> int:
        """Join stages until stopped, or with `once` until the run of the first stage is over. After a first Ctrl-C a
        stage that runs here still finishes.
        """
        offers = Offers(self._store.path / "work")
        refused: set[Path] = set()
        print_lines(f"waiting for stages in {self._store.path} that need more hosts (Ctrl-C to stop)")
        code = OK
        while not self._stop.is_set() and not (once and self._run and self._is_over()):
            folder = offers.find(refused)
            if folder is None:
                time.sleep(POLL_S)
                continue
            try:
                code = self.work_for(folder)
            except StageError as error:
                refused.add(folder.path)
                print_lines(f"cannot join {folder.path}: {error}", error=True)
        return code if once else OK

    def work_for(self, folder: HostFolder) -> int:
        """Join the stage and return when none of its ranks runs here. Raises StageError where it cannot run here."""
        offer = folder.offer()
        place = join_stage(folder, lambda: self._stop.count)
        if offer is None or place is None:
            return FAILED
        member, number = place
        self._run = offer.run
        name = f"{offer.node} (run {offer.run})"
        ranks = "1 rank" if offer.nproc == 1 else f"{offer.nproc} ranks"
        print_lines(f"{name}: joined {offer.executor} as host {number} of {offer.hosts}, counted from 0")
        code, why = member.run(lambda log: print_lines(f"{name}: {ranks} to run; log: {log}"))
        how = "done" if code == 0 else f"torchrun ended with exit code {code}"
        print_lines(f"{name}: ended: {why or ('as the executor requested' if member.is_stopping else how)}")
        self._is_disconnected = bool(why)
        return OK if code == 0 else FAILED

    def _is_over(self) -> bool:
        folder = self._store.records / self._run
        return self._is_disconnected or not folder.exists() or Record.load(folder).state.status != "running"
