"""The source text of all code that a node ran, kept once for each hash, so that a later change can be shown.

<store>/code/<first 2>/<hash>    the lines of one function, class or global, as they were written
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dsl.errors import ConfigError
from dsl.files import read_plain, remove_link, write_whole
from dsl.fingerprint import read_code
from dsl.graph import Graph
from dsl.os_errors import clear_errors
from executor.keys.node_key import class_symbols, code_roots, run_symbols
from executor.system.symlinks import is_plain

FOLDER = "code"
HASH = re.compile("[0-9a-f]{16,128}")


def keep_texts(store: Path, graph: Graph, node_id: str, code: Mapping[str, str]) -> None:
    """Keep the text of all code that enters a node's key; reads no source where all of it is kept already."""
    missing = {hash for hash in code.values() if not _path(store, hash).exists()}
    if not missing:
        return
    for hash, text in texts_now(graph, node_id).values():
        if hash in missing:  # else edited since the key was made
            path = _path(store, hash)
            with clear_errors(path):
                remove_link(path.parent)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text.encode())


def kept_text(store: Path, hash: str) -> str | None:
    """The text of a hash, None where it was never kept."""
    path = _path(store, hash)
    if not (HASH.fullmatch(hash) and is_plain(path, store)):
        return None
    return read_plain(path).decode(errors="replace")


def texts_now(graph: Graph, node_id: str) -> dict[str, tuple[str, str]]:
    """ "module:symbol" -> (hash, text) of a node's code as it is now; empty where its run function is gone."""
    node = graph.nodes[node_id]
    try:
        code = read_code(run_symbols(node), code_roots(graph), class_symbols(node))
    except ConfigError:
        return {}
    return {place: (hash, code.text(place)) for place, hash in code.hashes.items()}


def _path(store: Path, hash: str) -> Path:
    return store / FOLDER / hash[:2] / hash
