"""Code in artifacts: which is used only where the config of a node trusts it, never because an artifact says so.

An artifact may come from a store or a remote of somebody else, whose node had the same key and another content.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsl.errors import StoreError
from dsl.graph import Graph, GraphNode
from executor.store.artifact_store import Store

TRUST = "trust_remote_code"  # the field of an op by which its user lets code of a checkpoint run
BUILT_IN = "ops.artifacts"  # where the forms of artifacts are declared that built-in ops read
CODE = (".py", ".pyc", ".so", ".pkl", ".pickle")


def trusting_nodes(graph: Graph) -> frozenset[str]:
    """The nodes that may run code of a checkpoint, because their own config or that of a node above allows it.

    A tokenizer's code is copied from the target, so the nodes below need it as well.
    """
    found: set[str] = set()
    for node_id, node in graph.nodes.items():
        if getattr(node.config, TRUST, False) is True or not found.isdisjoint(node.parents):
            found.add(node_id)
    return frozenset(found)


def code_in(files: Iterable[str]) -> list[str]:
    return sorted(name for name in files if name.endswith(CODE))


def untrusted_code(store: Store, node: GraphNode, trusting: frozenset[str], digest: str) -> str:
    """The reason why the artifact of a node must not be used; empty where it may be. trusting: see `trusting_nodes`.

    Artifacts of a user's own form are only read by the user's own ops, and always allowed.
    """
    is_built_in = any(form.__module__ == BUILT_IN for form in node.op.output.__mro__)
    if node.id in trusting or not (is_built_in or hasattr(node.config, TRUST)):
        return ""
    names = code_in(store.files(digest))
    return f"its artifact has code in it ({', '.join(names[:3])}), which its config does not trust" if names else ""


def refuse_untrusted_code(store: Store, node: GraphNode, trusting: frozenset[str], digest: str) -> None:
    """Refuse an artifact whose code is not trusted; `untrusted_code` gives the reason. Raises StoreError."""
    why = untrusted_code(store, node, trusting, digest)
    if why:
        raise StoreError(
            f"{node.id}: {why}; read it, and if you trust it run the pipeline with {node.id}.{TRUST} = true"
        )
