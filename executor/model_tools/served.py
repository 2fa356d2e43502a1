"""What a server needs of a run: the draft, its target, how images were prepared, and prompts to try.

Also which run `dflow serve` and `dflow diagnose` use where none is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import Factory, evolve, frozen

from dsl.errors import ConfigError, DataError, DflowError, StoreError, UnknownName
from dsl.graph import Graph, GraphNode
from dsl.op import Artifact
from executor.planning.code_trust import refuse_untrusted_code, trusting_nodes
from executor.records.run_record import Record, find_record, newest_that_ran
from executor.store.artifact_store import Store
from ops.artifacts import CheckedDraft, Draft, DraftCheckpoint, ImageSamples, Report, TokenShards
from ops.check_export.op import WORKERS
from ops.lib.data.checkpoint_code import check_code
from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import NO_SERVER
from ops.lib.drafts.backbone.config import algorithm_of
from ops.lib.drafts.backbone.contract import embedding_warnings
from ops.lib.sglang.serve_command import DraftOption, Served
from ops.lib.vllm.serve_command import draft_for_vllm
from ops.tools.diagnose.chain import last_drafts_of
from ops.tools.serve.chat import ChatPrompt, held_out_prompts

LONGEST_ERROR = 500
# Metrics of ops/evaluate/load.py; the second one exists where a batch size was measured with several block sizes.
BEST_BLOCK = re.compile(r"eval/best_block_batch_(\d+)")
OTHER_BLOCK = re.compile(r"eval/speedup_batch_(\d+)_block_\d+")
DEFAULT_RUN = "the newest with a finished draft"


@frozen(kw_only=True)
class ServedRun:
    """What a server needs of a run. algorithm: the draft's, as train_dflash names it. warnings: why the draft may not
    be fit to serve. of_embedding: what single engines do with the target's embedding, by the engine's name. tau: as
    `evaluate` measured it, None where it did not. engine: that of export_draft.

    algorithm: the draft's, as train_dflash names it. warnings: doubts whether the draft is fit to serve. tau: measured
    by `evaluate`, else None. engine: the one set in export_draft. prompts: held-out ones; none where the store holds no
    samples. best_blocks: batch size -> the block size with the highest speed-up, where `evaluate` measured several.
    """

    target: Path
    served: Served
    draft: DraftOption
    algorithm: str
    engine: str | None
    warnings: tuple[str, ...]
    of_embedding: Mapping[str, str]
    tau: float | None
    prompts: tuple[ChatPrompt, ...]
    best_blocks: Mapping[int, int] = Factory(dict)

    def in_blocks(self, size: int) -> ServedRun:
        """The same with a draft that decodes in shorter blocks. size: verified tokens. Raises ConfigError."""
        if not 2 <= size <= self.draft.block_size:
            raise ConfigError(f"--block-size: must lie in 2..{self.draft.block_size}, which is the draft's, got {size}")
        return evolve(self, draft=evolve(self.draft, block_size=size))


def find_served(store: Store, record: Record, node: str | None, prompts: int = 1) -> ServedRun:
    """Find the draft to serve, that of the node or the run's only one, and at most `prompts` prompts.

    Raises StoreError where the run has no such draft or several, or the store lacks it or its target. Raises DataError
    where one of them has untrusted code, or no server supports its algorithm.
    """
    made = _Made(store, record, record.graph())
    export, check = made.choose(node)
    draft, warnings = made.draft_of(export, check)
    target = made.path(export.inputs["target"][0])
    info = _read(target / "target.json")
    config = _read(draft / "config.json")
    model, target_config = target / "model", _read(target / "model" / "config.json")
    engine = config.get("dflow", {}).get("engine")
    for directory in {draft, draft_for_vllm(draft)}:
        check_code(directory, trust_remote_code=False)
    return ServedRun(
        target=model,
        served=Served.as_trained(info, target_config, made.captured(export), model, engine),
        draft=_draft_option(draft, config),
        algorithm=algorithm_of(config).name,
        engine=engine,
        warnings=tuple(warnings),
        of_embedding=embedding_warnings(config, target_config),
        tau=made.tau(export),
        prompts=made.prompts(export, info["vision"], prompts),
        best_blocks=made.best_blocks(export),
    )


def _draft_option(draft: Path, config: Mapping[str, Any]) -> DraftOption:
    """The engine's options for a draft.

    The block size is counted as in plain DFlash: the tokens that are verified in a step.
    """
    algorithm = algorithm_of(config)
    if not algorithm.engine:
        raise DataError(f"{draft}: {NO_SERVER} ({algorithm.name}): evaluate measures its accepted lengths")
    _own, plain = algorithm.from_serving(config)
    return DraftOption(path=str(draft), block_size=plain["block_size"], algorithm=algorithm.engine)


@frozen
class _Made:
    store: Store
    record: Record
    graph: Graph

    def choose(self, named: str | None) -> tuple[GraphNode, GraphNode | None]:
        """The node that exported the draft to serve, and the node that checked it, if any.

        Without a name, drafts from which another one was trained are left out.
        """
        exports = [node for node in self.graph.nodes.values() if node.op.output is Draft]
        last = last_drafts_of(self.graph)
        pairs = [(export, next(iter(self._readers(export, CheckedDraft)), None)) for export in exports]
        wanted = [
            (export, check)
            for export, check in pairs
            if (export.id in last if named is None else named in (export.id, check.id if check is not None else ""))
        ]
        if len(wanted) == 1:
            return wanted[0]
        found = ", ".join(export.id for export in exports) or "none"
        if named is not None:
            raise UnknownName(f'run {self.record.run}: "{named}" does not export a draft; nodes that do: {found}')
        if not exports:
            raise StoreError(f"run {self.record.run} of {self.graph.name} has no draft (op export_draft or load_draft)")
        raise StoreError(f"run {self.record.run} exports several drafts: {', '.join(last)}; choose one with --node")

    def draft_of(self, export: GraphNode, check: GraphNode | None) -> tuple[Path, list[str]]:
        """The draft's serving directory, and warnings: the checked one if it passed, else the exported one."""
        if check is None:
            return self.path(export.id), [
                f"no node checks the draft of {export.id} (op check_export): SGLang does not report a draft that it "
                "reads wrongly"
            ]
        state = self.record.state.nodes[check.id]
        if state.state == "done":
            self._require_unaltered(export, check)
            return self.path(check.id) / "draft", self._skipped(check)
        if state.state == "failed":
            why = f"did not pass its gate; {check.id} failed: {_one_line(state.error or '')}"
        else:
            why = f"has not been through its gate; {check.id} is {state.state}"
        return self.path(export.id), [f"the draft of {export.id} {why}"]

    def _skipped(self, check: GraphNode) -> list[str]:
        """Warnings where the gate passed the draft without SGLang."""
        checked = _read(self.path(check.id) / "check.json")
        live = checked.get("live", {})
        if live.get("status") != "skipped":
            return []
        remedy = f"run it where SGLang can serve, dflow resume {self.record.run} --from {check.id}"
        if checked.get("engine", WORKERS[0]) not in WORKERS:
            remedy = "compare the accepted lengths of the server with the tau of the evaluation"
        return [f"{check.id} checked the draft without SGLang ({_one_line(live['reason'])}): {remedy}"]

    def _require_unaltered(self, export: GraphNode, check: GraphNode) -> None:
        """Check that the files of a draft are as the gate passed them; the export may share them by hard links.

        Raises StoreError where one was altered.
        """
        altered = self._altered(check)
        if altered:
            first = export.id if self._altered(export) else check.id
            raise StoreError(
                f"{altered[0]}: the checked draft is damaged: {', '.join(path.name for path in altered)} "
                f"is gone or was altered; make it again: dflow resume {self.record.run} --from {first}"
            )

    def _altered(self, node: GraphNode) -> list[Path]:
        digest = self.record.state.nodes[node.id].digest
        return [self.store.object_path(digest) / name for name in self.store.altered(digest)] if digest else []

    def captured(self, export: GraphNode) -> dict[str, Any]:
        """The image settings of the training, from its training.json.

        If the store has lost it, they come from tokens.json of the evaluation, which has the same fields.
        """
        for producer in export.inputs.get("draft", ()):
            training = self._stored(producer)
            if self.graph.nodes[producer].op.output is DraftCheckpoint and training is not None:
                return dict(_read(training / "training.json")["captured"])
        stored = (self._stored(tokens.id) for tokens in self._tokens(export))
        found = next(filter(None, stored), None)
        return {} if found is None else _read(found / "tokens.json")

    def tau(self, export: GraphNode) -> float | None:
        for node in self._readers(export, Report):
            measured = self.record.state.nodes[node.id].metrics.get("eval/tau")
            if measured is not None:
                return measured
        return None

    def best_blocks(self, export: GraphNode) -> dict[int, int]:
        """The block size with the highest speed-up at each batch size that was measured with several block sizes."""
        found = {}
        for node in self._readers(export, Report):
            metrics = self.record.state.nodes[node.id].metrics
            compared = {batch[1] for name in metrics if (batch := OTHER_BLOCK.fullmatch(name))}
            for name, block in metrics.items():
                if (batch := BEST_BLOCK.fullmatch(name)) and batch[1] in compared:
                    found[int(batch[1])] = int(block)
        return dict(sorted(found.items()))

    def prompts(self, export: GraphNode, vision: bool, count: int) -> tuple[ChatPrompt, ...]:
        """At most `count` prompts, from the first samples behind the draft's evaluation or check that have any."""
        found = (held_out_prompts(samples, vision, count) for samples in self._samples(export))
        return next(filter(None, found), ())

    def _tokens(self, export: GraphNode) -> Iterator[GraphNode]:
        """The nodes that made the tokens on which the draft was evaluated or checked."""
        for reader in (*self._readers(export, Report), *self._readers(export, CheckedDraft)):
            for node in reader.inputs.get("tokens", ()):
                if self.graph.nodes[node].op.output is TokenShards:
                    yield self.graph.nodes[node]

    def _samples(self, export: GraphNode) -> Iterator[Path]:
        """The folders of conversations from which the evaluated tokens were made, as far as the store has them."""
        for tokens in self._tokens(export):
            for producer in tokens.inputs.get("samples", ()):
                samples = self._stored(producer)
                if self.graph.nodes[producer].op.output is ImageSamples and samples is not None:
                    yield samples

    def _stored(self, node: str) -> Path | None:
        """The artifact of a node, None where the store does not hold it."""
        digest = self.record.state.nodes[node].digest
        return self.store.object_path(digest) if digest is not None and self.store.has(digest) else None

    def path(self, node: str) -> Path:
        state = self.record.state.nodes[node]
        if state.state != "done" or state.digest is None:
            raise StoreError(f"run {self.record.run}: {node} is {state.state}; {self.record.to_finish()}")
        if not self.store.has(state.digest):
            raise StoreError(
                f"{self.store.object_path(state.digest)}: the artifact of {node} is missing or incomplete; make it "
                f"again: dflow resume {self.record.run}"
            )
        refuse_untrusted_code(self.store, self.graph.nodes[node], trusting_nodes(self.graph), state.digest)
        return self.store.object_path(state.digest)

    def _readers(self, export: GraphNode, output: type) -> list[GraphNode]:
        """The nodes with this output type that read the exported draft."""
        nodes = self.graph.nodes.values()
        return [node for node in nodes if node.op.output is output and export.id in node.inputs.get("draft", ())]


def _one_line(text: str) -> str:
    """The lines of an error joined into one, and cut if too long."""
    joined = " | ".join(line.strip() for line in text.splitlines() if line.strip())
    return joined if len(joined) <= LONGEST_ERROR else joined[:LONGEST_ERROR] + " ..."


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); verify the store") from error


def find_draft_run(
    records: Path, run: str | None, node: str | None, outputs: Iterable[type[Artifact]]
) -> tuple[Record, str]:
    """The record of a run with a draft, and a note where it is not the latest run.

    run: as in `find_record`; None: the newest run in which a node with one of `outputs` is done. node: only this node
    counts. If no run has one, or the latest cannot be read without trust, it is the latest. Raises StoreError.
    """
    latest = find_record(records, run)
    wanted = tuple(outputs)
    if run is not None:
        return latest, ""
    try:
        if _has(latest, latest.graph(), node, wanted):
            return latest, ""
    except DflowError:
        return latest, ""
    for record in newest_that_ran(records):
        with suppress(DflowError):
            if record.run < latest.run and _has(record, record.graph(), node, wanted):
                what = "has no finished draft" if node is None else f'has no finished draft of "{node}"'
                used = f"run {record.run} of {record.state.pipeline} is used"
                return record, f"the latest run, {latest.run} of {latest.state.pipeline}, {what}; {used}"
    return latest, ""


def _has(record: Record, graph: Graph, named: str | None, wanted: tuple[type[Artifact], ...]) -> bool:
    return any(
        node.op.output in wanted and named in (None, node.id) and record.state.nodes[node.id].state == "done"
        for node in graph.nodes.values()
    )
