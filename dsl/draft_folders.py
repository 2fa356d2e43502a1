"""The folders of a pipeline's own draft algorithms, which `[pipeline] drafts` names.

A folder is a package, named like the algorithm, with the files that ops/lib/drafts/algorithms.py lists. It stands among
the pipeline's op files by its `__init__.py`, so it is trusted, recorded and looked for as they are. Its modules are
imported only where the algorithm is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dsl.finding import Finding
from dsl.imports import hidden_module, import_from_source, put_on_path
from dsl.named_function import named_function
from dsl.paths import is_there, store_above

INIT = "__init__.py"
COMES_WITH_DFLOW = "ops.lib.drafts.algorithms:CONFIGS"
FILES = ("config.py", "model.py", "loss.py", "reference.py")

_used: dict[str, Path] = {}


def is_draft_folder(op_file: Path) -> bool:
    return op_file.name == INIT


def draft_folders(op_files: Sequence[Path]) -> dict[str, Path]:
    """The draft folders among the op files, by the names of their algorithms."""
    return {file.parent.name: file.parent for file in op_files if is_draft_folder(file)}


def use_draft_folders(op_files: Sequence[Path]) -> None:
    """Register the draft algorithms in these op files for this process, in place of all registered before."""
    _used.clear()
    _used.update(draft_folders(op_files))
    for folder in _used.values():
        put_on_path(folder.parent)
    if _used:
        import_from_source()


def use_checked_folders(op_files: Sequence[Path]) -> list[Finding]:
    """Check the draft folders that a pipeline names, and register them. Returns mistakes; with any, none is
    registered.
    """
    taken: Mapping[str, str] = named_function(COMES_WITH_DFLOW) if any(map(is_draft_folder, op_files)) else {}
    mistakes = folder_mistakes(op_files, list(taken))
    use_draft_folders(() if mistakes else op_files)
    return mistakes


def own_algorithms() -> Mapping[str, Path]:
    """The registered draft folders, by the names of their algorithms."""
    return _used


def folder_mistakes(op_files: Sequence[Path], taken: Sequence[str]) -> list[Finding]:
    """Mistakes in the draft folders among the op files. taken: the names of the algorithms that come with dflow."""
    mistakes = []
    seen: dict[str, Path] = {}
    for file in dict.fromkeys(filter(is_draft_folder, op_files)):
        folder = file.parent
        name = folder.name
        if name in seen:
            mistakes.append(Finding(f'{folder} and {seen[name]} would both be the algorithm "{name}": rename one'))
        seen[name] = folder
        if not is_there(folder, Path.is_dir):
            mistakes.append(Finding(f"there is no folder {folder}"))
        elif store := store_above(file):
            mistakes.append(Finding(f"{folder} lies inside the store {store}, from which no code is imported"))
        elif not name.isidentifier() or name != name.lower():
            mistakes.append(Finding(f"{folder}: the name of an algorithm has lower-case letters, digits and _"))
        elif name in taken:
            mistakes.append(Finding(f'{folder}: the algorithm "{name}" comes with dflow: rename the folder'))
        elif hidden := hidden_module(name, partial(_lies_in, folder)):
            mistakes.append(Finding(f"{folder} would hide {hidden}: rename it"))
        elif missing := [each for each in (INIT, *FILES) if not is_there(folder / each, Path.is_file)]:
            mistakes.append(Finding(f"{folder} lacks {', '.join(missing)}", advice="docs/drafts.md has an example"))
    return mistakes


def _lies_in(folder: Path, file: Path) -> bool:
    return file.parent == folder
