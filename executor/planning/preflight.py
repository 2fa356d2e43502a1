"""What is known before anything runs: what the nodes of a graph need, and what those that will run lack.

Ops report both by hooks (dsl/op_class.py), which are loaded here; a plan in which all is cached loads none of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.encoding import fingerprint
from dsl.errors import ConfigError, DflowError, DiskFull, NotKnown
from dsl.estimate import CHECKPOINTS, PROMISED, Estimate, PlanContext, Trial
from dsl.files import free_bytes, read_object_or_none
from dsl.finding import Field, Finding
from dsl.graph import Graph, GraphNode
from dsl.op_class import hook
from dsl.shown import shown_bytes
from executor.keys.node_key import key_config
from executor.planning.planner import Decision, cached_artifacts
from executor.records.run_record import NodeState
from executor.store.artifact_store import Store
from executor.system.resource_pool import computes_on_gpu, devices
from executor.system.symlinks import folder_size


@frozen
class Estimates:
    """The estimated needs of each node whose op can tell. forecast: of each output, None where unknown.

    refused: why an op gives no estimate: what is wrong, each by itself. failed: what hooks with a bug raised.
    """

    needs: Mapping[str, Estimate]
    forecast: Mapping[str, Any]
    refused: Mapping[str, Sequence[str]]
    failed: Mapping[str, Exception]


def preflight(
    store: Store, graph: Graph, decisions: Mapping[str, Decision], free_disk: int
) -> tuple[list[Finding], Estimates]:
    """Check this machine before a run: findings on what nodes lack in files, inputs or disk, and the
    graph's estimates.
    """
    estimates = graph_estimates(graph, cached_artifacts(store, decisions), free_disk)
    lacking = missing_here(graph, decisions, estimates)
    return lacking + disk_mistakes(store, decisions, estimates.needs, free_disk), estimates


def graph_estimates(
    graph: Graph, made: Mapping[str, Path], free_disk: int, trials: Mapping[str, Trial] = {}
) -> Estimates:
    """The estimates of a graph. made: artifact folders in the store, by node id.

    A node whose artifact exists needs nothing, but its readers use its forecast. Unknown sizes become notes. Hooks see
    device = "cpu" where the node computes on the CPU. Raises what the first hook with a bug raised.
    """
    estimates = _estimates(graph, made, free_disk, trials)
    for error in estimates.failed.values():
        raise error
    return estimates


def _estimates(graph: Graph, made: Mapping[str, Path], free_disk: int, trials: Mapping[str, Trial] = {}) -> Estimates:
    """As `graph_estimates`, but a hook with a bug ends nothing: its readers know nothing of the node."""
    needs: dict[str, Estimate] = {}
    forecast: dict[str, Any] = dict.fromkeys(graph.nodes)
    refused: dict[str, Sequence[str]] = {}
    failed: dict[str, Exception] = {}
    identities: dict[str, str] = {}
    for node_id, node in graph.nodes.items():
        identities[node_id] = _identity(node, made.get(node_id), identities)
        estimate: Callable[[Any, PlanContext], Estimate | None] | None = hook(node.op, "estimate")
        if estimate is None:
            continue
        on_gpu = _computes_on_gpu_here(node)
        context = PlanContext(
            launch=node.launch if on_gpu else attrs.evolve(node.launch, device="cpu"),
            inputs=node.by_edge(forecast),
            artifact=made.get(node_id),
            root=graph.root,
            free_disk=free_disk,
            trial=trials.get(node_id),
            identity=identities[node_id],
        )
        try:
            needed = estimate(node.config, context)
        except NotKnown as error:
            needed = Estimate(notes=(f"what it needs cannot be estimated: {error}",))
        except DflowError as error:
            refused[node_id] = error.mistakes if isinstance(error, ConfigError) else [str(error)]
            continue
        except Exception as error:  # noqa: BLE001 - the op's author wrote it: one node fails, not the run
            failed[node_id] = error
            continue
        if needed is not None:
            forecast[node_id] = needed.forecast
            is_made = node_id in made
            needs[node_id] = Estimate(growth=needed.growth, work=needed.work) if is_made else needed
    return Estimates(needs, forecast, refused, failed)


def _identity(node: GraphNode, artifact: Path | None, identities: Mapping[str, str]) -> str:
    """The node's `PlanContext.identity`; an artifact's folder is named by its digest."""
    if artifact is not None:
        return artifact.name
    inputs = {edge: [identities[parent] for parent in parents] for edge, parents in node.inputs.items()}
    paths = {field.name: getattr(node.config, field.name) for field in node.op.fields.values() if field.external}
    parts = {"op": node.op.name, "config": key_config(node), "paths": paths, "inputs": inputs}
    return PROMISED + fingerprint(parts)


def _computes_on_gpu_here(node: GraphNode) -> bool:
    """Whether the node will compute on a GPU; on a cluster, whether it may."""
    is_chosen = node.launch.device == "cuda" or node.launch.kind == "ray"
    return computes_on_gpu(node) and (is_chosen or bool(devices()))


def estimate_row(need: Estimate, measured: int | None = None) -> dict[str, Any]:
    """A node's row in `dflow plan --json`, with sizes in bytes. measured: see `measured_memory`."""
    return {
        "memory": dict(need.memory),
        "memory_total": sum(need.memory.values()),
        "memory_measured": measured,
        "pass": dict(need.per_pass),
        "pass_total": sum(need.per_pass.values()),
        "disk": dict(need.disk),
        "disk_total": sum(need.disk.values()),
        "disk_per": need.disk_per,
        "notes": list(need.notes),
    }


def measured_memory(node: GraphNode, last: NodeState | None) -> int | None:
    """Peak bytes of one rank when the node was last computed: on its GPU, or of the process if it uses none."""
    if last is None:
        return None
    peak = last.gpu_memory if _computes_on_gpu_here(node) else last.memory
    return None if peak is None else peak // node.launch.world_size


def too_large(
    graph: Graph,
    needs: Mapping[str, Estimate],
    gpu_memory: Callable[[], int | None],
    memory: int,
    measured: Mapping[str, int | None] = {},
) -> list[str]:
    """A line for each node whose ranks do not fit on this machine, by their estimate or their last peak.

    gpu_memory: bytes of the smallest GPU here, None if unknown. memory: bytes of the machine, for ranks on the CPU; a
    node on several hosts has nproc ranks on each. measured: peak bytes of a rank by node, see `measured_memory`.
    """
    held = {node_id: sum(need.memory.values()) for node_id, need in needs.items()}
    needed = {node_id: most for node_id, size in held.items() if (most := max(size, measured.get(node_id) or 0))}
    has_gpus = bool(needed) and bool(devices())
    gpu = gpu_memory() if has_gpus else None
    lines = []
    for node_id, size in needed.items():
        node = graph.nodes[node_id]
        ranks = node.launch.nproc
        if has_gpus and computes_on_gpu(node):
            if gpu is not None and size > gpu:
                has = f"each rank needs {shown_bytes(size)}, and a GPU here has {shown_bytes(gpu)}"
                lines.append(f"{node_id}: memory: DOES NOT FIT: {has}")
        elif ranks * size > memory:
            each = shown_bytes(size) if ranks == 1 else f"{ranks} ranks of {shown_bytes(size)} each"
            lines.append(f"{node_id}: memory: DOES NOT FIT: needs {each}, and this machine has {shown_bytes(memory)}")
    return lines


def disk_mistakes(
    store: Store, decisions: Mapping[str, Decision], needs: Mapping[str, Estimate], free: int
) -> list[Finding]:
    """A mistake for each node whose output will not fit on the disk beside those of the nodes before it."""
    mistakes, before = [], 0
    for node_id, decision in decisions.items():
        need = needs.get(node_id, Estimate())
        size = known_size(need)
        if decision.cache != "miss" or not size:
            continue
        if before + size > free:
            size = max(0, size - _unfinished_work(store, node_id))
        if before + size > free:
            mistakes.append(Finding(_lack(need, size, free, store.path, before), Field(f"node.{node_id}")))
        else:
            before += size - need.disk.get(CHECKPOINTS, 0)
    return mistakes


def conflicts_below(
    store: Store, graph: Graph, pending: Sequence[str], digests: Mapping[str, str]
) -> dict[str, Exception]:
    """Why nodes that have yet to run cannot, by node; nodes without mistakes are left out.

    digests: the artifacts of this run so far, by node id, which say more than was promised before the run. The errors
    are ConfigError with what does not fit a node's inputs, or what its op refuses in its estimate; for a hook with a
    bug, what it raised.
    """
    if not any(hook(graph.nodes[node_id].op, name) for node_id in pending for name in ("conflicts", "estimate")):
        return {}
    made = {node_id: store.object_path(digest) for node_id, digest in digests.items()}
    estimates = _estimates(graph.up_to(pending), made, free_bytes(store.path))
    found = {node_id: _error_below(graph.nodes[node_id], estimates) for node_id in pending}
    return {node_id: error for node_id, error in found.items() if error is not None}


def _error_below(node: GraphNode, estimates: Estimates) -> Exception | None:
    try:
        findings = list(_not_fitting(node, estimates)) or _refused(node, estimates)
    except DflowError:
        raise
    except Exception as error:  # noqa: BLE001 - as in `_estimates`
        return error
    return ConfigError(*map(str, findings)) if findings else estimates.failed.get(node.id)


def check_space(graph: Graph, node_id: str, made: Mapping[str, Path], work_dir: Path) -> None:
    """Check a node's estimate before it starts, with the artifacts that it reads.

    made: the artifacts of the nodes above it. work_dir: a folder on the disk that it writes to. Raises DiskFull where
    it is known to write more than is free, and ConfigError where its op refuses to estimate it.
    """
    node = graph.nodes[node_id]
    if hook(node.op, "estimate") is None:
        return
    free = free_bytes(work_dir)
    estimates = graph_estimates(graph.up_to([node_id]), made, free)
    if refused := _refused(node, estimates):
        raise ConfigError(*map(str, refused))
    need = estimates.needs.get(node_id, Estimate())
    size = known_size(need)
    if size > free:
        size -= folder_size(work_dir)
    if size > free:
        raise DiskFull(_lack(need, size, free, work_dir))


def known_size(need: Estimate) -> int:
    """The bytes that a node writes; 0 where the amount of data is unknown."""
    return 0 if need.disk_per else sum(need.disk.values())


def _unfinished_work(store: Store, node_id: str) -> int:
    """The bytes that earlier attempts at a node left, and that a run may continue with."""
    work = store.path / "work"
    folders = [
        file.parent for file in work.glob("*/work.json") if (read_object_or_none(file) or {}).get("node") == node_id
    ]
    return sum(map(folder_size, folders))


def _lack(need: Estimate, size: int, free: int, place: Path, before: int = 0) -> str:
    """The message that a node lacks disk space.

    size: bytes still to be written. before: bytes that nodes before it write.
    """
    shared = f" ({shown_bytes(before)} of that for the nodes before it)" if before else ""
    less = f", or write less: {need.less_disk}" if need.less_disk else ""
    return (
        f"needs {shown_bytes(size)} of disk ({' and '.join(need.disk)}), and {shown_bytes(free)} are free at "
        f"{place}{shared}: free space there (`dflow gc --usage` shows what uses it, `dflow gc` removes what nothing "
        f"uses), use another store (--store){less}"
    )


def missing_here(graph: Graph, decisions: Mapping[str, Decision], estimates: Estimates) -> list[Finding]:
    """Findings on what tracking lacks, then on what each node that will run lacks, in the order of the graph, but for
    disk.
    """
    running = {node_id: graph.nodes[node_id] for node_id, decision in decisions.items() if decision.cache != "hit"}
    lacking = _of_tracking(graph)
    for node in running.values():
        lacking += list(dict.fromkeys(_of_node(node, estimates))) or _refused(node, estimates)
    asking = {node_id: node for node_id, node in running.items() if _asks_for_something(node)}
    if not asking:  # the usual case: the hardware is not queried
        return lacking
    from executor.launchers.backends import Backends  # and no module that runs stages is imported

    return lacking + Backends(graph.machine).check(asking)


def _of_tracking(graph: Graph) -> list[Finding]:
    """A finding if runs are tracked but MLflow is missing, so that it is known before hours of work."""
    if not graph.tracking or importlib.util.find_spec("mlflow") is not None:
        return []
    hint = "install it (pip install mlflow), or run without tracking: -s mlflow.tracking=false"
    return [Finding("mlflow is not installed here, so the run cannot be tracked", Field("mlflow.tracking"), hint)]


def _asks_for_something(node: GraphNode) -> bool:
    launch = node.launch
    by_ranks = launch.device == "cuda" or (node.op.gpu and launch.device == "auto" and launch.nproc > 1)
    return any((launch.cpus, launch.gpus, launch.memory, launch.kind == "ray", launch.shard_workers > 1, by_ranks))


def _of_node(node: GraphNode, estimates: Estimates) -> Iterator[Finding]:
    """Findings on what a node lacks on this machine, then on what does not fit its inputs."""
    lacking: Callable[[Any], Mapping[str, str]] | None = hook(node.op, "missing_here")
    if lacking is not None:
        yield from _by_field(node, lacking(node.config))
    yield from _not_fitting(node, estimates)


def _refused(node: GraphNode, estimates: Estimates) -> list[Finding]:
    """Findings on what a node's op refuses in its estimate."""
    wrong = estimates.refused.get(node.id, ())
    return [Finding(each, Field(f"node.{node.id}")) for each in dict.fromkeys(wrong)]


def _not_fitting(node: GraphNode, estimates: Estimates) -> Iterator[Finding]:
    """Findings on what does not fit a node's inputs, by what is known of them."""
    conflicts: Callable[[Any, Mapping[str, Any]], Mapping[str, str]] | None = hook(node.op, "conflicts")
    if conflicts is not None:
        yield from _by_field(node, conflicts(node.config, node.by_edge(estimates.forecast)))


def _by_field(node: GraphNode, found: Mapping[str, str]) -> Iterator[Finding]:
    for field, sentences in found.items():
        yield from (Finding(sentence, Field(f"node.{node.id}.{field}")) for sentence in sentences.splitlines())
