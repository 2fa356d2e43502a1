"""The manifest of an artifact: how it was made, and which files it has.

<artifact>/manifest.json    written by the commit, read by everybody through this module
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.artifact_digest import MANIFEST
from dsl.convert import structure, unstructure
from dsl.errors import StructureError
from dsl.json_files import known_fields, read_object, write_json
from executor.keys.node_key import Inputs, KeyParts
from executor.store.digests import FileEntry
from executor.system.symlinks import is_folder

# A part of a file's name that is empty, "." or "..", so that it leads elsewhere, or one that no file can have.
OUTSIDE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|\0|[^/]{256}|[\ud800-\udfff]")


@frozen(kw_only=True)
class Manifest:
    """The manifest of an artifact. config, launch: the node's settings, with names in place of secrets.

    metrics: as measured by the run that made it. started, ended: seconds since 1970. token, lease: of the holder that
    committed it. digest, files: empty before the commit.
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
    return file_entries(read_object(folder / MANIFEST)) if is_folder(folder) else None


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
