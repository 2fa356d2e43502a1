"""Small ops that write, copied beside each trial's pipeline: what runs, and what ran twice at once, is told there."""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from dsl.op import Artifact, field, op

HERE = Path(__file__).parent
PAUSE_S = 0.004
# Ends neither with its stage nor by SIGTERM, and writes when the stage is long gone, if it still can.
LATE = """
trap "" TERM
while kill -0 $PPID; do sleep 0.05; done
sleep 3
for i in $(seq 100); do echo late > "$0/last.txt"; echo late > "$0/late.txt"; sleep 0.05; done
"""


@frozen
class Files(Artifact):
    """Some files, a few of them in folders."""


@op(version=1, run="fault_ops:write")
@frozen(kw_only=True)
class Write:
    """Writes a few files."""

    name: str = field(help="of the node")
    files: int = field(default=3, help="how many")
    output = Files


@op(version=1, run="fault_ops:join")
@frozen(kw_only=True)
class Join:
    """Writes what its inputs hold, turned around, into a folder for each."""

    name: str = field(help="of the node")
    of: tuple[Files, ...]
    output = Files


@op(version=1, run="fault_ops:steps", resumable=True)
@frozen(kw_only=True)
class Steps:
    """Writes one file a step, and keeps those that are done between attempts."""

    name: str = field(help="of the node")
    of: tuple[Files, ...]
    steps: int = field(default=6, help="how many")
    output = Files


def write(config, stage):
    with alone(config.name):
        late = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(["bash", "-c", LATE, str(stage.out_dir)], start_new_session=True, **late)
        for number in range(config.files):
            slowly(stage.out_dir / f"folder {number}" / "text.txt", f"{config.name} {number}\n" * (100 * number + 1))
        slowly(stage.out_dir / "last.txt", config.name)


def join(config, stage):
    with alone(config.name):
        for place, given in enumerate(stage.inputs["of"]):
            for path in given.path.rglob("*.txt"):
                turned = path.read_text()[::-1]
                slowly(stage.out_dir / str(place) / path.relative_to(given.path), turned)


def steps(config, stage):
    with alone(config.name):
        names = [path for given in stage.inputs["of"] for path in sorted(given.path.rglob("*.txt"))]
        for step in range(config.steps):
            kept = stage.work_dir / f"{step}.txt"
            if not kept.exists():
                half = stage.work_dir / f"half of {step}.txt"
                slowly(half, f"{step} of {names[step % len(names)].read_text()}")
                half.rename(kept)
        for kept in sorted(stage.work_dir.glob("[0-9]*.txt")):
            slowly(stage.out_dir / kept.name, kept.read_text())


def slowly(path: Path, text: str) -> None:
    """Write a file in two parts, so that a kill finds half of it; stops in between if the trial asks for that file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            file.write(part)
            file.flush()
            time.sleep(PAUSE_S)
            if os.environ.get("DFLOW_FAULT_STOP_IN") == path.name:
                os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Log the node's start in calls.txt, and in overlaps.txt if it runs already. The lock ends with the process."""
    with (HERE / f"running-{name}").open("a") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            put_down("overlaps.txt", name)
        put_down("calls.txt", name)
        yield


def put_down(file: str, name: str) -> None:
    descriptor = os.open(HERE / file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, f"{name}\n".encode())
    os.close(descriptor)
