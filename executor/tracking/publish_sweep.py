"""The MLflow runs of a sweep's combinations, below the run as a whole: what was chosen, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from dsl.graph import Graph
from executor.records.run_record import Record
from executor.results.combinations import Combination, differing_params
from executor.tracking.mlflow_client import Place, Tracker
from executor.tracking.publish_results import send_metrics, send_note
from executor.tracking.run_description import combination_note

MakeRun = Callable[[Tracker, Place, float, Mapping[str, str]], str]


@frozen
class CombinationSender:
    """sent: what mlflow.json holds; make_run and save are the sender's."""

    tracker: Tracker
    record: Record
    graph: Graph
    sent: dict[str, Any]
    save: Callable[[], None]

    def begin(self, found: Sequence[Combination], make_run: MakeRun) -> None:
        """With what was chosen and all parameters that are not the same in all of them."""
        for combination, differing in zip(found, differing_params(found), strict=True):
            sent = self.sent["combinations"].get(combination.name)
            if sent is None:
                place = ("combination", combination.name)
                run_id = make_run(self.tracker, place, self.record.state.started, self._tags(combination))
                sent = self.sent["combinations"][combination.name] = {"run_id": run_id, "status": "RUNNING"}
                self.save()
            if not sent.get("params_sent"):
                self.tracker.log_params(sent["run_id"], {**differing, **combination.values})
                sent["params_sent"] = True
                self.save()

    def end(self, combination: Combination, *, is_running: bool) -> None:
        """When its last node has ended; a resumed one runs again."""
        sent, state = self.sent["combinations"][combination.name], self.record.state
        status = _status(combination, self.record, is_running=is_running)
        if status == sent["status"]:
            return
        if status == "RUNNING":
            self.tracker.run_again(sent["run_id"])
        else:
            send_metrics(self.tracker, sent["run_id"], self.sent, self.record, self.graph, combination.nodes)
            note = combination_note(combination, state, self.graph, self.sent["experiment"], self.sent["parent"])
            send_note(self.tracker, sent["run_id"], sent, note, self.save)
            ended = max((state.nodes[node.id].ended or 0.0 for node in combination.nodes), default=0.0)
            self.tracker.close(sent["run_id"], status, ended or state.started)
        sent["status"] = status
        self.save()

    def _tags(self, combination: Combination) -> dict[str, str]:
        return {
            "mlflow.parentRunId": self.sent["parent"],
            "mlflow.runName": combination.name,
            "dflow.kind": "combination",
            "dflow.pipeline": self.record.state.pipeline,
            "dflow.run": self.record.run,
            "dflow.combination": combination.name,
        }


def _status(combination: Combination, record: Record, *, is_running: bool) -> str:
    """In MLflow's words."""
    nodes = [record.state.nodes[node.id] for node in combination.nodes]
    states = [node.state for node in nodes]
    if all(state == "done" for state in states):
        return "FINISHED"
    if is_running:
        return "RUNNING"
    return "FAILED" if "failed" in states or any(state.is_blocked for state in nodes) else "KILLED"
