"""The process that sends a run to MLflow beside it: what it says, what comes of its end, and when it ends."""

import fcntl
import os
import signal
import socket
import sqlite3
import sys
import threading
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_ops import ONE_NODE, TRACKED, Toy, is_alive, wait_for
from tracked_toy import client_of, history, ids, newest_record, tracked_toy

from dsl.files import read_lines
from executor.records.run_record import Record
from executor.system.supervisor import Finished
from executor.tracking import publisher, sync_state
from executor.tracking.publisher import Publisher, Report
from executor.tracking.sync_state import lacks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

RUN = "20261122-100000-0000"
LACKS = f"MLflow lacks a part of this run; send it with: dflow sync {RUN}"
ENDED = "the process that sends to MLflow {}; nothing is lost: send it later with `dflow sync {}`"
KILLED = ENDED.format("was killed (signal 9); perhaps this machine ran out of memory", RUN)


class Told:
    """A display that keeps what it is told."""

    def __init__(self):
        self.notes, self.warnings, self.last = [], [], []
        self.note, self.warn, self.say_last = self.notes.append, self.warnings.append, self.last.append


class FakeSender:
    """Gives the answers one after the other, and the last one from then on."""

    def __init__(self, *answers):
        self.answers = answers
        self.sends = 0

    def send(self):
        self.sends += 1
        return self.answers[min(self.sends, len(self.answers)) - 1]


def followed(sender, sends):
    """The reports of the process for a run that ends after `sends` sends."""
    finished = threading.Event()
    told = []
    thread = threading.Thread(target=publisher.follow, args=(sender.send, finished, told.append))
    thread.start()
    wait_for(lambda: sender.sends > sends)
    finished.set()
    thread.join()
    return told


def test_a_warning_is_told_when_it_is_another_one_and_at_the_end(monkeypatch):
    monkeypatch.setattr(publisher, "EVERY_S", 0.01)
    monkeypatch.setattr(publisher, "RETRY_S", 0.01)
    assert followed(FakeSender("away", "away", "full", None), 5) == [
        Report("away", False), Report("full", False), Report(None, False), Report(None, True)
    ]  # fmt: skip
    assert followed(FakeSender(None), 3) == [Report(None, True)]


def test_the_end_of_a_run_does_not_wait_for_the_next_try(monkeypatch):
    monkeypatch.setattr(publisher, "RETRY_S", 3600)
    assert followed(FakeSender("away"), 0) == [Report("away", False), Report("away", True)]


def test_the_report_is_written_once_while_the_rest_is_sent_and_anew_for_a_run_that_went_on(monkeypatch, tmp_path):
    calls, may_end = [], threading.Event()

    def run(*arguments, within_s):
        calls.append(arguments)
        assert may_end.wait(within_s)
        return Finished(len(calls), "", "", within_s)

    monkeypatch.setattr(publisher, "run_module", run)
    writer = publisher.ReportWriter(tmp_path, tmp_path / "records" / RUN)
    writer.begin()
    wait_for(lambda: calls)
    writer.begin()
    may_end.set()
    assert [1, 2] == [writer.written().code, writer.written().code]
    report = ("executor.cli", "report", RUN, "--store", str(tmp_path), "-o", str(writer.file))
    assert [report, report] == calls


# A process in the place of the one that sends. argv: store, record, the executor's process id.
FAKE = """
import json, os, sys, time
from pathlib import Path

folder = Path(sys.argv[2])

def say(warning, is_last=False):
    print(json.dumps({"warning": warning, "is_last": is_last}), flush=True)

def is_told_to_finish():
    return sys.stdin.buffer.raw.read(1) == b"\\n"

with (folder / "pids").open("a") as pids:
    pids.write(f"{os.getpid()}\\n")
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Starts a publisher whose process runs the rest of the program, and has all the time that it needs."""
    monkeypatch.setattr(publisher, "SILENT_S", 3600.0)
    monkeypatch.setattr(publisher, "END_WITHIN_S", 3600.0)
    folder = tmp_path / RUN
    folder.mkdir()

    def start(program):
        monkeypatch.setattr(publisher, "COMMAND", (sys.executable, "-c", FAKE + program))
        told = Told()
        return Publisher(tmp_path, folder, told), told, folder

    return start


def pids_in(folder):
    path = folder / "pids"
    return [int(pid) for pid in path.read_text().split("\n")[:-1]] if path.exists() else []


def test_the_user_is_warned_once_and_told_when_the_server_is_there_again(started):
    program = "say('away'); say('still away'); say(None); say('gone'); is_told_to_finish(); say(None, True)"
    running, told, _ = started(program)
    running.finish(lambda: False)
    again = "MLflow can be reached again and has all of the run so far"
    assert (told.warnings, told.notes, told.last) == (["away", "gone"], [again, again], [])


def test_a_run_that_was_not_sent_whole_ends_with_the_last_warning(started):
    running, told, _ = started("say('away'); is_told_to_finish(); say('still away', True)")
    running.finish(lambda: False)
    assert (told.warnings, told.notes, told.last) == (["away"], [], [f"still away; {LACKS}"])


@pytest.mark.parametrize("stopped", [False, True])
def test_a_send_that_never_ends_holds_the_end_of_a_run_for_a_bounded_time_that_is_told(started, monkeypatch, stopped):
    looks = count()  # a clock that goes on by a second with every look at it
    monkeypatch.setattr(publisher, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    monkeypatch.setattr(publisher, "SILENT_S", 0.0)
    monkeypatch.setattr(publisher, "STOPPED_WITHIN_S" if stopped else "END_WITHIN_S", 8.0)
    running, told, folder = started("time.sleep(3600)")
    wait_for(lambda: pids_in(folder))
    running.finish(lambda: False, stopped=stopped)
    assert (told.notes, told.last) == (["sending the rest to MLflow, for 8 s at most (Ctrl-C: leave it)"], [LACKS])
    assert [is_alive(pid) for pid in pids_in(folder)] == [False]


def test_a_report_that_takes_long_is_named_and_waited_for(started, monkeypatch):
    monkeypatch.setattr(publisher, "END_WITHIN_S", 0.2)
    line = {"warning": None, "is_last": False, "note": "writing the report", "waits": 600.0}
    program = f"print(json.dumps({line}), flush=True); is_told_to_finish(); time.sleep(1); say(None, True)"
    running, told, _ = started(program)
    wait_for(lambda: told.notes)
    running.finish(lambda: False)
    assert (told.notes, told.last) == (["writing the report"], [])


def test_a_writer_says_that_only_its_report_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(publisher, "SILENT_S", 0.05)
    waited, noted, real = [], threading.Event(), publisher.run_module

    def run(*arguments, within_s):
        assert noted.wait(within_s)
        return real(*arguments, within_s=within_s)

    def note():
        waited.append(1)
        noted.set()

    monkeypatch.setattr(publisher, "run_module", run)
    done = publisher.ReportWriter(tmp_path, tmp_path / "no-run", note).written()
    assert done.code and waited == [1]


def test_who_does_not_want_to_wait_for_mlflow_gives_up_and_the_process_is_dead_by_then(started):
    running, told, folder = started("import signal; os.kill(os.getpid(), signal.SIGSTOP)")
    wait_for(lambda: pids_in(folder))
    running.finish(lambda: True)
    assert (told.warnings, told.notes, told.last) == ([], [], [LACKS])
    assert [is_alive(pid) for pid in pids_in(folder)] == [False]


def test_a_process_that_was_killed_is_followed_by_another_one_that_sends_the_rest(started):
    program = """
if len((folder / "pids").read_text().split()) == 1:
    say(None)
    time.sleep(3600)
say(None)
is_told_to_finish()
say(None, True)
"""
    running, told, folder = started(program)
    wait_for(lambda: pids_in(folder))
    os.kill(pids_in(folder)[0], signal.SIGKILL)
    wait_for(lambda: told.notes)
    running.finish(lambda: False)
    assert len(pids_in(folder)) == 2
    assert (told.warnings, told.last) == ([KILLED], [])
    assert told.notes == ["MLflow can be reached again and has all of the run so far"]


def test_a_process_that_breaks_twice_costs_one_warning_and_is_left(started):
    running, told, folder = started("sys.exit(3)")
    wait_for(lambda: len(pids_in(folder)) == 2)
    running.finish(lambda: False)
    assert len(pids_in(folder)) == 2
    what = "ended with exit code 3"
    said = f"the process that sends to MLflow {what}; {LACKS}"
    assert (told.warnings, told.notes, told.last) == ([ENDED.format(what, RUN)], [], [said])


def test_a_process_that_cannot_be_started_is_a_warning(started, monkeypatch, tmp_path):
    monkeypatch.setattr(publisher, "COMMAND", (str(tmp_path / "no python"),))
    told = Told()
    Publisher(tmp_path, tmp_path / RUN, told).finish(lambda: False)
    what = "cannot be started (No such file or directory)"
    said = f"the process that sends to MLflow {what}; {LACKS}"
    assert (told.warnings, told.last) == ([ENDED.format(what, RUN)], [said])


def test_half_a_line_of_a_process_that_was_killed_is_no_answer(started):
    program = """sys.stdout.write('{"warning": null, "is_la'); sys.stdout.flush(); os.kill(os.getpid(), 9)"""
    running, told, _ = started(program)
    running.finish(lambda: False)
    assert (told.warnings, told.last) == (
        [KILLED],
        [f"the process that sends to MLflow was killed (signal 9); {LACKS}"],
    )


def test_the_process_has_nothing_of_the_executor_but_its_errors(started, tmp_path):
    """No lock, and no pipe whose end somebody waits for."""
    program = """
names = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
say(" ".join(sorted(names)), True)
"""
    with (tmp_path / "mine").open("w") as mine:
        os.set_inheritable(mine.fileno(), True)
        running, told, _ = started(program)
        running.finish(lambda: False)
    assert told.warnings == ["0 1 2"]


def following(executor):
    """The process ids of the processes that send an executor's run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == executor.pid and b"executor.tracking.publisher" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def begun(toy, program=""):
    """A run at work, of whose last node MLflow has a part."""
    process = toy.start("run", str(toy.file), "-s", "d.steps=100000", "-s", "d.seconds=0.02", program=program)
    wait_for(lambda: points_sent(toy) > 0)
    return process


def points_sent(toy):
    with closing(sqlite3.connect(f"file:{toy.store / 'mlflow.db'}?mode=ro", timeout=120, uri=True)) as database:
        [(count,)] = database.execute("SELECT COUNT(*) FROM metrics WHERE key = 'steps/loss'")
    return count


def is_whole(toy):
    """Every run and every point is there once."""
    record = newest_record(toy)
    runs = client_of(toy).search_runs(["1"])
    assert sorted(run.data.tags.get("dflow.node", "") for run in runs) == ["", "a", "b", "c", "d"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    events = read_lines(record / "events.jsonl")
    points = [event for event in events if (event["node"], event["kind"]) == ("d", "metric")]
    expected = [(point["step"], point["metrics"]["steps/loss"], int(point["time"] * 1000)) for point in points]
    assert expected == history(client_of(toy), ids(record)[1]["d"], "steps/loss")
    assert not lacks(Record.load(record))


def test_a_run_goes_on_when_the_process_is_killed_and_the_next_one_sends_all_once(tmp_path):
    toy = tracked_toy(tmp_path)
    process = begun(toy)
    (first,) = following(process)
    os.kill(first, signal.SIGKILL)
    before = points_sent(toy)
    wait_for(lambda: points_sent(toy) > before)
    (toy.folder / "end").touch()
    out, errors = process.communicate(timeout=300)
    run = newest_record(toy).name
    assert (process.returncode, errors) == (0, f"warning: {KILLED}\n".replace(RUN, run))
    assert "MLflow can be reached again and has all of the run so far" in out
    is_whole(toy)


def test_when_the_next_one_is_killed_too_sync_sends_the_rest_once(tmp_path):
    toy = tracked_toy(tmp_path)
    process = begun(toy)
    first = following(process)
    os.kill(first[0], signal.SIGKILL)
    wait_for(lambda: following(process) not in ([], first))
    os.kill(following(process)[0], signal.SIGKILL)
    (toy.folder / "end").touch()
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, lacks(Record.load(newest_record(toy)))) == (0, True)
    what, run = "the process that sends to MLflow was killed (signal 9)", newest_record(toy).name
    assert errors == f"warning: {KILLED}\n".replace(RUN, run)
    assert out.endswith(f"\n{what}; {LACKS}\n".replace(RUN, run))
    assert toy.dflow("sync").returncode == 0
    is_whole(toy)


def test_no_such_process_outlives_an_executor_that_was_killed_alone(tmp_path):
    toy = tracked_toy(tmp_path)
    process = begun(toy)
    (first,) = following(process)
    process.kill()
    wait_for(lambda: not is_alive(first))
    process.communicate()
    (toy.folder / "end").touch()
    assert toy.dflow("resume").returncode == 0
    is_whole(toy)


def test_whoever_sends_a_run_is_the_only_one(tmp_path, monkeypatch):
    """By a lock of its own: that of an executor that was killed is free before its publisher is dead."""

    def is_free():
        with (newest_record(toy) / "mlflow.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    toy = tracked_toy(tmp_path)
    process = begun(toy)
    assert not is_free()
    process.kill()
    process.communicate()
    wait_for(is_free)
    monkeypatch.setattr(
        sync_state, "new_replay", lambda *_, **__: SimpleNamespace(send=lambda: str(is_free()), counts={})
    )
    assert sync_state.send_rest(toy.store, newest_record(toy)) == ("False", {})


def test_signals_to_all_processes_leave_it_to_send_how_the_run_ended(tmp_path):
    toy = tracked_toy(tmp_path)
    process = begun(
        toy,
        program=f"import executor.tracking.publisher; executor.tracking.publisher.STOPPED_WITHIN_S = 120.0\n{TRACKED}",
    )
    (first,) = following(process)
    assert os.getpgid(first) == first
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(first, number)
    process.terminate()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "warning" not in errors
    assert not lacks(Record.load(newest_record(toy)))
    assert client_of(toy).get_run(ids(newest_record(toy))[0]).info.status == "KILLED"


def test_no_secret_of_a_tracking_uri_is_in_the_process_list(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://me:${{secret:MY_PASSWORD}}@127.0.0.1:{silent.getsockname()[1]}"
        toy = Toy(tmp_path, ONE_NODE + f'seconds = 60.0\n[mlflow]\ntracking_uri = "{uri}"\n', tracked=True)
        process = toy.start("run", str(toy.file), MY_PASSWORD="open-sesame")
        silent.accept()[0].close()  # it has the whole address now
        (first,) = following(process)
        shown = Path(f"/proc/{first}/cmdline").read_bytes()
        process.kill()
        process.communicate()
    assert b"executor.tracking.publisher" in shown
    assert b"sesame" not in shown
