"""What one attempt at a node works on: its inputs, its work folder, what its stage gets, and the commit of its output.

Each step is called by the thread of attempt.py, which holds the lease. The stage runs the sources that the key parts
were made from, so an edit while it runs counts for the next run. It reads data at any time, so that data is checked
again before the commit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import frozen

from dsl.convert import unstructure
from dsl.errors import DflowError, StageError
from dsl.files import read_object_or_none, write_json
from dsl.finding import Finding
from dsl.graph import Graph, GraphNode, node_to_json
from dsl.imports import search_path
from dsl.op import ConfigField
from executor.keys.external_inputs import ExternalDigests, Look, Tree, look_at, tree_of
from executor.keys.node_key import (
    Inputs,
    KeyParts,
    LibraryVersions,
    Sources,
    externals_of,
    library_versions,
    node_inputs,
    node_parts,
)
from executor.launchers.stage_contract import InputArtifact, StageSpec, write_sealed
from executor.planning.planner import Planner
from executor.records.events import Cut, Event, Info, Metric, Progress, System, read_events
from executor.records.run_record import LOG, Record
from executor.store.artifact_store import Store
from executor.store.integrity import check_before_use
from executor.store.lease import Lease
from executor.store.manifest import IndexLine, Manifest
from executor.system.json_values import is_moment
from executor.system.output import shown_digest

# The fields of launch that can change results by rounding; the others only decide when and where a stage runs.
LAYOUT = ("kind", "nproc", "hosts", "sp_degree")
MOST_DAMAGES = 3
REPORTS = Metric | Progress | System | Info  # come while a stage runs; a node's state is also written afterwards


@frozen
class Snapshot:
    """The inputs of a node when its stage starts: key parts, source files, and data.

    sources: content of each file that the key's code was read from. torn: files that changed after they were read.
    looks: states of the external data.
    """

    node: GraphNode
    parts: KeyParts
    sources: Mapping[str, bytes]
    torn: tuple[str, ...]
    looks: Mapping[str, Look]

    @classmethod
    def of(cls, store: Store, graph: Graph, node_id: str) -> Snapshot:
        """The current code and data of a node. Raises DataError or ConfigError if they cannot be read."""
        node, list_path = graph.nodes[node_id], cache(tree_of)
        keys_sources = Sources.now(store.external_memo, ExternalDigests(store.external_memo, list_path=list_path))
        parts = node_parts(graph, node_id, keys_sources)
        contents = keys_sources.code.contents
        read = ((file, _content(file)) for file in sorted(contents))
        sources = {file: source for file, source in read if hashlib.sha256(source).hexdigest() == contents[file]}
        torn = tuple(sorted(contents.keys() - sources.keys()))
        return cls(node, parts, sources, torn, _looks(node, list_path))

    def write_sources(self, path: Path) -> str:
        """Write the sources for the ranks of the stage: JSON, a character for each byte. Returns the file's digest."""
        return write_sealed(path, {file: source.decode("latin-1") for file, source in self.sources.items()})

    def since(self, store: Store) -> tuple[KeyParts, tuple[str, ...]]:
        """The key parts for the current data, and the names of the files written since the snapshot. Raises DataError.

        Only data that was written since then is read again.
        """
        list_path = cache(tree_of)
        looks = _looks(self.node, list_path)
        written = [look.newest for name, look in looks.items() if look.listing != self.looks[name].listing]
        external = self.parts.external
        if written:
            digests = ExternalDigests(store.external_memo, list_path=list_path)
            external = {name: digests.of(each) for name, each in externals_of(self.node).items()}
        now = attrs.evolve(self.parts, external=external, libraries=library_versions(self.node, LibraryVersions()))
        return now, tuple(dict.fromkeys(written))

    def unseen(self, loaded: Sequence[str]) -> list[str]:
        """The files that a stage loaded and that are not part of the key."""
        seen = {Path(file).resolve() for file in self.sources}
        return [file for file in loaded if Path(file).resolve() not in seen]


@frozen(kw_only=True)
class AttemptStart:
    """A stage is about to start. time: seconds since 1970. earlier: metric events of the run that left the work folder
    behind; continued_from: that run, where its code was another. seconds: of the attempts whose work it continues.
    """

    cache: Literal["miss", "resumed"]
    time: float
    earlier: Sequence[Event] = ()
    continued_from: str | None = None
    seconds: float = 0.0


@frozen(kw_only=True)
class StageMeasures:
    """What a stage used and reported. ended: seconds since 1970; seconds: of all attempts whose work it continued, and
    of this one alone, attempt_seconds, by a clock that never goes back; memory, gpu_memory: peak bytes of its ranks
    together; gpu: the name of the GPU, empty without one.
    """

    ended: float
    seconds: float
    attempt_seconds: float
    metrics: Mapping[str, float]
    memory: int | None
    gpu_memory: int | None
    gpu: str


@frozen(kw_only=True)
class AttemptResult:
    """The result of an attempt at a node. stage: measurements; None where no stage ran.

    status "done": digest and acceptance are the artifact's; difference: how it differs from the key's earlier artifact.
    status "failed": failure, and log_tail, the last lines of the stage's log.
    status "replan": nothing was committed, as the store has the artifact already, or code or data changed. parts: the
    current key parts. changes: what changed. kept: path of the work folder.
    """

    status: Literal["done", "stopped", "failed", "replan"]
    stage: StageMeasures | None = None
    digest: str | None = None
    acceptance: str = ""
    difference: str = ""
    warnings: tuple[str, ...] = ()
    failure: Finding | None = None
    log_tail: tuple[str, ...] = ()
    parts: KeyParts | None = None
    changes: tuple[str, ...] = ()
    kept: str = ""


@frozen(kw_only=True)
class Task:
    """The data of one attempt at a node.

    key: from the planner's key parts. lease: held for this key. digests: the parents' artifacts. made: the run's
    artifacts so far, by node id. adopt: continue work that older code began. verify_inputs: read all inputs before the
    stage does. run, attempt, goes_on_from: as in the record. The record's state belongs to the loop's thread, so only
    its paths are used here.
    """

    store: Store
    record: Record
    planner: Planner
    node: GraphNode
    key: str
    lease: Lease
    digests: Mapping[str, str]
    made: Mapping[str, Path]
    adopt: bool
    verify_inputs: bool
    run: str
    attempt: int
    goes_on_from: str | None

    @property
    def inputs(self) -> Inputs:
        return node_inputs(self.node, self.digests.__getitem__)

    @property
    def key_without_code(self) -> str:
        return self.planner.parts[self.node.id].key_without_code(self.inputs)

    @property
    def sources(self) -> Path:
        """The file with the source code that the stage runs."""
        return self.lease.path("code", ".json")

    def damaged_inputs(self, go_on: Callable[[], None]) -> str:
        """The damages of the node's inputs, as text; "" where there are none. Damaged artifacts are set aside to be
        remade.

        go_on: called now and then, may raise.
        """
        parents = {digest: parent for parent, digest in self.digests.items()}
        damages = check_before_use(self.store, parents, read_all=self.verify_inputs, progress=lambda _size: go_on())
        if not damages:
            return ""
        each = [f'of node "{parents[digest]}" {damage}' for digest, found in damages.items() for damage in found]
        listed = "; ".join(each[:MOST_DAMAGES])
        return (
            f"an input was altered after its commit: {listed}; it was set aside: repeat the command, and its node "
            "runs again"
        )

    def prepare(self, snapshot: Snapshot, recover: Callable[[Path], None]) -> tuple[AttemptStart, int, str]:
        """Make the work folder ready for a stage. Also returns the byte of the events file from which metrics count,
        and the digest of `sources`.

        recover: as in `Lease.continue_from`.
        """
        lease, events = self.lease, self.record.events_path
        is_fresh = self._starts_fresh()
        continued_from = self._continue_earlier(recover) if self.adopt and not is_fresh else None
        spent = 0.0 if is_fresh else self._earlier_seconds()
        lease.empty(keep_state=not is_fresh)
        is_resumed = any(lease.work_dir.iterdir())
        seconds, now = spent if is_resumed else 0.0, time.time()
        self._write_work(seconds, now)
        digest = snapshot.write_sources(self.sources)
        if not is_resumed:
            first_byte = events.stat().st_size if events.exists() else 0
            return AttemptStart(cache="miss", time=now), first_byte, digest
        earlier = self._earlier_metrics()
        start = AttemptStart(cache="resumed", time=now, earlier=earlier, continued_from=continued_from, seconds=seconds)
        return start, 0, digest

    def keep_seconds(self, seconds: float) -> None:
        """Leave the seconds of all attempts so far to the one that continues their work, while the lease is held."""
        with suppress(DflowError):  # which must not take the place of what ended the attempt
            self.lease.check()
            self._write_work(seconds, None)

    def _write_work(self, seconds: float, started: float | None) -> None:
        """Describe the work folder. seconds: of ended attempts; started: when the one in progress began."""
        work = {"key_without_code": self.key_without_code, "node": self.node.id, "seconds": seconds, "started": started}
        write_json(self.lease.folder / "work.json", work)

    def _earlier_seconds(self) -> float:
        """The seconds of the attempts that left the work folder; one that was killed ended with its last report."""
        work = read_object_or_none(self.lease.folder / "work.json") or {}
        seconds: float = work["seconds"] if is_moment(work.get("seconds")) else 0.0
        started: float | None = work["started"] if is_moment(work.get("started")) else None
        run = self.lease.last_run
        if started is None or run is None:
            return seconds
        reports = (
            event.time
            for event in read_events(self.store.records / run / LOG)
            if event.node == self.node.id and event.time >= started and isinstance(event.body, REPORTS)
        )
        return seconds + max(reports, default=started) - started

    def check_space(self) -> None:
        """Check that the stage has enough disk space. Raises DiskFull."""
        from executor.planning.preflight import check_space

        check_space(self.planner.graph, self.node.id, self.made, self.lease.work_dir)

    def _starts_fresh(self) -> bool:
        """Whether the node starts with an empty work folder.

        That is so for a forced node that neither this run nor the run that it continues has started.
        """
        last_run = self.lease.last_run
        was_started = self.attempt or (last_run and last_run == self.goes_on_from)
        return self.node.id in self.planner.forced and not was_started

    def _continue_earlier(self, recover: Callable[[Path], None]) -> str | None:
        """Move the newest unleased work folder of the same key without code here; returns the run that left it."""
        work_dir = self.lease.work_dir
        has_own = work_dir.exists() and any(work_dir.iterdir())
        return None if has_own else self.lease.continue_from(self.key_without_code, recover)

    def _earlier_metrics(self) -> list[Event]:
        """The metrics of the run that left the work folder behind: this run's metrics continue them."""
        run = self.lease.last_run
        if run is None or run == self.run or self.attempt:
            return []
        return [
            event
            for event in read_events(self.store.records / run / LOG)
            if event.node == self.node.id and isinstance(event.body, Metric | Cut)
        ]

    def stage_spec(self, number: int, sources_digest: str) -> StageSpec:
        lease, launch = self.lease, self.node.launch
        return StageSpec(
            node=self.node.id,
            node_json=node_to_json(self.planner.graph, self.node.id),
            search_path=tuple(search_path(self.planner.graph.op_files)),
            sources=self.sources,
            sources_digest=sources_digest,
            artifacts={
                parent: InputArtifact(self.store.object_path(digest), digest) for parent, digest in self.digests.items()
            },
            folder=lease.folder,
            token=lease.token,
            lease_id=lease.id,
            out_dir=lease.out_dir,
            work_dir=lease.work_dir,
            results=lease.path("results"),
            events=self.record.events_path,
            figures=self.record.figures_path(self.node.id),
            attempt=number,
            started_before=number > 1 or lease.last_run is not None,
            device=launch.device,
            sp_degree=launch.sp_degree,
        )

    def _check_files(self) -> None:
        """Check that a stage which wrote files wrote all that its artifact type requires. Raises StageError."""
        output, out = self.node.op.output, self.lease.out_dir
        missing = [name for name in output.required_files if not (out / name).is_file()]
        if missing and any(out.iterdir()):
            raise StageError(
                f'node "{self.node.id}": {self.node.op.name} did not write {", ".join(missing)} to stage.out_dir, but '
                f"every {output.__name__} has that ({output.__module__}); write it, or declare another output type"
            )

    def commit(self, started: float, measures: StageMeasures, device: str, threads: int) -> AttemptResult:
        """Commit the out_dir as an artifact. started: seconds since 1970. Raises StageError, StoreError or OSError."""
        node = self.node
        self.lease.wait_for_ranks()
        self._check_files()
        earlier = self.store.newest(self.key)
        config = unstructure({name: getattr(node.config, name) for name in node.op.fields})
        layout = {name: getattr(node.launch, name) for name in LAYOUT}
        launch = {**layout, "threads": threads, "device": device}
        manifest = Manifest(
            node=node.id,
            op=node.op.name,
            run=self.run,
            key=self.key,
            key_parts=self.planner.parts[node.id],
            inputs=self.inputs,
            config=config,
            launch=launch,
            metrics=measures.metrics,
            started=started,
            ended=measures.ended,
            seconds=measures.seconds,
        )
        neutral = _neutral(node.op.fields, config)
        line = IndexLine(
            digest="",
            run=self.run,
            time=0.0,
            neutral={**neutral, "launch": launch},
            acceptance="forced" if node.id in self.planner.forced else "computed",
            without_code=self.key_without_code,
        )
        digest = self.store.commit(self.lease, manifest, line)
        self.lease.remove()
        difference = ""
        if earlier is not None and earlier.digest != digest:
            cause = "the op is not deterministic"
            if earlier.neutral != line.neutral:
                cause = "settings outside the key (launch, neutral fields) differ"
            digests = f"{shown_digest(earlier.digest)} before and {shown_digest(digest)} now"
            difference = f"the same key gave {digests}: {cause}"
        return AttemptResult(status="done", digest=digest, acceptance=line.acceptance, difference=difference)


def _neutral(fields: Mapping[str, ConfigField], config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields that do not enter the key, including those in tables."""
    found: dict[str, Any] = {}
    for name, field in fields.items():
        if field.neutral:
            found[name] = config[name]
        elif field.table is not None and config[name] is not None:
            inside = _neutral(field.fields, config[name])
            found |= {name: inside} if inside else {}
    return found


def _looks(node: GraphNode, list_path: Callable[[Path], Tree]) -> dict[str, Look]:
    return {name: look_at(external, list_path) for name, external in externals_of(node).items()}


def _content(file: str) -> bytes:
    """The bytes of a file, empty if the file is gone."""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""
