"""The parts of a stage on several hosts: what the end of one means for the others, and for the stage."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from executor.launchers.backend import HostsExit, StageOrder, exits_path
from executor.launchers.stage_contract import read_exits, report_lost
from executor.system.supervisor import GONE, exit_text


@frozen(kw_only=True)
class PartExit:
    """No process of the part runs any more. code, error, log_errno: as in HostsExit."""

    code: int | None
    error: str = ""
    log_errno: int = 0


class Parts:
    """Notes how the parts of a stage end. hosts: the names of their hosts, by number."""

    def __init__(self, order: StageOrder, hosts: Sequence[str]) -> None:
        self._results = order.results
        self._is_shared = order.launch.shard_workers > 1
        self._hosts = tuple(hosts)
        self._exits: dict[int, PartExit] = {}
        self._lost: dict[int, str] = {}

    def ended(self, number: int, how: PartExit) -> None:
        self._exits[number] = how
        if how.code != 0 and self._is_shared:
            report_lost(self._results, number)

    def lost(self, number: int, reason: str) -> None:
        """Its host left with it, or may have."""
        self._lost[number] = f"{self.host(number)}: {reason}"
        self.ended(number, PartExit(code=None))

    def host(self, number: int) -> str:
        return f"host {number} ({self._hosts[number]})"

    @property
    def ends_others(self) -> bool:
        """Whether the remaining parts have to end.

        Workers that share shards go on without one that was killed, and not after an error, which they would meet too.
        """
        if any(each.error for each in self._exits.values()):
            return True
        if not self._is_shared:
            return any(each.code != 0 for each in self._exits.values())
        exits = [each for number in self._exits for each in read_exits(exits_path(self._results, number))]
        return any(each.code > 0 and each.code != GONE for each in exits)

    def exit(self) -> HostsExit:
        """How the stage ended, once all parts have."""
        codes = [each.code for each in self._exits.values()]
        is_done = 0 in codes if self._is_shared else not any(code != 0 for code in codes)
        failed = [
            f"the processes on {self.host(number)}: the first {exit_text(each.code)}"
            for number, each in self._exits.items()
            if each.code
        ]
        return HostsExit(
            code=0 if is_done else next((code for code in codes if code), None),
            hosts=self._hosts,
            lost="; ".join(self._lost.values()),
            failed="; ".join(failed),
            error="; ".join(f"{self.host(number)}: {each.error}" for number, each in self._exits.items() if each.error),
            log_errno=next((each.log_errno for each in self._exits.values() if each.log_errno), 0),
        )
