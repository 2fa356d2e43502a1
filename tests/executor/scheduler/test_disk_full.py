"""A full disk gives one clear error; after space is freed, resuming completes the run and redoes nothing committed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from full_disk import LAYER, REFUSING, can_mount, make_read_only, mount, resize, unmount
from toy_ops import Toy

from dsl import files
from dsl.errors import DiskFull, StoreError
from dsl.files import append_line, clear_errors, is_full, read_json_or_none, read_lines, write_json

OPS = '''
from pathlib import Path
from attrs import frozen
from dsl.op import Artifact, field, op


@frozen
class Data(Artifact):
    """data.bin"""


@op(version=1, run="toy:fill")
@frozen(kw_only=True)
class Fill:
    """Writes so many bytes."""
    kib: int = field(default=4, help="how much")
    after: Data | None = None
    output = Data


def fill(config, stage):
    with (Path(__file__).parent / "calls.txt").open("a") as file:
        file.write(f"{config.kib}\\n")
    with (stage.out_dir / "data.bin").open("wb") as file:
        for _ in range(config.kib):
            file.write(b"x" * 1024)
'''

PIPELINE = """
[pipeline]
name = "full"
ops = ["toy.py"]

[node.small]
op = "fill"

[node.large]
op = "fill"
kib = {kib}
after = "@small"
"""


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small disk"
    if not can_mount(folder):
        pytest.skip("this user may not mount a file system")
    mount(folder, "400k")
    yield folder
    unmount(folder)


def toy_on(folder, store, kib):
    toy = Toy(folder, PIPELINE.format(kib=kib))
    (folder / "toy.py").write_text(OPS)
    toy.store = store
    return toy


def clear_lines(text):
    return [line for line in text.splitlines() if "disk full at " in line]


def lines_of_index(toy):
    return [len(read_lines(path)) for path in (toy.store / "index").iterdir()]


def test_a_stage_that_fills_the_disk_says_so_and_is_done_after_space_was_freed(tmp_path, small_disk):
    toy = toy_on(tmp_path, small_disk / "runs", 2000)
    full = toy.dflow("run", str(toy.file))
    assert 1 == full.returncode
    assert clear_lines(full.stderr), full.stderr
    assert "free space there" in full.stderr
    assert "choose another --store; then `dflow resume --store 'small disk/runs'`" in full.stderr
    resize(small_disk, "8m")
    assert (["4", "2000"], 0) == (toy.calls(), toy.dflow("resume").returncode)
    assert (["2000"], [1, 1]) == (toy.calls(), lines_of_index(toy))
    assert [] == list((toy.store / "work").iterdir())


def test_a_disk_that_is_full_before_the_first_byte_is_one_line(tmp_path, small_disk):
    with (small_disk / "rest").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    toy = toy_on(tmp_path, small_disk / "runs", 4)
    full = toy.dflow("run", str(toy.file))
    assert 1 == full.returncode
    assert 1 == len(full.stderr.splitlines()), full.stderr
    assert full.stderr.startswith(f"dflow: disk full at {small_disk}")
    (small_disk / "rest").unlink()
    assert 0 == toy.dflow("run", str(toy.file)).returncode


def test_a_read_only_store_is_one_line(tmp_path, small_disk):
    toy = toy_on(tmp_path, small_disk / "runs", 8)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    make_read_only(small_disk)
    for command in (["run", str(toy.file)], ["resume"]):
        refused = toy.dflow(*command)
        assert (1, 1) == (refused.returncode, len(refused.stderr.splitlines())), refused.stderr
        assert "its file system is read-only; choose another --store" in refused.stderr
    for command in (["status"], ["plan", str(toy.file)]):
        assert 0 == toy.dflow(*command).returncode


def test_a_store_on_another_file_system_than_the_temporary_folder_is_used_as_any_other(tmp_path, small_disk):
    """Its name has a space, and it is reached by a link."""
    (tmp_path / "größer").symlink_to(small_disk)
    toy = toy_on(tmp_path, tmp_path / "größer" / "läufe und mehr", 8)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    assert ["4", "8"] == toy.calls()


def refused_after(toy, count, *arguments):
    """The command on a disk that is full after so many writes of the executor: its exit status, and what it said."""
    told = {"UNDER": toy.store, "AFTER": count, "COUNT": toy.folder / "count"}
    environment = {f"DFLOW_FULL_{name}": str(value) for name, value in told.items()}
    process = toy.start(*arguments, program=REFUSING, **environment)
    out, errors = process.communicate(timeout=300)
    return process.returncode, out + errors


def refused_once(folder, count):
    toy = toy_on(folder, folder / "runs", 8)
    code, said = refused_after(toy, count, "run", str(toy.file))
    if int((toy.folder / "count").read_text()) <= count:  # this run wrote less than the one that was counted
        assert 0 == code, (count, said)
        return
    assert 1 == code, (count, said)
    assert clear_lines(said), (count, said)
    assert "Traceback" not in said, (count, said)
    has_record = any(toy.store.glob("records/*/events.jsonl"))
    assert 0 == toy.dflow(*(["resume"] if has_record else ["run", str(toy.file)])).returncode, count
    assert [1, 1] == lines_of_index(toy), count
    assert 0 == toy.dflow("gc", "--delete").returncode
    assert [] == list((toy.store / "work").iterdir())


@pytest.mark.parametrize(("count", "expected", "tried"), [(0, 1, 1), (2, 1, 3), (3, 0, 3), (4, 0, 3)])
def test_a_run_that_was_refused_a_write_tried_more_than_it_was_granted(tmp_path, count, expected, tried):
    """How often the executor asks for a lock depends on the machine: a run may need just what it is granted."""
    program = f"{LAYER}\nfor name in 'abc': os.mkdir(UNDER + name)"
    told = {"UNDER": tmp_path / "under", "AFTER": count, "COUNT": tmp_path / "count"}
    environment = {f"DFLOW_FULL_{name}": str(value) for name, value in told.items()}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert (expected, str(tried)) == (done.returncode, (tmp_path / "count").read_text()), done.stderr


def test_no_write_of_the_executor_is_refused_in_vain(tmp_path):
    """A tenth of the writes of a run; the others in the slow test."""
    refused_at_each(tmp_path, every=10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_write_at_all_of_the_executor_is_refused_in_vain(tmp_path):
    refused_at_each(tmp_path, every=1)


def refused_at_each(folder, *, every):
    (folder / "whole").mkdir()
    toy = toy_on(folder / "whole", folder / "whole" / "runs", 8)
    assert 0 == refused_after(toy, 10**6, "run", str(toy.file))[0]
    writes = int((toy.folder / "count").read_text())
    assert writes > 10
    for count in range(every // 2, writes, every):
        (folder / str(count)).mkdir()
        refused_once(folder / str(count), count)


def test_a_line_that_found_room_for_half_of_it_is_no_line_and_the_next_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda descriptor, data: real(descriptor, data[: len(data) // 2]))
    with pytest.raises(DiskFull, match=r"disk full at .*lines\.jsonl"):
        append_line(path, {"number": 1})
    monkeypatch.undo()
    append_line(path, {"number": 2})
    assert [{"number": 2}] == read_lines(path)


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    write_json(path, 1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(DiskFull):
        write_json(path, 2, durable=True)
    assert (1, ["value.json"]) == (read_json_or_none(path), [found.name for found in tmp_path.iterdir()])


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.ENOSPC, DiskFull, "free space there"),
        (errno.EDQUOT, DiskFull, "free space there"),
        (errno.EROFS, StoreError, "read-only"),
        (errno.EACCES, StoreError, "no permission"),
        (errno.ENOENT, StoreError, "its folder is gone"),
        (errno.EIO, StoreError, os.strerror(errno.EIO)),
    ],
)
def test_what_a_file_system_refuses_is_said_with_the_path_and_what_to_do(tmp_path, number, kind, text):
    with pytest.raises(StoreError, match=text) as caught, clear_errors(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert str(tmp_path / "file") in str(caught.value)


def test_a_full_disk_is_known_by_its_number_its_words_and_what_an_error_came_from():
    caused = RuntimeError("unexpected pos 704 vs 598")
    caused.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    others = [None, ValueError("no"), OSError(errno.EIO, "no")]
    words = RuntimeError("I/O error: No space left on device (os error 28)")
    assert [True, True, True] == [is_full(error) for error in (caused, caused.__cause__, words)]
    assert [False, False, False] == [is_full(error) for error in others]
