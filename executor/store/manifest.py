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
from dsl.files import clear_errors, known_fields, read_object_or_none, remove_link, write_json
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
        return cls.from_json(read_object_or_none(file) or {})

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
        """The manifest in a JSON object; keys of a newer dflow are ignored. Raises StructureError for an
        invalid one.
        """
        if not isinstance(data, dict):
            return structure(cls, data)
        known = known_fields(cls, data)
        if isinstance(known.get("key_parts"), dict):
            known["key_parts"] = known_fields(KeyParts, known["key_parts"])
        return structure(cls, known)

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, and sync it to disk."""
        write_json(folder / MANIFEST, unstructure(self), durable=True)

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum(entry.size for entry in self.files.values())


def committed_files(folder: Path) -> dict[str, FileEntry] | None:
    """The files that an artifact's manifest lists; None without a manifest, or if the folder is a link.

    It uses no converter for speed: it is read for every node, even in a run in which nothing runs.
    """
    return file_entries(read_object_or_none(folder / MANIFEST)) if is_folder(folder) else None


def file_entries(data: Any) -> dict[str, FileEntry] | None:
    """The files listed in a manifest's JSON; None if it is no manifest. Faster than a converter."""
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
    """A line of the index: the artifact `digest` was computed for a key by a run. digest, time: empty before the
    commit.

    acceptance: "computed"; "forced" by --from; "pulled" from `source`, a URL; or "accepted", if `user` declared for
    `reason` that the artifact of accepted_key, which differs by code only, is valid for this key. without_code: the key
    with the code left out.
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
        """The index line in a JSON object, without fields of a newer dflow; None for a line that no dflow writes."""
        is_line = line.keys() >= NEEDS and fit(CHECKS, line)
        return cls(**known_fields(cls, line)) if is_line else None

    @property
    def is_pulled(self) -> bool:
        """Whether another store computed the artifact; lines accepted in that store name a source too."""
        return self.acceptance == PULLED or bool(self.source)

    def to_json(self) -> dict[str, Any]:
        """The line as JSON, without empty texts."""
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
    """Copy the files outside the digest (measurements) of a finished out_dir into the run's record.

    They replace those of an earlier attempt.
    """
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
    """A run's own measurement files of an artifact, by name. folder: the artifact's folder.

    They are in the artifact if this run made it or no run is given, else in the run's record. Files of another run are
    never used.
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
    """A folder that shows an artifact with a run's own files: the artifact's folder, or else `view`, made of links."""
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
    """The files outside the digest in a folder, by name, without links. below: where the check for links starts."""
    return {name: folder / name for name in OUTSIDE_DIGEST if is_plain(folder / name, below or folder)}
