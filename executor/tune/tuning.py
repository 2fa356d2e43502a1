"""`dflow tune`: trains what the decision asks for, one run a rung, until there is a winner.

Everything is compiled once, before the first trial. A run has the trainings of one rung, and what they need, as
variants of one graph: shared nodes run once, cached ones not at all, and those that fit [machine] together run side by
side. What was decided is nowhere recorded: it follows from the artifacts (decision.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
from attrs import define, frozen

from dsl.check import Absent
from dsl.compile import compiled
from dsl.errors import DataError, DflowError, PipelineError
from dsl.finding import Field, Finding, Position
from dsl.graph import Graph
from dsl.read_toml import tree_with_ops
from dsl.tune import TUNE, Tune, check_tune, put_trials, trial_name
from executor.launchers.cluster_address import with_cluster
from executor.planning.planner import cached_artifacts
from executor.planning.session import Session, make_planner, new_run
from executor.scheduler.run_and_report import run_and_report
from executor.store.artifact_store import Store
from executor.system.file_locks import shared_gc_lock
from executor.system.output import FAILED, OK, print_lines
from executor.tune.decision import Decision, Failure, Result, Rules, decide
from executor.tune.points import Points, halving_steps, points_of
from executor.tune.rival import NODE, Rival, put_rival, rival_of
from ops.lib.forecasts import TargetStated
from ops.train_dflash.answers import read_answers

NO_TABLE = "[tune] with rungs = [100, 200, 400], and [tune.space] with train.lr = [3e-4, 1e-3]"


@frozen
class Trials:
    """The trials of a pipeline file: its table [tune], their points, and the compiled graph of all of them."""

    tune: Tune
    points: Points
    graph: Graph
    absent: Absent

    @property
    def rules(self) -> Rules:
        table = self.tune.table
        return Rules(len(self.points.tried), table.rungs, table.eta, table.budget_hours)

    @property
    def planned_steps(self) -> int:
        """The training steps of all trials, without a budget of hours."""
        return halving_steps(len(self.points.tried), self.tune.table.rungs, self.tune.table.eta)

    def node(self, trial: int, steps: int) -> str:
        """The id of the node that trains a trial to a rung."""
        return f"{self.tune.rung_node(steps)}-{trial_name(trial)}"

    def rival_node(self, trial: int) -> str | None:
        """The id of the node that evaluates the MTP head of the trial's target; None without one."""
        own = f"{NODE}-{trial_name(trial)}"
        return next((node_id for node_id in (own, NODE) if node_id in self.graph.nodes), None)

    def shown(self, trial: int) -> dict[str, str]:
        """The trial's values as a TOML file writes them, by the names of the space."""
        return {name: option.shown for name, option in self.points.tried[trial].items()}


def read_trials(file: Path) -> Trials:
    """Read a pipeline file with a table [tune], and compile all trials.

    Raises PipelineError with all mistakes of the file, or with all that values of the space cause together.
    """
    if file.suffix != ".toml":
        raise PipelineError([Finding(f"{file}: [tune] stands in a TOML file; one in Python has none")])
    tree = tree_with_ops(file)
    if TUNE not in tree.values:
        raise PipelineError([Finding("the table [tune] is missing", Field(TUNE, Position(str(file), 1, 1)), NO_TABLE)])
    compiled(tree, absent={})
    tree, absent = tree_with_ops(file), Absent()
    tune = check_tune(tree)
    assert tune is not None, "the file has no mistakes"
    points, table = points_of(tune), tune.table
    if not points.tried:
        least = halving_steps(1, table.rungs, table.eta)
        message = f"{table.budget_steps} steps are fewer than the {least} of one trial to the last rung"
        raise PipelineError([tree.mistake((TUNE, "budget_steps"), message, f"set {least} or more")])
    put_rival(tree, table.node)
    put_trials(tree, tune, points.tried)
    trials = Trials(tune, points, attrs.evolve(compiled(tree, absent=absent), sort_by="val/tau"), absent)
    node = trials.graph.nodes[trials.node(0, table.rungs[0])]
    if not node.config.measures_tau:
        message = "trials are compared by tau on val, which this training does not measure"
        hint = 'give it tokens = "@tokenize", eval_every = N and eval_prompts above 0'
        raise PipelineError([tree.mistake(("node", table.node), message, hint)])
    return trials


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

    def results(self) -> Iterator[Result]:
        """The results that the store has, of all trials and rungs."""
        trials = self.trials
        nodes = {
            trials.node(trial, steps): (trial, steps)
            for trial in range(len(trials.points.tried))
            for steps in trials.tune.table.rungs
        }
        graph = trials.graph.up_to(nodes)
        with shared_gc_lock(self.store.path):
            decisions = make_planner(self.store, graph, absent=self._absent(graph)).plan()
            for node_id, folder in cached_artifacts(self.store, decisions).items():
                if node_id not in nodes:
                    continue
                manifest = self.store.manifest(folder.name)
                answers = read_answers(folder)
                if not answers:
                    raise DataError(f"{folder}: the training measured no tau: it has no prompt of the split val")
                yield Result(*nodes[node_id], (manifest and manifest.seconds) or 0.0, tuple(answers))

    def rival(self, decision: Decision) -> Rival | str:
        """The MTP head of the winner's target on the same prompts, evaluated where the store does not have it; or why
        there is none. `code` is not OK where the evaluation was stopped.
        """
        assert decision.winner is not None
        node_id = self.trials.rival_node(decision.winner)
        if node_id is None:
            return "the training reads no target"
        (target,) = self.trials.graph.nodes[node_id].inputs["target"]
        folder, _ = self._stored(target)
        assert folder is not None, "the trainings read it"
        if mistake := TargetStated.read(folder, folder.name).mtp_mistake():
            return mistake
        folder, seconds = self._stored(node_id)
        if folder is None:
            code, session = self._run([node_id], "the target's own MTP head")
            if code == FAILED:
                return f"its evaluation failed: {session.record.state.nodes[node_id].error}"
            self.code = code
            folder, seconds = self._stored(node_id)
        if folder is None:
            return "its evaluation was stopped"
        steps = decision.rungs[-1].steps
        best = next(each for each in self.results() if (each.trial, each.steps) == (decision.winner, steps))
        return rival_of(folder, seconds, best)

    def _stored(self, node_id: str) -> tuple[Path | None, float]:
        """The artifact of a node and the seconds that it took; None where the store does not have it."""
        graph = self.trials.graph.up_to([node_id])
        with shared_gc_lock(self.store.path):
            decisions = make_planner(self.store, graph, absent=self._absent(graph)).plan()
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
            absent=self._absent(graph),
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

    def _absent(self, graph: Graph) -> Absent:
        return {node_id: found for node_id, found in self.trials.absent.items() if node_id in graph.nodes}
