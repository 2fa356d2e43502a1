"""The form of an artifact's digest, for the store that computes it and for ops that compare one with another.

The digest is the SHA-256 in hex of DIGEST_START and a line for each file, sorted by name. Files of OUTSIDE_DIGEST at
the artifact's top are left out, since they differ between runs that computed the same.
"""

from __future__ import annotations

import json

MANIFEST = "manifest.json"
MEASUREMENTS = "measurements.json"
OUTSIDE_DIGEST = (MANIFEST, MEASUREMENTS)
DIGEST_START = b"dflow artifact 1\n"


def digest_line(name: str, size: int, sha256: str) -> bytes:
    """The line of a file in the text that an artifact's digest is computed from.

    name: relative, with "/". size: bytes. sha256: of its content, in hex.
    """
    return json.dumps([name, size, sha256]).encode() + b"\n"
