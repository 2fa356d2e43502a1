"""Whether the digest in a record is that of a target at hand, whatever mask token either was loaded with.

target.json has the mask token, so an artifact's digest changes with it; but a draft brings its own, and the target is
the same. A record only has the digest: where that is another, it is compared with the digest that this artifact would
have with each other mask token, which takes half a second for 150,000 ids.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsl.artifact_digest import DIGEST_START, MANIFEST, OUTSIDE_DIGEST, digest_line
from dsl.files import read_object_or_none

INFO = "target.json"
MOST_IDS = 1 << 20  # of a vocabulary


def is_same_target(recorded: str, digest: str, folder: Path | None) -> bool:
    """Whether a recorded digest is this target's, up to its mask token. folder: the artifact's, None for none."""
    return recorded == digest or (folder is not None and _differs_by_mask(recorded, folder))


@lru_cache(maxsize=64)
def _differs_by_mask(recorded: str, folder: Path) -> bool:
    """Whether the artifact in a folder differs from the recorded digest only by the mask token in its target.json."""
    info, manifest = read_object_or_none(folder / INFO) or {}, read_object_or_none(folder / MANIFEST) or {}
    mask, size, files = info.get("mask_token_id"), info.get("vocab_size"), manifest.get("files")
    if type(mask) is not int or type(size) is not int or not isinstance(files, dict):
        return False  # no artifact of a store
    before, _, after = (folder / INFO).read_bytes().partition(f'"mask_token_id": {mask}'.encode())
    names = sorted(files.keys() - {*OUTSIDE_DIGEST, INFO})
    start = hashlib.sha256(DIGEST_START)
    start.update(b"".join(_line(name, files[name]) for name in names if name < INFO))
    end = b"".join(_line(name, files[name]) for name in names if name > INFO)
    for other in range(min(size, MOST_IDS)):
        content = b'%b"mask_token_id": %d%b' % (before, other, after)
        digest = start.copy()
        digest.update(digest_line(INFO, len(content), hashlib.sha256(content).hexdigest()) + end)
        if digest.hexdigest() == recorded:
            return True
    return False


def _line(name: str, entry: dict[str, Any]) -> bytes:
    return digest_line(name, entry["size"], entry["sha256"])
