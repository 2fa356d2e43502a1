"""Who may work on a key."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from toy_ops import PROJECT, wait_for

from dsl.errors import LeaseLost, StoreError
from executor.store import lease as lease_module
from executor.store.lease import Lease, move_away, remove_leftovers, share_ranks


def test_every_holder_gets_the_next_token(tmp_path):
    tokens = []
    for run in ("r1", "r2", "r3"):
        with Lease(tmp_path / "k", run) as lease:
            lease.acquire(print)
            tokens.append((lease.token, lease.last_run))
    assert tokens == [(1, None), (2, "r1"), (3, "r2")]


def test_the_lease_file_says_who_holds_it(tmp_path):
    with Lease(tmp_path / "k", "r1") as lease:
        lease.acquire(print)
        holder = json.loads((tmp_path / "k" / "lease").read_text())
        assert holder == {
            "token": 1, "id": lease.id, "host": os.uname().nodename, "pid": os.getpid(), "run": "r1", "released": False
        }  # fmt: skip
    assert json.loads((tmp_path / "k" / "lease").read_text())["released"] is True


def test_a_second_one_waits_and_says_for_whom(tmp_path):
    said = []
    first, second = Lease(tmp_path / "k", "r1"), Lease(tmp_path / "k", "r2")
    first.acquire(print)
    waiting = threading.Thread(target=second.acquire, args=(said.append,))
    waiting.start()
    wait_for(lambda: said)
    assert second.token == 0
    first.release()
    waiting.join(60)
    assert (second.token, said) == (2, [f"process {os.getpid()} on {os.uname().nodename} (run r1) works on it"])
    second.release()


def test_who_waits_is_not_fooled_by_the_folder_being_removed(tmp_path):
    said = []
    first, second = Lease(tmp_path / "k", "r1"), Lease(tmp_path / "k", "r2")
    first.acquire(print)
    first.empty(keep_state=False)
    (first.work_dir / "shard").write_text("")
    waiting = threading.Thread(target=second.acquire, args=(said.append,))
    waiting.start()
    wait_for(lambda: said)
    first.remove()
    waiting.join(60)
    assert sorted(path.name for path in (tmp_path / "k").iterdir()) == ["lease"]
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
    second.check()
    second.release()


def test_who_asks_is_not_fooled_by_the_folder_being_removed_at_that_moment(tmp_path, monkeypatch):
    first, second = Lease(tmp_path / "k", "r1"), Lease(tmp_path / "k", "r2")
    first.acquire(print)
    mkdir = os.mkdir

    def slow(path, *mode):
        try:
            mkdir(path, *mode)
        except FileExistsError:
            first.remove()
            raise

    monkeypatch.setattr(os, "mkdir", slow)
    assert not second.try_acquire()
    assert second.try_acquire()
    assert second.token == 1
    second.release()


def test_a_lease_of_another_host_is_never_taken_over(tmp_path):
    (tmp_path / "k").mkdir()
    holder = {"token": 4, "host": "elsewhere", "pid": 7, "run": "r0", "released": False}
    (tmp_path / "k" / "lease").write_text(json.dumps(holder))
    with pytest.raises(LeaseLost, match=r"leased by process 7 on elsewhere \(run r0\)"):
        Lease(tmp_path / "k", "r1").acquire(print)
    assert json.loads((tmp_path / "k" / "lease").read_text()) == holder
    (tmp_path / "k" / "lease").write_text(json.dumps({**holder, "released": True}))
    with Lease(tmp_path / "k", "r1") as lease:
        lease.acquire(print)
        assert lease.token == 5


def test_a_killed_holder_loses_its_lease(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from executor.store.lease import Lease\n"
        "lease = Lease(Path(sys.argv[1]), 'r1'); lease.acquire(print); print('held', flush=True)\n"
        "time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "k")], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    with Lease(tmp_path / "k", "r2") as lease:
        lease.acquire(print)
        assert (lease.token, lease.last_run) == (2, "r1")


def test_nobody_starts_while_a_rank_of_an_earlier_attempt_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "LATE_WRITERS_S", 0.2)
    with Lease(tmp_path / "k", "r1") as lease:
        lease.acquire(print)
        rank = share_ranks(lease.folder, lease.token, lease.id)
        with pytest.raises(LeaseLost, match="processes of an earlier attempt still run there"):
            lease.wait_for_ranks()
        os.close(rank)
        lease.wait_for_ranks()


def test_a_rank_that_comes_after_the_next_attempt_began_may_not_start(tmp_path):
    with Lease(tmp_path / "k", "r1") as first:
        first.acquire(print)
    with Lease(tmp_path / "k", "r1") as lease:
        lease.acquire(print)
        with pytest.raises(LeaseLost, match="the lease passed to another attempt"):
            share_ranks(lease.folder, first.token, first.id)
        lease.wait_for_ranks()


def test_the_op_keeps_its_state_but_not_its_output(tmp_path):
    with Lease(tmp_path / "k", "r1") as lease:
        lease.acquire(print)
        for keep, expected in ((True, ["shard"]), (False, [])):
            lease.empty(keep_state=keep)
            (lease.out_dir / "half").write_text("")
            (lease.work_dir / "shard").write_text("")
            lease.empty(keep_state=keep)
            assert [path.name for path in lease.out_dir.iterdir()] == []
            assert [path.name for path in lease.work_dir.iterdir()] == expected


def test_work_of_the_same_key_without_code_is_adopted_unless_somebody_is_on_it(tmp_path):
    old, new, held, other, elsewhere, mine = (tmp_path / (letter * 64) for letter in "012345")
    for folder, run in ((old, "r1"), (new, "r2"), (held, "r3"), (other, "r4")):
        with Lease(folder, run) as lease:
            lease.acquire(print)
            lease.empty(keep_state=False)
            (lease.work_dir / f"of {run}").write_text("")
            (folder / "work.json").write_text(json.dumps({"key_without_code": "x" if folder != other else "y"}))
    shutil.copytree(new, elsewhere)
    holder = {"token": 1, "host": "elsewhere", "pid": 7, "run": "r0", "released": False}
    (elsewhere / "lease").write_text(json.dumps(holder))
    removed = tmp_path / f".{new.name}.{'7' * 32}"
    shutil.copytree(new, removed)  # its process was killed while it removed the folder
    strange = [tmp_path / name for name in ("new", f".{new.name}.1.7", ".snapshot")]
    for folder in strange:
        shutil.copytree(new, folder)
    (tmp_path / ".locks.1").write_text("")
    (tmp_path / "stray").write_text("")
    for age, folder in enumerate((removed, *strange, elsewhere, held, new, old)):
        os.utime(folder / "work.json", (1000 - age, 1000 - age))
    with (held / "lease").open("r+") as lock, Lease(mine, "r5") as lease:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lease.acquire(print)
        assert lease.continue_from("x") == "r2"
        assert [path.name for path in lease.work_dir.iterdir()] == ["of r2"]
    remove_leftovers(tmp_path)
    stay = {old, held, other, elsewhere, mine, *strange, tmp_path / ".locks.1", tmp_path / "stray"}
    assert set(tmp_path.iterdir()) == stay


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_the_place_of_a_lease_is_named(make, tmp_path):
    make(tmp_path / "lease")
    for take in (lambda: Lease(tmp_path, "run").try_acquire(), lambda: move_away(tmp_path)):
        with pytest.raises(StoreError, match="lease is not a lease of dflow but a folder or a pipe; remove it"):
            take()
