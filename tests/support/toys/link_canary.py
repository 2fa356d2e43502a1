"""A folder behind a link: everything that dflow might take for its own, and how it looked before."""

from __future__ import annotations

import json
from pathlib import Path

from dsl.artifact_digest import MANIFEST

HASH, OTHER = "5" * 64, "6" * 64
RUN = "20260101-000000-abcd"
OWN_NAMES = [
    HASH, f"{HASH}.{'7' * 8}", f".{HASH}.{'8' * 32}", f".{HASH}.{'7' * 8}.{'8' * 32}", f".{RUN}", RUN,
    f"{HASH}.damaged", f".gone-{HASH}-1",
]  # fmt: skip
STRANGE_NAMES = [
    ".snapshot", ".nfs0001", ".git", ".gone-abc-1", f".gone-{HASH}", f".gone-{HASH}-1.bak", f".{HASH}", f".{HASH}.7",
    f"{HASH}.orig", f"{HASH}0", HASH.replace("5", "A"), "x.damaged", "notes", ".20260101", f"{RUN}.bak",
]  # fmt: skip


def fill(folder: Path) -> None:
    """Fill a folder with everything that dflow might take for its own and must not remove, some of it read-only."""
    for name in (*OWN_NAMES, *STRANGE_NAMES):
        (folder / name / "sub").mkdir(parents=True)
        (folder / name / "sub" / "data").write_text(name)
        for file in ("lease", "ranks", "lock", "text.txt", MANIFEST, f".{MANIFEST}.1", "events.jsonl", "work.json"):
            (folder / name / file).write_text("{}\n")
        (folder / name / "text.txt").chmod(0o444)
    (folder / OTHER).write_text(json.dumps({"digest": HASH, "run": RUN, "time": 1.0}) + "\n")
    (folder / "half a line").write_text("without an end")


def look(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """The mode, time and content of everything at and below a folder; links are not followed."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found
