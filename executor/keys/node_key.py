"""The key of a node: everything that decides what its artifact holds.

key = H(format, op name, op version, code, config without neutral fields, external content, input digests, libraries)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
from attrs import frozen

from dsl.convert import unstructure
from dsl.encoding import Encoded, fingerprint
from dsl.errors import DataError, PipelineError
from dsl.finding import Finding
from dsl.graph import Graph, GraphNode
from dsl.imports import search_path
from dsl.op import ConfigField
from dsl.op_class import method
from dsl.secrets import without_secrets
from executor.keys.code_memo import CodeDigests, CodeMemo
from executor.keys.external_inputs import External, ExternalDigests

FORMAT = 1
NOT_INSTALLED = "not installed"
EXTERNAL_FILES = "external_files"  # the method of a config that names more of them (dsl/op_class.py)
T = TypeVar("T")

Inputs = Mapping[str, str | tuple[str, ...] | None]  # digests by edge


@frozen
class KeyParts:
    """The parts of a node's key that do not depend on other nodes.

    code: source file -> digest (dsl/closure.py; an earlier dflow wrote "module:symbol"). external: a field or a list
    member -> digest of its content. libraries: distribution -> version.
    """

    op: str
    version: int
    code: Mapping[str, str]
    config: Mapping[str, Any]
    external: Mapping[str, str]
    libraries: Mapping[str, str]

    def key(self, inputs: Inputs) -> str:
        """The node's cache key: SHA-256 in hex over the parts and the inputs' digests."""
        code = self.code if isinstance(self.code, CodeDigests) else CodeDigests(self.code)
        return self._hash(inputs, code)

    def key_without_code(self, inputs: Inputs) -> str:
        """The key of a node without its code; by it, unfinished work is found again after a change of code."""
        return self._hash(inputs, CodeDigests())

    def _hash(self, inputs: Inputs, code: CodeDigests) -> str:
        return fingerprint(
            {
                "format": FORMAT,
                "op": self.op,
                "version": self.version,
                "code": Encoded(code.encoded),
                "config": self.config,
                "external": self.external,
                "libraries": self.libraries,
                "inputs": dict(inputs),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """The key parts as JSON, as in records and manifests."""
        parts: dict[str, Any] = unstructure(self)
        return parts


class LibraryVersions(dict[str, str]):
    """The installed version of each distribution, looked up once, on first use."""

    def __missing__(self, name: str) -> str:
        from importlib import metadata  # slow

        try:
            self[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            self[name] = NOT_INSTALLED
        return self[name]


@frozen
class Sources:
    """The sources of cache keys beside the graph. Each file is read once, and keeps that state."""

    externals: ExternalDigests
    code: CodeMemo
    libraries: LibraryVersions = attrs.field(factory=LibraryVersions)

    @classmethod
    def now(cls, external_memo: Path | None, externals: ExternalDigests | None = None) -> Sources:
        """Sources as they are now. external_memo: the store's memo file, beside which others lie; None: without a
        store.
        """
        code_memo = external_memo.with_name("modules.jsonl") if external_memo is not None else None
        return cls(externals or ExternalDigests(external_memo), CodeMemo(code_memo))


def graph_parts(
    graph: Graph, sources: Sources, without: Container[str] = (), known: Mapping[str, Mapping[str, str]] = {}
) -> dict[str, KeyParts]:
    """The key parts of every node that is not in `without`.

    known: by node, digests of external content, which is then not read. Raises PipelineError for all nodes whose
    external files cannot be read.
    """
    roots = code_roots(graph)
    parts: dict[str, KeyParts] = {}
    mistakes: list[Finding] = []
    for node_id in graph.nodes:
        if node_id not in without:
            try:
                parts[node_id] = node_parts(graph, node_id, sources, roots, known.get(node_id, {}))
            except DataError as error:
                mistakes.append(graph.mistake(node_id, str(error)))
    if mistakes:
        raise PipelineError(list(dict.fromkeys(mistakes)))
    return parts


def node_parts(
    graph: Graph,
    node_id: str,
    sources: Sources,
    roots: Sequence[Path] | None = None,
    known: Mapping[str, str] = {},
) -> KeyParts:
    """The key parts of one node.

    roots: the graph's `code_roots`, if known. known: digests of external fields that are taken as given, so that these
    paths are not read. Raises DataError where an external file cannot be read.
    """
    node = graph.nodes[node_id]
    external = {name: sources.externals.of(each) for name, each in externals_of(node, without=known).items()}
    return KeyParts(
        op=node.op.name,
        version=node.op.version,
        code=sources.code.of(code_starts(node), roots or code_roots(graph), code_classes(node)),
        config=key_config(node),
        external={**external, **known},
        libraries=library_versions(node, sources.libraries),
    )


def code_starts(node: GraphNode) -> tuple[str, ...]:
    """The names where a node's code begins beside its classes: its run function, and what the config chooses."""
    chosen: Callable[[Any], tuple[str, ...]] | None = method(node.op, "chosen_code")
    return (node.op.run, *(chosen(node.config) if chosen is not None else ()))


def code_classes(node: GraphNode) -> tuple[str, ...]:
    """The classes whose methods a run function may call: those of its config and the tables that this has, of its
    inputs and its output.
    """
    op = node.op
    given = (getattr(node.config, field.name) for field in op.fields.values() if field.table is not None)
    tables = (type(table) for table in given if table is not None)
    classes = (op.config_class, *tables, op.output, *(edge.type for edge in op.edges.values()))
    return tuple(dict.fromkeys(f"{cls.__module__}:{cls.__qualname__.partition('.')[0]}" for cls in classes))


def code_roots(graph: Graph) -> list[Path]:
    """The folders in which stages look for modules; modules outside the interpreter's folders belong to the project."""
    return [Path(folder) for folder in search_path(graph.op_files)]


def node_inputs(node: GraphNode, of: Callable[[str], T]) -> dict[str, T | tuple[T, ...] | None]:
    """The inputs of a node by edge, each as `of(id)`; None for an edge not given, a tuple for a `tuple` edge.

    An edge that came later is missing where it is not given, so that keys from before it hold.
    """
    inputs: dict[str, T | tuple[T, ...] | None] = {}
    for name, edge in node.op.edges.items():
        producers = node.inputs.get(name, ())
        if edge.many:
            inputs[name] = tuple(map(of, producers))
        elif producers or edge.keyed_absence:
            inputs[name] = of(producers[0]) if producers else None
    return inputs


def externals_of(node: GraphNode, without: Container[str] = ()) -> dict[str, External]:
    """The external paths of a node: those that its config names, by field or list member, and its external files.

    Names in `without` are left out.
    """
    found: dict[str, External] = {name: path for name, path in named_paths(node).items() if name not in without}
    files: Callable[[Any], Mapping[str, Path | None]] | None = method(node.op, EXTERNAL_FILES)
    if files is not None and EXTERNAL_FILES not in without:
        found[EXTERNAL_FILES] = files(node.config)
    return found


def key_config(node: GraphNode) -> dict[str, object]:
    """The config as it enters the key: tables with their defaults, but no neutral fields, edges or external paths.

    Edges and external paths enter the key by the digest of their content. An external field that names something built
    in, or a model id, enters by that name. A list of paths leaves its length. A default enters unless its field says
    that it came later.
    """
    return _keyed(node.op.fields, node.config)


def _keyed(fields: Mapping[str, ConfigField], config: object) -> dict[str, object]:
    keyed: dict[str, object] = {}
    for field in fields.values():
        value = getattr(config, field.name)
        if field.neutral or (field.external and is_path(value)):
            continue
        if not field.keyed_default and value == field.made_default:
            continue
        if field.external and isinstance(value, tuple):
            value = tuple(None if is_path(member) else member for member in value)
        is_table = field.table is not None and value is not None
        keyed[field.name] = _keyed(field.fields, value) if is_table else without_secrets(value)
    return keyed


def is_path(value: object) -> bool:
    """Whether the compiled value of an external field names a file or folder, whose content enters the key."""
    return isinstance(value, str) and Path(value).is_absolute()


def named_paths(node: GraphNode) -> dict[str, Path]:
    """The paths that a node's config names, by field or list member."""
    found: dict[str, Path] = {}
    for name, spec in node.op.fields.items():
        value = getattr(node.config, name)
        if spec.external and isinstance(value, tuple):
            found |= {f"{name}[{place}]": Path(member) for place, member in enumerate(value) if is_path(member)}
        elif spec.external and is_path(value):
            found[name] = Path(value)
    return found


def library_versions(node: GraphNode, versions: LibraryVersions) -> dict[str, str]:
    """The versions that enter the node's key, by distribution."""
    chosen: Callable[[Any], tuple[str, ...]] | None = method(node.op, "chosen_libraries")
    names = (*node.op.key_libraries, *(chosen(node.config) if chosen is not None else ()))
    return {name: versions[name] for name in names}
