"""What a store writes of an artifact: its manifest, its lines of the index, and its files as each run wrote them.

<artifact>/manifest.json    how it was made, and which files it has; read by everybody through this module
<store>/index/<key>         lines: what was computed for a key
<store>/records/<run id>/outside_digest/<key>/measurements.json, manifest.json

Two runs may make the same content with other measurements: the store keeps the artifact of one of them, with its
measurements. Reports and MLflow therefore use the files of a run's own record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.artifact_digest import MANIFEST, OUTSIDE_DIGEST
from dsl.convert import structure, unstructure
from dsl.errors import StructureError
from dsl.files import clear_errors, known_fields, read_object, remove_link, write_json
from executor.keys.node_key import Inputs, KeyParts
from executor.store.digests import FileEntry
from executor.system.json_values import Check, fit, is_id, is_moment, is_table_of, is_text
from executor.system.symlinks import is_folder, is_plain, remove

# A part of a file's name that is empty, "." or "..", so that it leads elsewhere, or one that no file can have.
OUTSIDE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\0|[^/]{256}|[\ud800-\udfff]")


@frozen(kw_only=True)
class Manifest:
    """The manifest of an artifact. config, launch: the node's settings, secrets by their names. metrics: as the run
    that made it measured them. started, ended: of its last attempt, seconds since 1970. seconds: of all attempts whose
    work it is. token, lease: of the holder that committed it. digest, files: empty before the commit.
    """

    node: str
    op: str
    run: str
    key: str
    key_parts: KeyParts
    inputs: Inputs
    config: Mapping[str, Any] = {}
    launch: Mapping[str, Any] = {}
    metrics: Mapping[str, float] = {}
    started: float | None = None
    ended: float | None = None
    seconds: float | None = None
    token: int = 0
    lease: str = ""
    digest: str = ""
    files: Mapping[str, FileEntry] = {}

    @classmethod
    def of(cls, folder: Path) -> Manifest | None:
        """The manifest of an artifact's folder; None if it is missing, damaged, or behind a link."""
        return cls.read(folder / MANIFEST) if is_folder(folder) else None

    @classmethod
    def read(cls, file: Path) -> Manifest | None:
        """Read a manifest from a file; None if the file is missing or is not a manifest."""
        return cls.from_json(read_object(file) or {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest | None:
        """The manifest of these values; None if it is not a manifest."""
        files = file_entries(data)
        try:
            return None if files is None else attrs.evolve(cls.checked({**data, "files": {}}), files=files)
        except StructureError:
            return None

    @classmethod
    def checked(cls, data: Any) -> Manifest:
        """Keys that only a newer dflow knows are ignored. Raises StructureError if it is not a manifest."""
        if not isinstance(data, dict):
            return structure(cls, data)
        known = known_fields(cls, data)
        if isinstance(known.get("key_parts"), dict):
            known["key_parts"] = known_fields(KeyParts, known["key_parts"])
        return structure(cls, known)

    def write(self, folder: Path) -> None:
        """Durably."""
        write_json(folder / MANIFEST, unstructure(self), durable=True)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def committed_files(folder: Path) -> dict[str, FileEntry] | None:
    """The files that an artifact's manifest names; None if there is no manifest.

    The target of a link is no artifact. Read without a converter, since a run in which nothing runs reads it for every
    node.
    """
    return file_entries(read_object(folder / MANIFEST)) if is_folder(folder) else None


def file_entries(data: Any) -> dict[str, FileEntry] | None:
    """The files of a manifest's JSON; None if it is not a manifest. Faster than a converter."""
    try:
        files = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
    except (KeyError, TypeError, AttributeError):
        return None
    are_own = all(
        isinstance(entry.size, int) and isinstance(entry.sha256, str) and not OUTSIDE.search(name)
        for name, entry in files.items()
    )
    return files if are_own else None


PULLED = "pulled"  # the acceptance of a line whose artifact another store computed


@frozen
class IndexLine:
    """A run computed `digest` for the key; empty, as the time, before the commit.

    acceptance: "computed", "forced" by --from, "pulled" from `source`, a URL, or "accepted": `user` declared, for
    `reason`, that what was computed for accepted_key holds for this key too, of which only the code differs.
    without_code: the key for any code.
    """

    digest: str
    run: str
    time: float
    neutral: Mapping[str, Any] = {}
    acceptance: str = "computed"
    without_code: str = ""
    accepted_key: str = ""
    reason: str = ""
    user: str = ""
    source: str = ""

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> IndexLine | None:
        """What this version of dflow knows of a line: a newer one may have written more, an older one less.

        None for a line that no dflow writes.
        """
        is_line = line.keys() >= NEEDS and fit(CHECKS, line)
        return cls(**known_fields(cls, line)) if is_line else None

    @property
    def is_pulled(self) -> bool:
        """Whether another store computed the artifact. A line that was accepted there has a source."""
        return self.acceptance == PULLED or bool(self.source)

    def to_json(self) -> dict[str, Any]:
        """The line, without texts that are empty."""
        return {name: value for name, value in attrs.asdict(self).items() if value != ""}


NEEDS = {"digest", "run", "time"}
CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("digest", "run"), is_id),
    "time": is_moment,
    "neutral": is_table_of(lambda value: True),
    **dict.fromkeys(("acceptance", "without_code", "reason", "user", "source"), is_text),
    "accepted_key": lambda value: value == "" or is_id(value),
}


FOLDER = "outside_digest"


def keep_own_files(record: Path, key: str, out: Path) -> None:
    """Copy those of a sealed out_dir into a run's record, replacing those of an earlier attempt."""
    if not is_folder(record):
        return
    kept = record / FOLDER / key
    with clear_errors(kept):
        remove_link(kept.parent)
        remove(kept)
        kept.mkdir(parents=True)
        for name in OUTSIDE_DIGEST:
            if (out / name).exists():
                (kept / name).write_bytes((out / name).read_bytes())


def own_files(records: Path, run: str | None, key: str | None, folder: Path) -> dict[str, Path]:
    """The files of a run by name; folder: that of the artifact.

    They are in the artifact if the store kept this run's or the run is not known, else in the run's record. Those of
    another run are never used.
    """
    in_artifact = _files_in(folder)
    manifest = Manifest.of(folder)
    maker = None if manifest is None else manifest.run
    if run is None or (maker == run and manifest is not None and manifest.key == key):
        return in_artifact
    kept = records / run / FOLDER / str(key)
    own = _files_in(kept, records)
    return own or (in_artifact if maker == run else {})


def with_own_files(own: Mapping[str, Path], folder: Path, view: Path) -> Path:
    """A folder with an artifact and a run's own files: that of the artifact, else `view`, made of links."""
    if own == _files_in(folder):
        return folder
    folder = folder.absolute()

    import shutil

    def outside(here: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(here) == folder and name in OUTSIDE_DIGEST]

    shutil.copytree(folder, view, copy_function=os.symlink, ignore=outside)
    for name, path in own.items():
        (view / name).symlink_to(path.absolute())
    return view


def _files_in(folder: Path, below: Path | None = None) -> dict[str, Path]:
    """The files outside the digest that no link leads to, on the way from `below` on."""
    return {name: folder / name for name in OUTSIDE_DIGEST if is_plain(folder / name, below or folder)}
