"""One trial: a run is killed at a named place or at a random moment, resumed (and killed again), and compared.

A trial is told apart by its environment: every process of it has DFLOW_FAULT_TRIAL, however it was started.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from attrs import field, frozen
from toy_ops import PROJECT, UNTRACKED, wait_for

from dsl.files import read_lines
from executor.store.artifact_store import Store
from executor.system.crash_points import FAIL_AT, FAIL_BY, FAIL_POINTS

HERE = Path(__file__).parent
MARK = "DFLOW_FAULT_TRIAL"
NODES = 8
COMMAND_S = 300.0
KILLED_AGAIN = 0.3  # how many resumes are killed as well
BESIDE = 0.5  # how many runs have another one beside them
AGAIN_AT_MOST = 3
DEAD = "ZX"
Victim = Literal["executor", "stage", "both"]
VICTIMS: tuple[Victim, ...] = ("executor", "stage", "both")
KINDS = ("lease", "commit", "run", "stage", "worker", "gc")
PLACES = tuple(name for name in FAIL_POINTS if name.partition(":")[0] in KINDS)
# What has to be there for the places that an undisturbed run does not pass.
BEFORE = {
    "lease:clearing": "interrupted",
    "commit:aside": "damaged",
    "lease:adopting": "edited",
    "lease:adopted": "edited",
    **dict.fromkeys((place for place in PLACES if place.startswith("gc:")), "unused"),
}
GC = ("gc", "--delete", "--keep", "1")


@frozen
class Kill:
    """One kill of a trial. place: a fail point's name, or "" for a kill at `moment`, a share of an undisturbed run."""

    seed: int
    victim: Victim
    place: str = ""
    moment: float = 0.0

    @property
    def phase(self) -> str:
        return f"{self.place or 'at a random moment'}, {self.victim}"

    @property
    def in_stage(self) -> bool:
        """Whether a stage passes the place, else the command does."""
        return self.place.startswith("worker:")


@frozen
class Undisturbed:
    """The result of an undisturbed run: the files by name for each digest, and its duration in seconds."""

    artifacts: dict[str, dict[str, bytes]]
    seconds: float


@frozen
class Place:
    """The folder of one trial: its store, and the dflow commands that run on it."""

    folder: Path
    mark: str = field(factory=lambda: uuid.uuid4().hex)

    @classmethod
    def make(cls, folder: Path) -> Place:
        folder.mkdir(parents=True)
        for name in ("fault_ops.py", "diamond.toml"):
            shutil.copy(HERE / name, folder)
        return cls(folder)

    @property
    def store(self) -> Path:
        return self.folder / "runs"

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-c", UNTRACKED, *arguments, "--store", str(self.store)],
                env={
                    **os.environ, "PYTHONPATH": str(PROJECT), "PYTHONSAFEPATH": "1", MARK: self.mark, **environment
                },
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def dflow(self, *arguments: str, **environment: str) -> int:
        return self.start(*arguments, **environment).wait(COMMAND_S)

    def run(self, **environment: str) -> int:
        return self.dflow("run", "diamond.toml", **environment)

    def start_again(self, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start `dflow resume`, or `dflow run` where the run was killed before it had a record."""
        if any(path.read_bytes().endswith(b"\n") for path in self.store.glob("records/*/events.jsonl")):
            return self.start("resume", *options, **environment)
        return self.start("run", "diamond.toml", **environment)

    def go_on(self, *options: str, **environment: str) -> int:
        return self.start_again(*options, **environment).wait(COMMAND_S)

    def pids(self) -> list[int]:
        """The ids of this trial's live processes."""
        return [
            pid
            for pid in _all_pids()
            if f"{MARK}={self.mark}".encode() in _environment(pid) and _state(pid) not in DEAD
        ]

    def stopped(self) -> list[int]:
        """The ids of the processes that stopped at a named place."""
        return [pid for pid in self.pids() if _state(pid) == "T"]

    def put_down(self, name: str) -> list[str]:
        """The words that the ops logged in a file of the trial's folder."""
        path = self.folder / name
        return path.read_text().split() if path.exists() else []

    def artifacts(self) -> dict[str, dict[str, bytes]]:
        return {folder.name: _files(folder) for folder in (self.store / "objects").iterdir()}


def undisturbed(folder: Path) -> Undisturbed:
    place = Place.make(folder)
    began = time.monotonic()
    assert 0 == place.run(), (folder / "output.txt").read_text()
    return Undisturbed(place.artifacts(), time.monotonic() - began)


def tried(folder: Path, kill: Kill, reference: Undisturbed) -> str:
    """Run one trial. Returns what was killed where, for the summary.

    Raises AssertionError where a result differs from an undisturbed run's. The folder of a failed trial is kept.
    """
    place = Place.make(folder)
    drawn = random.Random(kill.seed)
    before = BEFORE.get(kill.place, "")
    options = _prepare(place, before, reference, drawn)
    phase = kill.phase
    if kill.place.startswith("gc:"):
        assert -signal.SIGKILL == place.dflow(*GC, **{FAIL_AT: kill.place})
    elif kill.place:
        phase += _killed_at(place, kill, options, drawn)
    else:
        _killed_meanwhile(place, kill, drawn, reference.seconds)
    for _ in range(AGAIN_AT_MOST):
        if drawn.random() < KILLED_AGAIN:
            place.go_on(*options, **{FAIL_AT: f"{drawn.choice(PLACES)}:{drawn.randint(1, 3)}"})
            _end_stages(place, drawn)
    assert 0 == place.go_on(*options), "the last resume failed"
    wait_for(lambda: not place.pids())
    assert 0 == place.dflow(*GC)
    _check(place, reference, once=before in ("", "interrupted", "unused"))
    shutil.rmtree(folder)
    return phase


def _prepare(place: Place, before: str, reference: Undisturbed, drawn: random.Random) -> list[str]:
    """Bring the store to the state that a place needs. Returns the options of the command that will pass the place."""
    if before == "interrupted":
        _killed_in_stage(place, drawn, "text.txt")
    if before == "edited":
        _killed_in_stage(place, drawn, "half of 1.txt")
        ops = place.folder / "fault_ops.py"
        edited = ops.read_text().replace("names[step % len(names)].read_text()", "_text(names, step)")
        ops.write_text(f"{edited}\n\ndef _text(names, step):\n    return names[step % len(names)].read_text()\n")
        return ["--adopt"]
    if before == "damaged":
        assert 0 == place.run()
        damaged = place.store / "objects" / drawn.choice(sorted(reference.artifacts))
        file = drawn.choice(sorted(damaged.rglob("*.txt")))
        file.chmod(0o644)
        os.truncate(file, file.stat().st_size // 2)
    if before == "unused":
        assert [0, 0, 0] == [place.run(), place.dflow("run", "diamond.toml", "-s", "small.files=2"), place.run()]
    return []


def _killed_in_stage(place: Place, drawn: random.Random, file: str) -> None:
    """Run until a stage has written half of the named file, then kill the command and perhaps its stages."""
    process = place.start("run", "diamond.toml", DFLOW_FAULT_STOP_IN=file)
    wait_for(lambda: bool(place.stopped()) or process.poll() is not None, seconds=COMMAND_S)
    assert place.stopped(), f"nobody wrote {file}"
    process.kill()
    process.wait()
    _end_stages(place, drawn)
    _signal(place.stopped(), signal.SIGCONT)


def _killed_at(place: Place, kill: Kill, options: list[str], drawn: random.Random) -> str:
    """Stop the process that passes the place, kill the victim, let the rest go on. Returns a remark for the summary.

    Victim "executor": its stages end by themselves. Victim "stage": at a place of the executor, all its stages.
    """
    once = kill.place in BEFORE or kill.in_stage
    at = {FAIL_AT: f"{kill.place}:{1 if once else drawn.randint(1, NODES)}", FAIL_BY: "SIGSTOP"}
    command = place.start_again(*options, **at)
    wait_for(lambda: bool(place.stopped()) or command.poll() is not None, seconds=COMMAND_S)
    assert place.stopped(), f"nobody came by {at}: the command ended with {command.poll()}"
    beside = [pid for pid in place.pids() if pid != command.pid]
    if kill.victim != "stage":
        _kill([command.pid])
    if kill.victim != "executor":
        _kill(place.stopped() if kill.in_stage and kill.victim == "stage" else beside)
    wait_for(lambda: _let_go(place) and command.poll() is not None, seconds=COMMAND_S)
    assert command.returncode in (0, 1, -signal.SIGKILL)
    return "" if beside or kill.victim != "stage" else " (none was there)"


def _let_go(place: Place) -> bool:
    """Continue the stopped processes. Returns whether there were none: other stages may come by the same place."""
    stopped = place.stopped()
    _signal(stopped, signal.SIGCONT)
    return not stopped


def _killed_meanwhile(place: Place, kill: Kill, drawn: random.Random, seconds: float) -> None:
    process = place.start("run", "diamond.toml")
    others = [place.start("run", "diamond.toml")] if drawn.random() < BESIDE else []
    end = time.monotonic() + kill.moment * seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    stages = [pid for pid in place.pids() if pid not in (process.pid, *(other.pid for other in others))]
    if kill.victim != "executor":
        _kill(stages)
    if kill.victim != "stage":
        _kill([process.pid])
    for command in (process, *others):
        command.wait(COMMAND_S)


def _end_stages(place: Place, drawn: random.Random) -> None:
    """Kill the processes that are left, or let them end by themselves, at random."""
    if drawn.random() < 0.5:
        _kill(place.pids())


def _check(place: Place, reference: Undisturbed, *, once: bool) -> None:
    assert [] == place.put_down("overlaps.txt"), "a node ran twice at once"
    assert reference.artifacts == place.artifacts(), "artifacts differ from those of an undisturbed run"
    assert [] == [path.name for path in (place.store / "work").iterdir()], "a work folder is left"
    store = Store(place.store)
    assert [] == [digest for digest in reference.artifacts if store.altered(digest)]
    lines = {path.name: len(read_lines(path)) for path in (place.store / "index").iterdir()}
    if once:
        assert dict.fromkeys(lines, 1) == lines, "what was committed was computed again"
        assert NODES == len(lines)


def _files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def _kill(pids: list[int]) -> None:
    _signal(pids, signal.SIGKILL)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _state(pid: int) -> str:
    """The state letter of a process from /proc/<pid>/stat; "X" (dead) where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def every_kill(seed: int, times: int = 10, moments: int = 100) -> list[Kill]:
    """The kills of the whole test: each victim at each named place `times` times, and `moments` at random moments."""
    drawn = random.Random(seed)
    at_places = [(place, victim) for place in PLACES for victim in _victims(place) for _ in range(times)]
    return [_at_place(drawn, *each) for each in at_places] + _at_moments(drawn, moments)


def few_kills(seed: int, moments: int = 10) -> list[Kill]:
    """The kills of the short test: one victim at each named place, in turn, and `moments` at random moments."""
    drawn = random.Random(seed)
    turns = [(place, _victims(place)) for place in PLACES]
    at_places = [(place, victims[(seed + turn) % len(victims)]) for turn, (place, victims) in enumerate(turns)]
    return [_at_place(drawn, *each) for each in at_places] + _at_moments(drawn, moments)


def _victims(place: str) -> tuple[Victim, ...]:
    """Who is killed at a place: only the command for `dflow gc`, which starts no stages."""
    return ("executor",) if place.startswith("gc:") else VICTIMS


def _at_place(drawn: random.Random, place: str, victim: Victim) -> Kill:
    return Kill(drawn.getrandbits(32), victim, place)


def _at_moments(drawn: random.Random, moments: int) -> list[Kill]:
    return [Kill(drawn.getrandbits(32), VICTIMS[number % 3], moment=drawn.random()) for number in range(moments)]
