"""Read a pipeline file, TOML or Python, into a Pipeline; every mistake in it is reported at once, with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from dsl.document import TABLE_NAMES, Document, Places, read_document
from dsl.draft_folders import INIT, use_checked_folders
from dsl.edge_checks import Absent, absolute_path, all_of, wiring_mistakes
from dsl.errors import PipelineError, did_you_mean, listed
from dsl.finding import Field, Finding, Position
from dsl.for_each import expanded, merged_mistakes
from dsl.graph import Graph, compiled, ids_to_upload
from dsl.imports import import_from_source, put_on_path
from dsl.interpolation import TRACKING_URI, interpolate
from dsl.op import OpSpec
from dsl.op_table import all_ops, load_op, new_module, raised_in, run_source, unknown_op, user_ops
from dsl.overrides import apply_overrides, parsed_overrides, put_into, unknown_owners
from dsl.paths import is_there, store_above
from dsl.pipeline import TAKEN_ID, Pipeline, relative_to
from dsl.shown import shown_value
from dsl.tables import pipeline_of, tables_of, upload_mistakes, written_table
from dsl.unchecked_node import WrittenNode, add_checked_node, ops_of, written_nodes
from dsl.variants import Sweep, sort_of

TABLES = (*TABLE_NAMES, "node", "for_each", "sweep")


def read_graph(
    file: Path, overrides: Sequence[str] = (), sweeps: Sequence[str] = (), absent: Absent | None = None
) -> Graph:
    """Read and compile. Raises PipelineError with all mistakes of both, in the order of the file."""
    return compiled(read_pipeline(file, overrides, sweeps, absent))


def read_pipeline(
    file: Path, overrides: Sequence[str] = (), sweeps: Sequence[str] = (), absent: Absent | None = None
) -> Pipeline:
    """The pipeline of a `*.toml`, or of a `*.py` with `pipeline() -> Pipeline`, with `node.field=value` overrides.

    What is returned compiles. Raises PipelineError with all mistakes, in the order of the file, overrides last.
    absent: if given, collects missing files and folders, which by themselves are then no mistakes.
    """
    _require_file(file)
    swept = [Sweep(text) for text in sweeps]
    if file.suffix == ".toml":
        return _read_toml(file, overrides, swept, absent)
    if file.suffix == ".py":
        return _read_python(file, overrides, swept, absent)
    raise PipelineError([Finding(f"{file} is not a pipeline file: its name must end in .toml or .py")])


def op_files_of(file: Path) -> tuple[Path, ...]:
    """The user's op files that a TOML pipeline names, whatever else is wrong with it. Raises PipelineError."""
    _require_file(file)
    document = read_document(file)
    head = written_table("pipeline", document.table("pipeline"), Places(document, ("pipeline",)))
    return _op_files({"pipeline": head}, absolute_path(file.parent, Path.cwd()), [])


def tracking_uri_of(file: Path) -> str | None:
    """Where a TOML pipeline sends its runs, whatever else is wrong with it; None where it does not say.

    Raises PipelineError where that itself is wrong, and for what is no TOML.
    """
    document = read_document(file)
    tables = {name: written_table(name, document.table(name), Places(document, (name,))) for name in TABLE_NAMES}
    mistakes = interpolate({}, tables)
    pipeline, wrong = pipeline_of(tables, absolute_path(file.parent, Path.cwd()), (), {})
    own = [mistake for mistake in (*mistakes, *wrong) if mistake.path == ".".join(TRACKING_URI)]
    if own:
        raise PipelineError(own)
    return pipeline.tracking_uri


def _require_file(file: Path) -> None:
    if is_there(file, Path.is_file):
        return
    if not is_there(file, Path.is_dir):
        raise PipelineError([Finding(f"there is no pipeline file {file}")])
    inside = [str(each) for each in sorted(file.glob("*.toml"))]
    hint = f"in it: {listed(inside, 300)}" if inside else "there is no *.toml in it"
    raise PipelineError([Finding(f"{file} is a folder, not a pipeline file", advice=hint)])


def _read_toml(file: Path, texts: Sequence[str], sweeps: Sequence[Sweep], absent: Absent | None) -> Pipeline:
    document = read_document(file)
    mistakes: list[Finding] = []
    tables = {name: written_table(name, document.table(name), Places(document, (name,))) for name in TABLE_NAMES}
    overrides, wrong = parsed_overrides(texts)
    mistakes += wrong
    overrides, wrong = put_into(tables, overrides)
    mistakes += wrong
    root = absolute_path(file.parent, Path.cwd())
    op_files = _op_files(tables, root, mistakes)
    reader = _NodeReader(document, op_files, mistakes)
    nodes = {node_id: reader.read(node_id, table) for node_id, table in document.table("node").items()}
    overrides, wrong = put_into(nodes, overrides)
    mistakes += wrong
    written = nodes
    nodes, wrong = expanded(written, sweeps, document, reader.read_variant)
    mistakes += wrong
    taken = [node_id for node_id in TABLE_NAMES if node_id in written and node_id not in nodes]
    mistakes += [written[node_id].mistake("", TAKEN_ID.format(node_id)) for node_id in taken]
    overrides, wrong = put_into(nodes, overrides)
    mistakes += [*wrong, *unknown_owners(overrides, nodes), *interpolate(nodes, tables)]
    ops = ops_of(nodes)
    mistakes += _top_level_mistakes(document, file, ops)
    pipeline, wrong = pipeline_of(tables, root, op_files, ops)
    mistakes += wrong
    pipeline.sort_by, wrong = sort_of(document)
    mistakes += wrong
    for node in nodes.values():
        mistakes += add_checked_node(pipeline, node, ops)
    mistakes += upload_mistakes(tables["mlflow"], list(dict.fromkeys((*written, *nodes))))
    mistakes += wiring_mistakes(nodes, root, pipeline.machine, absent)
    if mistakes:
        raise PipelineError(_in_order(merged_mistakes([*mistakes, *all_of(absent)], nodes), document))
    if absent:
        absent |= {node_id: merged_mistakes(lacking, nodes) for node_id, lacking in absent.items()}
    return pipeline


def _in_order(mistakes: Sequence[Finding], document: Document | None) -> list[Finding]:
    """In the order of the files, those of the command line last."""

    def place(mistake: Finding) -> tuple[bool, tuple[int, int, int]]:
        position = mistake.position or Position("")
        where = document.place_of(position) if document is not None else (0, position.line, position.column)
        return position.is_argument, where

    return sorted(mistakes, key=place)


def _top_level_mistakes(document: Document, file: Path, ops: Mapping[str, str]) -> list[Finding]:
    mistakes = []
    start = Position(str(file), 1, 1)
    for name, value in document.values.items():
        if name not in TABLES:
            from dsl.aliases import alias_hint  # only for mistakes

            hint = did_you_mean(name, TABLES) or f"a pipeline file has {', '.join(f'[{table}]' for table in TABLES)}"
            message = "unknown table" if isinstance(value, dict) else "unknown key"
            alias = None if isinstance(value, dict) else alias_hint(name, "", ops)
            hint = hint if alias is None else alias.text
            mistakes.append(Finding(message, Field(name, document.position((name,))), hint))
        elif not isinstance(value, dict):
            mistakes.append(Finding("expected a table", Field(name, document.position((name,))), f"[{name}]"))
    if "pipeline" not in document.values:
        mistakes.append(
            Finding("the required table is missing", Field("pipeline", start), '[pipeline] with name = "..."')
        )
    if "node" not in document.values:
        mistakes.append(Finding("there is no node", Field("node", start), "a node is a table [node.<id>] with its op"))
    return mistakes


def _op_files(tables: Mapping[str, WrittenNode], root: Path, mistakes: list[Finding]) -> tuple[Path, ...]:
    """The files of `[pipeline] ops`, and its `drafts` by their `__init__.py`, from the listing file's folder."""
    files = _listed("ops", tables["pipeline"], root, mistakes)
    folders = _listed("drafts", tables["pipeline"], root, mistakes)
    return (*files, *(folder / INIT for folder in folders))


def _listed(key: str, head: WrittenNode, root: Path, mistakes: list[Finding]) -> tuple[Path, ...]:
    alone = attrs.evolve(head, values={name: value for name, value in head.values.items() if name == key})
    mistakes += interpolate({}, {"pipeline": alone})
    names = alone.values.get(key, ())
    if key in alone.values:
        head.values[key] = names
    else:
        head.values.pop(key, None)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()  # reported with the table's other mistakes
    folder = head.places.folder(key) or root
    return tuple(absolute_path(name, folder) for name in names)


class _NodeReader:
    """Makes nodes of tables; what is wrong with them is added to the mistakes."""

    def __init__(self, document: Document, op_files: tuple[Path, ...], mistakes: list[Finding]) -> None:
        self._document = document
        self._op_files = op_files
        self._mistakes = mistakes
        self._ops: dict[str, OpSpec] = {}
        self._op_files_work = True
        where = document.position(("pipeline", "drafts"))
        mistakes += [each.at("pipeline.drafts", where) for each in use_checked_folders(op_files)]
        try:
            user_ops(op_files)
        except PipelineError as error:
            self._op_files_work = False
            where = document.position(("pipeline", "ops"))
            mistakes += [mistake.at("pipeline.ops", mistake.position or where) for mistake in error.mistakes]

    def read(self, node_id: str, table: Any) -> WrittenNode:
        return self.read_variant(node_id, table, Places(self._document, ("node", node_id)))

    def read_variant(self, node_id: str, table: Any, places: Places) -> WrittenNode:
        node = WrittenNode(node_id, None, {}, {}, places)
        if not isinstance(table, dict):
            self._mistakes.append(node.mistake("", "expected a table", f"[node.{node_id}]"))
            return node
        launch = table.get("launch", {})
        if isinstance(launch, dict):
            node.launch = dict(launch)
        else:
            self._mistakes.append(node.mistake("launch", "expected a table", "launch = { nproc = 2 }"))
        node.values = {name: value for name, value in table.items() if name not in ("op", "launch")}
        node.op = self._op(node, table)
        return node

    def _op(self, node: WrittenNode, table: Mapping[str, Any]) -> OpSpec | None:
        name = table.get("op")
        if isinstance(name, str) and name in self._ops:
            return self._ops[name]
        if "op" not in table:
            mistake = node.mistake("", 'the required key "op" is missing', "the ops: dflow ops")
        elif not isinstance(name, str):
            mistake = node.mistake("op", f"expected the name of an op, got {shown_value(name)}")
        else:
            try:
                self._ops[name] = load_op(name, self._op_files if self._op_files_work else ())
                return self._ops[name]
            except PipelineError:
                if not self._op_files_work:
                    return None  # it may be one of those that could not be read
                unknown = unknown_op(name, self._op_files)
                mistake = node.mistake("op", unknown.what, unknown.advice)
        self._mistakes.append(mistake)
        return None


def _read_python(file: Path, overrides: Sequence[str], sweeps: Sequence[Sweep], absent: Absent | None) -> Pipeline:
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
    return checked_pipeline(pipeline, overrides, sweeps, absent)


def checked_pipeline(
    pipeline: Pipeline, overrides: Sequence[str] = (), sweeps: Sequence[Sweep] = (), absent: Absent | None = None
) -> Pipeline:
    """A pipeline that Python made, with overrides; what is returned compiles. Raises PipelineError with all mistakes.

    absent: as of `read_pipeline`.
    """
    mistakes: list[Finding] = []
    try:
        pipeline = apply_overrides(pipeline, overrides, sweeps)
    except PipelineError as error:
        mistakes += error.mistakes
    mistakes += upload_mistakes(tables_of(pipeline)["mlflow"], ids_to_upload(pipeline))
    mistakes += wiring_mistakes(written_nodes(pipeline), pipeline.root, pipeline.machine, absent)
    if mistakes:
        raise PipelineError(_in_order([*mistakes, *all_of(absent)], None))
    return pipeline


def _run_python(file: Path) -> Pipeline:
    """What `pipeline()` of the file returns; an error in it is shown with its line in the file."""
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
