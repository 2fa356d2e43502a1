"""Compile a pipeline: a tree, or a Pipeline of Python, in; a checked and ordered `Graph` out, or every mistake at once.

The tree is rewritten first, by `-s`, by the copies of [for_each] and [sweep], and by what `${...}` refers to. Then each
node's config is made, once, and the nodes are checked against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from dsl.check import Absent, NodeCheck, absolute_path, all_of, check_node, check_table, inputs_of, wiring_mistakes
from dsl.convert import structure, type_mistake
from dsl.errors import PipelineError, did_you_mean, shortened
from dsl.finding import Field, Finding, Position
from dsl.for_each import FOR_EACH, SWEEP, expand, put_sweeps, sort_of
from dsl.graph import Graph, GraphNode
from dsl.interpolation import interpolate
from dsl.launch import TABLE_NAMES, Machine
from dsl.order import in_order
from dsl.pipeline import Node, Pipeline, wrong_id
from dsl.tree import Tree, merged, parsed_overrides, put_overrides, table_values, unknown_owner
from dsl.tune import TUNE, check_tune

TABLES = (*TABLE_NAMES, "node", FOR_EACH, SWEEP, TUNE)


def compile_pipeline(
    pipeline: Pipeline, overrides: Sequence[str] = (), sweeps: Sequence[str] = (), absent: Absent | None = None
) -> Graph:
    """The compiled graph of a pipeline made in Python. Takes and raises the same as `compiled`."""
    return compiled(tree_of(pipeline), overrides, sweeps, absent)


def override_graph(graph: Graph, overrides: Sequence[str], absent: Absent | None = None) -> Graph:
    """A compiled graph, such as a recorded one, with some values replaced and everything checked again.

    overrides: texts `node.field=value`; relative paths in them start at the graph's root. absent: as in `compiled`,
    whose errors are raised.
    """
    if not overrides:
        return graph
    hint = "give a node its own: -s NODE.seed=1"
    seeds = [each for each in parsed_overrides(overrides)[0] if (each.owner, each.field) == ("pipeline", "seed")]
    message = "the nodes of a recorded run hold their seeds already"
    if refused := [Finding(message, Field(position=seed.position), hint) for seed in seeds]:
        raise PipelineError(refused)
    return compiled(tree_of(graph), overrides, absent=absent)


def compiled(
    tree: Tree, overrides: Sequence[str] = (), sweeps: Sequence[str] = (), absent: Absent | None = None
) -> Graph:
    """The compiled graph of a parsed pipeline; the tree is changed in place.

    Raises PipelineError with all mistakes: first those of the file in its order, then those of arguments. absent: if
    given, missing files and folders are collected in it and are not mistakes by themselves.
    """
    given, wrong = parsed_overrides(overrides)
    tree.mistakes += wrong
    templates = list(tree.nodes)
    _check_names(tree)
    given = put_overrides(tree, given)
    if TUNE in tree.values:
        check_tune(tree)
    put_sweeps(tree, sweeps)
    expand(tree)
    given = put_overrides(tree, given)
    tree.mistakes += [unknown_owner(each, [*tree.nodes]) for each in given]
    interpolate(tree)
    tables = {name: check_table(tree, name) for name in TABLE_NAMES}
    head, mlflow, machine = (table.values for table in tables.values())
    sort_by = sort_of(tree)
    named = [node_id for node_id in tree.nodes if node_id not in TABLE_NAMES]  # the others' ids are mistakes
    nodes = {node_id: check_node(tree, node_id, head.get("seed", 0)) for node_id in named}
    _check_upload(tables["mlflow"], list(dict.fromkeys((*templates, *nodes))))
    tree.mistakes += wiring_mistakes(nodes, Machine(**machine), absent)
    if tree.mistakes:
        raise PipelineError(_in_order([*tree.mistakes, *all_of(absent)], tree))
    made = {node_id: _graph_node(node, tree) for node_id, node in nodes.items()}
    return Graph(
        name=head["name"],
        seed=head.get("seed", 0),
        experiment=mlflow.get("experiment") or head["name"],
        tracking=mlflow.get("tracking", True),
        tracking_uri=mlflow.get("tracking_uri"),
        root=tree.root,
        op_files=tree.op_files,
        nodes={node_id: made[node_id] for node_id in in_order({node.id: node.parents for node in made.values()})},
        tags=mlflow.get("tags", {}),
        notes=mlflow.get("notes", ""),
        machine=Machine(**machine),
        sort_by=sort_by,
        upload=mlflow.get("upload", ()),
        tree=tree,
    )


def tree_of(made: Pipeline | Graph) -> Tree:
    """The tree that a pipeline file would give for a pipeline made in Python, or for a recorded graph.

    `${...}` is a reference only in command line arguments then, not in the values.
    """
    mlflow = {name: getattr(made, name) for name in ("tracking", "tracking_uri", "tags", "notes", "upload")}
    if made.experiment != made.name:
        mlflow["experiment"] = made.experiment
    values = {
        "pipeline": {"name": made.name, "seed": made.seed},
        "mlflow": mlflow,
        "machine": attrs.asdict(made.machine),
        "sweep": {"sort": made.sort_by},
        "node": {node.id: _table(node) for node in made.nodes.values()},
    }
    copies = {node.id: node.copy for node in made.nodes.values() if node.copy is not None}
    op_files = tuple(absolute_path(file, made.root) for file in made.op_files)
    return Tree(merged({}, values), made.root, op_files=op_files, is_literal=True, copies=copies)


def _table(node: Node | GraphNode) -> dict[str, Any]:
    """A node as the table that a pipeline file would hold.

    A table that another field chooses is left out where it has only defaults, so that an override may choose another.
    """
    values = attrs.asdict(node.config, recurse=False)
    for name, field in node.op.fields.items():
        if field.table is None or (inside := table_values(values[name])) is None:
            continue
        is_default = not type_mistake(field.type, {}) and structure(field.type, {}) == values[name]
        if field.chosen_by is not None and is_default:
            del values[name]
        else:
            values[name] = inside
    return {"op": node.op, "launch": attrs.asdict(node.launch), **values}


def _graph_node(node: NodeCheck, tree: Tree) -> GraphNode:
    assert node.op is not None and node.made_launch is not None, "a node without mistakes has both"
    inputs = inputs_of(node.op, attrs.asdict(node.made, recurse=False))
    return GraphNode(node.id, node.made, node.op, node.made_launch, inputs, tree.copies.get(node.id))


def _check_upload(mlflow: NodeCheck, nodes: Sequence[str]) -> None:
    """Report the names in `upload` that are no nodes. nodes: ids, including nodes that were expanded into copies."""
    known = shortened(f"nodes: {', '.join(nodes) or 'none'}", 300)
    for name in mlflow.values.get("upload", ()):
        if name not in nodes:
            mlflow.report("upload", f'there is no node "{name}"', did_you_mean(name, nodes) or known)


def _check_names(tree: Tree) -> None:
    """Report unknown and missing top-level tables, and invalid node ids."""
    for node_id in tree.nodes:
        if wrong := wrong_id(node_id):
            tree.report(("node", node_id), wrong)
    if not tree.files:
        return
    start = Position(str(tree.files[0].path), 1, 1)
    for name, value in tree.values.items():
        if name not in TABLES:
            from dsl.aliases import alias_hint  # only for mistakes

            is_table = isinstance(value, dict)
            ops = {node_id: op.name for node_id in tree.nodes if (op := tree.op(node_id)) is not None}
            alias = None if is_table else alias_hint(name, "", ops)
            known = did_you_mean(name, TABLES) or f"a pipeline file has {', '.join(f'[{table}]' for table in TABLES)}"
            message = "unknown table" if is_table else "unknown key"
            tree.report((name,), message, known if alias is None else alias.text)
        elif not isinstance(value, dict):
            tree.report((name,), "expected a table", f"[{name}]")
    if "pipeline" not in tree.values:
        hint = '[pipeline] with name = "..."'
        tree.mistakes.append(Finding("the required table is missing", Field("pipeline", start), hint))
    if "node" not in tree.values:
        hint = "a node is a table [node.<id>] with its op"
        tree.mistakes.append(Finding("there is no node", Field("node", start), hint))


def _in_order(mistakes: Sequence[Finding], tree: Tree) -> list[Finding]:
    """The mistakes without repetition, as copies of a node share theirs: in the order of the files, arguments last."""
    files = {str(source.path): place for place, source in enumerate(tree.files)}

    def place(mistake: Finding) -> tuple[bool, int, int, int]:
        position = mistake.position or Position("")
        return position.is_argument, files.get(position.file, len(files)), position.line, position.column

    return sorted(dict.fromkeys(mistakes), key=place)
