"""The trials of a pipeline file, compiled once: the nodes of each at every rung, and what a store has of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.check import Absent
from dsl.compile import compiled
from dsl.errors import DataError, PipelineError
from dsl.finding import Field, Finding, Position
from dsl.for_each import references
from dsl.graph import Graph
from dsl.read_toml import tree_with_ops
from dsl.toml import KeyPath
from dsl.tree import Tree
from dsl.tune import TUNE, Point, Tune, can_pause, check_tune, put_trials, trial_name
from executor.planning.planner import cached_artifacts
from executor.planning.session import make_planner
from executor.store.artifact_store import Store
from executor.tune.decision import Result, Rules
from executor.tune.points import Points, halving_counts, halving_steps, points_of
from executor.tune.rival import NODES, put_rivals
from ops.train_dflash.answers import read_answers

DECISIVE = ("eval_every", "eval_prompts", "max_steps")  # of a training: whether tau is measured at the rungs
NO_TABLE = "[tune] with rungs = [100, 200, 400], and [tune.space] with train.lr = [3e-4, 1e-3]"


@frozen
class Trials:
    """The trials of a pipeline file: its table [tune], their points, and the compiled graph of all of them.

    nodes: those of the file, as it was when it was read.
    """

    tune: Tune
    points: Points
    graph: Graph
    absent: Absent
    nodes: Mapping[str, Any]

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

    @property
    def planned_trainings(self) -> int:
        """The nodes that train for them."""
        return sum(halving_counts(self.count, len(self.tune.table.rungs), self.tune.table.eta))

    def node(self, trial: int, steps: int) -> str:
        """The id of the node that trains a trial to a rung."""
        return f"{self.tune.rung_node(steps)}-{trial_name(trial)}"

    @property
    def rung_nodes(self) -> dict[str, tuple[int, int]]:
        """The nodes that train, each with its trial and rung."""
        return {
            self.node(trial, steps): (trial, steps) for steps in self.tune.table.rungs for trial in range(self.count)
        }

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
        nodes = self.rung_nodes
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

    Raises PipelineError with all mistakes of the file and of its trials.
    """
    if file.suffix != ".toml":
        raise PipelineError([Finding(f"{file}: [tune] stands in a TOML file; one in Python has none")])
    tree = tree_with_ops(file)
    if TUNE not in tree.values:
        raise PipelineError([Finding("the table [tune] is missing", Field(TUNE, Position(str(file), 1, 1)), NO_TABLE)])
    return trials_of(tree)


def trials_of(tree: Tree) -> Trials:
    """The trials of a pipeline with a table [tune], compiled. Raises PipelineError as `read_trials`."""
    tune = check_tune(tree)
    if tune is None:
        raise PipelineError([tree.mistake((TUNE,), "expected a table", NO_TABLE)])
    nodes, points, table, absent = dict(tree.nodes), points_of(tune), tune.table, Absent()
    if not points.tried:
        least = halving_steps(1, table.rungs, table.eta)
        message = f"{table.budget_steps} steps are fewer than the {least} of one trial to the last rung"
        tree.report((TUNE, "budget_steps"), message, f"set {least} or more")
    tried = points.tried or points.beyond
    if can_pause(tree, table.node):
        _check_reach(tree, tune)
        _check_trainings(tree, tune, tried)
        put_rivals(tree, tune)
    rivals = tree.nodes.keys() - nodes.keys()
    put_trials(tree, tune, tried)
    try:
        graph = attrs.evolve(compiled(tree, absent=absent), sort_by="val/tau")
    except PipelineError as error:  # a rival's values are those of other nodes, whose mistakes it repeats
        own = [each for each in error.mistakes if "".join(each.path.split(".")[1:2]) not in rivals]
        raise PipelineError(own or error.mistakes) from error
    return Trials(tune, points, graph, absent, nodes)


def _check_reach(tree: Tree, tune: Tune) -> None:
    """Report values that change nothing of the training."""
    reached = [tune.table.node]
    for node in reached:
        op, table = tree.op(node), tree.table("node", node)
        named = [parent for edge in (op.edges if op else ()) for parent in references(table.get(edge))]
        reached += [parent for parent in dict.fromkeys(named) if parent in tree.nodes and parent not in reached]
    for axis in tune.axes:
        for node in sorted({path[0] for path in axis.paths} - {*reached}):
            message = (
                f'"{node}" is not above "{tune.table.node}", so trials with other values of it are the same training'
            )
            tree.report(axis.place, message, f"vary fields of {tune.table.node}, or of nodes above it")


def _check_trainings(tree: Tree, tune: Tune, points: Sequence[Point]) -> None:
    """Report trainings that measure no tau on val, and rungs beyond max_steps."""
    node, last = tune.table.node, tune.table.rungs[-1]
    training, op = tree.table("node", node), tree.op(node)
    assert op is not None, "it can pause"
    found: dict[tuple[KeyPath, str, str], list[int]] = {}
    for trial, point in enumerate(points):
        tried = {path: value for option in point.values() for path, value in option.changes.items()}
        values = {name: tried.get((node, name), training.get(name, op.fields[name].made_default)) for name in DECISIVE}
        given = {
            'tokens = "@tokenize"': training.get("tokens") is not None,
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
