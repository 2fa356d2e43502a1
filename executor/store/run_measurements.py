"""The files outside an artifact's digest as each run wrote them.

    <store>/records/<run id>/outside_digest/<key>/measurements.json, manifest.json

Two runs may make the same content with other measurements: the store keeps the artifact of one of them, with its
measurements. Reports and MLflow therefore use the files of a run's own record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dsl.artifact_digest import OUTSIDE_DIGEST
from dsl.files import remove_link
from dsl.os_errors import clear_errors
from executor.store.manifest import Manifest
from executor.system.symlinks import is_folder, is_plain, remove

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
