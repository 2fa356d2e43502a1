"""Read a pipeline file, TOML or Python, into a graph; every mistake in it is reported at once, with its place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from dsl.check import Absent, absolute_path, check_table
from dsl.compile import compile_pipeline, compiled
from dsl.errors import PipelineError, listed
from dsl.files import is_there, store_above
from dsl.finding import Field, Finding, Position
from dsl.graph import Graph
from dsl.imports import import_from_source, put_on_path
from dsl.interpolation import TRACKING_URI, interpolate
from dsl.launch import TABLE_NAMES
from dsl.op import OpSpec
from dsl.op_table import INIT, all_ops, load_op, new_module, raised_in, run_source, use_checked_folders, user_ops
from dsl.pipeline import Pipeline, relative_to
from dsl.shown import shown_value
from dsl.tree import Tree, read_tree


def read_graph(
    file: Path, overrides: Sequence[str] = (), sweeps: Sequence[str] = (), absent: Absent | None = None
) -> Graph:
    """Read and compile a pipeline: a `*.toml`, or a `*.py` with `pipeline() -> Pipeline`.

    overrides: texts `node.field=value`. Raises PipelineError with all mistakes, in the order of the file, overrides
    last. absent: if given, missing files and folders are collected in it and are no mistakes by themselves.
    """
    _require_file(file)
    if file.suffix == ".toml":
        return compiled(tree_with_ops(file), overrides, sweeps, absent)
    if file.suffix == ".py":
        return compile_pipeline(_read_python(file), overrides, sweeps, absent)
    raise PipelineError([Finding(f"{file} is not a pipeline file: its name must end in .toml or .py")])


def tree_with_ops(file: Path) -> Tree:
    """The tree of a TOML pipeline, which finds its ops. Raises PipelineError where a file of it cannot be read."""
    _require_file(file)
    tree = read_tree(file)
    _load_ops(tree)
    return tree


def op_files_of(file: Path) -> tuple[Path, ...]:
    """The user's op files that a TOML pipeline names, even if other values are wrong. Raises PipelineError."""
    _require_file(file)
    return _op_files(read_tree(file))


def tracking_uri_of(file: Path) -> str | None:
    """The URI to which a TOML pipeline sends its runs, even if other values are wrong; None where none is set.

    Raises PipelineError where the URI itself is wrong, or the file is not TOML.
    """
    tree = read_tree(file)
    tree.values = {name: tree.table(name) for name in TABLE_NAMES if name in tree.values}
    interpolate(tree)
    mlflow = check_table(tree, "mlflow")
    if own := [mistake for mistake in tree.mistakes if mistake.path == ".".join(TRACKING_URI)]:
        raise PipelineError(own)
    uri: str | None = mlflow.values.get("tracking_uri")
    return uri


def _require_file(file: Path) -> None:
    if is_there(file, Path.is_file):
        return
    if not is_there(file, Path.is_dir):
        raise PipelineError([Finding(f"there is no pipeline file {file}")])
    inside = [str(each) for each in sorted(file.glob("*.toml"))]
    hint = f"in it: {listed(inside, 300)}" if inside else "there is no *.toml in it"
    raise PipelineError([Finding(f"{file} is a folder, not a pipeline file", advice=hint)])


def _load_ops(tree: Tree) -> None:
    """Load the user's op files and draft folders that a pipeline names, and make the tree find their ops."""
    tree.op_files = _op_files(tree)
    for mistake in use_checked_folders(tree.op_files):
        tree.report(("pipeline", "drafts"), mistake.what, mistake.advice)
    try:
        user_ops(tree.op_files)
    except PipelineError as error:
        tree.knows_all_ops = False
        where = tree.position(("pipeline", "ops"))
        tree.mistakes += [each.at("pipeline.ops", each.position or where) for each in error.mistakes]
    files = tree.op_files if tree.knows_all_ops else ()

    @cache
    def found(name: str) -> OpSpec | None:
        try:
            return load_op(name, files)
        except PipelineError:
            return None

    def find_op(name: Any) -> OpSpec | None:
        return found(name) if isinstance(name, str) else None

    tree.find_op = find_op


def _op_files(tree: Tree) -> tuple[Path, ...]:
    """The op files that `[pipeline] ops` lists, and the `__init__.py` of each folder in `drafts`.

    Relative paths start from the folder of the file that lists them.
    """
    head = tree.table("pipeline")
    listing: dict[str, Any] = {key: head.pop(key) for key in ("ops", "drafts") if key in head}
    interpolate(attrs.evolve(tree, values={"pipeline": listing}))  # which may ask for no other value
    head |= listing
    return (*_listed(tree, "ops"), *(folder / INIT for folder in _listed(tree, "drafts")))


def _listed(tree: Tree, key: str) -> tuple[Path, ...]:
    """The paths that a key of [pipeline] lists; empty for any other value, which is reported later with the table."""
    names = tree.table("pipeline").get(key, ())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(absolute_path(name, tree.folder(("pipeline", key))) for name in names)


def _read_python(file: Path) -> Pipeline:
    pipeline = _run_python(file)
    if not pipeline.root_given:
        pipeline.root = absolute_path(file.parent, Path.cwd())
    pipeline.op_files = tuple(absolute_path(name, pipeline.root) for name in pipeline.op_files)
    if mistakes := use_checked_folders(pipeline.op_files):
        raise PipelineError(mistakes)
    known = all_ops(pipeline.op_files)
    strangers = [node for node in pipeline.nodes.values() if known.get(node.op.name) != node.op]
    if strangers:
        hint = "name the file that declares it in Pipeline(..., op_files=(...)), since stages load ops from there"
        raise PipelineError(
            [Finding(f"the op {node.op.name} is in no op file", Field(f"node.{node.id}"), hint) for node in strangers]
        )
    return pipeline


def _run_python(file: Path) -> Pipeline:
    """The pipeline that `pipeline()` of a Python file returns; an error in it is shown with its line."""
    place = absolute_path(file, Path.cwd())
    if store := store_above(place):
        raise PipelineError([Finding(f"{file} lies inside the store {store}, from which no code is run: copy it out")])
    put_on_path(place.parent)
    import_from_source()
    module = new_module(f"pipeline_file_{place.stem}", place)
    try:
        with relative_to(place.parent):
            run_source(module, place)
            make = getattr(module, "pipeline", None)
            returned = make() if callable(make) else None
    except Exception as error:
        mistake = raised_in(place, error, str(file))  # of a config, every mistake on a line
        raise PipelineError([attrs.evolve(mistake, what=line) for line in mistake.what.split("\n")]) from error
    if not isinstance(returned, Pipeline):
        message = "a pipeline file in Python has a function pipeline() that returns a Pipeline"
        if callable(make):
            message += f", not {shown_value(returned)}" if returned is not None else "; this one returns nothing"
        raise PipelineError([Finding(message, Field(position=Position(str(file))))])
    return returned
