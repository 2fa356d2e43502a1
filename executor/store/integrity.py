"""Whether artifacts are as they were committed, by their sizes and by reading them.

verified.jsonl     among the store's memos, append-only: digest, name, size, mtime_ns, ctime_ns, inode of files that
                   were read and found intact. A file that still has this stamp need not be read again. Losing lines
                   costs time only. A commit adds none: right after it the stamps cannot be relied on yet, see
                   system/stamps.py.

A damaged artifact is set aside as objects/<digest>.damaged, so that no run uses it: its node runs again.

Before a stage reads artifacts, their sizes and stamps are compared always. The content is read where a stamp differs,
and whenever that is asked for. What was pulled was compared with its digest then.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import attrs

from dsl.artifact_digest import MANIFEST
from dsl.errors import StoreError
from dsl.files import append_lines, read_json_or_none, read_lines
from dsl.finding import File, Finding
from executor.store.artifact_store import Store
from executor.store.digests import FileEntry, artifact_digest, sha256_of
from executor.store.manifest import Manifest, file_entries
from executor.store.names import DAMAGED, DIGEST
from executor.system.output import shown_digest
from executor.system.stamps import SeenStamps, Stamp, is_settled, stamps_of
from executor.system.symlinks import plain_status, remove

VERIFIED = "verified.jsonl"

What = Literal["missing", "size", "content", "extra", "unreadable", "link"]
WORDS: Mapping[What, str] = {
    "missing": "is missing",
    "size": "has another size",
    "content": "has other content",
    "extra": "does not belong there",
    "unreadable": "cannot be read from the disk",
    "link": "is a link, or behind one",
}
Progress = Callable[[int], None]  # called with the bytes checked since the last call


def check(
    store: Store,
    digests: Iterable[str],
    *,
    read_all: bool = False,
    sizes_only: bool = False,
    progress: Progress = lambda size: None,
    on_unread: Callable[[str], None] = lambda name: None,
) -> dict[str, list[Finding]]:
    """The damaged files of artifacts, by digest.

    Files that are unchanged since an earlier check are not read again. read_all: read every file. sizes_only: read only
    the manifests. on_unread: called with the name of each file that is not read again. Raises StoreError if a file may
    not be read.
    """
    known = {} if read_all else _known_stamps(store)
    found = {}
    for digest in dict.fromkeys(digests):
        artifact = _Artifact(store, digest, known, progress, on_unread)
        if damages := artifact.damages(sizes_only):
            found[digest] = damages
        _append(store, digest, artifact.verified)
    return found


def artifact_digests(store: Store) -> list[str]:
    """The digests of all artifacts in the store, sorted."""
    folder = store.path / "objects"
    return sorted(path.name for path in folder.iterdir() if DIGEST.fullmatch(path.name)) if folder.is_dir() else []


def set_aside(store: Store, digests: Iterable[str]) -> None:
    """Take damaged artifacts out of use. Raises StoreError if the store cannot be written."""
    for digest in dict.fromkeys(digests):
        target = store.object_path(digest)
        damaged = target.with_name(target.name + DAMAGED)
        try:
            if target.exists() or target.is_symlink():
                remove(damaged)  # from before: its replacement is damaged too
                target.rename(damaged)
        except FileNotFoundError:  # another check was faster
            pass
        except OSError as error:
            raise StoreError(f"{target}: cannot be set aside ({error.strerror}); runs would still use it") from error
        store.forget(digest)


class _Artifact:
    """The check of one artifact. verified: stamps of files that were read and found intact."""

    def __init__(
        self,
        store: Store,
        digest: str,
        known: Mapping[tuple[str, str], Stamp],
        progress: Progress,
        on_unread: Callable[[str], None],
    ) -> None:
        self.verified: dict[str, Stamp] = {}
        self._digest = digest
        self._folder = store.object_path(digest)
        self._known = known
        self._progress = progress
        self._on_unread = on_unread

    def damages(self, sizes_only: bool) -> list[Finding]:
        files = self._files()
        if isinstance(files, Finding):
            return [files]
        wrong = {name: what for name, entry in files.items() if (what := self._file(name, entry, True))}
        found = [self._damage(name, what) for name, what in wrong.items()]
        found += [self._damage(name, "extra") for name in _names(self._folder) if name not in files]
        if sizes_only:
            return found
        rest = {name: entry for name, entry in files.items() if name not in wrong}
        read = [self._damage(name, what) for name, entry in rest.items() if (what := self._file(name, entry, False))]
        return found + read

    def _damage(self, name: str, what: What) -> Finding:
        return Finding(WORDS[what], File(shown_digest(self._digest), name), code=what)

    def _files(self) -> dict[str, FileEntry] | Finding:
        """The files that the manifest lists, or a finding if the manifest does not match the digest."""
        if self._folder.is_symlink():
            return self._damage("its folder", "link")
        if (self._folder / MANIFEST).is_symlink():
            return self._damage(MANIFEST, "link")
        try:
            manifest = read_json_or_none(self._folder / MANIFEST)
            if manifest is None:
                return self._damage(MANIFEST, "missing")
            files = file_entries(manifest)
        except PermissionError as error:
            raise _refused(self._folder / MANIFEST, error) from error
        except OSError:
            return self._damage(MANIFEST, "unreadable")
        except ValueError:
            return self._damage(MANIFEST, "content")
        return (
            files if files is not None and artifact_digest(files) == self._digest else self._damage(MANIFEST, "content")
        )

    def _file(self, name: str, entry: FileEntry, size_only: bool) -> What | None:
        path = self._folder / name
        now = time.time()
        try:
            plain_status(self._folder, name)
            stamp = Stamp.of(path)
            if stamp.size != entry.size:
                return "size"
            if size_only:
                return None
            if self._known.get((self._digest, name)) == stamp:
                self._progress(stamp.size)
                self._on_unread(name)
                return None
            with path.open("rb", buffering=0) as file:
                if sha256_of(file, self._progress) != entry.sha256:
                    return "content"
            if is_settled(stamp, now) and Stamp.of(path) == stamp:
                self.verified[name] = stamp
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        except PermissionError as error:
            raise _refused(path, error) from error
        except OSError as error:
            return "link" if error.errno == errno.ELOOP else "unreadable"
        return None


def _names(folder: Path) -> list[str]:
    """Files under an artifact's folder; hidden ones, of file systems or editors, are ignored."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in files)
    return [name for name in names if name != MANIFEST and not name.rpartition("/")[2].startswith(".")]


def _refused(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be read ({error.strerror}); the store belongs to another user")


def _known_stamps(store: Store) -> dict[tuple[str, str], Stamp]:
    fields = [field.name for field in attrs.fields(Stamp)]
    known = {}
    for line in read_lines(store.memos / VERIFIED) if store.memos is not None else ():
        if all(isinstance(line.get(name), int) for name in fields):
            known[str(line.get("digest")), str(line.get("name"))] = Stamp(**{name: line[name] for name in fields})
    return known


def _append(store: Store, digest: str, stamps: Mapping[str, Stamp]) -> None:
    if not stamps or store.memos is None:
        return
    lines = [{"digest": digest, "name": name, **attrs.asdict(stamp)} for name, stamp in stamps.items()]
    try:
        append_lines(store.memos / VERIFIED, lines)
    except (OSError, StoreError):  # a full disk: the next time they are read again
        return


def check_before_use(
    store: Store, digests: Iterable[str], *, read_all: bool, progress: Progress
) -> dict[str, list[Finding]]:
    """Check artifacts before they are read, and set damaged ones aside. Returns the damages by digest.

    read_all: read every file, even if it is known to be intact. Raises StoreError where a file may not be read, or a
    damaged artifact cannot be set aside.
    """
    seen = SeenStamps(store.memos)
    known = seen.newest()
    damages: dict[str, list[Finding]] = {}
    for digest in dict.fromkeys(digests):
        manifest = Manifest.of(store.object_path(digest))
        before = _stamps(store, digest, manifest)
        is_known = known.get(digest) == before
        if before is not None and (is_known or digest not in known) and not read_all:
            found = check(store, [digest], sizes_only=True)
        else:
            found = check(store, [digest], read_all=read_all, progress=progress)
        damages |= found
        if before is not None and not (found or is_known) and before == _stamps(store, digest, manifest):
            seen.add(digest, before)
    set_aside(store, damages)
    return damages


def _stamps(store: Store, digest: str, manifest: Manifest | None) -> str | None:
    """A hash of the stamps of an artifact's files; None where one is missing, or no regular file."""
    try:
        return None if manifest is None else stamps_of(store.object_path(digest), manifest.files)
    except OSError:
        return None
