"""The manifest of an artifact: how it was made, and which files it has.

<artifact>/manifest.json    written by the commit, read by everybody through this module
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.errors import StructureError
from executor.store.digests import MANIFEST, FileEntry
from executor.system.jsonlines import read_object, write_json
from executor.system.symlinks import is_folder


@frozen(kw_only=True)
class Manifest:
    """key_parts: the JSON form of the node's KeyParts. config, launch: its settings, secrets by their names. inputs: a
    digest, a list of digests or None by edge. metrics: as the run that made it measured them. started, ended: seconds
    since 1970. token, lease: of the holder that committed it. digest, files: empty before the commit.
    """

    node: str
    op: str
    run: str
    key: str
    key_parts: Mapping[str, Any]
    inputs: Mapping[str, Any]
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
        """That of an artifact's folder; None where there is none, or it is not one after a crash."""
        return cls.read(folder / MANIFEST) if _is_plain(folder) else None

    @classmethod
    def read(cls, file: Path) -> Manifest | None:
        """None where the file is not there, or is not a manifest."""
        return cls.from_json(read_object(file) or {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest | None:
        """What this version of dflow knows of it: a newer one may have written more. None where it is not one."""
        from dsl.convert import structure

        try:
            known = {name: data[name] for name in attrs.fields_dict(cls) if name in data}
            return attrs.evolve(structure(cls, {**known, "files": {}}), files=_entries(data.get("files", {})))
        except (StructureError, KeyError, TypeError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        """Durably."""
        from dsl.convert import unstructure

        write_json(folder / MANIFEST, unstructure(self), durable=True)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def committed_files(folder: Path) -> dict[str, FileEntry] | None:
    """The files that an artifact's manifest names, and nothing else of it; None where there is no manifest.

    A run in which nothing runs reads it of every node, so that it is read without a converter.
    """
    data = read_object(folder / MANIFEST) if _is_plain(folder) else None
    try:
        return None if data is None else _entries(data["files"])
    except (KeyError, TypeError, AttributeError):
        return None


def _entries(files: Mapping[str, Mapping[str, Any]]) -> dict[str, FileEntry]:
    return {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in files.items()}


def _is_plain(folder: Path) -> bool:
    """An artifact is a folder: what a link in its place leads to is none."""
    return is_folder(folder) and not (folder / MANIFEST).is_symlink()
