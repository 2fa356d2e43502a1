"""Shards that the workers of a stage share: who makes which, who takes over from a lost one, who writes the artifact.

A worker that is free claims the next shard that nobody has claimed. A claim is a symbolic link in stage.shared_dir,
NAME.0, that points at its worker's number: only one worker can create it, also on NFS, and it names its owner from the
first moment, while a file would be empty until it is written. If its owner is lost, NAME.1 is the next claim.

A shard is a file in stage.work_dir that is published once; the first one counts. All workers stay until every shard is
published. One then writes the artifact, and the others wait for that, so any of them may be lost at any time.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, field

from dsl.errors import ConfigError, StopRequested
from dsl.files import sync
from dsl.stage import Stage
from ops.lib.data.files import read_json, write_json

T = TypeVar("T")

POLL_S = 0.2
ARTIFACT = "artifact"
RANGE = re.compile(r"(\d{8})-(\d{8})")


@define(eq=False)
class SharedShards:
    """One worker's view of the shards that the workers of a stage share. _claims: name -> newest claim and
    its owner.
    """

    stage: Stage
    _claims: dict[str, tuple[int, int]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        """Register this worker, and remove files that a worker of its number left unfinished in an earlier attempt."""
        for file in self.stage.work_dir.glob("*.partial-*"):
            number = int(file.name.rpartition("-")[2])
            if number == self.stage.worker or number >= self.stage.workers:
                file.unlink(missing_ok=True)
        (self.stage.shared_dir / f"worker-{self.stage.worker}").touch()

    def claimed(self, stream: Callable[[], Iterable[T]], path: Callable[[T], Path]) -> Iterator[T | None]:
        """The items of the stream that this worker has to make, until the files of all items are published.

        path(item): its file in stage.work_dir. None is yielded while no item is free, but other items are still being
        made by other workers or in the background; ask again later.
        """
        while True:
            seen = []
            for item in stream():
                file = path(item)
                if not file.exists():
                    seen.append(file)
                    if self._claim(file.name):
                        yield item
            missing = self._unpublished(seen)
            while missing and not any(self._is_lost(file.name) for file in missing):
                yield None
                missing = self._unpublished(missing)
            if not missing:
                return

    def write_artifact(self, write: Callable[[], None]) -> None:
        """Call `write` in only one worker, with an empty out_dir; the other workers wait until it is done.

        Raises StopRequested while waiting.
        """
        complete = f"{ARTIFACT}.complete"
        while complete not in _names(self.stage.shared_dir):
            if self._claim(ARTIFACT):
                _empty(self.stage.out_dir)
                write()
                (self.stage.shared_dir / complete).touch()
                return
            pause(self.stage.stop_requested)

    def give(self, name: str, value: object) -> None:
        """Store a JSON value for the worker that writes the artifact."""
        write_json(self.stage.shared_dir / f"{name}-{self.stage.worker}.json", value)

    def given(self, name: str) -> list[Any]:
        """The values that all workers gave under a name, in the order of their numbers; waits for all that are not
        lost.
        """
        while True:
            lost = self.stage.lost_workers()
            found = _names(self.stage.shared_dir)
            missing = [
                number
                for number in range(self.stage.workers)
                if f"worker-{number}" in found and f"{name}-{number}.json" not in found and number not in lost
            ]
            if not missing:
                break
            pause(self.stage.stop_requested)
        names = [f"{name}-{number}.json" for number in range(self.stage.workers)]
        return [read_json(self.stage.shared_dir / each) for each in names if each in found]

    def _claim(self, name: str) -> bool:
        """Claim a name for this worker. Returns False if another worker has it, or this one already claimed it."""
        claim, owner = self._claims.get(name, (-1, None))
        while owner is None or owner in self.stage.lost_workers():
            claim += 1
            link = self.stage.shared_dir / f"{name}.{claim}"
            try:
                link.symlink_to(str(self.stage.worker))
            except FileExistsError:
                pass  # by another worker; or by this one, if the answer of a file server was lost
            except PermissionError as error:
                raise ConfigError(
                    f"{self.stage.shared_dir}: workers share shards by symbolic links, which this file system lacks: "
                    "leave shard_workers out, or use a store on another file system"
                ) from error
            owner = int(link.readlink().name)
            self._claims[name] = claim, owner
            if owner == self.stage.worker:
                return True
        return False

    def _is_lost(self, name: str) -> bool:
        return self._claims[name][1] in self.stage.lost_workers()

    def _unpublished(self, files: Sequence[Path]) -> list[Path]:
        """The files that are not published yet, found by a listing: NFS may report a new file as missing
        for a while.
        """
        found = _names(self.stage.work_dir) if files else set()
        return [file for file in files if file.name not in found]


def waited(items: Iterable[T | None], stop_requested: Callable[[], bool]) -> Iterator[T]:
    """The items of `claimed` without its Nones, at each of which it waits a moment. Raises StopRequested."""
    for item in items:
        if item is None:
            pause(stop_requested)
        else:
            yield item


def pause(stop_requested: Callable[[], bool]) -> None:
    """Wait briefly for other workers. Raises StopRequested."""
    if stop_requested():
        raise StopRequested("stopped while waiting for other workers; finished shards are kept")
    time.sleep(POLL_S)


def partial_path(path: Path, worker: int) -> Path:
    """The path to which a worker writes a shard before it is published."""
    return path.with_suffix(f".partial-{worker}")


def publish(partial: Path, path: Path) -> None:
    """Sync a finished file to disk, and rename it to its final name; it is dropped if that name already exists."""
    sync(partial)
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            partial.replace(path)
            return
    partial.unlink()


def published_rows(folder: Path, suffix: str) -> int:
    """Rows in the published files; see `published_ranges`."""
    return sum(stop - start for start, stop in published_ranges(folder, suffix))


def published_ranges(folder: Path, suffix: str) -> list[tuple[int, int]]:
    """The first row and the one after the last of files whose names end with them: 00000000-00000256.

    Files of several splits may have the same range.
    """
    stems = (name.removesuffix(suffix) for name in _names(folder) if name.endswith(suffix))
    ranges = (RANGE.search(stem) for stem in stems)
    return [(int(found[1]), int(found[2])) for found in ranges if found]


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
