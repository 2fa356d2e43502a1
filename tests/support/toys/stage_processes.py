"""The processes of a toy's run, and a run of two ranks."""

from pathlib import Path

from toy_ops import is_alive, wait_for


def processes(is_meant):
    """The ids of living processes that `is_meant` selects by their folder under /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if is_meant(folder) and is_alive(folder.name):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended just now, or is somebody else's
            continue
    return found


def stage_pids(toy):
    """The process ids of this toy's stages, found by their logs, which are in a record."""
    return processes(lambda folder: str(toy.store / "records") in str((folder / "fd" / "1").readlink()))


def two_ranks(toy, program=""):
    process = toy.start("run", str(toy.file), program=program)
    pids = [toy.folder / "rank-0.pid", toy.folder / "rank-1.pid"]
    wait_for(lambda: all(path.exists() and path.read_text() for path in pids))
    return process, [int(path.read_text()) for path in pids]
