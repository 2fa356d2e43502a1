"""The table `[tune]`: trials of a training with other values, of which the worse ones stop early (`dflow tune`).

    [tune]
    rungs = [100, 200, 400]             # the steps after which trials are compared by tau on val
    trials = 8                          # default: every combination of the lists

    [tune.space]
    train.lr = [3e-4, 6e-4, 1e-3]       # one of these
    train.weight_decay = { low = 1e-4, high = 0.1, log = true }    # or from a range
    recipe = [                          # a name that is no node: values that go together
        { train.algorithm = "dflash" },
        { train.algorithm = "dspark", train.dspark.rank = 32 },
    ]

A trial is a variant of a group of for_each (for_each.py): what it changes and all below is copied, the rest is shared.
Its training is a chain of nodes, one for each rung, that go on from each other: train_100, train_200, ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import attrs
from attrs import frozen, validators

from dsl.check import unknown_key
from dsl.convert import checked, member_type, type_mistake
from dsl.errors import known_nodes, shortened
from dsl.for_each import FOR_EACH, SORT, SWEEP
from dsl.launch import LAUNCH
from dsl.shown import shown_value, toml_text
from dsl.toml import KeyPath
from dsl.tree import Tree, merged

TUNE, SPACE, TRIAL = "tune", "space", "trial"
PAUSE, CONTINUES = "pause_after", "continues"  # of the op that is tuned
LOW, HIGH, LOG = "low", "high", "log"
DIGITS = 4  # significant ones of a value from a range
Path = tuple[str, ...]  # of a value: node, field, and key of a table


def _are_rungs(_table: object, _field: object, rungs: tuple[int, ...]) -> None:
    if not rungs or rungs[0] < 1 or any(later <= earlier for earlier, later in pairwise(rungs)):
        raise ValueError(f"expected numbers of steps that ascend from 1 or more, got {toml_text(list(rungs))}")


@frozen(kw_only=True)
class TuneTable:
    """The table `[tune]`. node: the training that is tuned.

    rungs: steps, ascending, after which trials are compared. trials: how many points of the space are tried at most
    (default: every combination of its lists). eta: of the trials of a rung, one in eta goes on; 1: all. seed: of the
    drawn points. budget_steps: of all trials together. budget_hours: of all trainings together, however many run at a
    time. eagle3: the folder of an EAGLE-3 draft that the winner is compared with. space: by name, the values to try.
    """

    rungs: tuple[int, ...] = attrs.field(validator=_are_rungs)
    space: dict[str, Any]
    node: str = "train"
    trials: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    eta: int = attrs.field(default=2, validator=validators.ge(1))
    seed: int = 0
    budget_steps: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    budget_hours: float | None = attrs.field(default=None, validator=validators.optional(validators.gt(0)))
    eagle3: str | None = None


@frozen
class Option:
    """A value, or several that go together. shown: as TOML writes it. changes: by path, the value of a node's field."""

    shown: str
    changes: Mapping[Path, Any]


@frozen
class Choice:
    """A list of the space. place: where it is written."""

    name: str
    place: KeyPath
    options: tuple[Option, ...]

    def draw(self, random: Random) -> Option:
        return self.options[random.randrange(len(self.options))]


@frozen
class Range:
    """A range of the space for the field at `path`: evenly drawn, or its logarithm with `log`. Whole numbers if both
    ends are such.
    """

    name: str
    place: KeyPath
    path: Path
    low: float
    high: float
    log: bool

    def draw(self, random: Random) -> Option:
        if self.log:
            value = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = random.uniform(self.low, self.high)
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        drawn = round(value) if is_whole else float(f"{value:.{DIGITS}g}")
        kept = min(max(drawn, self.low), self.high)
        return Option(toml_text(kept), {self.path: kept})


Axis = Choice | Range
Point = Mapping[str, Option]  # by the axis' name


@frozen
class Tune:
    """A checked table `[tune]`, and the axes of its space."""

    table: TuneTable
    axes: tuple[Axis, ...]

    @property
    def size(self) -> int | None:
        """The number of points in the space; None with a range."""
        sizes = [len(axis.options) for axis in self.axes if isinstance(axis, Choice)]
        return math.prod(sizes) if len(sizes) == len(self.axes) else None

    def rung_node(self, steps: int) -> str:
        """The id of the node that trains to a rung."""
        return f"{self.table.node}_{steps}"


def trial_name(trial: int) -> str:
    return f"t{trial + 1:02d}"


def check_tune(tree: Tree) -> Tune | None:
    """Check the table `[tune]` of a tree whose nodes are not copied yet; None, with all its mistakes reported, where
    it is wrong.
    """
    before = len(tree.mistakes)
    given = tree.table(TUNE)
    found = checked(TuneTable, given, owner=TUNE)
    for mistake in found.mistakes:
        tree.report((TUNE, *([mistake.path] if mistake.path else [])), mistake.what, mistake.advice)
    table: TuneTable | None = found.made
    _check_node(tree, found.values.get("node", "train"))
    space = given.get(SPACE)
    axes = tuple(_axes(tree, found.values.get("node", "train"), space)) if isinstance(space, dict) else ()
    for name in (FOR_EACH, SWEEP):
        if set(tree.table(name)) - ({SORT} if name == SWEEP else set()):
            tree.report(
                (name,), "a pipeline with [tune] has no other copies: leave it out, or put it into [tune.space]"
            )
    if len(tree.mistakes) > before or table is None:
        return None
    tune = Tune(table, axes)
    if table.trials is None and tune.size is None:
        tree.report((TUNE,), 'the required key "trials" is missing: a range has no end of points', "trials = 8")
    return tune if len(tree.mistakes) == before else None


def put_trials(tree: Tree, tune: Tune, points: Sequence[Point]) -> None:
    """Replace the table `[tune]` by the nodes of all rungs, and by a variant of them for each point.

    A rung whose node has the id of another one is reported.
    """
    node, rungs = tune.table.node, tune.table.rungs
    chain = [tune.rung_node(steps) for steps in rungs]
    taken = [each for each in chain if each in tree.nodes]
    for each in taken:
        tree.report((TUNE, "rungs"), f'"{each}" is a node of the file: rename it, or take other steps')
    tree.values.pop(TUNE, None)
    if taken:
        return
    tree.values["node"] = with_chain(tree.nodes, tune, rungs)
    for each in chain:
        tree.origins["node", each] = (("node", node), None)
    places = {axis.name: axis.place for axis in tune.axes}
    variants: dict[str, Any] = {}
    for trial, point in enumerate(points):
        name = trial_name(trial)
        variants[name] = {}
        for axis, option in point.items():
            for path, value in option.changes.items():
                for owner in (node, *chain) if path[0] == node else path[:1]:
                    variants[name] = merged(variants[name], _nested((owner, *path[1:]), value))
                    tree.origins[FOR_EACH, TRIAL, name, owner, *path[1:]] = (places[axis], None)
    tree.values[FOR_EACH] = {TRIAL: variants}


def with_chain(nodes: Mapping[str, Any], tune: Tune, rungs: Sequence[int]) -> dict[str, Any]:
    """The nodes, with the chain of nodes that train to each of these rungs before the node that is tuned, which goes
    on from the last of them.
    """
    node = tune.table.node
    earlier: dict[str, Any] = {}
    chain: dict[str, Any] = {}
    for steps in rungs:
        chain[tune.rung_node(steps)] = {**nodes[node], **earlier, PAUSE: steps}
        earlier = {CONTINUES: f"@{tune.rung_node(steps)}"}
    found: dict[str, Any] = {}
    for node_id, table in nodes.items():
        found |= {**chain, node: {**table, **earlier}} if node_id == node else {node_id: table}
    return found


def _nested(path: Path, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _check_node(tree: Tree, node: str) -> None:
    """Report a node that is not there, or whose op cannot pause."""
    if node not in tree.nodes:
        tree.report((TUNE, "node"), f'there is no node "{shortened(node)}"', known_nodes(node, tree.nodes))
        return
    op = tree.op(node)
    if op is not None and (PAUSE not in op.fields or CONTINUES not in op.edges):
        tree.report((TUNE, "node"), f'"{node}" is a node of {op.name}, which cannot pause', "name one of train_dflash")
    elif PAUSE in tree.table("node", node):
        tree.report(("node", node, PAUSE), "[tune] sets the pauses of this node: leave it out")


def _axes(tree: Tree, node: str, space: Mapping[str, Any]) -> Iterator[Axis]:
    """The axes of a space, without those that have mistakes, which are reported."""

    def below(path: Path, value: Any) -> Iterator[Axis]:
        place = (TUNE, SPACE, *path)
        if isinstance(value, dict) and not (len(path) > 1 and {LOW, HIGH} & value.keys()):
            if not value:
                tree.report(place, "expected node.field = [value, value]")
            for key, each in value.items():
                yield from below((*path, key), each)
        elif isinstance(value, dict):
            yield from _range(tree, node, place, path, value)
        elif not isinstance(value, (list, tuple)) or not value:
            hint = f"{'.'.join(path)} = [value, value], or {{ low = 1e-4, high = 1e-2, log = true }}"
            tree.report(place, f"expected a list of values, or a range, got {shown_value(value)}", hint)
        else:
            yield from _choice(tree, node, place, path, value)

    yield from below((), space)


def _choice(tree: Tree, node: str, place: KeyPath, path: Path, values: Sequence[Any]) -> Iterator[Choice]:
    before = len(tree.mistakes)
    shown = list(map(toml_text, values))
    if len(set(shown)) < len(shown):
        tree.report(place, "a value is given twice")
    if len(path) > 1:
        expected = _expected(tree, node, place, path)
        options = [Option(text, {path: value}) for text, value in zip(shown, values, strict=True)]
        for value in values if expected is not None else ():
            _check_value(tree, place, path, expected, value)
    elif path[0] in tree.nodes or not all(isinstance(value, dict) and value for value in values):
        hint = "node.field = [value, value], or NAME = [{ node.field = value }, ...] with a name that is no node"
        tree.report(place, "expected values of a field, or tables of values that go together", hint)
        options = []
    else:
        options = [Option(text, dict(_leaves(value))) for text, value in zip(shown, values, strict=True)]
        for option in options:
            for each, value in option.changes.items():
                if (expected := _expected(tree, node, place, each)) is not None:
                    _check_value(tree, place, each, expected, value)
    if len(tree.mistakes) == before:
        yield Choice(".".join(path), place, tuple(options))


def _range(tree: Tree, node: str, place: KeyPath, path: Path, value: Mapping[str, Any]) -> Iterator[Range]:
    low: Any = value.get(LOW)
    high: Any = value.get(HIGH)
    log = value.get(LOG, False)
    expected = _expected(tree, node, place, path)
    unknown = sorted(value.keys() - {LOW, HIGH, LOG})
    if unknown or not isinstance(log, bool) or not _is_number(low) or not _is_number(high):
        message = f"expected a range with two numbers, got {shown_value(value)}"
        tree.report(place, message, "{ low = 1e-4, high = 1e-2 }, with log = true for even draws of the logarithm")
    elif low >= high or (log and low <= 0):
        tree.report(place, f"low must be less than high{', and above 0 with log' if log else ''}: {low}, {high}")
    elif expected is not None:
        before = len(tree.mistakes)
        for end in (low, high):
            _check_value(tree, place, path, expected, end)
        if len(tree.mistakes) == before:
            yield Range(".".join(path), place, path, low, high, log)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_value(tree: Tree, place: KeyPath, path: Path, expected: Any, value: Any) -> None:
    if mistake := type_mistake(expected, value):
        _report(tree, place, path, mistake)


def _report(tree: Tree, place: KeyPath, path: Path, message: str, hint: str = "") -> None:
    """Report a mistake of the field at a path, which is named where its place is not that of the field alone."""
    tree.report(place, message if place[2:] == path else f"{'.'.join(path)}: {message}", hint)


def _expected(tree: Tree, tuned: str, place: KeyPath, path: Path) -> Any:
    """The type of the field at a path; None, with its mistake reported, for what cannot be tuned."""
    node, *names = path
    report = partial(_report, tree, place, path)
    if node not in tree.nodes:
        return report(f'there is no node "{shortened(node)}"', known_nodes(node, tree.nodes))
    op = tree.op(node)
    if op is None:
        return None  # a mistake of the node
    if not names or names[0] in op.edges or names[0] in (LAUNCH, "op"):
        return report("only fields of the op can be tuned, not its inputs or its launch")
    if node == tuned and names[0] == PAUSE:
        return report("[tune] sets it itself: leave it out")
    field = tree.field(("node", *path))
    if field is None and len(names) > 1 and (table := tree.field(("node", *path[:2]))) and table.table is None:
        return member_type(table.type, dict)  # a key of a field that is a table
    if field is None:
        return report("unknown key", unknown_key(tree, node, ".".join(names), True).text)
    if field.neutral:
        return report("it changes no result, so all its trials would be the same")
    return field.type


def _leaves(table: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
