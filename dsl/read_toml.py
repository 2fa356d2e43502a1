"""Read a pipeline file, TOML or Python, into a Pipeline; every mistake in it is reported at once, with its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli
from attrs import frozen, validators

from dsl.errors import Mistake, PipelineError, Position, did_you_mean
from dsl.graph import Graph, compile_pipeline
from dsl.launch import Machine
from dsl.op import OpSpec
from dsl.op_table import all_ops, load_op, new_module, put_on_path, raised_in, run_source, unknown_op, user_ops
from dsl.overrides import apply_overrides, override_nodes
from dsl.pipeline import Pipeline, check_tags
from dsl.positions import KeyPath, key_positions
from dsl.wiring import absolute_path, wiring_mistakes
from dsl.written import COMMAND_LINE, WrittenNode, add_checked_node, table_mistakes, written_nodes

TABLES = ("pipeline", "mlflow", "machine", "node")

Tables = dict[KeyPath, dict[str, Position]]


@frozen(kw_only=True)
class PipelineTable:
    """The table `[pipeline]`; the paths in ops are relative to the file."""

    name: str = attrs.field(validator=validators.min_len(1))
    seed: int = 0
    ops: tuple[str, ...] = ()


def _are_tags(_table: MlflowTable, _field: attrs.Attribute[dict[str, str]], tags: dict[str, str]) -> None:
    check_tags(tags)


@frozen(kw_only=True)
class MlflowTable:
    """The table `[mlflow]`: the pipeline's name and SQLite in the store unless given; tags and notes of its runs."""

    experiment: str | None = None
    tracking_uri: str | None = None
    tags: dict[str, str] = attrs.field(factory=dict, validator=_are_tags)
    notes: str = ""


def read_graph(file: Path, overrides: Sequence[str] = ()) -> Graph:
    """Read and compile. Raises PipelineError with all mistakes of both, in the order of the file."""
    return compile_pipeline(read_pipeline(file, overrides))


def read_pipeline(file: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline of a `*.toml`, or of a `*.py` with `pipeline() -> Pipeline`, with `node.field=value` overrides.

    What is returned compiles. Raises PipelineError with all mistakes, in the order of the file, overrides last.
    """
    if not file.is_file():
        raise PipelineError([Mistake(f"there is no pipeline file {file}")])
    if file.suffix == ".toml":
        pipeline, mistakes = _read_toml(file, overrides)
    elif file.suffix == ".py":
        pipeline, mistakes = _read_python(file, overrides)
    else:
        raise PipelineError([Mistake(f"{file} is no pipeline file: its name ends neither in .toml nor in .py")])
    if mistakes:
        raise PipelineError(sorted(mistakes, key=_place))
    return pipeline


def _place(mistake: Mistake) -> tuple[bool, int, int]:
    position = mistake.position or Position("")
    return (position == COMMAND_LINE, position.line, position.column)


def _read_toml(file: Path, overrides: Sequence[str]) -> tuple[Pipeline, list[Mistake]]:
    document, places = _parse(file)
    tables, mistakes = _top_level_tables(document, places, Position(str(file), 1, 1))
    root = absolute_path(file.parent, Path.cwd())
    head, head_mistakes = _read_table(PipelineTable, "pipeline", tables, places)
    mlflow, mlflow_mistakes = _read_table(MlflowTable, "mlflow", tables, places)
    machine, machine_mistakes = _read_table(Machine, "machine", tables, places)
    mistakes += head_mistakes + mlflow_mistakes + machine_mistakes
    op_files = tuple(absolute_path(name, root) for name in head.get("ops", ()))
    nodes, node_mistakes = _read_nodes(tables["node"], places, op_files)
    mistakes += node_mistakes
    mistakes += override_nodes(nodes, overrides)
    pipeline = Pipeline(
        head.get("name", ""),
        seed=head.get("seed", 0),
        experiment=mlflow.get("experiment"),
        tracking_uri=mlflow.get("tracking_uri"),
        root=root,
        op_files=op_files,
        tags=mlflow.get("tags"),
        notes=mlflow.get("notes", ""),
        machine=Machine(**machine),
    )
    for node in nodes.values():
        mistakes += add_checked_node(pipeline, node)
    return pipeline, mistakes + wiring_mistakes(nodes, root)


def _parse(file: Path) -> tuple[dict[str, Any], Tables]:
    try:
        text = file.read_bytes().decode()
        document = tomli.loads(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PipelineError([Mistake("the file is not UTF-8", position=Position(str(file), line, 1))]) from error
    except RecursionError as error:
        raise PipelineError([Mistake(f"not TOML: {error}", position=Position(str(file)))]) from error
    except tomli.TOMLDecodeError as error:
        position = Position(str(file), error.lineno, error.colno)
        raise PipelineError([Mistake(f"not TOML: {error.msg}", position=position)]) from error
    return document, _by_table(key_positions(text, str(file)))


def _top_level_tables(
    document: Mapping[str, Any], places: Tables, start: Position
) -> tuple[dict[str, dict[str, Any]], list[Mistake]]:
    mistakes = []
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for name, value in document.items():
        position = places[(name,)][""]
        if name not in TABLES:
            hint = did_you_mean(name, TABLES) or "a pipeline file has [pipeline], [mlflow], [machine] and [node.<id>]"
            mistakes.append(
                Mistake("unknown table" if isinstance(value, dict) else "unknown key", name, position, hint)
            )
        elif not isinstance(value, dict):
            mistakes.append(Mistake("expected a table", name, position, f"[{name}]"))
        else:
            tables[name] = value
    if "pipeline" not in document:
        mistakes.append(Mistake("the required table is missing", "pipeline", start, '[pipeline] with name = "..."'))
    if "node" not in document:
        mistakes.append(Mistake("there is no node", "node", start, "a node is a table [node.<id>] with its op"))
    return tables, mistakes


def _read_table(
    cls: type, name: str, tables: Mapping[str, dict[str, Any]], places: Tables
) -> tuple[dict[str, Any], list[Mistake]]:
    """The right values of a table, and its mistakes; a missing table is the caller's business."""
    if (name,) not in places:
        return {}, []
    table = dict(tables[name])
    mistakes = table_mistakes(table, cls, name, places[(name,)])
    return table, mistakes


def _by_table(positions: Mapping[KeyPath, Position]) -> Tables:
    """Positions by table, for tables one and two levels deep: those of the table itself ("") and of keys in it."""
    tables: Tables = defaultdict(dict)
    for path, position in positions.items():
        for depth in (1, 2):
            if depth <= len(path) <= depth + 2:
                tables[path[:depth]][".".join(str(part) for part in path[depth:])] = position
    return tables


def _read_nodes(
    tables: Mapping[str, Any], places: Tables, op_files: tuple[Path, ...]
) -> tuple[dict[str, WrittenNode], list[Mistake]]:
    mistakes: list[Mistake] = []
    op_files_work = True
    try:
        user_ops(op_files)
    except PipelineError as error:
        op_files_work = False
        where = places[("pipeline",)]["ops"]
        mistakes += [attrs.evolve(mistake, path="pipeline.ops", position=where) for mistake in error.mistakes]
    nodes = {}
    for node_id, table in tables.items():
        node = WrittenNode(node_id, None, {}, {}, places["node", node_id])
        nodes[node_id] = node
        if not isinstance(table, dict):
            mistakes.append(node.mistake("", "expected a table", f"[node.{node_id}]"))
            continue
        launch = table.get("launch", {})
        if isinstance(launch, dict):
            node.launch = dict(launch)
        else:
            mistakes.append(node.mistake("launch", "expected a table", "launch = { nproc = 2 }"))
        node.values = {name: value for name, value in table.items() if name not in ("op", "launch")}
        found = _op_of_table(node, table, op_files if op_files_work else ())
        if isinstance(found, OpSpec):
            node.op = found
        elif op_files_work or not isinstance(table.get("op"), str):
            mistakes.append(found)
    return nodes, mistakes


def _op_of_table(node: WrittenNode, table: Mapping[str, Any], op_files: tuple[Path, ...]) -> OpSpec | Mistake:
    if "op" not in table:
        return node.mistake("", 'the required key "op" is missing', "the ops: dflow ops")
    if not isinstance(table["op"], str):
        return node.mistake("op", f"expected the name of an op, got {table['op']!r}")
    try:
        return load_op(table["op"], op_files)
    except PipelineError:
        unknown = unknown_op(table["op"], op_files)
        return node.mistake("op", unknown.message, unknown.hint)


def _read_python(file: Path, overrides: Sequence[str]) -> tuple[Pipeline, list[Mistake]]:
    pipeline = _run_python(file)
    if not pipeline.root_given:
        pipeline.root = absolute_path(file.parent, Path.cwd())
    pipeline.op_files = tuple(absolute_path(name, pipeline.root) for name in pipeline.op_files)
    known = all_ops(pipeline.op_files)
    strangers = [node for node in pipeline.nodes.values() if known.get(node.op.name) != node.op]
    if strangers:
        hint = "name the file that declares it in Pipeline(..., op_files=(...)), since stages load ops from there"
        raise PipelineError(
            [Mistake(f"the op {node.op.name} is in no op file", f"node.{node.id}", None, hint) for node in strangers]
        )
    mistakes: list[Mistake] = []
    try:
        pipeline = apply_overrides(pipeline, overrides)
    except PipelineError as error:
        mistakes += error.mistakes
    return pipeline, mistakes + wiring_mistakes(written_nodes(pipeline), pipeline.root)


def _run_python(file: Path) -> Pipeline:
    """What `pipeline()` of the file returns; an error in it is shown with its line in the file."""
    place = absolute_path(file, Path.cwd())
    put_on_path(place.parent)
    module = new_module(f"pipeline_file_{place.stem}", place)
    try:
        run_source(module, place)
        make = getattr(module, "pipeline", None)
        pipeline = make() if callable(make) else None
    except Exception as error:
        raise PipelineError([raised_in(place, error, str(file))]) from error
    if not isinstance(pipeline, Pipeline):
        message = "a pipeline file in Python has a function pipeline() that returns a Pipeline"
        raise PipelineError([Mistake(message, position=Position(str(file)))])
    return pipeline
