"""Digests of the files and folders outside the store that configs name, hashed once while they stay as they are.

Two memos in the user's cache, both append-only; losing them costs only time:

    external_listings.jsonl    for each requested path: a hash over the names and stamps below it, and its digest. A
                               run in which nothing changed reads only this one, a line for each path.
    external.jsonl             the digest of each file by its stamp: what did not change in a folder that did.

What changed within the clock's grain of now, or in the future, is not remembered (see system/stamps.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from stat import S_ISREG

import attrs
from attrs import frozen

from dsl.errors import DataError
from dsl.files import known_fields
from executor.system.stamps import Memo, Stamp, is_settled

MISSING = "missing"  # in the place of a digest
MOST_PATHS = 1000  # by which links lead to one folder


@frozen
class File:
    """A file of an external input. stamp: its size, time and inode when it was looked at."""

    path: str
    stamp: Stamp


External = Path | Mapping[str, Path | None]  # a file or folder, or many by name; None is a name without a file
Tree = File | None | Mapping[str, "Tree"]  # a folder is its files by relative name; None is a name without a file


@frozen
class Look:
    """The state of a path. listing: a hash over names, sizes, times of change and inodes. newest: the last changed
    file.

    ctime does not count: new permissions or another link do not change a file.
    """

    listing: str
    newest: str


class ExternalDigests:
    """A cache of digests of external files and folders; without a memo file everything is hashed again."""

    def __init__(
        self, memo: Path | None, now: Callable[[], float] = time.time, list_path: Callable[[Path], Tree] | None = None
    ) -> None:
        self._now = now
        self._list = list_path or tree_of
        self._files_memo = Memo(memo, "path")
        self._listings_memo = Memo(memo.with_name("external_listings.jsonl") if memo is not None else None, "path")

    def of(self, external: External) -> str:
        """The digest of a file's content, of a folder's files by relative name, or of several files or folders by name.

        Raises DataError if one is missing.
        """
        asked_at = self._now()
        label = str(external)
        if not isinstance(external, Path):
            paths = json.dumps(sorted((name, str(path)) for name, path in external.items()))
            label = f"{len(external)} files {hashlib.sha256(paths.encode()).hexdigest()}"
        return self._remembered(label, _listed(external, self._list), asked_at)

    def _remembered(self, label: str, tree: Tree, asked_at: float) -> str:
        """The digest of a listed file or folder, from the memo if possible. asked_at: a time before it was listed."""
        label = label.encode("utf-8", "backslashreplace").decode()
        listing, settled = _listing(tree, asked_at)
        known = self._listings
        if label in known and known[label][0] == listing:
            return known[label][1]
        digest = self._digest(tree, asked_at)
        if settled:
            known[label] = (listing, digest)
            self._listings_memo.add({"path": label, "listing": listing, "sha256": digest})
        return digest

    def _digest(self, tree: Tree, asked_at: float) -> str:
        if tree is None:
            return MISSING
        if isinstance(tree, File):
            return self._content(tree, asked_at)
        return folder_digest({name: self._digest(member, asked_at) for name, member in tree.items()})

    def _content(self, file: File, asked_at: float) -> str:
        name = file.path.encode("utf-8", "backslashreplace").decode()
        identity = (name, file.stamp)
        known = self._files
        if identity in known:
            return known[identity]
        try:
            with Path(file.path).open("rb") as opened:
                sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(file.path, error) from error
        if is_settled(file.stamp, asked_at):
            known[identity] = sha256
            self._files_memo.add({"path": name, **attrs.asdict(file.stamp), "sha256": sha256})
        return sha256

    @cached_property
    def _listings(self) -> dict[str, tuple[str, str]]:
        return {line["path"]: (line["listing"], line["sha256"]) for line in self._listings_memo.newest().values()}

    @cached_property
    def _files(self) -> dict[tuple[str, Stamp], str]:
        lines = [line for line in self._files_memo.newest().values() if "ctime_ns" in line]
        return {(line["path"], Stamp(**known_fields(Stamp, line))): line["sha256"] for line in lines}


def folder_digest(files: Mapping[str, str]) -> str:
    """SHA-256 in hex over the sorted (relative name, SHA-256 of the content, or MISSING) of an external folder."""
    hashed = hashlib.sha256(b"dflow folder 1\n")
    for name in sorted(files):
        hashed.update(json.dumps([name, files[name]]).encode() + b"\n")
    return hashed.hexdigest()


def tree_of(path: Path) -> Tree:
    """A file with its stamp, or a folder's members, recursively. Raises DataError if it is missing or neither."""
    try:
        status = path.stat()
        if S_ISREG(status.st_mode):
            return File(str(path), Stamp.of_status(status))
        return _members(str(path))
    except OSError as error:
        raise _unreadable(error.filename or str(path), error) from error


def _listed(external: External, list_path: Callable[[Path], Tree]) -> Tree:
    if isinstance(external, Path):
        return list_path(external)
    return {name: None if path is None else list_path(path) for name, path in external.items()}


def _members(folder: str) -> dict[str, Tree]:
    """Files below a folder by relative name; links are followed, except to a folder above the link.

    Raises DataError for a folder that links reach by more than MOST_PATHS ways: they may be 2^n.
    """
    files: dict[str, Tree] = {}
    ways: Counter[tuple[int, int]] = Counter()
    pending: list[tuple[str, str, frozenset[tuple[int, int]]]] = [("", folder, frozenset())]
    while pending:
        prefix, here, above = pending.pop()
        status = Path(here).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            continue
        ways[identity] += 1
        if ways[identity] > MOST_PATHS:
            raise DataError(f"{here}: links lead to this folder by more than {MOST_PATHS} ways; remove some of them")
        with os.scandir(here) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir():
                    pending.append((f"{prefix}{entry.name}/", entry.path, above | {identity}))
                    continue
                status = entry.stat()
                if not S_ISREG(status.st_mode):
                    raise DataError(f"{entry.path}: is no plain file; move it out of this input of the pipeline")
                files[prefix + entry.name] = File(entry.path, Stamp.of_status(status))
    return files


def _listing(tree: Tree, asked_at: float) -> tuple[str, bool]:
    """A hash over all names and stamps of a tree, and whether all stamps are old enough to be reliable."""
    members = list(_flat(tree))
    listing = _hash_of(members, lambda stamp: f"{stamp.size} {stamp.mtime_ns} {stamp.ctime_ns} {stamp.inode}")
    return listing, all(is_settled(member.stamp, asked_at) for _, member in members if isinstance(member, File))


def changed_since(folder: Path, at: float) -> list[str]:
    """The names of files directly in a folder that were written or moved there after a time (seconds since 1970).

    Empty for a file or for what cannot be read.
    """
    try:
        tree = tree_of(folder)
    except DataError:
        return []
    members = tree.items() if isinstance(tree, Mapping) else ()
    return [name for name, file in members if isinstance(file, File) and file.stamp.ctime_ns > at * 1e9]


def look_at(external: External, list_path: Callable[[Path], Tree] = tree_of) -> Look:
    """The current state of an external file or folder. Raises DataError."""
    members = list(_flat(_listed(external, list_path)))
    files = [member for _, member in members if isinstance(member, File)]
    newest = max(files, key=lambda file: file.stamp.ctime_ns).path if files else ""
    return Look(_hash_of(members, lambda stamp: f"{stamp.size} {stamp.mtime_ns} {stamp.inode}"), newest)


def _flat(tree: Tree) -> Iterator[tuple[str, File | str]]:
    """All files and folders of a tree with their paths; the value is the file, or the number of a folder's members."""
    pending: list[tuple[str, Tree]] = [("", tree)]
    while pending:
        name, member = pending.pop()
        if isinstance(member, File):
            yield name, member
        elif member is None:
            yield name, MISSING
        else:
            yield name, f"{len(member)} members"
            pending += [(f"{name}\0{inner}", each) for inner, each in member.items()]


def _hash_of(members: Iterable[tuple[str, File | str]], text_of: Callable[[Stamp], str]) -> str:
    texts = ((name, text_of(member.stamp) if isinstance(member, File) else member) for name, member in members)
    text = "\0\0".join(sorted(f"{name}\0{each}" for name, each in texts))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _unreadable(path: str, error: OSError) -> DataError:
    text = f"{path}: cannot be read ({error.strerror}); it is an input of the pipeline"
    link = Path(path)
    if not link.is_symlink():
        return DataError(text)
    import shlex  # only for a mistake

    folder = shlex.quote(str(link.parent))
    return DataError(
        f"{text} and a link to {link.readlink()}: remove the link, or restore what it leads to; "
        f"`find {folder} -xtype l` lists all such links"
    )
