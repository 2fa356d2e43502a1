"""Check nodes: make the config and the launch of each, then references, artifact types, paths and cycles between them.

Every mistake is found at once, with its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define

from dsl.convert import UNKNOWN, Checked, KeyHint, checked, type_mistake
from dsl.errors import did_you_mean, listed, shortened
from dsl.files import is_there
from dsl.finding import Finding
from dsl.launch import CLASSES, LAUNCH, LAUNCH_FIELD, Launch, Machine
from dsl.op import ConfigField, Edge, OpSpec, Ref, checked_config, chosen_tables, is_builtin, with_tables
from dsl.op_class import method
from dsl.op_table import unknown_op
from dsl.order import cycles
from dsl.secrets import may_hold_secrets, secret_names
from dsl.shown import parsed_bytes, shown_value
from dsl.toml import KeyPath
from dsl.tree import Tree, cells, owner_path

LAUNCH_FIELDS = LAUNCH_FIELD.fields
FILL_IN = "FILL IN:"  # begins a value that `dflow init` leaves to the user
TORCHRUN_HOSTS = ("nnodes", "rendezvous")  # torchrun's own names for what `hosts` of kind = "ray" does


@define
class NodeCheck:
    """The state of checking one node, or one table beside the nodes, which has no op.

    values: the valid values, converted to their fields' types; paths as written. wrong: the names of fields with
    invalid values. made: the finished config, or the object of a table. launch, made_launch: the values and the object
    of the node's launch table.
    """

    tree: Tree
    id: str
    op: OpSpec | None = None
    values: dict[str, Any] = attrs.Factory(dict)
    wrong: set[str] = attrs.Factory(set)
    launch: dict[str, Any] = attrs.Factory(dict)
    made: Any = None
    made_launch: Launch | None = None

    @property
    def fields(self) -> Mapping[str, ConfigField]:
        return self.tree.fields(self.id) if self.op is None else self.op.fields

    @property
    def edges(self) -> Mapping[str, Edge]:
        return {} if self.op is None else self.op.edges

    def cells(self) -> Iterator[tuple[str, Any]]:
        """The values by "field"; those in a table by "table.field"."""
        return ((".".join(path), value) for path, value in cells(self.values, self.fields))

    def path(self, field: str = "") -> KeyPath:
        table, _, key = field.partition(".")
        is_inside = key and (table == LAUNCH or (table in self.fields and self.fields[table].table is not None))
        return (*owner_path(self.id), *((table, key) if is_inside else filter(None, (field,))))

    def folder(self, field: str) -> Path:
        """The folder that a relative path in the field starts from."""
        return self.tree.folder(self.path(field))

    def is_argument(self, field: str) -> bool:
        """Whether the value of the field was given on the command line."""
        return self.tree.is_argument(self.path(field))

    def mistake(self, field: str, message: str, hint: str = "") -> Finding:
        """A mistake at a field of this node or table; field "" stands for the node itself."""
        return self.tree.mistake(self.path(field), message, hint)

    def report(self, field: str, message: str, hint: str = "") -> None:
        self.tree.report(self.path(field), message, hint)


def check_node(tree: Tree, node_id: str, seed: int) -> NodeCheck:
    """Check the op, the config and the launch table of one node. seed: the pipeline's, used where the node
    sets none.
    """
    node = NodeCheck(tree, node_id, tree.op(node_id))
    table = tree.nodes[node_id]
    if not isinstance(table, dict):
        node.report("", "expected a table", f"[node.{node_id}]")
    elif node.op is None:
        _report_op(node, table)
    else:
        given = {name: value for name, value in table.items() if name != "op"}
        launch = given.pop(LAUNCH, {})
        _check_config(node, node.op, given, seed)
        _check_launch(node, launch)
    return node


def check_table(tree: Tree, name: str) -> NodeCheck:
    """Check a table beside the nodes, such as [pipeline], against its class."""
    table = NodeCheck(tree, name)
    if name in tree.values:  # a missing table is reported by itself
        found = checked(CLASSES[name], tree.table(name), owner=name)
        table.values, table.wrong, table.made = found.values, found.wrong, found.made
        _report(table, found)
    return table


def _check_config(node: NodeCheck, op: OpSpec, given: dict[str, Any], seed: int) -> None:
    values = dict(given)
    for name, field in op.fields.items():
        value = given.get(name, field.default)
        if field.external and value is not attrs.NOTHING and type_mistake(field.type, value) is None:
            values[name] = external_value(value, field, node.folder(name))
    if "seed" in op.fields and given.get("seed") is None:
        values["seed"] = seed
    found = checked_config(op, values)
    written = {*given, *chosen_tables(op.fields, given)}
    node.values = {
        name: given[name] if name in op.fields and op.fields[name].external else value
        for name, value in found.values.items()
        if name in written
    }
    node.wrong, node.made = found.wrong, found.made
    _report(node, found)


def _check_launch(node: NodeCheck, given: Any) -> None:
    if not isinstance(given, dict):
        if given is not attrs.NOTHING:
            node.report(LAUNCH, "expected a table", "launch = { nproc = 2 }")
        return
    given = dict(given)
    _report_several_hosts(node, given)
    found = checked(Launch, given, owner=LAUNCH)
    node.launch, node.made_launch = found.values, found.made
    _report(node, found, LAUNCH)


def _report(node: NodeCheck, found: Checked, table: str = "") -> None:
    """Report the mistakes in the values of a node, or of a table in it."""
    prefix = f"{table}." if table else ""
    for mistake in found.mistakes:
        field = prefix + mistake.path if mistake.path else table
        advice = mistake.advice
        if mistake.code == UNKNOWN:
            advice = unknown_key(node.tree, node.id, field).text
        elif mistake.path in found.clashes and not advice:
            advice = _unset_hint(node, field, [prefix + each for each in found.clashes[mistake.path]])
        node.report(field, mistake.what, advice)


def unknown_key(tree: Tree, owner: str, name: str, fields_only: bool = False) -> KeyHint:
    """A hint for a key, also "table.key" or "launch.key", that a node or table does not have.

    fields_only: whether edges are no candidates.
    """
    from dsl import aliases  # only for mistakes

    op = tree.op(owner)
    fields, edges = (tree.fields(owner), {}) if op is None else (op.fields, op.edges)
    called = owner if op is None else op.name
    ops = {tree.template(each): found.name for each in tree.nodes if (found := tree.op(each)) is not None}
    table, _, key = name.partition(".")
    if key and table == LAUNCH:
        return aliases.key_hint(key, LAUNCH, [*LAUNCH_FIELDS], ops)
    if key and table in fields:
        if key in fields or key in edges:
            return KeyHint(f'it is "{key}" of the node, not of its table {table}')
        return aliases.key_hint(key, f"{called}.{table}", [*fields[table].fields], ops)
    return aliases.key_hint(name, called, [*(() if fields_only else edges), *with_tables(fields)], ops)


def _report_op(node: NodeCheck, table: Mapping[str, Any]) -> None:
    name = table.get("op")
    if "op" not in table:
        node.report("", 'the required key "op" is missing', "the ops: dflow ops")
    elif not isinstance(name, str) and name is not attrs.NOTHING:
        node.report("op", f"expected the name of an op, got {shown_value(name)}")
    elif isinstance(name, str) and node.tree.knows_all_ops:
        unknown = unknown_op(name, node.tree.op_files)
        node.report("op", unknown.what, unknown.advice)


def _report_several_hosts(node: NodeCheck, launch: dict[str, Any]) -> None:
    """Report torchrun's fields for several machines as one mistake, and remove them from `launch`."""
    given = {name: launch.pop(name) for name in TORCHRUN_HOSTS if name in launch}
    if given:
        hosts = given.get("nnodes")
        hint = f'set kind = "ray" and hosts = {hosts if isinstance(hosts, int) else 2} instead; see docs/cluster.md'
        message = "ranks on several machines are started by Ray, not by torchrun"
        node.report(f"{LAUNCH}.{next(iter(given))}", message, hint)


def _unset_hint(node: NodeCheck, name: str, others: Sequence[str]) -> str:
    """A hint at how to unset a value of the file that an argument excludes; "" where file or arguments set both."""
    if node.is_argument(name):
        of_file = [other for other in others if not node.is_argument(other)]
    else:
        of_file = [name] if any(map(node.is_argument, others)) else []
    if not of_file:
        return ""
    set_at = [f"{node.tree.position(node.path(field)) or 'the pipeline'} sets {field}" for field in of_file]
    template = node.tree.template(node.id)
    unset = " ".join(f"-s {template}.{field}=none" for field in of_file)
    return f"{' and '.join(set_at)}; unset with {unset}"


MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
MOST_OF_CYCLE = 12  # nodes of a cycle that are shown
FieldCheck = Callable[[Mapping[str, Any], Any], Mapping[str, str]]  # the result: field -> what is wrong with it
Absent = dict[str, list[Finding]]  # mistakes about missing files and folders, by node


def wiring_mistakes(nodes: Mapping[str, NodeCheck], machine: Machine, absent: Absent | None = None) -> list[Finding]:
    """All mistakes between the nodes, even where some nodes are only partly valid.

    absent: if given, missing files and folders are collected in it, and are no mistakes.
    """
    mistakes: list[Finding] = []
    for node in nodes.values():
        if node.op is not None:
            mistakes += _edge_mistakes(node, node.op, nodes)
            not_there = list(dict.fromkeys(_absent_paths(node, node.op)))
            if absent is None:
                mistakes += not_there
            elif not_there:
                absent[node.id] = not_there
            mistakes += _empty_paths(node, node.op)
            mistakes += _pin_mistakes(node, node.op)
            mistakes += _launch_mistakes(node, node.op)
            mistakes += _mistakes_with_nodes_above(node, node.op, nodes)
            mistakes += _machine_mistakes(node, machine)
            mistakes += _secret_mistakes(node)
    return [*mistakes, *_cycle_mistakes(nodes)]


def all_of(absent: Absent | None) -> list[Finding]:
    """The mistakes of all nodes in one list."""
    return [mistake for mistakes in (absent or {}).values() for mistake in mistakes]


def inputs_of(op: OpSpec, values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """A mapping from each edge (input field) of the op to the ids of the nodes that it reads, in declaration order.

    An edge that is not given has an empty tuple.
    """
    inputs = {}
    for edge in op.edges:
        value = values.get(edge)
        references = value if isinstance(value, tuple) else (value,)
        inputs[edge] = tuple(reference.node for reference in references if isinstance(reference, Ref))
    return inputs


def absolute_path(path: str | Path, root: Path) -> Path:
    """The absolute form of a path that is relative to root, without `..`; symbolic links are not resolved."""
    return Path(os.path.normpath(root.absolute() / path))


def external_path(value: object, root: Path) -> Path | None:
    """The absolute path that an external value names; None for a builtin value and for no value."""
    if not isinstance(value, str) or is_builtin(value):
        return None
    return absolute_path(value, root)


def external_value(value: Any, field: ConfigField, root: Path) -> Any:
    """The value of an external field as the compiled graph holds it: an absolute path as text.

    None, a model id and a builtin value stay as they are. A list is converted member by member.
    """
    if isinstance(value, (tuple, list)):
        return tuple(external_value(member, field, root) for member in value)
    path = external_path(value, root)
    if path is None or (_may_be_model_id(value, field, path) and not is_there(path)):
        return value
    return str(path)


def _may_be_model_id(value: str, field: ConfigField, path: Path) -> bool:
    """Whether a text "owner/name" names a model: it does unless a folder `owner` exists, where `name` is then looked
    for.
    """
    return field.model_id and MODEL_ID.fullmatch(value) is not None and not is_there(path.parent, Path.is_dir)


def _edge_mistakes(node: NodeCheck, op: OpSpec, nodes: Mapping[str, NodeCheck]) -> Iterator[Finding]:
    for name, parents in inputs_of(op, node.values).items():
        wanted = op.edges[name].type
        for parent in parents:
            if parent not in nodes:
                known = list(nodes) if node.is_argument(name) else node.tree.templates(nodes)
                hint = did_you_mean(parent, known) or _who_gives(wanted, nodes, known)
                yield node.mistake(name, f'there is no node "{shortened(parent)}"', hint)
                continue
            parent_op = nodes[parent].op
            if parent_op is not None and not issubclass(parent_op.output, wanted):
                made = f'node "{node.tree.template(parent)}" produces {parent_op.output.__name__}'
                known = list(nodes) if node.is_argument(name) else node.tree.templates(nodes)
                yield node.mistake(name, f"expected {wanted.__name__}, but {made}", _who_gives(wanted, nodes, known))


def _who_gives(wanted: type, nodes: Mapping[str, NodeCheck], known: Sequence[str]) -> str:
    """A hint that names the nodes which produce the wanted artifact. known: the node ids that may be written there."""
    having = [node for node in nodes.values() if node.op is not None and issubclass(node.op.output, wanted)]
    named = {node.id if node.id in known else node.tree.template(node.id) for node in having}
    givers = [f'"@{name}"' for name in known if name in named]
    return f"{wanted.__name__}: {listed(givers, 100)}" if givers else f"no node produces {wanted.__name__}"


def _absent_paths(node: NodeCheck, op: OpSpec) -> Iterator[Finding]:
    for field, value in _external_values(node, op):
        path = external_path(value, node.folder(field.name))
        if not value or path is None or is_there(path) or _may_be_model_id(str(value), field, path):
            continue
        if str(value).startswith(FILL_IN):
            yield node.mistake(field.name, f"still to be filled in:{str(value).removeprefix(FILL_IN)}")
            continue
        hint = "neither a path nor a model id of the form owner/name" if field.model_id else ""
        if not hint and not node.is_argument(field.name):
            hint = f"create it, or give another path: -s {node.tree.template(node.id)}.{field.name}=PATH"
        yield node.mistake(field.name, f"there is no file or folder {path.parent / shortened(path.name)}", hint)


def _empty_paths(node: NodeCheck, op: OpSpec) -> Iterator[Finding]:
    for field, value in _external_values(node, op):
        if value == "":
            yield node.mistake(field.name, "expected a path, got an empty string")


def _external_values(node: NodeCheck, op: OpSpec) -> Iterator[tuple[ConfigField, object]]:
    """Pairs of an external field and its value; a field that holds a list yields one pair for each member."""
    for field in op.fields.values():
        if field.external:
            given = node.values.get(field.name)
            yield from ((field, value) for value in (given if isinstance(given, (tuple, list)) else (given,)))


def _pin_mistakes(node: NodeCheck, op: OpSpec) -> Iterator[Finding]:
    """A mistake for each model id whose commit is not given.

    The id alone enters the node's key, so what it names must not change.
    """
    for field in op.fields.values():
        if not field.pinned_by:
            continue
        value = node.values.get(field.name)
        path = external_path(value, node.folder(field.name))
        commit = node.values.get(field.pinned_by)
        if path is not None and is_there(path) and commit is not None and node.is_argument(field.pinned_by):
            message = f"a commit belongs to a model id, and {shortened(str(value))} is a path; leave it out"
            yield node.mistake(field.pinned_by, message)
        if path is None or is_there(path) or not _may_be_model_id(str(value), field, path):
            continue
        if isinstance(commit, str) and COMMIT.fullmatch(commit):
            continue
        if commit is None:
            where, given = field.name, "none is given"
        else:
            where = field.pinned_by
            given = f'"{shortened(str(commit))}" may change without changing the key'
        message = f'the model id "{value}" needs a commit as {field.pinned_by}, 40 hex digits: {given}'
        hint = "find it on the model's page under Files and versions, or give the directory of a checkpoint"
        yield node.mistake(where, message, hint)


def _launch_mistakes(node: NodeCheck, op: OpSpec) -> Iterator[Finding]:
    several = [name for name in ("nproc", "hosts") if node.launch.get(name, 1) > 1]
    if op.single_process and (several or node.launch.get("kind") == "ranks"):
        where = "kind" if node.launch.get("kind") == "ranks" else several[0]
        hint = 'leave launch out, or set kind = "process"' if where == "kind" else f"leave {where} out"
        yield node.mistake(f"launch.{where}", f'the op "{op.name}" runs in one process', hint)
    if not op.shares_shards and node.launch.get("shard_workers", 1) > 1:
        message = f'the op "{op.name}" does not share its shards among processes'
        yield node.mistake("launch.shard_workers", message, "leave shard_workers out")
    if not op.sequence_parallel and node.launch.get("sp_degree", 1) > 1:
        message = f'the op "{op.name}" does not support sequence parallelism'
        yield node.mistake("launch.sp_degree", message, "leave sp_degree out; every rank then takes whole sequences")
    if not op.pool and node.launch.get("pool") is not None:
        yield node.mistake("launch.pool", f'the op "{op.name}" has no use for a pool', "leave pool out")
    check: FieldCheck | None = method(op, "launch_mistakes")
    for name, message in check(node.values, node.launch).items() if check is not None else ():
        yield node.mistake(name, message)


def _mistakes_with_nodes_above(node: NodeCheck, op: OpSpec, nodes: Mapping[str, NodeCheck]) -> Iterator[Finding]:
    """Mistakes that the op's own check finds between this node's values and those of nodes above it."""

    def above(*edges: str) -> Mapping[str, Any]:
        reached: NodeCheck | None = node
        for edge in edges:
            reached = _read_by(reached, edge, nodes) if reached is not None else None
        return {} if reached is None else _known_values(reached)

    check: FieldCheck | None = method(op, "mistakes_with_nodes_above")
    for name, message in check(_known_values(node), above).items() if check is not None else ():
        yield node.mistake(name, message)


def _read_by(node: NodeCheck, edge: str, nodes: Mapping[str, NodeCheck]) -> NodeCheck | None:
    """The one node that an edge of `node` reads; None where the edge reads none or several."""
    read = () if node.op is None else inputs_of(node.op, node.values).get(edge, ())
    return nodes.get(read[0]) if len(read) == 1 else None


def _known_values(node: NodeCheck) -> dict[str, Any]:
    """The values of a node that are given and valid, with defaults for the other fields."""
    defaults = {name: field.default for name, field in node.fields.items() if not field.required}
    return {name: value for name, value in {**defaults, **node.values}.items() if name not in node.wrong}


def _machine_mistakes(node: NodeCheck, machine: Machine) -> Iterator[Finding]:
    """A mistake for each resource of which the node asks for more than the run may use: it would never start."""
    for name in ("cpus", "gpus", "memory"):
        asked, there = node.launch.get(name), getattr(machine, name)
        if asked is None or there is None or node.launch.get("kind") == "ray":  # a cluster has its own limits
            continue
        is_more = parsed_bytes(asked) > parsed_bytes(there) if name == "memory" else asked > there
        if is_more:
            yield node.mistake(f"launch.{name}", f"more than the {there} of [machine] {name}")


def _secret_mistakes(node: NodeCheck) -> Iterator[Finding]:
    for name, value in node.cells():
        for variable in secret_names(value) if may_hold_secrets(value) else ():
            if variable not in os.environ:
                message = f"the environment variable {variable} is not set"
                yield node.mistake(name, message, "export it before you call dflow")


def _cycle_mistakes(nodes: Mapping[str, NodeCheck]) -> Iterator[Finding]:
    inputs = {node.id: inputs_of(node.op, node.values) for node in nodes.values() if node.op is not None}
    parents = {
        node_id: [parent for ids in edges.values() for parent in ids if parent in inputs]
        for node_id, edges in inputs.items()
    }
    for cycle in cycles(parents):
        reads = dict(zip(cycle, [cycle[-1], *cycle[:-1]], strict=True))

        def edge(node_id: str, reads: Mapping[str, str] = reads) -> str:
            return next(name for name, ids in inputs[node_id].items() if reads[node_id] in ids)

        shown = [_with_place(nodes[node_id], edge(node_id)) for node_id in _ends(cycle)]
        if len(shown) < len(cycle):
            shown.insert(MOST_OF_CYCLE // 2, f"... {len(cycle) - len(shown):,} more ...")
        path = " -> ".join([*shown, nodes[cycle[0]].tree.template(cycle[0])])
        hint = "remove one of these references"
        yield nodes[cycle[0]].mistake(edge(cycle[0]), f"the nodes form a cycle: {path}", hint)


def _ends(cycle: list[str]) -> list[str]:
    if len(cycle) <= MOST_OF_CYCLE:
        return cycle
    return cycle[: MOST_OF_CYCLE // 2] + cycle[-(MOST_OF_CYCLE // 2) :]


def _with_place(node: NodeCheck, edge: str) -> str:
    """The node's name, with the file and line where its edge is written, if that is known."""
    position, name = node.tree.position(node.path(edge)), node.tree.template(node.id)
    if position is None:
        return name
    return f"{name} ({position.file}:{position.line})" if position.line else f"{name} ({position})"
