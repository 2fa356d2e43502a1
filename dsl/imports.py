"""How the project's modules are found and read: by stages that import them, and by the keys that follow them.

They are looked for in the same order by both:

    dflow's own folder, PYTHONPATH       and what an op file put before the standard library itself
    the standard library, site-packages  of the interpreter that runs the stage
    all that comes behind them           editable installs, the folders of the op files, in their order

Everything but the middle is the project's: its code is part of keys. It is imported from its source, always: Python
takes cached bytecode for a source of the same size and the same second, so that a stage could run other code than its
key says. A stage is given the sources that its key was made of, and runs them whenever it imports them, whatever became
of the files meanwhile. `named_function` imports by a name, which keys do not follow.
"""

from __future__ import annotations

import gc
import importlib
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PROJECT = Path(__file__).resolve().parent.parent
INSTALLED = frozenset({"site-packages", "dist-packages"})
STANDARD = Path(os.__file__).parent
ARCHIVE = str(STANDARD.with_name(f"python{sys.version_info.major}{sys.version_info.minor}.zip"))
FRAMEWORK = (str(PROJECT / "dsl"), str(PROJECT / "executor"))  # no part of any key

_at_start = frozenset(sys.path)  # with the folder of the command's script, which no stage has
_added_folders: list[str] = []
_given: dict[str, bytes] = {}


def search_path(op_files: Sequence[Path]) -> list[str]:
    """The absolute folders in which a pipeline's stages look for modules, in search order."""
    here = [_absolute(entry) for entry in sys.path]
    end = _end_of_front(here)
    given = {_absolute(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    late = {_absolute(entry) for entry in sys.path if entry not in _at_start}
    op_folders = [str(module_folder(file)) for file in op_files]
    added = {*_added_folders} - {*op_folders}
    own = [entry for entry in here if is_interpreters(entry)]
    front = [entry for entry in here[:end] if entry in given or entry in late]
    behind = [entry for entry in (*here[end:], *_editable_folders(), *op_folders) if entry not in added]
    return _in_order(front, own, behind)


def take_search_path(folders: Sequence[str]) -> None:
    """Set sys.path to the executor's folders, but keep this interpreter's own folders in place of the executor's."""
    end = _end_of_front(folders)
    sys.path[:] = _in_order(folders[:end], [entry for entry in sys.path if is_interpreters(entry)], folders[end:])


def is_standard(path: str) -> bool:
    """Whether a path is the standard library's folder or archive, or below it."""
    return path == ARCHIVE or is_below(path, [str(STANDARD)])


def is_interpreters(path: str) -> bool:
    """Whether a file or folder belongs to the standard library or to an installed package."""
    return is_standard(path) or not INSTALLED.isdisjoint(Path(path).parts)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of the folders or lies in one."""
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def module_folder(file: Path) -> Path:
    """The folder from which a module is imported; for an `__init__.py` it is the one above the package."""
    return file.parent.parent if file.name == "__init__.py" else file.parent


def put_on_path(folder: Path) -> None:
    """Add a user's folder to the end of sys.path, so that its modules come after everything installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _added_folders.append(str(folder))


def path_without_added() -> list[str]:
    """sys.path as it would be without `put_on_path`."""
    return [folder for folder in sys.path if folder not in _added_folders]


def hidden_module(name: str, is_own: Callable[[Path], bool]) -> str | None:
    """A description of the Python or installed module that a user's module of this name would hide; None without one.

    is_own: tells whether an installed module's file counts as the user's own.
    """
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return f"Python's own module {name}"
    installed = PathFinder.find_spec(name, path_without_added())
    if installed is None or not installed.origin or is_own(Path(installed.origin)):
        return None
    return f"the installed module {name} ({installed.origin})"


class FromSource(SourceFileLoader):
    """A loader that neither reads nor writes bytecode."""

    def path_stats(self, path: str) -> NoReturn:
        """Raise OSError, which tells a SourceLoader that bytecode cannot be used."""
        raise OSError(f"{path} is read from its source")

    def get_data(self, path: str) -> bytes:
        return _given[path] if path in _given else super().get_data(path)


class _Finder(FileFinder):
    """A finder of modules whose source was passed to `import_from_source`, even where the file no longer exists."""

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
    """Import the project's modules from source, not from bytecode, from now on. Imported modules stay as they are.

    given: source bytes by file path, used in place of the files.
    """
    if given:
        _given.update(given)
        # Tracebacks and `inspect` show what runs: entries without a time are never compared with the file.
        linecache.cache.update({file: _lines(file, source) for file, source in given.items() if file.endswith(".py")})
    if _project_finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _project_finder)
        sys.path_importer_cache.clear()


def source_of(file: Path) -> bytes:
    """The source of a file: the bytes passed to `import_from_source`, else the file's content. Raises OSError."""
    source = _given.get(str(file))
    return file.read_bytes() if source is None else source


def _lines(file: str, source: bytes) -> tuple[int, None, list[str], str]:
    """An entry of `linecache` for a source file."""
    return len(source), None, decode_source(source).splitlines(keepends=True), file


def _project_finder(folder: str) -> Any:
    """A path hook: the finder for a folder of the project. Raises ImportError for any other folder."""
    is_own_op = is_below(folder, [str(PROJECT / "ops")])
    if is_below(folder, FRAMEWORK) or (is_interpreters(folder) and not is_own_op):
        raise ImportError(f"{folder} is not the project's")
    if not Path(folder).is_dir() and not _holds_given(folder, list(_given)):
        raise ImportError(f"{folder} is no folder")
    return _Finder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES), (FromSource, SOURCE_SUFFIXES))


def _holds_given(folder: str, files: Sequence[str]) -> bool:
    return any(is_below(file, [folder]) for file in files)


def _in_order(front: Sequence[str], own: Sequence[str], behind: Sequence[str]) -> list[str]:
    """The search path made of these folders: the project, then `front`, `own` and `behind`, each folder once.

    own: this interpreter's folders; those of other interpreters in `front` and `behind` are left out.
    """
    first, last = ([entry for entry in entries if not is_interpreters(entry)] for entries in (front, behind))
    return list(dict.fromkeys([str(PROJECT), *first, *own, *last]))


def _end_of_front(path: Sequence[str]) -> int:
    return next((place for place, entry in enumerate(path) if is_standard(entry)), len(path))


def _absolute(entry: str) -> str:
    return os.path.normpath(Path(entry).absolute())


def _editable_folders() -> list[str]:
    """The folders of editable packages whose setuptools finder does not use sys.path."""
    modules = (sys.modules.get(getattr(finder, "__module__", "")) for finder in sys.meta_path)
    mappings = (_mapping(module) for module in dict.fromkeys(module for module in modules if module is not None))
    return [str(Path(place).parent) for mapping in mappings for place in mapping.values()]


def _mapping(module: ModuleType) -> dict[str, str]:
    """The packages and their folders that an editable install's finder module lists; empty for any other module."""
    is_editable = module.__name__.startswith("__editable__")
    mapping: dict[str, str] = getattr(module, "MAPPING", {}) if is_editable else {}
    return mapping


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of dflow; its environment must come from `child_environment`."""
    return [sys.executable, "-m", module, *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment, changed so that `ops` in the working directory cannot shadow dflow's.

    variables: set in addition.
    """
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", **variables}


def named_function(place: str) -> Any:
    """The object named "module:name". Raises ImportError or AttributeError.

    Importing by name keeps a module out of processes that do not need it, and its code out of cache keys:
    `dsl/closure.py` does not follow such names. mypy does not either, so every caller declares the type.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Open a context without garbage collection; objects that exist at its end are exempt for good, such as modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
