"""The files outside an artifact's digest as each run wrote them.

    <store>/records/<run id>/outside_digest/<key>/measurements.json, manifest.json

Two runs may make the same content with other measurements: the store keeps the artifact of one of them, and in it what
that run measured. What a report or MLflow shows of a run is therefore made with the files of its own record.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from executor.store.digests import OUTSIDE_DIGEST
from executor.store.manifest import Manifest
from executor.system.os_errors import clear_errors
from executor.system.symlinks import is_folder, remove, remove_link

FOLDER = "outside_digest"


def keep_own_files(record: Path, key: str, out: Path) -> None:
    """Copy those of a sealed out_dir into a run's record, in the place of what an earlier attempt left there."""
    if not is_folder(record):
        return
    kept = record / FOLDER / key
    with clear_errors(kept):
        remove_link(kept.parent)
        remove(kept)
        kept.mkdir(parents=True)
        for name in OUTSIDE_DIGEST:
            if (out / name).exists():
                shutil.copyfile(out / name, kept / name)


def own_files(records: Path, run: str | None, key: str | None, folder: Path) -> dict[str, Path]:
    """Those that belong to what a run made, by name; folder: that of the artifact.

    They are the artifact's own where this run is the one whose artifact the store kept, or where the run is not known.
    Where neither the artifact nor the record has them, there are none: those of another run are not taken for them.
    """
    there = _there(folder)
    manifest = Manifest.of(folder)
    maker = None if manifest is None else manifest.run
    if run is None or (maker == run and manifest is not None and manifest.key == key):
        return there
    kept = records / run / FOLDER / str(key)
    own = _there(kept)
    return own or (there if maker == run else {})


def with_own_files(own: Mapping[str, Path], folder: Path, view: Path) -> Path:
    """A folder that holds an artifact with a run's own files: the artifact's own, else `view`, made of links."""
    if own == _there(folder):
        return folder
    folder = folder.absolute()

    def outside(here: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(here) == folder and name in OUTSIDE_DIGEST]

    shutil.copytree(folder, view, copy_function=os.symlink, ignore=outside)
    for name, path in own.items():
        (view / name).symlink_to(path.absolute())
    return view


def _there(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in OUTSIDE_DIGEST if (folder / name).is_file()}
