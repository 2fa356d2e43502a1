"""`dflow diagnose`: the usual causes of a low tau, measured on what a run made.

The computation is a process of its own (ops/tools/diagnose/run.py), because this one must not load torch. It ends with
this one, and what they tell each other has no names in the file system: nothing is left behind, however this one ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl.errors import DataError, DflowError, Mistake, PipelineError, StoreError, did_you_mean
from dsl.graph import Graph
from dsl.graph_json import graph_to_json
from dsl.threads import useful_threads
from executor.launchers.stage_process import stage_environment
from executor.records.metric_points import NodeEvents
from executor.records.run_record import Record, load_begun
from executor.store.artifact_store import Store
from executor.system.jsonlines import read_lines, read_object, write_json
from executor.system.resource_pool import threads_of
from ops.tools.diagnose.chain import Chain, drafts_of, last_drafts_of, training_of

ENTRY = "ops.tools.diagnose.run"
NOW = "dflow: now: "  # what ops/tools/diagnose/run.py begins a line with that says what it does next
LOG_LINES = 20
RESULT = "diagnosis.json"

Result = Mapping[str, Any]


def diagnose(
    store: Store,
    record: Record,
    node_id: str | None,
    prompts: int,
    tell: Callable[[str], None],
    split: str | None = None,
) -> Iterator[Result]:
    """What ops/tools/diagnose/run.py says of each draft of a run, or of that of the named node, one after the other.

    tell: called with what is measured next. split: the only one to take prompts of, as Chain.of has it. Raises
    PipelineError where there is no such node, StoreError where its draft is not in the store, and DataError where it
    cannot be measured.
    """
    graph = record.graph()
    nodes = _chosen(graph, record.run, node_id)
    made = {name: state.digest for name, state in record.state.nodes.items() if state.digest is not None}
    artifacts = {
        name: [str(store.object_path(digest)), digest]
        for name, digest in made.items()
        # A damaged draft is measured too, as its damage is a cause.
        if store.has(digest) or (name in nodes and store.object_path(digest).is_dir())
    }
    missing = [name for name in nodes if name not in artifacts]
    if missing:
        raise StoreError(
            f"run {record.run}: the store holds no draft of {' and '.join(missing)}; make it: dflow resume {record.run}"
        )
    places = {name: (Path(path), digest) for name, (path, digest) in artifacts.items()}
    for name in nodes:
        Chain.of(graph, places, name, run=record.run)  # refuses here what the process would refuse seconds later
    for name in nodes:
        request = {
            "graph": graph_to_json(graph),
            "node": name,
            "artifacts": artifacts,
            "prompts": prompts,
            "split": split,
            "loss": loss_curve(store, record, training_of(graph, name)),
            "again": f"dflow resume {record.run} --from {name}",
        }
        node = graph.nodes[name]
        useful = useful_threads(node, {parent: path for parent, (path, _) in places.items()})
        yield _measured(request, threads_of(node.launch, useful=useful), tell)


def keep(record: Record, result: Result) -> None:
    """In the run's record: {"drafts": [what was last said of each, ...]}."""
    known = (read_object(record.folder / RESULT) or {}).get("drafts", [])
    by_node = {each["node"]: each for each in (*known, dict(result))}
    write_json(record.folder / RESULT, {"drafts": list(by_node.values())})


def _chosen(graph: Graph, run: str, node_id: str | None) -> list[str]:
    drafts = drafts_of(graph)
    if node_id in drafts:
        return [str(node_id)]
    if node_id is not None:
        hint = did_you_mean(node_id, drafts) or f"nodes that make one: {', '.join(drafts) or 'none'}"
        raise PipelineError([Mistake(f'"{node_id}" makes no draft in run {run}', hint=hint)])
    if not drafts:
        raise PipelineError([Mistake(f"run {run} of {graph.name} makes no draft: there is nothing to diagnose")])
    return last_drafts_of(graph)


def loss_curve(store: Store, record: Record, node_id: str | None) -> list[tuple[int, float]]:
    """[step, train/loss] of a node, from the run that made its artifact; nothing where that is gone."""
    state = None if node_id is None else record.state.nodes.get(node_id)
    if state is None:
        return []
    if state.cache == "hit" and state.source_run is not None:
        maker = load_begun(store.records / state.source_run)
        if maker is None:
            return []
        record, key = maker, store.computed_key(state.source_run, state.key)
        node_id = next((name for name, other in record.state.nodes.items() if other.key == key), node_id)
    events = NodeEvents()
    for event in read_lines(record.events_path):
        if event["node"] == node_id:
            events.add(event)
    return [(point.step, point.metrics["train/loss"]) for point in events.points if "train/loss" in point.metrics]


def _measured(request: Mapping[str, Any], threads: int, tell: Callable[[str], None]) -> Result:
    """What the process wrote. Raises DataError where it refused, DflowError where it broke down."""
    node = request["node"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as asked, tempfile.TemporaryFile() as answer:
        json.dump(request, asked)
        asked.flush()
        files = [asked.fileno(), answer.fileno()]
        code, tail = _run(files, threads, lambda text: tell(f"{node}: {text}"))
        if code:
            raise DflowError("\n  ".join([f"{node}: the diagnosis ended with exit code {code}:", *tail]))
        said: Result = json.load(answer)
    if "error" in said:
        raise DataError(f"{node}: {said['error']}")
    return said


def _run(files: Sequence[int], threads: int, tell: Callable[[str], None]) -> tuple[int, Sequence[str]]:
    """The exit code, and the last lines that say nothing of what is done next. files: of the request and the result."""
    places = [f"/proc/self/fd/{file}" for file in files]
    tail: deque[str] = deque(maxlen=LOG_LINES)
    with subprocess.Popen(
        [sys.executable, "-m", "executor.system.parent", str(os.getpid()), ENTRY, *places],
        env=stage_environment(threads),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=files,
    ) as process:
        try:
            for line in process.stdout or ():
                if line.startswith(NOW):
                    tell(line.removeprefix(NOW).strip())
                else:
                    tail.append(line.rstrip())
            process.wait()
        finally:
            process.kill()  # after Ctrl-C; nothing where it has ended
    return process.returncode, tail
