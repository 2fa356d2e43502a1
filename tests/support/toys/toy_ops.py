"""A file of ops without torch, with the code of one of them in a module of its own, and a pipeline of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from executor.records.run_record import Record
from executor.system.trust import trust_store

PROJECT = Path(__file__).resolve().parents[3]

OPS = '''
import json, os, signal, sys, time
from pathlib import Path
from attrs import frozen
from dsl.errors import DataError, StopRequested
from dsl.op import Artifact, field, op


@frozen
class Text(Artifact):
    """text.txt"""


def count_call(name):
    with (Path(__file__).parent / "calls.txt").open("a") as file:
        file.write(name + "\\n")


@op(version=1, run="toy:make")
@frozen(kw_only=True)
class Make:
    """Writes a text."""
    text: str = field(default="a", help="what to write")
    note: str = field(default="", neutral=True, help="outside the key")
    source: str = field(default="builtin", external=True, help="a file")
    seconds: float = field(default=0.0, neutral=True, help="how long it takes")
    output = Text


def make(config, stage):
    count_call("make")
    time.sleep(config.seconds)
    text = config.text if config.source == "builtin" else Path(config.source).read_text()
    (stage.out_dir / "text.txt").write_text(text)
    (stage.out_dir / "measurements.json").write_text(json.dumps({"now": time.time()}))
    stage.log({"make/length": len(text)}, step=0)


@op(version=1, run="toy:upper")
@frozen(kw_only=True)
class Upper:
    """Writes the text in capitals."""
    text: Text
    output = Text


def upper(config, stage):
    count_call("upper")
    (stage.out_dir / "text.txt").write_text((stage.inputs["text"].path / "text.txt").read_text().upper())


@op(version=1, run="toy_join:join")
@frozen(kw_only=True)
class Join:
    """Joins texts."""
    texts: tuple[Text, ...]
    extra: Text | None = None
    between: str = field(default="-", help="stands between the texts")
    weight: float = field(default=1.0, help="a number")
    output = Text


@op(version=1, run="toy:steps", resumable=True)
@frozen(kw_only=True)
class Steps:
    """Counts steps, keeps its place in work_dir, ends early where a file `end` is there, and can be made to fail."""
    text: Text
    steps: int = field(default=5, help="steps")
    seconds: float = field(default=0.0, neutral=True, help="of each step")
    fail_at: int = field(default=-1, neutral=True, help="the step that raises an error")
    error: str = field(default="data", neutral=True, help="data, bug, kill, memory, nothing or exit")
    output = Text


def steps(config, stage):
    count_call("steps")
    place = stage.work_dir / "place"
    start = int(place.read_text()) if place.exists() else 0
    done = stage.work_dir / "done.txt"
    for step in range(start, config.steps):
        if (Path(__file__).parent / "end").exists():
            break
        if step == config.fail_at:
            fail(config.error)
        if stage.stop_requested():
            raise StopRequested(f"saved at step {step}")
        time.sleep(config.seconds)
        with done.open("a") as file:
            file.write(f"{step}\\n")
        stage.log({"steps/loss": 1.0 / (step + 1)}, step=step)
        stage.progress(step + 1, config.steps)
        if step % 2 == 1:
            (stage.work_dir / "next").write_text(str(step + 1))
            (stage.work_dir / "next").replace(place)
    if config.error != "nothing":
        (stage.out_dir / "text.txt").write_text(str(config.steps))
        (Path(__file__).parent / "done.txt").write_text(done.read_text())


def fail(kind):
    print("about to fail", flush=True)
    if kind == "data":
        raise DataError("line 3 of the data is broken")
    if kind == "bug":
        raise ValueError("a bug")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        raise MemoryError
    if kind == "exit":
        sys.exit(3)


@op(version=1, run="toy:ranks", resumable=True)
@frozen(kw_only=True)
class Ranks:
    """Every rank writes its process id beside this file, and waits."""
    seconds: float = field(default=0.0, neutral=True, help="how long")
    output = Text


def ranks(config, stage):
    pids = Path(__file__).parent
    (pids / f"rank-{stage.rank}.pid").write_text(str(os.getpid()))
    end = time.time() + config.seconds
    while time.time() < end:
        if stage.stop_requested():
            (pids / f"rank-{stage.rank}.saved").write_text("saved")
            raise StopRequested("saved")
        time.sleep(0.05)
    if stage.rank == 0:
        (stage.out_dir / "text.txt").write_text(f"{stage.world_size} ranks, threads {os.environ['OMP_NUM_THREADS']}")
'''

JOIN = """
from pathlib import Path
from toy import count_call


def join(config, stage):
    count_call("join")
    texts = [text.path.joinpath("text.txt").read_text() for text in stage.inputs["texts"]]
    joined = glue(texts, config.between)
    (stage.out_dir / "text.txt").write_text(joined)
    stage.log({"join/length": len(joined), "join/weight": config.weight}, step=1)
    stage.figure("plot", Plot())


class Plot:
    def savefig(self, path):
        Path(path).write_bytes(b"a picture")


def glue(texts, between):
    return between.join(texts)
"""

PIPELINE = """
[pipeline]
name = "toy"
ops = ["toy.py"]

[node.a]
op = "make"
text = "hello"

[node.b]
op = "upper"
text = "@a"

[node.c]
op = "join"
texts = ["@a", "@b"]

[node.d]
op = "steps"
text = "@c"
"""

ONE_NODE = """
[pipeline]
name = "toy"
ops = ["toy.py"]

[node.a]
op = "make"
text = "hello"
"""

TWO_RANKS = """
[pipeline]
name = "two-ranks"
ops = ["toy.py"]

[node.r]
op = "ranks"
seconds = 60.0
launch = { kind = "ranks", nproc = 2, threads = 1 }
"""

# How often a node is looked at depends on the machine: without what it uses, a record always holds the same.
WITHOUT_USAGE = "import executor.system.system_metrics; executor.system.system_metrics.FIRST_S = 3600.0"
TRACKED = f"{WITHOUT_USAGE}\nimport sys, executor.cli; sys.exit(executor.cli.main())"
# Importing mlflow takes seconds: most tests go without it.
UNTRACKED = f"""
{WITHOUT_USAGE}
import sys, executor.cli, executor.scheduler.run_loop

class NoPublisher:
    def __init__(self, store, folder, display):
        pass

    def finish(self, give_up, *, stopped=False):
        pass

executor.scheduler.run_loop.Publisher = NoPublisher
executor.tracking.sync_state.is_tracked = lambda record: False  # for what is imported later: `accept`
sys.exit(executor.cli.main())
"""
# Before either of them: other threads than the run loop's fail where they read or write the record.
ONLY_THE_LOOP = """
import threading
from executor.records import run_record
from executor.records.run_record import NodeState, Record

def by_the_loop(call):
    def checked(*arguments, **values):
        thread = threading.current_thread()
        assert thread is threading.main_thread(), f"{call} in {thread.name}"
        return call(*arguments, **values)
    return checked

NodeState.__setattr__ = by_the_loop(NodeState.__setattr__)
run_record.append_lines = by_the_loop(run_record.append_lines)
Record.state = property(
    by_the_loop(lambda record: record.__dict__["state"]), lambda record, state: record.__dict__.update(state=state)
)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int | str) -> bool:
    """Whether a process runs. It may also end between opening and reading its file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Toy:
    """A folder with the op file, a pipeline and a store, and commands on them in processes of their own.

    own: whether a store that is copied there is the user's.
    """

    def __init__(self, folder: Path, pipeline: str = PIPELINE, *, tracked: bool = False, own: bool = True) -> None:
        self.tracked = tracked
        self.folder = folder
        self.store = folder / "runs"
        self.file = folder / "pipeline.toml"
        (folder / "toy.py").write_text(OPS)
        (folder / "toy_join.py").write_text(JOIN)
        self.file.write_text(pipeline)
        if own and self.store.is_dir():
            trust_store(self.store)

    def start(self, *arguments: str, program: str = "", **environment: str) -> subprocess.Popen[str]:
        """Start a command. program: Python code to run instead of the command itself."""
        program = program or (TRACKED if self.tracked else UNTRACKED)
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                program,
                *arguments,
                *([] if "--store" in arguments else ["--store", str(self.store)]),
            ],
            env={**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONSAFEPATH": "1", "COLUMNS": "200", **environment},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def dflow(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, out, errors)

    def has_begun(self) -> bool:
        """Whether the state of a run can be read: the first line of its record is complete."""
        return any(b"\n" in path.read_bytes() for path in self.store.glob("records/*/events.jsonl"))

    def state(self) -> dict[str, Any]:
        """The state of the latest run, read from its record."""
        newest = max(self.store.glob("records/*/events.jsonl"))
        state = Record.load(newest.parent).state
        nodes = {name: {**attrs.asdict(node), "error": node.error} for name, node in state.nodes.items()}
        return {**attrs.asdict(state), "nodes": nodes}

    def caches(self) -> dict[str, tuple[str, str]]:
        """The state and cache word of every node of the latest run."""
        return {name: (node["state"], node["cache"]) for name, node in self.state()["nodes"].items()}

    def text(self, node: str) -> str:
        """The text that a node of the latest run wrote."""
        return (self.store / "objects" / self.state()["nodes"][node]["digest"] / "text.txt").read_text()

    def steps(self) -> list[int]:
        """The steps that an unfinished node `steps` has completed."""
        found = list(self.store.glob("work/*/state/done.txt"))
        return [int(step) for step in found[0].read_text().split()] if found else []

    def calls(self) -> list[str]:
        """The ops that were called since the last call of this method."""
        path = self.folder / "calls.txt"
        called = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return called
