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

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import attrs
from attrs import frozen, validators

from dsl.check import unknown_key
from dsl.convert import bound_mistake, checked, member_type, structure, type_mistake, unstructure
from dsl.errors import known_nodes, shortened
from dsl.for_each import FOR_EACH, SORT, SWEEP, leaves, nested
from dsl.launch import LAUNCH
from dsl.op import ConfigField
from dsl.shown import shown_value, toml_text
from dsl.toml import KeyPath
from dsl.tree import Tree, merged

TUNE, SPACE, TRIAL = "tune", "space", "trial"
PAUSE, CONTINUES = "pause_after", "continues"  # of the op that is tuned
LOW, HIGH, LOG = "low", "high", "log"
A_RANGE = "{ low = 1e-4, high = 1e-2 }, with log = true for even draws of the logarithm"
DIGITS = 4  # significant ones of a value from a range
Path = tuple[str, ...]  # of a value: node, field, and key of a table


def _are_rungs(_table: object, _field: object, rungs: tuple[int, ...]) -> None:
    if not rungs or rungs[0] < 1 or any(later <= earlier for earlier, later in itertools.pairwise(rungs)):
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

    @property
    def paths(self) -> Collection[Path]:
        """Those of all fields that an option changes."""
        return dict.fromkeys(path for option in self.options for path in option.changes)

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

    @property
    def paths(self) -> Collection[Path]:
        return (self.path,)

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
    """Check the table `[tune]` of a tree whose nodes are not copied yet, and report all its mistakes; None where it
    is no table, which compile.py reports.

    What is wrong is replaced, in the space by NOTHING, so that the trials show what else is wrong.
    """
    given = tree.values[TUNE]
    if not isinstance(given, dict):
        return None
    found = checked(TuneTable, given, owner=TUNE)
    for mistake in found.mistakes:
        tree.report((TUNE, *([mistake.path] if mistake.path else [])), mistake.what, mistake.advice)
    table: TuneTable = found.made or TuneTable(**{"rungs": (1,), SPACE: {}, **found.values})
    _check_node(tree, table.node)
    tune = Tune(table, tuple(_axes(tree, table.node, table.space)) if SPACE in found.values else ())
    _report_shared(tree, tune.axes)
    if table.trials is None and tune.size is None:
        if "trials" not in given:
            tree.report((TUNE,), 'the required key "trials" is missing: a range has no end of points', "trials = 8")
        tune = attrs.evolve(tune, table=attrs.evolve(table, trials=1))
    for name in (FOR_EACH, SWEEP):
        if set(tree.table(name)) - ({SORT} if name == SWEEP else set()):
            tree.report(
                (name,), "a pipeline with [tune] has no other copies: leave it out, or put it into [tune.space]"
            )
    return tune


def put_trials(tree: Tree, tune: Tune, points: Sequence[Point]) -> None:
    """Replace the table `[tune]` by the nodes of all rungs, and by a variant of them for each point.

    A rung whose node has the id of another one is reported. Without a node to tune, there are no trials.
    """
    node, rungs = tune.table.node, tune.table.rungs
    chain = [tune.rung_node(steps) for steps in rungs]
    taken = [each for each in chain if each in tree.nodes]
    for each in taken:
        tree.report((TUNE, "rungs"), f'"{each}" is a node of the file: rename it, or take other steps')
    for name in (TUNE, FOR_EACH, SWEEP):
        tree.values.pop(name, None)
    if taken or not can_pause(tree, node):
        return
    tree.values["node"] = with_chain(tree.nodes, tune, rungs)
    for each in chain:
        tree.origins["node", each] = (("node", node), None)
    places = {axis.name: axis.place for axis in tune.axes}
    variants: dict[str, Any] = {}
    for trial, point in enumerate(points):
        name, changes = trial_name(trial), changed_nodes(point)
        variants[name] = changes | (dict.fromkeys(chain, changes[node]) if node in changes else {})
        for axis, path in [(axis, path) for axis, option in point.items() for path in option.changes]:
            for owner in (node, *chain) if path[0] == node else path[:1]:
                for end in range(2, len(path) + 1):  # a field's table may be the trial's, too
                    tree.origins[FOR_EACH, TRIAL, name, owner, *path[1:end]] = (places[axis], None)
    if any(variants.values()):
        tree.values[FOR_EACH] = {TRIAL: variants}


def changed_nodes(point: Point) -> dict[str, Any]:
    """The values of a point as a partial table of each node."""
    found: dict[str, Any] = {}
    for option in point.values():
        for path, value in option.changes.items():
            found = merged(found, nested(path, value))
    return found


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


def can_pause(tree: Tree, node: str) -> bool:
    """Whether a node is one whose op can pause and go on."""
    op = tree.op(node)
    return op is not None and PAUSE in op.fields and CONTINUES in op.edges


def _check_node(tree: Tree, node: str) -> None:
    """Report a node that is not there, or whose op cannot pause."""
    if node not in tree.nodes:
        tree.report((TUNE, "node"), f'there is no node "{shortened(node)}"', known_nodes(node, tree.nodes))
        return
    op = tree.op(node)
    if op is not None and not can_pause(tree, node):
        tree.report((TUNE, "node"), f'"{node}" is a node of {op.name}, which cannot pause', "name one of train_dflash")
    elif PAUSE in tree.table("node", node):
        tree.report(("node", node, PAUSE), "[tune] sets the pauses of this node: leave it out")


def _axes(tree: Tree, node: str, space: Mapping[str, Any]) -> Iterator[Axis]:
    """The axes of a space, without those that cannot be tuned, which are reported."""

    def below(path: Path, value: Any) -> Iterator[Axis]:
        place = (TUNE, SPACE, *path)
        if isinstance(value, dict) and (len(path) < 2 or _takes_table(tree, path)):
            if not value:
                tree.report(place, "expected node.field = [value, value]")
            for key, each in value.items():
                yield from below((*path, key), each)
        elif isinstance(value, dict):
            yield from _range(tree, node, place, path, value)
        elif not isinstance(value, (list, tuple)) or not value:
            hint = f"{'.'.join(path)} = [value, value], or {A_RANGE}"
            tree.report(place, f"expected a list of values, or a range, got {shown_value(value)}", hint)
        else:
            yield from _choice(tree, node, place, path, value)

    yield from below((), space)


def _takes_table(tree: Tree, path: Path) -> bool:
    """Whether the field of a node at a path has keys of its own."""
    field = tree.field(("node", *path))
    return field is not None and (field.table is not None or type_mistake(field.type, {}) is None)


def _choice(tree: Tree, node: str, place: KeyPath, path: Path, values: Sequence[Any]) -> Iterator[Choice]:
    if len(path) > 1:
        tables = [{path: value} for value in values]
    elif path[0] in tree.nodes or not all(isinstance(value, dict) and value for value in values):
        hint = "node.field = [value, value], or NAME = [{ node.field = value }, ...] with a name that is no node"
        tree.report(place, "expected values of a field, or tables of values that go together", hint)
        return
    else:
        tables = [dict(leaves(value)) for value in values]
    found = {each: _tunable(tree, node, place, each) for each in dict.fromkeys(itertools.chain(*tables))}
    fields = {each: field for each, field in found.items() if field is not None}
    options, alike = [], dict[str, list[str]]()
    for value, table in zip(values, tables, strict=True):
        changes = {each: _valid(tree, place, each, fields[each], table[each]) for each in fields if each in table}
        options.append(Option(toml_text(value), changes))
        if len(changes) == len(table) and attrs.NOTHING not in changes.values():
            meant = {each: unstructure(structure(fields[each].type, made)) for each, made in changes.items()}
            alike.setdefault(repr(meant), []).append(options[-1].shown)
    for texts in alike.values():
        if len(texts) > 1:
            one, *others = dict.fromkeys(texts)
            tree.report(place, f"{' and '.join([one, *others])} are the same" if others else f"{one} is given twice")
    if fields:
        yield Choice(".".join(path), place, tuple(options))


def _valid(tree: Tree, place: KeyPath, path: Path, field: ConfigField, value: Any) -> Any:
    """The value, or NOTHING for a wrong one, which is reported."""
    mistake = type_mistake(field.type, value) or bound_mistake(field.validator, field, value)
    if mistake:
        _report(tree, place, path, mistake)
    return attrs.NOTHING if mistake else value


def _range(tree: Tree, node: str, place: KeyPath, path: Path, value: Mapping[str, Any]) -> Iterator[Range]:
    field = _tunable(tree, node, place, path)
    if field is None:
        return
    low: Any = value.get(LOW)
    high: Any = value.get(HIGH)
    log = value.get(LOG, False)
    if value.keys() - {LOW, HIGH, LOG} or not isinstance(log, bool) or not _is_number(low) or not _is_number(high):
        tree.report(place, f"expected a range with two numbers, got {shown_value(value)}", A_RANGE)
    elif low >= high or (log and low <= 0):
        tree.report(place, f"low must be less than high{', and above 0 with log' if log else ''}: {low}, {high}")
    elif attrs.NOTHING not in [_valid(tree, place, path, field, end) for end in (low, high)]:
        yield Range(".".join(path), place, path, low, high, log)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _report_shared(tree: Tree, axes: Sequence[Axis]) -> None:
    """Report fields that two axes set, of which one would win."""
    for first, other in itertools.combinations(axes, 2):
        for one, two in itertools.product(first.paths, other.paths):
            if one[: len(two)] == two[: len(one)]:
                _report(tree, other.place, two, f"{TUNE}.{SPACE}.{first.name} sets it too: give its values once")


def _report(tree: Tree, place: KeyPath, path: Path, message: str, hint: str = "") -> None:
    """Report a mistake of the field at a path, which is named where its place is not that of the field alone."""
    tree.report(place, message if place[2:] == path else f"{'.'.join(path)}: {message}", hint)


def _tunable(tree: Tree, tuned: str, place: KeyPath, path: Path) -> ConfigField | None:
    """The field at a path; None, with its mistake reported, for what cannot be tuned."""
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
        return attrs.evolve(table, type=member_type(table.type, dict), validator=None)  # a key of it
    if field is None:
        return report("unknown key", unknown_key(tree, node, ".".join(names), True).text)
    if field.neutral:
        return report("it changes no result, so all its trials would be the same")
    return field
