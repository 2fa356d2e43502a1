"""Whether artifacts are still as they were committed, before a stage reads them.

Sizes and stamps are compared always, see seen_stamps.py. The content is read where a stamp differs, and whenever that
is asked for. What was pulled was compared with its digest then.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsl.finding import Finding
from executor.store.artifact_store import Store
from executor.store.integrity import Progress, check, set_aside
from executor.store.manifest import Manifest
from executor.store.seen_stamps import SeenStamps, stamps_of


def check_before_use(
    store: Store, digests: Iterable[str], *, read_all: bool, progress: Progress
) -> dict[str, list[Finding]]:
    """Check artifacts before they are read, and set damaged ones aside. Returns the damages by digest.

    read_all: read every file, even if it is known to be intact. Raises StoreError where a file may not be read, or a
    damaged artifact cannot be set aside.
    """
    seen = SeenStamps(store.memos)
    known = seen.newest()
    damages: dict[str, list[Finding]] = {}
    for digest in dict.fromkeys(digests):
        manifest = Manifest.of(store.object_path(digest))
        before = _stamps(store, digest, manifest)
        is_known = known.get(digest) == before
        if before is not None and (is_known or digest not in known) and not read_all:
            found = check(store, [digest], sizes_only=True)
        else:
            found = check(store, [digest], read_all=read_all, progress=progress)
        damages |= found
        if before is not None and not (found or is_known) and before == _stamps(store, digest, manifest):
            seen.add(digest, before)
    set_aside(store, damages)
    return damages


def _stamps(store: Store, digest: str, manifest: Manifest | None) -> str | None:
    """A hash of the stamps of an artifact's files; None where one is missing, or no regular file."""
    try:
        return None if manifest is None else stamps_of(store.object_path(digest), manifest.files)
    except OSError:
        return None
