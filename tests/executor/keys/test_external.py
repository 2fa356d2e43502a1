"""Digests of external inputs: by content, hashed once, never taken from a memo after an edit."""

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsl.errors import DataError
from executor.keys.external_inputs import ExternalDigests, folder_digest
from executor.keys.node_key import Sources
from executor.store.artifact_store import Store

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
GRAIN_S = 0.02  # more than the kernel's


def later() -> float:
    """A clock by which everything on disk has settled."""
    return time.time() + 100


def spoil(memo: Path) -> None:
    """Other digests in the memo, so that what is taken from it can be told."""
    lines = [json.loads(line) for line in memo.read_text().splitlines()]
    memo.write_text("".join(json.dumps({**line, "sha256": "from the memo"}) + "\n" for line in lines))


def test_a_folder_is_its_relative_names_and_contents(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a").write_text("a")
    externals = ExternalDigests(None)
    assert externals.of(tmp_path / "one") == externals.of(tmp_path / "two")
    (tmp_path / "two" / "sub" / "a").rename(tmp_path / "two" / "sub" / "b")
    assert externals.of(tmp_path / "one") != externals.of(tmp_path / "two")


def test_a_linked_folder_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a").write_text("a")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a").symlink_to(tmp_path / "plain" / "a")
    (tmp_path / "linked" / "loop").symlink_to(tmp_path / "linked")
    externals = ExternalDigests(None)
    assert externals.of(tmp_path / "linked") == externals.of(tmp_path / "plain")


def test_each_link_to_a_folder_counts(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").write_text("1")
    before = ExternalDigests(None).of(tmp_path)
    for name in ("a", "z"):
        (tmp_path / name).symlink_to("real")
    sha256 = hashlib.sha256(b"1").hexdigest()
    expected = folder_digest({f"{name}/x": sha256 for name in ("a", "real", "z")})
    assert before != expected
    assert expected == ExternalDigests(None).of(tmp_path)


def test_folders_that_hold_each_other_by_links_end(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
        (tmp_path / name / "other").symlink_to(tmp_path / other)
        (tmp_path / name / "up").symlink_to(tmp_path)
    of = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b")}
    files = {"a/x": of["a"], "a/other/x": of["b"], "b/x": of["b"], "b/other/x": of["a"]}
    assert folder_digest(files) == ExternalDigests(None).of(tmp_path)


def test_an_external_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        ExternalDigests(None).of(tmp_path / "gone.jsonl")


def test_files_that_have_exchanged_their_names_or_are_missing_have_another_digest(tmp_path: Path) -> None:
    x, y = tmp_path / "x", tmp_path / "y"
    x.write_text("hello")
    y.write_text("other")
    externals = ExternalDigests(None)
    held: list[dict[str, Path | None]] = [
        {"a": x, "b": None},
        {"a": None, "b": x},
        {"a": x},
        {"a": x, "b": y},
        {"a": y, "b": x},
        {},
    ]
    assert len(held) == len({externals.of(named) for named in held})
    assert externals.of({"a": x, "b": y}) == externals.of({"b": y, "a": x})
    copied = tmp_path / "copied"
    copied.write_text("hello")
    assert externals.of({"a": x}) == externals.of({"a": copied})


def test_a_file_that_stayed_as_it_was_is_taken_from_the_memo_until_it_changes(tmp_path: Path) -> None:
    path, memo = tmp_path / "data.jsonl", tmp_path / "external.jsonl"
    path.write_text("hello")
    assert HELLO == ExternalDigests(memo, later).of(path)
    spoil(tmp_path / "external_listings.jsonl")
    assert "from the memo" == ExternalDigests(memo, later).of(path)
    time.sleep(GRAIN_S)
    path.write_text("jello")  # the same size
    assert ExternalDigests(memo, later).of(path) not in ("from the memo", HELLO)


def test_the_memo_of_the_files_is_read_only_where_something_changed(tmp_path: Path) -> None:
    folder, memo = tmp_path / "folder", tmp_path / "external.jsonl"
    folder.mkdir()
    (folder / "a").write_text("hello")
    (folder / "b").write_text("b")
    whole = ExternalDigests(memo, later).of(folder)
    spoil(memo)
    assert whole == ExternalDigests(memo, later).of(folder)
    (folder / "b").write_text("other")
    changed = ExternalDigests(None).of(folder)
    from_memo = ExternalDigests(memo, later).of(folder)
    assert changed != from_memo  # "a" came from the spoilt memo: it was not read again


def test_a_file_changed_within_the_grain_of_the_clock_is_never_remembered(tmp_path: Path) -> None:
    path, memo = tmp_path / "data.jsonl", tmp_path / "external.jsonl"
    path.write_text("hello")
    assert HELLO == ExternalDigests(memo, lambda: path.stat().st_mtime).of(path)
    assert not memo.exists()
    assert not (tmp_path / "external_listings.jsonl").exists()


@pytest.mark.parametrize("clock", [lambda: time.time() - 3600, lambda: time.time() - 86400 * 365])
def test_a_file_from_the_future_is_never_remembered(tmp_path: Path, clock: Callable[[], float]) -> None:
    path, memo = tmp_path / "data.jsonl", tmp_path / "external.jsonl"
    path.write_text("hello")
    digests = ExternalDigests(memo, clock)
    assert HELLO == digests.of(path)
    path.write_text("jello")
    assert HELLO != digests.of(path)
    assert not memo.exists()


def test_an_edit_that_puts_the_time_back_is_seen(tmp_path: Path) -> None:
    path, memo = tmp_path / "data.jsonl", tmp_path / "external.jsonl"
    path.write_text("hello")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert HELLO == ExternalDigests(memo, later).of(path)
    time.sleep(GRAIN_S)
    path.write_text("jello")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert HELLO != ExternalDigests(memo, later).of(path)


def test_a_memo_of_mostly_old_lines_is_rewritten_and_one_of_an_older_dflow_is_read(tmp_path: Path) -> None:
    path, memo = tmp_path / "data.jsonl", tmp_path / "external.jsonl"
    path.write_text("hello")
    status = path.stat()
    old = {"path": str(path), "size": 5, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino, "sha256": "old"}
    memo.write_text((json.dumps(old) + "\n") * 3000 + '{"half a line')
    assert HELLO == ExternalDigests(memo, later).of(path)
    assert 2 == len(memo.read_text().splitlines())
    assert HELLO == ExternalDigests(memo, later).of(path)


def test_a_memo_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("hello")
    assert HELLO == ExternalDigests(tmp_path / "no folder" / "external.jsonl", later).of(path)


def test_a_folder_that_is_no_store_yet_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("hello")
    (tmp_path / "empty").mkdir()
    sources = Sources.now(Store.open(tmp_path / "empty", write=False).external_memo)
    assert HELLO == sources.externals.of(path)
    assert [] == list((tmp_path / "empty").iterdir())


def test_names_that_are_not_unicode_are_hashed_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).write_text("hello")
    digests = [ExternalDigests(tmp_path / "external.jsonl", later).of(folder) for _ in range(2)]
    assert [folder_digest({"\udcff": HELLO})] * 2 == digests


def test_a_folder_with_a_pipe_or_a_dead_link_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "p")
    with pytest.raises(DataError, match="pipes/p: is no plain file"):
        ExternalDigests(None).of(tmp_path / "pipes")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "dead").symlink_to("nowhere")
    with pytest.raises(DataError, match="links/dead: cannot be read"):
        ExternalDigests(None).of(tmp_path / "links")


def test_a_dead_link_is_reported_with_where_it_leads_and_how_to_find_all_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "my photos"
    folder.mkdir()
    (folder / "dead.png").symlink_to("/nowhere/x.png")
    (folder / "loop.png").symlink_to("loop.png")
    for name, leads_to in (("dead.png", "/nowhere/x.png"), ("loop.png", "loop.png")):
        with pytest.raises(DataError) as raised:
            ExternalDigests(None).of(folder)
        assert f"my photos/{name}: cannot be read (" in str(raised.value)
        assert f"a link to {leads_to}: remove the link, or restore what it leads to" in str(raised.value)
        assert f"`find '{folder}' -xtype l` lists all such links" in str(raised.value)
        (folder / name).unlink()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from(["write", "remove", "swap", "touch"]), max_size=6))
def test_whatever_is_done_to_a_folder_the_memo_says_what_hashing_anew_says(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: list[str]
) -> None:
    random_source = random.Random(seed)
    folder = tmp_path_factory.mktemp("folder")
    memo = tmp_path_factory.mktemp("store") / "external.jsonl"
    names = ["a", "b", "sub/c", "sub/deep/d"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(random_source.choice("xyz"))
    for step in ["", *steps]:
        time.sleep(GRAIN_S)
        one, other = (folder / name for name in random_source.sample(names, 2))
        if step == "write":
            one.write_text(random_source.choice("xyz"))
        elif step == "remove":
            one.unlink(missing_ok=True)
        elif step == "touch" and one.exists():
            os.utime(one, (random_source.randrange(10**9),) * 2)
        elif step == "swap" and one.exists() and other.exists():
            one.rename(folder / "between")
            other.rename(one)
            shutil.move(folder / "between", other)
        assert ExternalDigests(None).of(folder) == ExternalDigests(memo, later).of(folder)
        named = {"a": folder / "sub", "b": None}
        assert ExternalDigests(None).of(named) == ExternalDigests(memo, later).of(named)
