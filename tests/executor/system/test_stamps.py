"""Stamps of files: any edit of a settled file gives another one."""

import os
import time
from pathlib import Path

import pytest

from executor.system.stamps import SETTLED_AFTER_NS, Stamp, is_settled

NOW = 1_800_000_000.0


def stamp_at(mtime: float, ctime: float) -> Stamp:
    return Stamp(size=1, mtime_ns=int(mtime * 1e9), ctime_ns=int(ctime * 1e9), inode=1)


@pytest.mark.parametrize(
    ("mtime", "ctime", "expected"),
    [
        (NOW - 10, NOW - 10, True),
        (NOW - 1, NOW - 1, False),
        (NOW - 1000, NOW - 1, False),
        (NOW + 1000, NOW - 1000, False),
        (NOW - 1000, NOW + 1000, False),
        (0.0, NOW - 10, True),
    ],
)
def test_a_file_is_settled_when_its_newest_time_is_past_by_more_than_any_grain(
    mtime: float, ctime: float, expected: bool
) -> None:
    assert expected == is_settled(stamp_at(mtime, ctime), NOW)


def test_a_file_just_written_is_not_settled(tmp_path: Path) -> None:
    now = time.time()
    (tmp_path / "a").write_text("x")
    assert not is_settled(Stamp.of(tmp_path / "a"), now)
    assert is_settled(Stamp.of(tmp_path / "a"), time.time() + SETTLED_AFTER_NS / 1e9 + 1)


def test_an_edit_of_the_same_size_with_its_time_put_back_gives_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x")
    before = Stamp.of(path)
    time.sleep(0.05)  # more than the kernel's grain
    path.write_text("y")
    os.utime(path, ns=(before.mtime_ns, before.mtime_ns))
    after = Stamp.of(path)
    assert (before.size, before.mtime_ns, before.inode) == (after.size, after.mtime_ns, after.inode)
    assert before != after


def test_a_link_has_the_stamp_of_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to("a")
    assert Stamp.of(tmp_path / "a") == Stamp.of(tmp_path / "link")
