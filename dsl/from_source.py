"""Imports the project's modules from their source, always.

Python takes cached bytecode for a source of the same size and the same second. A key sees the source, so a stage
that ran the bytecode could make an artifact of other code than its key says.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from typing import Any, NoReturn

from dsl.search_path import PROJECT, is_below, is_interpreters

FRAMEWORK = (str(PROJECT / "dsl"), str(PROJECT / "executor"))  # no part of any key


class FromSource(SourceFileLoader):
    """Neither reads nor writes bytecode."""

    def path_stats(self, path: str) -> NoReturn:
        """Raises OSError, by which a SourceLoader knows that bytecode cannot be used."""
        raise OSError(f"{path} is read from its source")


_finder = FileFinder.path_hook((ExtensionFileLoader, EXTENSION_SUFFIXES), (FromSource, SOURCE_SUFFIXES))


def import_from_source() -> None:
    """From now on, for the modules of this process that are not yet imported."""
    if _project_finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _project_finder)
        sys.path_importer_cache.clear()


def _project_finder(folder: str) -> Any:
    """A finder for a folder of the project. Raises ImportError, as a path hook does, for any other."""
    is_own_op = is_below(folder, [str(PROJECT / "ops")])
    if is_below(folder, FRAMEWORK) or (is_interpreters(folder) and not is_own_op):
        raise ImportError(f"{folder} is not the project's")
    return _finder(folder)
