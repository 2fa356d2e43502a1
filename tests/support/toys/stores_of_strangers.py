"""A small store, a remote and a canary folder beside them, and what a stranger may have done to the first two.

Strategies give `Change`s, plain values that are applied to a copy; hypothesis shrinks them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from imitated_runs import dflow, edit, run, toy_pipeline
from manifests import made
from toy_ops import JOIN, OPS, PIPELINE, Toy

from dsl.files import append_line, write_json
from executor.records.events import Event, Figure, Info, Metric, Progress, Warned
from executor.records.run_record import Record
from executor.store.artifact_store import COMMIT, Store
from executor.store.commit_journal import PendingCommit
from executor.tracking.sync_state import SentPart, SentRun

SECRET = "words-that-nobody-may-read"
CANARY = "<canary>"  # in strategies; its folder's path where a change is applied
THEIRS = "their_ops"  # the module of a stranger's op file
NO_SERVER = "http://127.0.0.1:9"
# The ops of a real stage find their files where imitated runs write them.
OWN_OPS, OWN_JOIN = (
    text.replace('"text.txt"', '"sub/text.txt"').replace("(stage.out_dir /", "(with_sub(stage.out_dir) /")
    for text in (OPS, JOIN.replace("import count_call", "import count_call, with_sub"))
)
OWN_OPS += """

def with_sub(folder):
    (folder / "sub").mkdir(exist_ok=True)
    return folder
"""
PNG = b"\x89PNG\r\n\x1a\n"
DIGEST = "5" * 64  # a name in the canary folder

# A path out of the store from the folder of an artifact, of a record, of a work folder and of the store.
ESCAPES = [f"{'../' * ups}canary/{name}" for ups in (1, 2, 3, 4) for name in (DIGEST, "secret.txt", "secret", "")]
TEXTS = [
    "", ".", "..", "/", "~", CANARY, f"{CANARY}/secret.txt", f"{CANARY}/secret", *ESCAPES, "a\0b", "x" * 300,
    "x" * 5000, "\x1b[31mred", "one\ndflow: another", "\ud800", "\u202etxt", "@a", "@", "a/b", "a\\b",
    "${secret:HOME}", "-rf", "=1+1", "nan", "done", "running", "failed", "hit", "miss", "accepted", "pulled", DIGEST,
    DIGEST.upper(), f"{DIGEST}\n", "20260101-000000-abcd", "file:///etc/passwd", "<script>alert(1)</script>",
    "{{ 7 * 7 }}", "%s%n", "1" * 400, "toy:make", "../toy.py", "make", "steps", "ü", "\u2028", "\r", "\t",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")]
RAW = [
    b"", b"\n", b"\0", b"\0" * 4096, b"\xff\xfe\x00", b"{", b"}", b"[]", b"{}", b"null", b'"text"', b"1e999", b"nan",
    b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b'{"a": ' + b"1" * 5000 + b"}", b'{"a":1,"a":2}',
    b"\xef\xbb\xbf{}", b'{"digest":"../../canary","run":"r","time":0}\n', b'"\\ud800"', b"{}\n{}\n", b"{'a': 1}",
    b"\x80PNG", PNG,
]  # fmt: skip
LINKS = [
    CANARY, f"{CANARY}/secret.txt", f"{CANARY}/{DIGEST}", "../../canary", "../../../canary/secret.txt", "nowhere",
    ".", "..", "/dev/zero", "/proc/self/environ", "",
]  # fmt: skip
NAMES = [
    DIGEST, f"{DIGEST}.damaged", f".gone-{DIGEST}-1", f".gone-{DIGEST}-1\n", f".{DIGEST}.{'8' * 32}",
    "20260101-000000-abcd", "99991231-235959-ffff", "99991231-235959-ffff\n", "x" * 255, "-rf", ".", "a\nb",
    "\x1b[31m", "ü", "events.jsonl", "serving-1", ".tmp", "manifest.json", "tags.json", "commit.json", "actors-1",
    "\udcff",
]  # fmt: skip
# Files of the store and of the remote; rglob follows no links.
PATTERNS = [
    "*", "*", "records/*/*", "records/*", "state.jsonl", "events.jsonl", "events.jsonl", "graph.json", "graph.json",
    "plan.json", "events.jsonl", "events.jsonl", "tags.json", "mlflow.json", "manifest.json", "manifest.json",
    "index/*", "index/*/*", "objects/*", "objects/*/*", "work/*", "work/*/*", "lease", "format", "*.log", "figures/*",
    "outside_digest/*",
]  # fmt: skip
# Of a work folder whose stage ended, but whose commit did not.
NOTES = ["ended.json", "ended.json", "ended.json", "commit.json", "commit.json", "lease", "out-*", "text.txt", "ranks"]
SPECIAL = ["folder", "full folder", "pipe", "gone", "unreadable"]


class Home:
    """A user's home, with the user's store, a remote, another store, a stranger's store, and a canary folder.

    They are home/mine with the toy's pipeline and store, home/remote, home/other and home/theirs. The stranger's op
    file writes into home/canary when it is imported, and the stranger's MLflow database would be created there. The
    user's state folder must be home/state. The code of the user's op file changed since the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary = folder / "canary"
        self.toy = toy_pipeline(folder / "mine")
        self.remote = folder / "remote"
        self.page = folder / "page.html"
        self.sweep = folder / "mine" / "sweep.toml"
        (self.canary / DIGEST / "sub").mkdir(parents=True)
        for name in (
            "secret.txt",
            "secret",
            "a.log",
            "events.jsonl",
            "plot.png",
            f"{DIGEST}/manifest.json",
            f"{DIGEST}/sub/x",
        ):
            (self.canary / name).write_bytes(
                PNG + SECRET.encode() if name.endswith("png") else f'"{SECRET}"\n'.encode()
            )
        self.theirs, self.received = self._received()
        shutil.rmtree(folder / "state")
        ops = self.toy.folder / "toy.py"
        ops.write_text(OWN_OPS)
        joining = ops.with_name("toy_join.py")
        joining.write_text(OWN_JOIN)
        self.toy.file.write_text(f'{PIPELINE}\n[mlflow]\ntracking_uri = "{NO_SERVER}"\n')
        self.runs = [
            done(self.toy),
            done(self.toy, "c.weight=2.0"),
            run(self.toy, "a.text=new", fail_at="d", contents="y"),
        ]
        assert dflow(self.toy, "push", str(self.remote), self.runs[0].run) == 0
        assert dflow(self.toy, "runs", "--tag", "best", self.runs[1].run) == 0
        joining.write_text(OWN_JOIN.replace("return between.join(texts)", "return str(between).join(texts)"))

    def _received(self) -> tuple[Toy, Record]:
        theirs = toy_pipeline(self.folder / "theirs")
        ops = theirs.folder / f"{THEIRS}.py"
        ops.write_text(OPS.replace("toy:", f"{THEIRS}:"))
        database = f'tracking_uri = "sqlite:///{self.canary}/mlflow.db"'
        theirs.file.write_text(f"{PIPELINE.replace('toy.py', ops.name)}\n[mlflow]\n{database}\n")
        done(theirs)
        record = run(theirs, "a.text=theirs", fail_at="d")
        ops.write_text(f"open({str(self.canary / 'ran')!r}, 'w').close()\n{ops.read_text()}")
        return theirs, record

    @property
    def stores(self) -> tuple[Path, ...]:
        """The stores that a stranger may change, and the remote."""
        return self.toy.store, self.theirs.store, self.remote

    @property
    def other(self) -> Path:
        return self.folder / "other"


def noted_commit(folder: Path, is_sealed: bool) -> tuple[Store, str]:
    """A store with a work folder whose commit is pending, and its key.

    is_sealed: with the later of the two notes as well.
    """
    store = Store.open(folder, write=True)
    with store.lease(DIGEST, "20260101-000000-abcd") as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "text.txt").write_text("text")
        manifest, line = made(DIGEST, "20260101-000000-abcd")
        PendingCommit(lease.out_dir, manifest, line).write(lease.folder)
        if is_sealed:
            write_json(lease.folder / COMMIT, {**line.to_json(), "digest": DIGEST, "out": lease.out_dir.name})
    return store, DIGEST


def done(toy: Toy, *overrides: str) -> Record:
    """Run the toy with everything that a record may hold."""
    record = run(toy, *overrides)
    at = record.state.started
    for node, body in (
        ("a", Metric(0, {"make/length": 5.0, "make/b_low": 1.0})),
        ("a", Progress(1, 2)),
        ("a", Info("a note")),
        ("b", Warned("a warning")),
        ("c", Figure("plot", str(record.figures_path("c") / "plot.png"))),
    ):
        append_line(record.events_path, Event(at + 1, node, 1, body).to_json())
    for node in record.state.nodes:
        record.log_path(node).write_text(f"the log of {node}\n")
    (record.folder / "figures" / "c").mkdir(parents=True)
    (record.folder / "figures" / "c" / "plot.png").write_bytes(PNG)
    SentRun("1", "2", nodes={"a": SentPart("3")}).write(record.folder)
    return record


@frozen
class Change:
    """A change of one of the files or folders that a pattern matches; `place` selects it, modulo their number."""

    pattern: str
    place: int
    do: Callable[[Path, Path], None]
    text: str

    def __repr__(self) -> str:
        return f"{self.pattern} {self.place}: {self.text}"

    def apply(self, roots: Sequence[Path], canary: Path) -> None:
        found = sorted(
            path for root in roots if root.is_dir() for path in root.rglob(self.pattern) if _is_below(path, root)
        )
        if found:
            self.do(found[self.place % len(found)], canary)


def changes(patterns: Sequence[str] = PATTERNS) -> SearchStrategy[list[Change]]:
    in_json = st.builds(
        _json_change, st.integers(0, 400), st.sampled_from(["set", "drop", "add", "copy"]), values(), texts()
    )
    kinds = st.one_of(
        in_json,
        in_json,
        in_json,
        st.builds(_raw_change, st.sampled_from(RAW)),
        st.builds(_raw_change, st.binary(max_size=60)),
        st.builds(_cut_change, st.integers(1, 400)),
        st.builds(_line_change, st.integers(0, 20), st.sampled_from(["twice", "first", "gone"])),
        st.builds(_append_change, values()),
        st.builds(_link_change, st.sampled_from(LINKS)),
        st.builds(_name_change, st.sampled_from(NAMES), st.booleans()),
        st.builds(_special_change, st.sampled_from(SPECIAL)),
    )
    one = st.builds(
        lambda pattern, place, kind: Change(pattern, place, *kind), st.sampled_from(patterns), st.integers(0, 60), kinds
    )
    return st.lists(one, min_size=1, max_size=4)


def texts() -> SearchStrategy[str]:
    return st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))


def values() -> SearchStrategy[Any]:
    plain = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.integers(), texts())
    return st.one_of(
        plain,
        st.recursive(
            plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(), inner, max_size=3), max_leaves=6
        ),
    )


Step = tuple[Callable[[Path, Path], None], str]


def _json_change(place: int, how: str, value: Any, name: str) -> Step:
    def do(path: Path, canary: Path) -> None:
        lines = _lines(path)
        found = [(line, way) for line, text in enumerate(lines) for way in _ways(text)]
        if not found:
            return
        line, way = found[place % len(found)]
        lines[line] = _changed(lines[line], way, how, _at(canary, value), _at(canary, name))
        edit(path, "".join(f"{json.dumps(each)}\n" for each in lines))

    return do, f"json {how} at {place}: {value!r} {name!r}"


def _lines(path: Path) -> list[Any]:
    """The values of a JSON file, or of a file of JSON lines."""
    try:
        text = path.read_text() if _is_own(path) else ""
        try:
            return [json.loads(text)]
        except ValueError:
            return [json.loads(line) for line in text.splitlines()]
    except (ValueError, RecursionError, OSError):
        return []


def _ways(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to every member of a JSON value at any depth, and to the value itself."""
    yield way
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        yield from _ways(member, (*way, name))


def _changed(whole: Any, way: Sequence[Any], how: str, value: Any, name: str) -> Any:
    if not way:
        return {**whole, name: value} if how == "add" and isinstance(whole, dict) else value
    *above, last = way
    inner = whole
    for step in above:
        inner = inner[step]
    if how == "drop":
        del inner[last]
    elif how == "add" and isinstance(inner[last], dict):
        inner[last][name] = value
    elif how == "copy" and isinstance(inner, dict):
        inner[name] = inner.pop(last)
    else:
        inner[last] = value
    return whole


def _at(canary: Path, value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(CANARY, str(canary))
    if isinstance(value, list):
        return [_at(canary, each) for each in value]
    return {_at(canary, name): _at(canary, each) for name, each in value.items()} if isinstance(value, dict) else value


def _raw_change(data: bytes) -> Step:
    def do(path: Path, canary: Path) -> None:
        if _is_own(path):
            path.chmod(0o644)
            path.write_bytes(data)

    return do, f"holds {data[:40]!r}"


def _cut_change(size: int) -> Step:
    def do(path: Path, canary: Path) -> None:
        if _is_own(path):
            path.chmod(0o644)
            os.truncate(path, max(0, path.stat().st_size - size))

    return do, f"without the last {size} bytes"


def _line_change(place: int, how: str) -> Step:
    def do(path: Path, canary: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True) if _is_own(path) else []
        if not lines:
            return
        line = lines[place % len(lines)]
        if how == "gone":
            lines.remove(line)
        else:
            lines.insert(0 if how == "first" else len(lines), line)
        path.chmod(0o644)
        path.write_bytes(b"".join(lines))

    return do, f"line {place} {how}"


def _append_change(value: Any) -> Step:
    def do(path: Path, canary: Path) -> None:
        if _is_own(path):
            path.chmod(0o644)
            with path.open("a") as file:
                file.write(f"{json.dumps(_at(canary, value))}\n")

    return do, f"and a line {value!r}"


def _link_change(target: str) -> Step:
    def do(path: Path, canary: Path) -> None:
        _remove(path)
        path.symlink_to(_at(canary, target) or path.name)

    return do, f"a link to {target!r}"


def _name_change(name: str, is_copy: bool) -> Step:
    def do(path: Path, canary: Path) -> None:
        target = path.parent / name
        if target.exists() or target.is_symlink():
            return
        if is_copy and path.is_dir() and not path.is_symlink():
            with suppress(shutil.Error):  # of a pipe in it
                shutil.copytree(path, target, symlinks=True)
        elif is_copy and _is_own(path):
            shutil.copy2(path, target, follow_symlinks=False)
        else:
            path.rename(target)

    return do, f"{'copied' if is_copy else 'renamed'} to {name!r}"


def _special_change(kind: str) -> Step:
    def do(path: Path, canary: Path) -> None:
        _remove(path)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind != "gone":
            path.mkdir()
        if kind == "full folder":
            (path / "events.jsonl").write_text("{}\n")
            (path / "manifest.json").mkdir()

    return do, f"a {kind} in its place"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_below(path: Path, root: Path) -> bool:
    """Whether a path is below a root without a link on the way: patterns with several parts follow links."""
    above = path.parent
    return above == root or (not above.is_symlink() and _is_below(above, root))


def _is_own(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
