"""What MLflow gets of a whole run, and of each combination of its sweep, when it has ended.

The final metrics, linked to the model that they evaluate, a description, and the report. Each of them
can be sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from dsl.graph import Graph, GraphNode
from dsl.hooks import hook
from executor.records.run_record import Record
from executor.records.sent_run import FAILED, SentCombination, SentRun
from executor.results.metric_order import is_judged
from executor.results.sweep import Combination, differing_params, final_metrics, sorted_rows
from executor.tracking.logged_model_process import described
from executor.tracking.mlflow_client import Place, Tracker
from executor.tracking.node_files import ModelFiles, artifact_files
from executor.tracking.report_writer import ReportWriter
from executor.tracking.run_description import combination_note, maker_tags, run_name

ARTIFACT = "artifact/"

MakeRun = Callable[[Place, float, Mapping[str, str]], str]


def send_model(tracker: Tracker, store: Path, sent: SentRun, graph: Graph, node: GraphNode, digest: str) -> None:
    """Send the artifact of a finished node as a logged model, where it is one.

    Raises StageError where the op does not describe it.
    """
    folder = store / "objects" / digest
    child = sent.nodes[node.id]
    if hook(node.op, "logged_model") is None or not folder.is_dir():
        return
    model = described(graph, node, folder)
    small, large = artifact_files(folder, {})  # a model is one for all runs, whatever they measured
    files = ModelFiles(child.run_id, {name.removeprefix(ARTIFACT): path for name, path in small.items()}, large)
    child.model = tracker.logged_model(sent.experiment, node.id, digest, model, files)
    tracker.log_output(child.run_id, child.model)


def send_metrics(
    tracker: Tracker, run_id: str, sent: SentRun, record: Record, graph: Graph, nodes: Iterable[GraphNode]
) -> None:
    """Send the final metrics of these nodes to a run; those of nodes downstream of a model also to the model.

    Main metrics come first: MLflow's charts start with the first metric. What judges the result also has a short name,
    `tau`, under which it is one column of all runs, whatever their nodes.
    """
    states = record.state.nodes
    by_node: dict[str, dict[str, float]] = {}
    found = final_metrics(nodes, states)
    short = _short(found, graph)
    main = {*short, *(name for name in found if is_judged(name, graph.judged_by))}
    for name, (node_id, value) in sorted({**short, **found}.items(), key=lambda each: each[0] not in main):
        by_node.setdefault(node_id, {})[name] = value
    results = {node_id: (states[node_id].ended or record.state.started, values) for node_id, values in by_node.items()}
    models = {node_id: child.model for node_id, child in sent.nodes.items() if child.model != FAILED}
    for model_node in graph.nodes:
        model_id = models.get(model_node)
        judged = [result for node_id, result in results.items() if node_id in graph.below(model_node)]
        if model_id is not None and judged:
            tracker.log_model_results(run_id, model_id, judged)
            tracker.tag_model(model_id, _judgement(graph, judged))
            tracker.log_output(run_id, model_id)
    tracker.log_results(run_id, results.values())


def send_best(tracker: Tracker, run_id: str, record: Record, graph: Graph, found: Sequence[Combination]) -> None:
    """Send what judges the first combination of a sweep's table to the run of the sweep, by its short name: `tau`.

    Not where a node that was not swept has one, which `send_metrics` sends.
    """
    states = record.state.nodes
    unswept = (graph.nodes[node_id] for node_id in graph.result_nodes if graph.nodes[node_id].copy is None)
    shared = _short(final_metrics(unswept, states), graph)
    rows, sort_by = sorted_rows(graph, states, found)
    if sort_by in rows[0].metrics:
        best = _short(final_metrics(rows[0].combination.result_nodes(graph), states), graph)
        times = {node_id: states[node_id].ended or record.state.started for node_id, _ in best.values()}
        tracker.log_results(
            run_id, [(times[node_id], {name: value}) for name, (node_id, value) in best.items() if name not in shared]
        )


def short_name(judged: str) -> str:
    return judged.rpartition("/")[2]


def _short(found: Mapping[str, tuple[str, float]], graph: Graph) -> dict[str, tuple[str, float]]:
    """By `tau` what `eval/tau` judges by: of the first node that has it."""
    return {
        short_name(judged): next(value for name, value in found.items() if is_judged(name, (judged,)))
        for judged in sorted(graph.judged_by)
        if any(is_judged(name, (judged,)) for name in found)
    }


def _judgement(graph: Graph, judged: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, str]:
    """The figures that ops declare in `judged_by`, such as tau.

    Where several nodes have one, the first also gets the plain name, so that models can be compared by it.
    """
    names = graph.judged_by
    found = {name: value for _, values in judged for name, value in values.items() if is_judged(name, names)}
    first = {each: next((found[name] for name in found if is_judged(name, (each,))), None) for each in sorted(names)}
    known = {**{name: value for name, value in first.items() if value is not None}, **found}
    return {name: f"{value:.4g}" for name, value in known.items()}


def send_note(
    tracker: Tracker, run_id: str, sent: SentRun | SentCombination, note: str, save: Callable[[], None]
) -> None:
    """Set the description of a run."""
    sent.notes = (*sent.notes[-1:], note)
    save()
    tracker.log_note(run_id, note, sent.notes)


def send_report(tracker: Tracker, report: ReportWriter, record: Record, sent: SentRun) -> str | None:
    """Send the report of the run as an artifact; returns a warning where it could not be written."""
    done = report.written()
    if done.code != 0:
        sent.report = FAILED
        return f"the report of the run could not be written ({done.reason}); try it: dflow report {record.run}"
    tracker.log_files(sent.parent, {report.file.name: report.file}, {})
    sent.report = time.time()
    return None


@frozen
class CombinationPublisher:
    """Sends a sweep's combinations as MLflow runs below the whole run."""

    tracker: Tracker
    record: Record
    graph: Graph
    sent: SentRun
    save: Callable[[], None]

    def begin(self, found: Sequence[Combination], make_run: MakeRun) -> None:
        """Create the runs, with the swept values and all parameters that differ between combinations."""
        for combination, differing in zip(found, differing_params(found), strict=True):
            sent = self.sent.combinations.get(combination.name)
            if sent is None:
                place = ("combination", combination.name)
                sent = SentCombination(make_run(place, self.record.state.started, self._tags(combination)))
                self.sent.combinations[combination.name] = sent
                self.save()
            if not sent.params_sent:
                self.tracker.log_params(sent.run_id, {**differing, **combination.values})
                sent.params_sent = True
                self.save()

    def end(self, combination: Combination, *, is_running: bool) -> None:
        """Close a combination's run when its last node has ended; reopen it after a resume."""
        sent, state = self.sent.combinations[combination.name], self.record.state
        status = _status(combination, self.record, is_running=is_running)
        if status == sent.status:
            return
        if status == "RUNNING":
            self.tracker.run_again(sent.run_id)
        else:
            send_metrics(self.tracker, sent.run_id, self.sent, self.record, self.graph, combination.nodes)
            note = combination_note(combination, state, self.graph, self.sent.experiment, self.sent.parent)
            send_note(self.tracker, sent.run_id, sent, note, self.save)
            ended = max((state.nodes[node.id].ended or 0.0 for node in combination.nodes), default=0.0)
            self.tracker.close(sent.run_id, status, ended or state.started)
        sent.status = status
        self.save()

    def _tags(self, combination: Combination) -> dict[str, str]:
        state = self.record.state
        return {
            "mlflow.parentRunId": self.sent.parent,
            **maker_tags(state, f"{combination.name} ({run_name(state)})"),
            "dflow.kind": "combination",
            "dflow.pipeline": state.pipeline,
            "dflow.run": state.run,
            "dflow.combination": combination.name,
        }


def _status(combination: Combination, record: Record, *, is_running: bool) -> str:
    """MLflow's name for the state of a combination."""
    nodes = [record.state.nodes[node.id] for node in combination.nodes]
    states = [node.state for node in nodes]
    if all(state == "done" for state in states):
        return "FINISHED"
    if is_running:
        return "RUNNING"
    return "FAILED" if "failed" in states or any(state.is_blocked for state in nodes) else "KILLED"
