"""What a key is made of, and which nodes run and why. No store on disk, no processes."""

import importlib.metadata
import json
from pathlib import Path

import attrs
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from dsl.compile import compile_pipeline
from dsl.errors import StoreError
from dsl.op import Artifact, Ref, field, op
from dsl.op_class import HOOK_FILES, METHODS
from dsl.pipeline import Pipeline
from executor.commands.plan import print_plan
from executor.keys.differences import differences, reasons, with_paths
from executor.keys.node_key import KeyParts, Sources, graph_parts, node_inputs
from executor.planning.planner import Decision, Planner, Previous
from executor.store.manifest import IndexLine


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=3, run="test_keys_and_plan:make", key_libraries=("attrs",))
@frozen(kw_only=True)
class Source:
    """Reads a file."""

    file: str = field(default="builtin", external=True)
    lr: float = field(default=0.5)
    batch: int = field(default=1, neutral=True)
    output = Text


@op(version=1, run="test_keys_and_plan:make")
@frozen(kw_only=True)
class Merge:
    """Merges texts."""

    texts: tuple[Text, ...]
    extra: Text | None = None
    lr: float = field(default=1.0)
    output = Text


@op(version=1, run="test_keys_and_plan:make", key_libraries=("attrs",))
@frozen(kw_only=True)
class Parse:
    """Another library does it where it is chosen."""

    parser: str | None = field(default=None)
    output = Text

    def chosen_libraries(self):
        return (self.parser,) if self.parser else ()


@op(version=1, run="test_keys_and_plan:make")
@frozen(kw_only=True)
class NamedLikeMethods:
    """An op whose fields have the names of all methods of an op that are no hooks."""

    external_files: tuple[str, ...] = field(default=("photo.png",))
    chosen_libraries: str = field(default="attrs")
    chosen_code: str = field(default="test_keys_and_plan:make")
    launch_mistakes: int = field(default=0)
    mistakes_with_nodes_above: int = field(default=0)
    output = Text


def make(config, stage):
    """Never called here."""


def diamond(**config):
    p = Pipeline("diamond", root=Path("/"))
    a = p.node("a", Source(**config))
    b = p.node("b", Merge(texts=(a,)))
    c = p.node("c", Merge(texts=(a,), extra=b))
    p.node("d", Merge(texts=(b, c)))
    return attrs.evolve(compile_pipeline(p), op_files=(Path(__file__),))


def test_fields_that_are_named_like_methods_are_config_and_nothing_more():
    p = Pipeline("p", root=Path("/"))
    p.node("a", NamedLikeMethods())
    graph = attrs.evolve(compile_pipeline(p), op_files=(Path(__file__),))
    parts = graph_parts(graph, Sources.now(None))["a"]
    assert {*METHODS} - {*HOOK_FILES} == {*parts.config}
    assert ("photo.png",) == tuple(parts.config["external_files"])
    assert ({}, {}) == (parts.external, parts.libraries)


@frozen
class FakeStore:
    index: dict
    objects: set

    def newest(self, key):
        return IndexLine(self.index[key], "run", 0.0) if key in self.index else None

    def has(self, digest):
        return digest in self.objects


def parts_of(graph, code=None):
    config = {node.id: {"lr": node.config.lr} for node in graph.nodes.values()}
    return {
        node.id: KeyParts(node.op.name, node.op.version, code or {"m:f": "1"}, config[node.id], {}, {})
        for node in graph.nodes.values()
    }


def ran_before(graph, code=None):
    """A store and the previous records after a run in which node x gave the digest "x0"."""
    parts = parts_of(graph, code)
    digests = {node: f"{node}0" for node in graph.nodes}
    index = {
        parts[node.id].key(node_inputs(node, digests.__getitem__)): digests[node.id] for node in graph.nodes.values()
    }
    previous = {
        node.id: Previous(parts[node.id], {parent: digests[parent] for parent in node.parents}, digests[node.id])
        for node in graph.nodes.values()
    }
    return FakeStore(index, set(digests.values())), FakePrevious(previous)


class FakePrevious(dict):
    def nearest(self, node_id, differences):
        return self.get(node_id)


def plan(graph, store, previous, code=None, **more):
    return Planner(graph=graph, parts=parts_of(graph, code), store=store, previous=previous, **more).plan()


def seen(decisions):
    return {node: (decision.cache, decision.reason) for node, decision in decisions.items()}


def test_the_key_is_this_one():
    parts = KeyParts(
        op="merge",
        version=1,
        code={"ops.merge.run:merge": "c0"},
        config={"lr": 1.0, "sizes": (1, 2), "name": None},
        external={"file": "e0"},
        libraries={"torch": "2.13.0"},
    )
    inputs = {"texts": ["d1", "d2"], "extra": None}
    assert parts.key(inputs) == "1eb5cc7a0199897d7dccf0d458673a3f84305021122542ac391945447b89e379"
    assert parts.key_without_code(inputs) == "793909ff6c1939fa689e9bd92633d1b1c86d97b77df1acceda234359bdd715fc"


@pytest.mark.parametrize(
    "change",
    [
        {"op": "other"},
        {"version": 2},
        {"code": {"m:f": "c1"}},
        {"config": {"lr": 1}},
        {"external": {"file": "e1"}},
        {"libraries": {"torch": "3"}},
    ],
)
def test_every_part_enters_the_key(change):
    parts = KeyParts("merge", 1, {"m:f": "c0"}, {"lr": 1.0}, {"file": "e0"}, {"torch": "2"})
    inputs = {"texts": ["d1"]}
    assert attrs.evolve(parts, **change).key(inputs) != parts.key(inputs)
    assert (attrs.evolve(parts, **change).key_without_code(inputs) == parts.key_without_code(inputs)) is (
        "code" in change
    )


def test_inputs_enter_the_key_in_their_order():
    parts = KeyParts("merge", 1, {}, {}, {}, {})
    assert len({parts.key({"t": value}) for value in ("d1", ["d1"], ["d1", "d2"], ["d2", "d1"], None)}) == 5


def test_the_version_of_a_chosen_library_is_in_the_key_of_those_who_choose_it():
    p = Pipeline("p", root=Path("/"))
    p.node("a", Parse())
    p.node("b", Parse(parser="pytest"))
    graph = attrs.evolve(compile_pipeline(p), op_files=(Path(__file__),))
    parts = graph_parts(graph, Sources.now(None))
    assert ["attrs"] == list(parts["a"].libraries)
    assert {"attrs", "pytest"} == set(parts["b"].libraries)
    assert importlib.metadata.version("pytest") == parts["b"].libraries["pytest"]


def test_neutral_fields_stay_out_and_content_stands_for_a_path(tmp_path):
    (tmp_path / "a").write_text("hello")
    (tmp_path / "b").write_text("hello")
    sources = Sources.now(None)
    a = graph_parts(diamond(file=str(tmp_path / "a")), sources)["a"]
    assert dict(a.config) == {"lr": 0.5}
    assert list(a.external) == ["file"]
    assert dict(a.libraries) == {"attrs": importlib.metadata.version("attrs")}
    assert list(a.code) == ["test_keys_and_plan.py"]
    assert graph_parts(diamond(file=str(tmp_path / "b"), batch=9), sources)["a"] == a
    (tmp_path / "b").write_text("other")
    assert graph_parts(diamond(file=str(tmp_path / "b")), sources)["a"] != a


def test_changes_name_what_differs():
    old = KeyParts(
        "m", 1, {"f.py": "1", "g.py": "1"}, {"lr": 0.5, "ids": (1,), "old": 1}, {"file": "1"}, {"torch": "2"}
    )
    new = KeyParts("m", 2, {"f.py": "2", "h.py": "1"}, {"lr": 1, "ids": (1,), "new": 2}, {"file": "2"}, {"torch": "3"})
    assert reasons("a", differences(old, new)) == [
        "op changed: version from 1 to 2",
        "config changed: a.lr from 0.5 to 1, a.new set to 2, a.old no longer there, was 1",
        "content changed: a.file",
        "code changed: f.py",  # another value may have chosen h.py in place of g.py
        'library changed: torch from "2" to "3"',
    ]
    assert differences(old, KeyParts(**old.to_json())) == []
    newer = attrs.evolve(old, version=2, code=new.code)
    code = "code changed: f.py, g.py (no longer imported), h.py (imported now)"
    assert reasons("a", differences(old, newer)) == ["op changed: version from 1 to 2", code]


def test_a_field_that_names_a_file_instead_of_a_value_is_told_with_both():
    value = KeyParts("m", 1, {}, {"template": None, "lr": 1}, {}, {})
    file = KeyParts("m", 1, {}, {"lr": 1}, {"template": "ab" * 32}, {})
    named = with_paths(differences(value, file), {"template": "/data/my.jinja", "lr": 1})
    assert reasons("a", named) == ["config changed: a.template from null to file my.jinja"]
    back = with_paths(differences(file, value), {"template": None}, {"template": "/data/my.jinja"})
    assert reasons("a", back) == ["config changed: a.template from file my.jinja to null"]
    assert reasons("a", differences(file, value)) == ["config changed: a.template from file abababababab to null"]
    assert json.loads(json.dumps([each.to_json() for each in named])) == [
        {"kind": "config", "name": "template", "old": None, "new": {"digest": "ab" * 32, "path": "/data/my.jinja"}}
    ]
    assert reasons("a", differences(file, KeyParts("m", 1, {}, {"lr": 1}, {"template": "cd" * 32}, {}))) == [
        "content changed: a.template"
    ]


def test_a_plan_has_a_column_of_digests_where_the_store_has_an_artifact(capsys):
    graph, reasons = diamond(), dict.fromkeys("abcd", "new")
    none = {node_id: Decision("miss", reason) for node_id, reason in reasons.items()}
    print_plan(graph, none, "")
    assert ["node", "op", "plan", "why"] == capsys.readouterr().out.splitlines()[0].split()
    print_plan(graph, none | {"a": Decision("hit", "", digest="abc123")}, "")
    head, first, second, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (["node", "op", "plan", "digest", "why"], ["abc123"], ["-", "new"]) == (head, first[3:], second[3:])


def test_in_an_empty_store_everything_is_new_and_has_no_key_yet_below_the_first():
    decisions = plan(diamond(), FakeStore({}, set()), FakePrevious())
    assert seen(decisions) == dict.fromkeys("abcd", ("miss", "new"))
    assert [node for node, decision in decisions.items() if decision.key is not None] == ["a"]


def test_what_the_store_holds_is_taken():
    store, previous = ran_before(diamond())
    decisions = plan(diamond(), store, previous)
    assert [(decision.cache, decision.digest) for decision in decisions.values()] == [
        ("hit", "a0"), ("hit", "b0"), ("hit", "c0"), ("hit", "d0")
    ]  # fmt: skip


def test_below_a_changed_node_the_rest_may_be_cut_off():
    store, previous = ran_before(diamond())
    assert seen(plan(diamond(lr=0.25), store, previous)) == {
        "a": ("miss", "config changed: a.lr from 0.5 to 0.25"),
        "b": ("maybe", "input may change: a"),
        "c": ("maybe", "input may change: a, b"),
        "d": ("maybe", "input may change: b, c"),
    }


def test_a_node_whose_own_parts_changed_surely_runs():
    store, previous = ran_before(diamond())
    assert seen(plan(diamond(lr=0.25), store, previous, code={"m:f": "2"})) == {
        "a": ("miss", "config changed: a.lr from 0.5 to 0.25; code changed: m:f"),
        "b": ("miss", "code changed: m:f"),
        "c": ("miss", "code changed: m:f"),
        "d": ("miss", "code changed: m:f"),
    }


def test_a_changed_input_is_named_once_it_is_known():
    store, previous = ran_before(diamond())
    planner = Planner(graph=diamond(), parts=parts_of(diamond()), store=store, previous=previous)
    assert planner.decide("c", {"a": "a0", "b": "b1"}).reason == "input changed: b"
    assert planner.decide("c", {"a": "a0", "b": "b0"}).digest == "c0"


def test_a_lost_artifact_is_made_again_and_what_is_below_may_be_cut_off():
    store, previous = ran_before(diamond())
    store.objects.remove("b0")
    assert seen(plan(diamond(), store, previous)) == {
        "a": ("hit", ""),
        "b": ("miss", "artifact gone: b0 is missing or damaged in the store"),
        "c": ("maybe", "input may change: b"),
        "d": ("maybe", "input may change: b, c"),
    }


def test_a_node_that_never_finished_says_so():
    _, previous = ran_before(diamond())
    assert plan(diamond(), FakeStore({}, set()), previous)["a"].reason == "not finished before"


def test_of_a_forced_node_only_what_this_run_made_itself_is_a_hit():
    store, previous = ran_before(diamond())  # run "run" made all
    other = plan(diamond(), store, previous, forced=frozenset({"d"}), run="another")
    own = plan(diamond(), store, previous, forced=frozenset({"d"}), run="run")
    assert (("miss", "forced"), ("hit", "")) == (seen(other)["d"], seen(own)["d"])


def test_pinned_nodes_are_taken_as_they_are_and_forced_ones_run():
    store, previous = ran_before(diamond())
    decisions = plan(
        diamond(), store, previous, code={"m:f": "2"}, pinned={"a": "a0", "b": "b0"}, forced=frozenset({"c", "d"})
    )
    assert decisions["b"] == Decision("hit", "", None, "b0")
    assert seen(decisions) == {"a": ("hit", ""), "b": ("hit", ""), "c": ("miss", "forced"), "d": ("miss", "forced")}


@given(
    edges=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=8),
    changed=st.sets(st.integers(0, 7)),
)
def test_exactly_what_changed_runs_and_only_what_is_below_may_run(edges, changed):
    ids = [f"n{place}" for place in range(len(edges))]
    p = Pipeline("random", root=Path("/"))
    above = {}
    for place, producers in enumerate(edges):
        parents = sorted({ids[producer] for producer in producers if producer < place})
        lr = float(place)  # no two nodes have the same key
        p.node(ids[place], Merge(texts=tuple(map(Ref, parents)), lr=lr) if parents else Source(lr=lr))
        above[ids[place]] = {ancestor for parent in parents for ancestor in {parent, *above[parent]}}
    graph = compile_pipeline(p)
    store, previous = ran_before(graph)
    parts = parts_of(graph)
    anew = {ids[place] for place in changed if place < len(ids)}
    for node in anew:
        parts[node] = attrs.evolve(parts[node], code={"m:f": "2"})
    decisions = Planner(graph=graph, parts=parts, store=store, previous=previous).plan()
    for node in ids:
        below = "maybe" if above[node] & anew else "hit"
        assert decisions[node].cache == ("miss" if node in anew else below)


def test_a_pinned_artifact_that_is_gone_is_an_error():
    store, previous = ran_before(diamond())
    store.objects.remove("b0")
    with pytest.raises(StoreError, match=r'the artifact of node "b" \(b0\) is missing or damaged in the store'):
        plan(diamond(), store, previous, pinned={"a": "a0", "b": "b0"}, forced=frozenset({"c", "d"}))
