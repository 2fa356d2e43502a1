"""Stores and remotes made to do harm: no command fails by a traceback, and none reads or changes what lies beside.

`DFLOW_FUZZ_SECONDS=3600 pytest -s tests/security/test_fuzz.py` tries new ones for an hour; DFLOW_FUZZ_SEED repeats it.
"""

from __future__ import annotations

import base64
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from link_canary import look
from stores_of_strangers import NOTES, SECRET, THEIRS, Change, Home, changes, noted_commit

from dsl.errors import DflowError
from executor.cli import main

SECONDS = float(os.environ.get("DFLOW_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("DFLOW_FUZZ_SEED", random.randrange(2**32) if SECONDS else 0))
AT_ONCE = 1000 if SECONDS else 100  # examples of one search; the next one has another seed
LONGEST_S = 120  # of a command: a report asks a process, which a busy machine starts slowly
TRACEBACK = b"Traceback (most recent call last)"  # also of a process that a command starts
HIDDEN = (SECRET.encode(), base64.b64encode(b"\x89PNG\r\n\x1a\n" + SECRET.encode()), base64.b64encode(SECRET.encode()))
COMMANDS = [
    "runs", "runs --json", "status", "status --json", "status --paths", "status RUN", "status FAILED --json",
    "report -o PAGE", "report RUN RUN2 -o PAGE", "report FAILED -o PAGE", "doctor --verify", "doctor --verify --quick",
    "doctor --full --verify RUN", "gc", "gc --json --keep 0", "gc --delete --keep 0", "gc --delete --keep 1 --pulled",
    "gc --usage", "gc --usage --json", "diff", "diff RUN RUN2 --json", "plan FILE --why c", "plan FILE --why d --json",
    "logs RUN a", "logs RUN2 c -n 2", "logs FAILED d", "runs --tag kept RUN", "runs --untag best2", "runs --untag best",
    "rm RUN --yes", "rm FAILED --yes", "push REMOTE RUN", "push REMOTE", "pull REMOTE FILE",
    "pull REMOTE FILE --store OTHER", "pull REMOTE FILE --store OTHER", "pull STORE FILE --store OTHER",
    "pull REMOTE RUN", "plan FILE", "plan FILE --json", "plan FILE --graph", "accept FILE c --reason x --yes",
    "resume UNTRACKED", "resume RUN UNTRACKED", "resume FAILED UNTRACKED", "run FILE UNTRACKED",
    "run FILE --to b -s a.text=fresh UNTRACKED", "sync", "sync RUN", "serve RUN", "diagnose RUN",
    *(f"{command} --store THEIRS" for command in (
        "runs", "status", "status RECEIVED --json", "report -o PAGE", "report RECEIVED -o PAGE",
        "doctor --verify --full", "gc", "gc --usage", "diff", "plan FILE --why c", "logs RECEIVED a", "plan FILE",
        "plan FILE --graph", "resume RECEIVED", "gc --delete", "run FILE UNTRACKED", "sync", "serve RECEIVED --check",
        "push REMOTE", "pull REMOTE FILE", "rm RECEIVED --yes",
    )),
    "pull THEIRS FILE --store OTHER",
]  # fmt: skip
EXIT_CODES = {
    "plan FILE --why c": 0, "accept FILE c --reason x --yes": 0, "resume FAILED UNTRACKED": 0,
    "run FILE --to b -s a.text=fresh UNTRACKED": 0, "run FILE UNTRACKED": 0,
    "status --store THEIRS": 0, "report RECEIVED -o PAGE --store THEIRS": 0, "doctor --verify --full --store THEIRS": 0,
    "diff --store THEIRS": 0, "resume RECEIVED --store THEIRS": 2, "resume RECEIVED --from a --store THEIRS": 2,
    "sync --store THEIRS": 2, "serve RECEIVED --check --store THEIRS": 2, "diagnose RECEIVED --store THEIRS": 2,
    "gc --delete --store THEIRS": 2, "push REMOTE --store THEIRS": 2, "run FILE UNTRACKED --store THEIRS": 2,
}  # fmt: skip
SLOW = ["doctor", "doctor --json", "doctor FILE"]  # libraries are imported; only tried for as long as is asked for


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "home" / "state"))
        made = Home(folder / "home")
        shutil.copytree(made.folder, folder / "as made", symlinks=True)
        yield made


class OutOfTime(BaseException):
    """Ends a command that takes too long. No Exception, so that the tested code does not catch it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again each second, if something caught it after all
    try:
        yield
    except OutOfTime:
        raise AssertionError(f"took longer than {seconds} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def restore(home: Home) -> None:
    shutil.rmtree(home.folder)
    shutil.copytree(home.folder.with_name("as made"), home.folder, symlinks=True)


def arguments(home: Home, command: str) -> list[str]:
    records = (*home.runs, home.received)
    names = dict(zip(("RUN", "RUN2", "FAILED", "RECEIVED"), (record.run for record in records), strict=True))
    words = names | {
        "THEIRS": str(home.theirs.store),
        "PAGE": str(home.page), "REMOTE": str(home.remote), "OTHER": str(home.other), "FILE": str(home.toy.file),
        "STORE": str(home.toy.store),
    }  # fmt: skip
    given = [words.get(word, word) for word in command.replace("UNTRACKED", "-s mlflow.tracking=false").split()]
    return given if "--store" in given else [*given, "--store", str(home.toy.store)]


def try_commands(home: Home, capsysbinary, made: list[Change], commands: list[str]) -> list[object]:
    """Run commands one after the other on a changed copy of the home. Returns their exit codes."""
    restore(home)
    codes: list[object] = []
    before = look(home.canary)
    for change in made:
        change.apply(home.stores, home.canary)
    for command in commands:
        capsysbinary.readouterr()
        sys.modules.pop(THEIRS, None)  # importing it once more would show no more
        with within(LONGEST_S):
            try:
                code = main(arguments(home, command))
            except SystemExit as end:
                code = end.code
        said = capsysbinary.readouterr()
        codes.append(code)
        assert code in (0, 1, 2), command
        assert code == 0 or said.out or said.err, f"{command} does not say why it failed"
        shown = said.out + said.err  # bytes: `logs` shows a log as it is
        assert not [hidden for hidden in (*HIDDEN, TRACEBACK) if hidden in shown], f"{command}: {said}"
    assert look(home.canary) == before, commands
    contents = [path.read_bytes() for place in (home.page, home.remote, home.other) for path in written(place)]
    assert not [hidden for hidden in HIDDEN for content in contents if hidden in content], commands
    assert not [page for page in written(home.page) if TRACEBACK in page.read_bytes()], commands
    return codes


def written(place: Path) -> list[Path]:
    """The plain files at or below a place; links are left out."""
    files = (place, *place.rglob("*")) if place.is_dir() else (place,)
    return [path for path in files if not path.is_symlink() and path.is_file()]


def search(capsysbinary, one: Callable[..., None], *strategies: SearchStrategy) -> None:
    """Call a function on generated examples: the same few each time, or new ones for DFLOW_FUZZ_SECONDS."""
    number, end = SEED, time.monotonic() + SECONDS
    while True:
        if SECONDS:
            with capsysbinary.disabled():
                print(f"DFLOW_FUZZ_SEED={number} {time.strftime('%H:%M:%S')}", flush=True)
        how = settings(
            max_examples=AT_ONCE,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[*HealthCheck],
        )
        seed(number)(how(given(*strategies)(one)))()
        number += 1
        if time.monotonic() > end:
            return


def test_no_command_is_harmed_by_a_store_or_a_remote(home, capsysbinary):
    def one(made, commands):
        try_commands(home, capsysbinary, made, commands)

    commands = [*COMMANDS, *SLOW] if SECONDS else COMMANDS
    search(capsysbinary, one, changes(), st.lists(st.sampled_from(commands), min_size=1, max_size=3))


def test_an_untouched_store_is_used_and_what_a_stranger_left_in_it_is_refused(home, capsysbinary):
    """Without changes the commands get as far as they should, or the search would try little."""
    assert try_commands(home, capsysbinary, [], [*EXIT_CODES]) == [*EXIT_CODES.values()]


def test_a_commit_that_somebody_else_noted_harms_nothing(home, capsysbinary):
    """A run, or a pull, that finds a work folder completes what was about to be committed there."""

    def one(made, is_sealed):
        restore(home)
        before = look(home.canary)
        store, key = noted_commit(home.folder / "noted", is_sealed)
        for change in made:
            change.apply([store.path / "work"], home.canary)
        with within(LONGEST_S), suppress(DflowError), store.lease(key, "another") as lease:
            lease.acquire(print)
            store.finish_commit(lease, key)
        assert look(home.canary) == before
        assert not [path for path in written(store.path / "objects") if SECRET.encode() in path.read_bytes()]

    search(capsysbinary, one, changes(NOTES), st.booleans())
