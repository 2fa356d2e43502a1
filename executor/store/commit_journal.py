"""A note of a stage that succeeded, written before its output is hashed: after a kill the next holder commits it.

<work folder>/ended.json    {"out": its out_dir's name, "boot", "files", "manifest", "line"}

A new holder removes the note with all other files before it starts a stage, so a note is always about the last one. It
is valid until the machine restarts, since the files may not be on disk yet, and only while each file has the size, time
and inode of the note.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

from dsl.artifact_digest import MANIFEST
from dsl.convert import unstructure
from dsl.files import read_object_or_none, write_json
from executor.store.manifest import IndexLine, Manifest
from executor.store.names import OUT, RUN
from executor.system.hardware import boot_id
from executor.system.symlinks import is_folder, remove

NOTE = "ended.json"


@frozen
class PendingCommit:
    """A pending commit: the manifest without files and digest, and the index line without the digest."""

    out: Path
    manifest: Manifest
    line: IndexLine

    def write(self, folder: Path) -> None:
        """Write the note of a pending commit into a work folder."""
        note = {
            "out": self.out.name,
            "boot": boot_id(),
            "files": _files(self.out),
            "manifest": unstructure(self.manifest),
            "line": self.line.to_json(),
        }
        write_json(folder / NOTE, note, in_one_line=True)

    @classmethod
    def read(cls, folder: Path, key: str) -> PendingCommit | None:
        """Read the note of a pending commit in a work folder; None without a valid one.

        Files that an interrupted commit added are removed.
        """
        note = read_object_or_none(folder / NOTE) or {}
        if note.get("boot") != boot_id():
            return None
        values = [note.get(name) for name in ("manifest", "line", "files")]
        if not all(isinstance(value, dict) for value in values):
            return None
        name = str(note.get("out"))
        out, manifest = folder / name, Manifest.from_json(note["manifest"])
        # A commit gives the line its digest and time.
        line = IndexLine.from_json({**note["line"], "digest": key, "time": 0.0})
        if manifest is None or manifest.key != key or line is None:
            return None
        if not (OUT.fullmatch(name) and is_folder(out) and RUN.fullmatch(line.run)):
            return None
        if MANIFEST not in note["files"]:
            for half_written in (out / MANIFEST, *out.glob(f".{MANIFEST}.*")):
                remove(half_written)
        return cls(out, manifest, line) if _files(out) == note["files"] else None


def _files(out: Path) -> dict[str, list[int]]:
    """Size, modification time and inode of each file below a folder; links are not followed. Sealing changes none of
    them.
    """
    found = {}
    for here, _, names in os.walk(out):
        for name in names:
            path = Path(here, name)
            status = path.lstat()
            found[path.relative_to(out).as_posix()] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found
