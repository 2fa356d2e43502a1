"""Imports the project's modules from their source, always.

Python takes cached bytecode for a source of the same size and the same second. A key sees the source, so a stage
that ran the bytecode could make an artifact of other code than its key says. A stage is given the sources that its key
was made of, and runs them whenever it imports them, whatever became of the files meanwhile. So it is with data files
that code reads by `pkgutil.get_data`.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dsl.search_path import PROJECT, is_below, is_interpreters

FRAMEWORK = (str(PROJECT / "dsl"), str(PROJECT / "executor"))  # no part of any key

_given: dict[str, bytes] = {}


class FromSource(SourceFileLoader):
    """Neither reads nor writes bytecode."""

    def path_stats(self, path: str) -> NoReturn:
        """Raises OSError, by which a SourceLoader knows that bytecode cannot be used."""
        raise OSError(f"{path} is read from its source")

    def get_data(self, path: str) -> bytes:
        return _given[path] if path in _given else super().get_data(path)


class _Finder(FileFinder):
    """Finds the sources that were given first, also where their files are gone."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        place = f"{self.path}{os.sep}{fullname.rpartition('.')[2]}"
        package = f"{place}{os.sep}__init__.py"
        if package in _given:
            loader = FromSource(fullname, package)
            return spec_from_file_location(fullname, package, loader=loader, submodule_search_locations=[place])
        file = f"{place}.py"
        if file in _given:
            return spec_from_file_location(fullname, file, loader=FromSource(fullname, file))
        return super().find_spec(fullname, target)


def import_from_source(given: Mapping[str, bytes] | None = None) -> None:
    """From now on, for the modules of this process that are not yet imported. given: sources by their files' paths."""
    if given:
        _given.update(given)
        # Tracebacks and `inspect` show what runs: entries without a time are never compared with the file.
        linecache.cache.update({file: _lines(file, source) for file, source in given.items() if file.endswith(".py")})
    if _project_finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _project_finder)
        sys.path_importer_cache.clear()


def source_of(file: Path) -> bytes:
    """What was given as the file's source, else what it holds. Raises OSError."""
    source = _given.get(str(file))
    return file.read_bytes() if source is None else source


def _lines(file: str, source: bytes) -> tuple[int, None, list[str], str]:
    """An entry of `linecache`."""
    return len(source), None, decode_source(source).splitlines(keepends=True), file


def _project_finder(folder: str) -> Any:
    """A finder for a folder of the project. Raises ImportError, as a path hook does, for any other."""
    is_own_op = is_below(folder, [str(PROJECT / "ops")])
    if is_below(folder, FRAMEWORK) or (is_interpreters(folder) and not is_own_op):
        raise ImportError(f"{folder} is not the project's")
    if not Path(folder).is_dir() and not _holds_given(folder, list(_given)):
        raise ImportError(f"{folder} is no folder")
    return _Finder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES), (FromSource, SOURCE_SUFFIXES))


def _holds_given(folder: str, files: Sequence[str]) -> bool:
    return any(is_below(file, [folder]) for file in files)
