"""The trials of a pipeline file, compiled once: the nodes of each at every rung, and what a store has of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.check import Absent
from dsl.compile import compiled
from dsl.errors import DataError, PipelineError
from dsl.finding import Field, Finding, Position
from dsl.graph import Graph
from dsl.read_toml import tree_with_ops
from dsl.toml import KeyPath
from dsl.tree import Tree
from dsl.tune import TUNE, Point, Tune, check_tune, put_trials, trial_name
from executor.planning.planner import cached_artifacts
from executor.planning.session import make_planner
from executor.store.artifact_store import Store
from executor.tune.decision import Result, Rules
from executor.tune.points import Points, halving_steps, points_of
from executor.tune.rival import NODES, put_rivals
from ops.train_dflash.answers import read_answers

DECISIVE = ("eval_every", "eval_prompts", "max_steps")  # of a training: whether tau is measured at the rungs
NO_TABLE = "[tune] with rungs = [100, 200, 400], and [tune.space] with train.lr = [3e-4, 1e-3]"


@frozen
class Trials:
    """The trials of a pipeline file: its table [tune], their points, and the compiled graph of all of them."""

    tune: Tune
    points: Points
    graph: Graph
    absent: Absent

    @property
    def count(self) -> int:
        return len(self.points.tried)

    @property
    def rules(self) -> Rules:
        table = self.tune.table
        return Rules(self.count, table.rungs, table.eta, table.budget_hours)

    @property
    def planned_steps(self) -> int:
        """The training steps of all trials, without a budget of hours."""
        return halving_steps(self.count, self.tune.table.rungs, self.tune.table.eta)

    def node(self, trial: int, steps: int) -> str:
        """The id of the node that trains a trial to a rung."""
        return f"{self.tune.rung_node(steps)}-{trial_name(trial)}"

    def rival_node(self, rival: str, trial: int) -> str | None:
        """The id of the node that evaluates a rival, one of NODES, with the trial's target; None without one."""
        own = f"{NODES[rival]}-{trial_name(trial)}"
        return next((node_id for node_id in (own, NODES[rival]) if node_id in self.graph.nodes), None)

    def shown(self, trial: int) -> dict[str, str]:
        """The trial's values as a TOML file writes them, by the names of the space."""
        return {name: option.shown for name, option in self.points.tried[trial].items()}

    def absent_of(self, graph: Graph) -> Absent:
        """The missing files and folders of the nodes of a part of the graph."""
        return {node_id: found for node_id, found in self.absent.items() if node_id in graph.nodes}

    def results(self, store: Store) -> Iterator[Result]:
        """The results that a store has, of all trials and rungs."""
        nodes = {
            self.node(trial, steps): (trial, steps) for trial in range(self.count) for steps in self.tune.table.rungs
        }
        graph = self.graph.up_to(nodes)
        decisions = make_planner(store, graph, absent=self.absent_of(graph)).plan()
        for node_id, folder in cached_artifacts(store, decisions).items():
            if node_id not in nodes:
                continue
            manifest = store.manifest(folder.name)
            answers = read_answers(folder)
            if not answers:
                raise DataError(f"{folder}: the training measured no tau: it has no prompt of the split val")
            yield Result(*nodes[node_id], (manifest and manifest.seconds) or 0.0, tuple(answers))


def read_trials(file: Path) -> Trials:
    """Read a pipeline file with a table [tune], and compile all trials.

    Raises PipelineError with all mistakes of the file, or with all that the trials cause together.
    """
    if file.suffix != ".toml":
        raise PipelineError([Finding(f"{file}: [tune] stands in a TOML file; one in Python has none")])
    tree = tree_with_ops(file)
    if TUNE not in tree.values:
        raise PipelineError([Finding("the table [tune] is missing", Field(TUNE, Position(str(file), 1, 1)), NO_TABLE)])
    whole = compiled(tree, absent={})
    tree, absent = tree_with_ops(file), Absent()
    tune = check_tune(tree)
    assert tune is not None, "the file has no mistakes"
    points, table = points_of(tune), tune.table
    if not points.tried:
        least = halving_steps(1, table.rungs, table.eta)
        message = f"{table.budget_steps} steps are fewer than the {least} of one trial to the last rung"
        tree.report((TUNE, "budget_steps"), message, f"set {least} or more")
    tried = points.tried or points.beyond
    training = whole.up_to([table.node]).nodes
    _check_reach(tree, training, tune, tried)
    _check_trainings(tree, training[table.node].config, tune, tried)
    put_rivals(tree, tune)
    put_trials(tree, tune, tried)
    return Trials(tune, points, attrs.evolve(compiled(tree, absent=absent), sort_by="val/tau"), absent)


def _check_reach(tree: Tree, training: Collection[str], tune: Tune, points: Sequence[Point]) -> None:
    """Report values that change nothing of the training. training: its node's id, and those of all nodes above it."""
    places = {axis.name: axis.place for axis in tune.axes}
    nodes = {(name, path[0]) for point in points for name, option in point.items() for path in option.changes}
    for name, node in sorted(nodes):
        if node not in training:
            message = (
                f'"{node}" is not above "{tune.table.node}", so trials with other values of it are the same training'
            )
            tree.report(places[name], message, f"vary fields of {tune.table.node}, or of nodes above it")


def _check_trainings(tree: Tree, training: Any, tune: Tune, points: Sequence[Point]) -> None:
    """Report trainings that measure no tau on val, and rungs beyond max_steps. training: its config in the file."""
    node, last = tune.table.node, tune.table.rungs[-1]
    found: dict[tuple[KeyPath, str, str], list[int]] = {}
    for trial, point in enumerate(points):
        tried = {path: value for option in point.values() for path, value in option.changes.items()}
        values = {name: tried.get((node, name), getattr(training, name)) for name in DECISIVE}
        given = {
            'tokens = "@tokenize"': training.tokens is not None,
            f"eval_every = {tune.table.rungs[0]}": values["eval_every"] is not None,
            "eval_prompts = 8": values["eval_prompts"] != 0,
        }
        if lacking := [what for what, is_given in given.items() if not is_given]:
            message = "trials are compared by tau on val, which this training does not measure"
            found.setdefault((("node", node), message, f"set {', '.join(lacking)}"), []).append(trial)
        most = values["max_steps"]
        if isinstance(most, int) and last > most:
            message = f"{last} is more than the {most} steps of the training"
            found.setdefault(((TUNE, "rungs"), message, f"lower it, or raise max_steps of {node}"), []).append(trial)
    for (path, message, hint), trials in found.items():
        tree.report(path, message + of_trials(trials, len(points)), hint)


def of_trials(trials: Collection[int], count: int) -> str:
    """The names of the trials that a message concerns; empty where it concerns all of them."""
    return f" ({', '.join(map(trial_name, sorted(trials)))})" if len(trials) < count else ""
