"""Which records may act for the user: import op files, run their graph, send secrets to their MLflow server.

A run that the user started is trusted as it was. What a record names that came from somebody else, or was altered
since, is only read, until the user trusts it with --trust.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

from attrs import frozen

from dsl.draft_folders import is_draft_folder
from dsl.errors import NotTrusted
from dsl.imports import module_folder, path_without_added, places_of
from dsl.paths import is_there
from dsl.secrets import without_credentials
from executor.system.trust import (
    GRAPH,
    OP_FILE,
    TRACKING_URI,
    Trusted,
    are_trusted,
    is_own_store,
    is_trusted,
    trust,
    trust_store,
)

UNKNOWN_STORE = "not one that you made here, at this place"
UNKNOWN = "not as you ran it here, or you never did"
HOW = "read it, then repeat the command with --trust"
IN_TEXT = r"(\w+)(\.\w+)*:\w+"  # "my_run:capture", as @op names a run function


@frozen
class Acting:
    """What a record would do for the user. store: where it lies; graph: the content of its file; op_files: absolute."""

    store: Path
    graph: bytes
    op_files: Sequence[Path]
    tracking_uri: str | None

    def trust(self) -> None:
        """Remember all of it as the user's own."""
        uri = [] if self.tracking_uri is None else [(TRACKING_URI, self.tracking_uri)]
        trust_store(self.store)
        trust([(GRAPH, self.graph), *_entries(self.op_files), *uri])

    def unknown(self, *, to_run: bool) -> list[str]:
        """What of it is not as the user ran or trusted it, in words; to_run: its graph too."""
        found = [] if is_own_store(self.store) else [f"the store {self.store}"]
        found += [] if is_trusted(GRAPH, self.graph) or not to_run else ["its graph"]
        if self.tracking_uri is not None and not is_trusted(TRACKING_URI, self.tracking_uri):
            found.append(f"the tracking server {without_credentials(self.tracking_uri)}")
        return [*found, *map(str, untrusted_op_files(self.op_files))]


def trust_op_files(op_files: Sequence[Path]) -> None:
    """Remember those that the user named."""
    trust(_entries(op_files))


def _entries(op_files: Sequence[Path]) -> list[Trusted]:
    return [_op_file(file) for file in op_files if is_there(file, Path.is_file)]


def require_trusted_graph(graph: bytes) -> None:
    """Raises NotTrusted for the content of a graph's file that is not as the user ran or trusted it."""
    if not is_trusted(GRAPH, graph):
        raise NotTrusted(f"the run's graph is {UNKNOWN}; {HOW}")


def require_own_store(store: Path) -> None:
    """Raises NotTrusted for a store that the user neither made nor trusted: all in it may be made to do harm."""
    if not is_own_store(store):
        raise NotTrusted(f"the store {store} is {UNKNOWN_STORE}; {HOW}")


def require_trusted_op_files(store: Path, op_files: Sequence[Path]) -> None:
    """Raises NotTrusted for the first whose code is not as the user ran or trusted it, and for all that the store of
    somebody else names: where a file lies decides what it imports.
    """
    if op_files:
        require_own_store(store)
    for file in untrusted_op_files(op_files):
        raise NotTrusted(f"{file} is not imported: it is {UNKNOWN}; {HOW}")


def untrusted_op_files(op_files: Sequence[Path]) -> list[Path]:
    """Those whose code is not as the user ran or trusted it."""
    there = [file for file in dict.fromkeys(op_files) if is_there(file, Path.is_file)]
    known = are_trusted(map(_op_file, there)) if there else []
    return [file for file, is_known in zip(there, known, strict=True) if not is_known]


def _op_file(file: Path) -> Trusted:
    """An op file with the modules beside it that it imports, whatever folder they all lie in; of a folder all."""
    folder = module_folder(file)
    code: dict[Path, bytes] = {}
    pending = [file, *_below(file.parent)] if is_draft_folder(file) else [file]
    while pending:
        one = pending.pop()
        if one not in code:
            code[one] = one.read_bytes()
            pending += [other for name in _imported(one, code[one]) for other in _beside(name, folder)]
    digests = (
        f"{each.relative_to(folder)}\0{hashlib.sha256(source).hexdigest()}\n" for each, source in sorted(code.items())
    )
    return OP_FILE, "".join(digests)


def _imported(file: Path, source: bytes) -> Iterator[str]:
    """The first names of the modules that a source imports, anywhere in it, or names in texts."""
    import ast  # only where there are op files

    try:
        nodes = ast.walk(ast.parse(source)) if file.suffix == ".py" else iter(())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # importing it fails, too
        return
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Constant(value=str(text)) if found := re.fullmatch(IN_TEXT, text):
                yield found[1]


def _beside(name: str, folder: Path) -> Iterator[Path]:
    """The files of a module, or of a package with all below it, in a folder; none where another one comes first."""
    if name in sys.stdlib_module_names:
        return
    found = [place for place in places_of(name, folder) if place.parent == folder and place.is_file()]
    found += _below(folder / name)
    if found and not _is_elsewhere(name, folder):
        yield from found


def _below(folder: Path) -> Iterator[Path]:
    """All code files in a folder and those below it."""
    suffixes = tuple(all_suffixes())
    for here, _, files in os.walk(folder):
        yield from (Path(here, file) for file in files if file.endswith(suffixes))


def _is_elsewhere(name: str, folder: Path) -> bool:
    """Whether Python finds a module of that name elsewhere, before it looks beside an op file, in a folder.

    `python -m` has that folder on its path where it is the working directory, and the processes that it starts do not:
    what they trust has to be the same.
    """
    found = PathFinder.find_spec(name, path_without_added())
    if found is None or found.origin is None:
        return False
    return os.path.realpath(found.origin) not in map(os.path.realpath, places_of(name, folder))
