"""Find ops by name: the built-in table of the package `ops`, and the user's own op files beside it.

The folders of a pipeline's own draft algorithms, which `[pipeline] drafts` names, stand among its op files by their
`__init__.py`, so they are trusted, recorded and looked for as they are. A folder is a package, named like the
algorithm, with the files that ops/lib/drafts/algorithms.py lists, imported only where the algorithm is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from dsl.errors import DflowError, PipelineError, did_you_mean, shortened
from dsl.files import is_there, store_above
from dsl.finding import Field, Finding, Position
from dsl.imports import hidden_module, import_from_source, named_function, put_on_path, source_of
from dsl.op import OpSpec, op_of


def load_op(name: str, op_files: Sequence[Path] = ()) -> OpSpec:
    """The op of that name. A built-in op is loaded alone. Raises PipelineError, with a suggestion, if there is none."""
    built_in = _built_in_table()
    if name in built_in:
        return _load_built_in(built_in[name])
    own = user_ops(op_files)
    if name not in own:
        raise PipelineError([unknown_op(name, op_files)])
    return own[name]


def all_ops(op_files: Sequence[Path] = ()) -> dict[str, OpSpec]:
    """All ops by name: the built-in ones in the order of the data flow, then the user's in the order of their files."""
    return {name: _load_built_in(place) for name, place in _built_in_table().items()} | user_ops(op_files)


def op_names(op_files: Sequence[Path] = ()) -> list[str]:
    """The names of all ops; loads no built-in op."""
    return [*_built_in_table(), *user_ops(op_files)]


def unknown_op(name: str, op_files: Sequence[Path] = ()) -> Finding:
    """The mistake of naming an unknown op."""
    names = op_names(op_files)
    return Finding(
        f'there is no op "{shortened(name)}"', advice=did_you_mean(name, names) or f"ops: {', '.join(names)}"
    )


def user_ops(op_files: Sequence[Path]) -> dict[str, OpSpec]:
    """The ops declared in the user's files (absolute paths), by name. Draft folders among them declare none.

    Raises PipelineError with all mistakes.
    """
    mistakes: list[Finding] = []
    found: dict[str, OpSpec] = {}
    declared_in = dict.fromkeys(_built_in_table(), "the built-in ops")
    stems: dict[str, Path] = {}
    for file in dict.fromkeys(file for file in op_files if not is_draft_folder(file)):
        if file.stem in stems:
            mistakes.append(
                Finding(f'{file} and {stems[file.stem]} would both be the module "{file.stem}": rename one')
            )
            continue
        stems[file.stem] = file
        try:
            specs = _declared_ops(_load_op_file(file))
        except PipelineError as error:
            mistakes += error.mistakes
            continue
        if not specs:
            mistakes.append(Finding(f"{file} declares no op", advice="a class with @op above @frozen(kw_only=True)"))
        for spec in specs:
            if spec.name in declared_in:
                taken = f'{file}: the op name "{spec.name}" is taken by {declared_in[spec.name]}'
                mistakes.append(Finding(taken, advice=f"rename the class {spec.config_class.__name__}"))
            declared_in[spec.name] = str(file)
            found[spec.name] = spec
    if mistakes:
        raise PipelineError(mistakes)
    return found


def new_module(name: str, file: Path) -> ModuleType:
    """An empty module object for a file."""
    module = ModuleType(name)
    module.__file__ = str(file)
    return module


def run_source(module: ModuleType, file: Path) -> None:
    """Run a file as the code of a module, always from its source: cached bytecode may be older than a quick edit."""
    exec(compile(source_of(file), file, "exec", dont_inherit=True), vars(module))


def raised_in(file: Path, error: BaseException, shown_as: str) -> Finding:
    """A mistake for an error that a user's file raised while it ran, with the place in that file."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return Finding(
            f"SyntaxError: {error.msg}", Field(position=Position(shown_as, error.lineno or 1, error.offset or 1))
        )
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    position = Position(shown_as)
    if frames:
        position = Position(shown_as, frames[-1].lineno or 1, (frames[-1].colno or 0) + 1)
    message = str(error) if isinstance(error, DflowError) else f"{type(error).__name__}: {error}"
    return Finding(message, Field(position=position))


def _built_in_table() -> dict[str, str]:
    table: dict[str, str] = named_function("ops:OPS")
    return table


def _load_built_in(place: str) -> OpSpec:
    import_from_source()
    return op_of(named_function(place))


def _declared_ops(module: ModuleType) -> list[OpSpec]:
    members = [member for member in vars(module).values() if isinstance(member, type)]
    return [op_of(member) for member in members if "__op__" in vars(member) and member.__module__ == module.__name__]


def _load_op_file(file: Path) -> ModuleType:
    """Run an op file as a module named after it, once per process; returns the module."""
    name = file.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    mistake = _cannot_be_module(file)
    if mistake:
        raise PipelineError([mistake])
    put_on_path(file.parent)
    import_from_source()
    module = new_module(name, file)
    sys.modules[name] = module
    try:
        run_source(module, file)
    except Exception as error:
        del sys.modules[name]
        raise PipelineError([raised_in(file, error, str(file))]) from error
    return module


def _is_copy(file: Path, other: Path) -> bool:
    """Whether both paths are one file or have equal content, as where a copied project is on the path twice."""
    return file.samefile(other) or file.read_bytes() == other.read_bytes()


def _cannot_be_module(file: Path) -> Finding | None:
    name = file.stem
    if not is_there(file, Path.is_file):
        return Finding(f"there is no file {file}")
    if store := store_above(file):
        return Finding(f"{file} lies inside the store {store}, from which no code is imported: copy it out")
    if file.suffix != ".py" or not name.isidentifier():
        return Finding(f"{file}: an op file is a Python module: letters, digits and _ in its name, which ends in .py")
    if hidden := hidden_module(name, lambda origin: _is_copy(file, origin)):
        return Finding(f"{file} would hide {hidden}: rename it")
    return None


INIT = "__init__.py"
COMES_WITH_DFLOW = "ops.lib.drafts.algorithms:CONFIGS"
DRAFT_FILES = ("config.py", "model.py", "loss.py", "reference.py")

_used: dict[str, Path] = {}


def is_draft_folder(op_file: Path) -> bool:
    return op_file.name == INIT


def use_draft_folders(op_files: Sequence[Path]) -> None:
    """Register the draft algorithms in these op files for this process, in place of all registered before."""
    _used.clear()
    _used.update({file.parent.name: file.parent for file in op_files if is_draft_folder(file)})
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
        elif missing := [each for each in (INIT, *DRAFT_FILES) if not is_there(folder / each, Path.is_file)]:
            mistakes.append(Finding(f"{folder} lacks {', '.join(missing)}", advice="docs/drafts.md has an example"))
    return mistakes


def _lies_in(folder: Path, file: Path) -> bool:
    return file.parent == folder
