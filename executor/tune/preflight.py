"""What is known of a search before it trains: what every trial lacks at every rung, the steps at most, and their time.

`dflow plan` and `dflow tune` both ask here. The steps of the trainings are known once the samples are tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from attrs import evolve, frozen

from dsl.files import free_bytes, read_object_or_none
from dsl.finding import Field, Finding
from dsl.tune import PAUSE, TRIAL, TUNE, trial_name
from executor.planning.history import PreviousNodes
from executor.planning.planner import Decision, cached_artifacts
from executor.planning.preflight import Estimates, disk_mistakes, graph_estimates, known_size, missing_here
from executor.planning.session import make_planner, missing_data
from executor.store.artifact_store import Store
from executor.system.output import shown_duration
from executor.tune.decision import decide
from executor.tune.points import halving_counts
from executor.tune.rival import NODES
from executor.tune.trials import Trials, of_trials
from ops.lib.forecasts import StepsForecast, TokensForecast

MEASURED = ("steps_in_this_attempt", "step_seconds", "measuring_seconds")  # of a training's measurements.json


@frozen
class Preflight:
    """refused: why the search would not start, or would fail later. uncounted: the nodes of tokens that have to be made
    before the steps of the trainings are known. Of a search that has a winner, both are empty.
    """

    refused: Sequence[Finding]
    uncounted: Sequence[str]


@frozen
class Pace:
    """Seconds of a training. start: of all but its steps, such as loading. step: with its share of measuring tau."""

    start: float
    step: float

    def seconds(self, trials: Trials) -> float:
        """Of all trainings of a search together, at most."""
        return trials.planned_trainings * self.start + trials.planned_steps * self.step


def search_preflight(store: Store, trials: Trials) -> Preflight:
    """Check all trainings of a search, and the evaluation of the rivals, on this machine."""
    if not decide(trials.rules, trials.results(store)).pending:
        return Preflight((), ())
    table = trials.tune.table
    every = (trials.rival_node(rival, trial) for rival in NODES for trial in range(trials.count))
    rivals = dict.fromkeys(node_id for node_id in every if node_id is not None)
    graph = trials.graph.up_to([*trials.rung_nodes, *rivals])
    decisions = make_planner(store, graph, absent=trials.absent_of(graph)).plan()
    free = free_bytes(store.path)
    estimates = graph_estimates(graph, cached_artifacts(store, decisions), free)
    lacking = [
        *missing_data(decisions, trials.absent_of(graph)),
        *missing_here(graph, decisions, estimates),
        *_without_val(trials, estimates),
        *disk_mistakes(store, _certain(trials, decisions, estimates), estimates.needs, free),
    ]
    uncounted: dict[str, None] = {}
    for trial in range(trials.count):
        node = graph.nodes[trials.node(trial, table.rungs[0])]
        batches: StepsForecast | None = estimates.forecast[node.inputs["batches"][0]]
        if decisions[node.id].cache != "hit" and (batches is None or batches.count() is None):
            uncounted |= dict.fromkeys(each for each in node.inputs["tokens"] if decisions[each].cache != "hit")
    return Preflight(_grouped(trials, lacking), tuple(uncounted))


def _certain(trials: Trials, decisions: Mapping[str, Decision], estimates: Estimates) -> dict[str, Decision]:
    """The nodes that run whichever trials stop: of a rung, as many trainings as it has, those that write the least."""
    table = trials.tune.table
    left_out: set[str] = set()
    counts = halving_counts(trials.count, len(table.rungs), table.eta)
    if table.budget_hours is not None:
        counts = [1, *[0] * len(counts[1:])]
    for steps, count in zip(table.rungs, counts, strict=True):
        needs = {node: estimates.needs.get(node) for node in (trials.node(each, steps) for each in range(trials.count))}
        sizes = {node: 0 if need is None else known_size(need) for node, need in needs.items()}
        left_out |= {*sorted(sizes, key=lambda node: sizes[node])[count:]}
    return {node_id: decision for node_id, decision in decisions.items() if node_id not in left_out}


def _without_val(trials: Trials, estimates: Estimates) -> Iterator[Finding]:
    """A finding for each trial without val samples, by which it could be compared."""
    for trial in range(trials.count):
        node = trials.graph.nodes[trials.node(trial, trials.tune.table.rungs[0])]
        tokens: TokensForecast | None = estimates.forecast[node.inputs["tokens"][0]]
        if tokens is not None and "val" in tokens.empty:
            message = "trials are compared by tau on the split val, which has no samples: raise val_fraction of ingest"
            yield Finding(message, Field(f"node.{node.id}.tokens"))


def _grouped(trials: Trials, findings: Sequence[Finding]) -> list[Finding]:
    """The findings with the nodes of the file instead of the trials', each once, with the trials that it concerns.

    A pause behind the end of a training is a rung beyond it. That the target has no MTP head refuses nothing.
    """
    tree, rungs = trials.graph.tree, {trials.tune.rung_node(steps) for steps in trials.tune.table.rungs}
    assert tree is not None, "the trials are those of a file"
    found: dict[Finding, set[int]] = {}
    names = [trial_name(trial) for trial in range(trials.count)]
    for each in findings:
        owner, _, field = each.path.removeprefix("node.").partition(".")
        copy = trials.graph.nodes[owner].copy if owner in trials.graph.nodes else None
        template = owner if copy is None else copy.template
        concerned = range(trials.count) if copy is None else (names.index(copy.values[TRIAL]),)
        if (template, field) == (NODES["mtp"], "mtp"):
            continue
        if (template, field) == (NODES["eagle3"], "eagle3"):
            each = tree.mistake((TUNE, "eagle3"), each.what)
        elif template in rungs and field == PAUSE:
            each = tree.mistake((TUNE, "rungs"), each.what)
        elif template in rungs:
            each = each.at(".".join(filter(None, ("node", trials.tune.table.node, field))))
        elif copy is not None:
            each = each.at(".".join(filter(None, ("node", template, field))))
        found.setdefault(each, set()).update(concerned)
    return [evolve(each, what=each.what + of_trials(concerned, trials.count)) for each, concerned in found.items()]


def pace_of(store: Store, trials: Trials) -> Pace | None:
    """The pace of the trials that the store has trained, else of the training of the file; None if it knows none."""
    history = PreviousNodes(store, trials.graph.name)

    def measured(node_id: str) -> Pace | None:
        state = history.computed(node_id)
        if state is None or state.digest is None or state.seconds is None:
            return None
        figures = read_object_or_none(store.object_path(state.digest) / "measurements.json") or {}
        steps, step, measuring = (figures.get(name) or 0.0 for name in MEASURED)
        seconds = state.seconds if state.attempt_seconds is None else state.attempt_seconds
        return Pace(max(0.0, seconds - steps * step - measuring), step + measuring / steps) if steps else None

    known = [pace for node_id in trials.rung_nodes if (pace := measured(node_id)) is not None]
    if not known:
        return measured(trials.tune.table.node)
    return Pace(fmean(pace.start for pace in known), fmean(pace.step for pace in known))


def announcement(trials: Trials, pace: Pace | None) -> str:
    """How many trials there are, when they are compared, and what they cost at most."""
    rules, steps, trainings = trials.rules, trials.planned_steps, trials.planned_trainings
    time = "how long they take is known once one is trained"
    if pace is not None:
        time = (
            f"{shown_duration(pace.seconds(trials))} of all trainings together, by earlier ones: {pace.step:.3g} s a "
            f"step with measuring, and {pace.start:.3g} s to start and end each"
        )
    goes_on = "all go on" if rules.eta == 1 else f"one in {rules.eta} goes on"
    return (
        f"{rules.trials} trials, compared at steps {', '.join(map(str, rules.rungs))}; {goes_on}: at most {steps:,} "
        f"training steps in {trainings} trainings; {time}"
    )
