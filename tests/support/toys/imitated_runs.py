"""Runs without processes: real plans, records, leases and commits on a real store, only the ops are imitated."""

from __future__ import annotations

import contextlib
from pathlib import Path

from attrs import evolve
from manifests import made
from toy_ops import Toy

from dsl.read_toml import read_graph
from executor.cli import main
from executor.keys.node_key import node_inputs
from executor.planning.planner import Decision
from executor.planning.session import Session, make_planner, new_run, run_from
from executor.records.run_record import Record
from executor.store.artifact_store import Store

KINDS = 3


def toy_pipeline(folder: Path) -> Toy:
    folder.mkdir(parents=True, exist_ok=True)
    return Toy(folder)


def run(toy: Toy, *overrides: str, name: str = "toy", fail_at: str | None = None, contents: str = "") -> Record:
    """Run the toy pipeline under a name. fail_at: a node that fails and leaves unfinished work."""
    return execute(begin(toy, *overrides, name=name), fail_at, contents)


def dflow(toy: Toy, *arguments: str) -> int:
    """Run a command on the toy's store, in this process and in the toy's folder; returns its exit code."""
    with contextlib.chdir(toy.folder):
        return main([*arguments, "--store", str(toy.store)])


def begin(toy: Toy, *overrides: str, name: str = "toy") -> Session:
    file = toy.folder / f"{name}.toml"
    file.write_text(toy.file.read_text().replace('name = "toy"', f'name = "{name}"'))
    return new_run(Store.open(toy.store, write=True), read_graph(file, overrides))


def run_again(toy: Toy, record: Record, node: str, contents: str) -> Record:
    """Run `dflow resume --from`, whose results may differ from the earlier ones."""
    return execute(run_from(Store.open(toy.store, write=True), record.run, [node], []), None, contents)


def execute(session: Session, fail_at: str | None = None, contents: str = "") -> Record:
    """Run a session without processes.

    A node writes `contents`, or if that is empty a text that depends on its key only, so that several keys agree.
    """
    store, record, planner = session.store, session.record, session.planner
    digests: dict[str, str] = {}
    for node_id in session.graph.nodes:
        decision = planner.decide(node_id, digests)
        state = record.state.nodes[node_id]
        state.key = decision.key
        if decision.digest is None:
            assert decision.key is not None
            with store.lease(decision.key, record.run) as lease:
                lease.acquire(print)
                lease.empty(keep_state=False)
                if node_id == fail_at:
                    (lease.work_dir / "half").write_text("half")
                    state.state = "failed"
                    record.save_node(node_id)
                    return ended(record, "failed")
                (lease.out_dir / "sub").mkdir()
                text = contents or str(int(decision.key[:8], 16) % KINDS)
                (lease.out_dir / "sub" / "text.txt").write_text(f"{node_id} {text}" * 10)
                node, parts = session.graph.nodes[node_id], planner.parts[node_id]
                inputs = node_inputs(node, digests.__getitem__)
                manifest, line = made(
                    decision.key, record.run, node=node_id, op=node.op.name, key_parts=parts, inputs=inputs
                )
                line = evolve(line, without_code=parts.key_without_code(inputs))
                digests[node_id] = store.commit(lease, manifest, line)
                lease.remove()
        else:
            digests[node_id] = decision.digest
        state.state, state.digest = "done", digests[node_id]
        record.save_node(node_id)
    return ended(record, "done")


def ended(record: Record, status: str) -> Record:
    record.state.status = status
    record.save()
    record.unlock()
    return record


def planned(toy: Toy, record: Record) -> dict[str, Decision]:
    """The decisions that a run of the recorded graph would make now."""
    return make_planner(Store.open(toy.store, write=False), record.graph()).plan()


def edit(path: Path, text: str) -> None:
    path.chmod(0o644)
    path.write_text(text)


def artifacts(toy: Toy) -> set[str]:
    return {path.name for path in (toy.store / "objects").iterdir()}
