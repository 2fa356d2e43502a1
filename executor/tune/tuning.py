"""`dflow tune`: trains what the decision asks for, one run a rung, until there is a winner.

Everything is compiled once, before the first trial. A run has the trainings of one rung, and what they need, as
variants of one graph: shared nodes run once, cached ones not at all, and those that fit [machine] together run side by
side. What was decided is nowhere recorded: it follows from the artifacts (decision.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs
from attrs import define

from dsl.errors import DflowError, PipelineError
from dsl.tune import trial_name
from executor.launchers.cluster_address import with_cluster
from executor.planning.planner import cached_artifacts
from executor.planning.session import Session, make_planner, new_run
from executor.scheduler.run_and_report import run_and_report
from executor.store.artifact_store import Store
from executor.system.file_locks import shared_gc_lock
from executor.system.output import FAILED, OK, print_lines
from executor.tune.decision import Decision, Failure, Result, decide
from executor.tune.preflight import Preflight, search_preflight
from executor.tune.rival import NODES, Rival, rival_of
from executor.tune.trials import Trials
from ops.evaluate.rivals import RIVALS
from ops.lib.forecasts import TargetStated


@define
class Tuning:
    """A search in a store. file: the pipeline file. command: what continues it. failures: the trials that failed in
    this call. code: of the last run. has_run: whether anything was trained.
    """

    store: Store
    trials: Trials
    file: Path
    command: str
    failures: list[Failure] = attrs.Factory(list)
    code: int = OK
    has_run: bool = False

    def check(self) -> None:
        """Refuse what any trial lacks at any rung, before one is trained; the samples are tokenised for it where only
        they tell how many steps there are. Where that ends before, `code` is not OK.

        Raises PipelineError with everything that is wrong.
        """
        found = self._preflight()
        if not found.refused and found.uncounted:
            self.code, _ = self._run(found.uncounted, "the samples, which say how many steps a training has")
            if self.code != OK:
                return
            found = self._preflight()
        if found.refused:
            raise PipelineError(found.refused)

    def run(self) -> Decision:
        """Train what is asked for until there is a winner. Where it ends before, `code` is not OK.

        Raises DflowError where all trials of a rung failed.
        """
        while True:
            decision = decide(self.trials.rules, [*self.results(), *self.failures])
            if not decision.pending:
                break
            self.code = self._train(decision)
            if self.code != OK:
                return decision
        if decision.winner is None:
            failed = "\n".join(f"{trial_name(each.trial)}: {each.message}" for each in decision.rungs[-1].failed)
            raise DflowError(f"every trial failed on the way to step {decision.rungs[-1].steps}:\n{failed}")
        return decision

    def results(self) -> list[Result]:
        """The results that the store has, of all trials and rungs."""
        with shared_gc_lock(self.store.path):
            return list(self.trials.results(self.store))

    def rivals(self, decision: Decision) -> dict[str, Rival | str]:
        """The rivals that the file has, by their names in RIVALS, on the same prompts, evaluated where the store does
        not have them; or why there is no row of one. `code` is not OK where an evaluation was stopped.
        """
        assert decision.winner is not None
        nodes = {rival: self.trials.rival_node(rival, decision.winner) for rival in NODES}
        found: dict[str, Rival | str] = {}
        for rival, node_id in nodes.items():
            if node_id is not None and self.code == OK:
                found[rival] = self._rival(rival, node_id, decision)
        return found or {"mtp": "the training reads no target"}

    def _rival(self, rival: str, node_id: str, decision: Decision) -> Rival | str:
        (target,) = self.trials.graph.nodes[node_id].inputs["target"]
        folder, _ = self._stored(target)
        if rival == "mtp" and folder is not None and (lack := TargetStated.read(folder, folder.name).mtp_mistake()):
            return lack
        folder, seconds = self._stored(node_id)
        if folder is None:
            code, session = self._run([node_id], RIVALS[rival])
            if code == FAILED:
                return f"its evaluation failed: {session.record.state.nodes[node_id].error}"
            self.code = code
            folder, seconds = self._stored(node_id)
        if folder is None:
            return "its evaluation was stopped"
        steps = decision.rungs[-1].steps
        best = next(each for each in self.results() if (each.trial, each.steps) == (decision.winner, steps))
        return rival_of(folder, seconds, best)

    def _preflight(self) -> Preflight:
        with shared_gc_lock(self.store.path):
            return search_preflight(self.store, self.trials)

    def _stored(self, node_id: str) -> tuple[Path | None, float]:
        """The artifact of a node and the seconds that it took; None where the store does not have it."""
        graph = self.trials.graph.up_to([node_id])
        with shared_gc_lock(self.store.path):
            decisions = make_planner(self.store, graph, absent=self.trials.absent_of(graph)).plan()
            folder = cached_artifacts(self.store, decisions).get(node_id)
            manifest = None if folder is None else self.store.manifest(folder.name)
        return folder, (manifest and manifest.seconds) or 0.0

    def _run(self, asked: Iterable[str], name: str) -> tuple[int, Session]:
        """One run with these nodes and what they need. Returns its exit code."""
        self.has_run = True
        graph = self.trials.graph.up_to(asked)
        print_lines(name)
        session = new_run(
            self.store,
            with_cluster(graph),
            absent=self.trials.absent_of(graph),
            file=str(self.file.absolute()),
            name=f"tune: {name}",
        )
        return run_and_report(session, keep_going=True, again=self.command), session

    def _train(self, decision: Decision) -> int:
        """One run with the pending trainings of a rung. Returns its exit code; OK where only trials failed."""
        asked = {self.trials.node(trial, decision.steps): trial for trial in decision.pending}
        code, session = self._run(asked, f"{len(asked)} of {self.trials.rules.trials} trials to step {decision.steps}")
        if code != FAILED:
            return code
        states = session.record.state.nodes
        failed = [
            Failure(trial, decision.steps, states[node_id].error or "it failed")
            for node_id, trial in asked.items()
            if states[node_id].state == "failed"
        ]
        self.failures += failed
        return OK if len(failed) == sum(states[node_id].state != "done" for node_id in asked) else FAILED
