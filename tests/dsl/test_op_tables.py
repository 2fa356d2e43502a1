"""Tables in the config of an op: read, checked, changed, referred to and written as its other values are."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli
from attrs import frozen
from jsonschema import Draft7Validator
from ops_with_tables import HEAD, read, train, written

import ops.aliases
from dsl.compile import compile_pipeline, override_graph
from dsl.convert import ChosenBy, Only
from dsl.errors import ConfigError, PipelineError
from dsl.graph import Graph, graph_from_json, graph_to_json
from dsl.op import field, op
from dsl.pipeline import Pipeline
from dsl.read_toml import read_graph
from dsl.schema import pipeline_schema
from dsl.secrets import resolved, secret_values
from ops.artifacts import Samples

LOW = 'kind = "low"\n[node.train.low]\nrank = 64\n'
READER = '[node.reads]\nop = "reads"\ntext = "@train"\nrank = "${train.low.rank}"\n'


def low(graph: Graph, node: str = "train") -> dict[str, Any]:
    found: dict[str, Any] = attrs.asdict(graph.nodes[node].config.low)
    return found


def mistakes(folder: Path, text: str, *overrides: str, sweeps: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        read(folder, text, *overrides, sweeps=sweeps)
    return str(caught.value).replace(f"{folder}/", "").split("\n")


def in_python(folder: Path, **values: Any) -> Graph:
    """The graph with the ops that are already there."""
    pipeline = Pipeline("p", root=folder, op_files=(folder / "ranked_ops.py",))
    pipeline.node("train", train(folder).config_class(**values))
    return compile_pipeline(pipeline)


def test_a_table_in_a_file_is_an_object_of_its_class_with_the_defaults_of_the_rest(tmp_path: Path) -> None:
    graph = read(tmp_path, LOW)
    config = graph.nodes["train"].config
    expected = {"rank": 64, "form": "square", "width": None, "label": None, "headers": {}, "chunk": 4}
    assert expected == low(graph)
    assert (128, None, 10) == (config.low.size, config.high, config.pace.steps)
    assert expected == low(read(tmp_path, 'kind = "low"\nlow = { rank = 64 }\n'))


def test_a_chosen_table_that_is_left_out_has_its_defaults(tmp_path: Path) -> None:
    assert 256 == low(read(tmp_path, 'kind = "low"\n'))["rank"]
    assert low(read(tmp_path, 'kind = "low"\n')) == low(read(tmp_path, 'kind = "low"\n[node.train.low]\n'))
    assert None is read(tmp_path, "").nodes["train"].config.low
    (missing,) = mistakes(tmp_path, 'kind = "high"\n')
    assert 'p.toml:2:7: node.train.high: the required key "level" is missing (float)' == missing


def test_python_takes_an_object_or_a_dict_and_checks_both(tmp_path: Path) -> None:
    expected = read(tmp_path, LOW).nodes["train"].config
    written(tmp_path, "")
    low_class = train(tmp_path).fields["low"].table
    assert low_class is not None
    for value in ({"rank": 64}, low_class(rank=64)):
        (config,) = [node.config for node in in_python(tmp_path, kind="low", low=value).nodes.values()]
        assert attrs.asdict(expected) == attrs.asdict(config)
    assert 256 == low(in_python(tmp_path, kind="low"))["rank"]
    for wrong in ({"form": "flat", "label": 3}, low_class(label=3, form="flat")):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            in_python(tmp_path, kind="low", low=wrong)
        assert [
            'train.low.form: expected one of "square", "round", got "flat"',
            "train.low.label: expected str or none, got 3 (int)",
        ] == str(caught.value).split("\n")
    with pytest.raises(ConfigError, match=r'^train.low.rnk: unknown key \(did you mean "rank"\?\)$'):
        in_python(tmp_path, kind="low", low={"rnk": 1})
    with pytest.raises(ConfigError, match=r'^train.low: \'low\' needs kind = "low"$'):
        in_python(tmp_path, low={"rank": 1})


def test_a_field_of_a_table_is_changed_on_the_command_line(tmp_path: Path) -> None:
    changed = read(tmp_path, LOW, "train.low.form=round", "train.low.width=9", "train.low.rank=none")
    assert {"rank": 256, "form": "round", "width": 9} == {
        name: low(changed)[name] for name in ("rank", "form", "width")
    }
    assert 128 == low(read(tmp_path, "", "train.low.rank=128", "train.kind=low"))["rank"]
    assert 3 == read(tmp_path, "", "train.pace.steps=3").nodes["train"].config.pace.steps
    whole = read(tmp_path, LOW, "train.low={form='round'}")
    assert ("round", 256) == (low(whole)["form"], low(whole)["rank"])
    assert 256 == low(read(tmp_path, LOW, "train.low=none"))["rank"]
    assert {"a": "b"} == low(read(tmp_path, LOW, "train.low.headers={a='b'}"))["headers"]
    assert [
        '-s train.low.rank=x: expected int, got "x"',
        '-s train.low.rnk=1: unknown key (did you mean "rank"?)',
        '-s train.low.form.a=1: train.low.form: expected one of "square", "round", got { a = 1 } (table)',
        "-s train.pace.steps=1.5: expected int, got 1.5 (float)",
    ] == mistakes(tmp_path, LOW, "train.low.rank=x", "train.low.rnk=1", "train.low.form.a=1", "train.pace.steps=1.5")
    assert ["-s train.low={rank=0}: train.low.rank: must be >= 1, got 0"] == mistakes(
        tmp_path, LOW, "train.low={rank=0}"
    )


def test_a_recorded_or_python_pipeline_can_choose_another_table(tmp_path: Path) -> None:
    for graph in (read(tmp_path, 'kind = "low"\n'), in_python(tmp_path, kind="low")):
        config = override_graph(graph, ["train.kind=high", "train.high.level=2"]).nodes["train"].config
        assert (None, 2.0) == (config.low, config.high.level)
        assert 8 == low(override_graph(graph, ["train.low.rank=8"]))["rank"]
    with pytest.raises(PipelineError, match=r'train.low: \'low\' needs kind = "low" \(the pipeline sets low; unset '):
        override_graph(read(tmp_path, LOW), ["train.kind=plain"])
    kept = override_graph(read(tmp_path, LOW), ["train.low.form=round"])
    assert (64, "round") == (low(kept)["rank"], low(kept)["form"])


def test_all_mistakes_in_tables_are_found_at_once_with_their_places(tmp_path: Path) -> None:
    text = """\
kind = "low"
rank = 3
[node.train.low]
rnk = 1
rank = 0
form = "flat"
width = 8
rate = 1
nproc_per_node = 2
[node.train.high]
depth = 1.5
[node.train.pace]
steps = "many"
[node.other]
op = "train"
kind = "low"
low = 3
high = [{ level = 1.0 }]
"""
    launch = 'it is "launch.nproc"; ranks on each host, with kind = "ranks" or "ray"'
    assert [
        'p.toml:5:1: node.train.rank: unknown key (did you mean "low.rank"?)',
        'p.toml:7:1: node.train.low.rnk: unknown key (did you mean "rank"?)',
        "p.toml:8:1: node.train.low.rank: must be >= 1, got 0",
        'p.toml:9:1: node.train.low.form: expected one of "square", "round", got "flat"',
        "p.toml:10:1: node.train.low.width: 8 needs a label",
        'p.toml:11:1: node.train.low.rate: unknown key (it is "rate" of the node, not of its table low)',
        f"p.toml:12:1: node.train.low.nproc_per_node: unknown key ({launch})",
        'p.toml:13:13: node.train.high: the required key "level" is missing (float)',
        "p.toml:13:13: node.train.high: 'high' needs kind = \"high\"",
        "p.toml:14:1: node.train.high.depth: expected int, got 1.5 (float)",
        'p.toml:16:1: node.train.pace.steps: expected int, got "many"',
        "p.toml:20:1: node.other.low: expected table or none, got 3 (int)",
        "p.toml:21:1: node.other.high: expected table or none, got [{ level = 1.0 }] (list)",
    ] == mistakes(tmp_path, text)


def test_a_table_that_was_not_chosen_is_a_mistake_that_names_both_places(tmp_path: Path) -> None:
    needs = "'low' needs kind = \"low\""
    assert [f"p.toml:4:13: node.train.low: {needs}"] == mistakes(tmp_path, "[node.train.low]\n")
    assert [f"-s train.low.rank=1: train.low: {needs}"] == mistakes(tmp_path, "", "train.low.rank=1")
    unset = "p.toml:5:13 sets low; unset with -s train.low=none"
    assert [f"p.toml:5:13: node.train.low: {needs} ({unset})"] == mistakes(tmp_path, LOW, "train.kind=plain")
    read(tmp_path, LOW, "train.kind=plain", "train.low=none")


def test_names_of_other_projects_may_be_fields_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.aliases, "ALIASES", {"matrix_rank": {"train.low.rank": "of both"}})
    there = 'it is "low.rank" of train: node.train.low.rank'
    text = "matrix_rank = 1\n[node.train.low]\nmatrix_rank = 1\n[node.train.pace]\nmatrix_rank = 1\n"
    assert [
        'p.toml:5:1: node.train.matrix_rank: unknown key (here it is "low.rank"; of both)',
        'p.toml:7:1: node.train.low.matrix_rank: unknown key (here it is "rank"; of both)',
        f"p.toml:9:1: node.train.pace.matrix_rank: unknown key ({there}; of both)",
    ] == mistakes(tmp_path, f'kind = "low"\n{text}')


def test_references_lead_into_tables_and_out_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "32")
    graph = read(tmp_path, LOW + 'label = "of ${train.low.rank} and ${train.pace.steps}"\n' + READER)
    assert ("of 64 and 10", 64) == (low(graph)["label"], graph.nodes["reads"].config.rank)
    graph = read(tmp_path, 'kind = "low"\nlow = { rank = "${env:RANK}", width = "${train.low.rank}" }\n' + READER)
    assert (32, 32, 32) == (low(graph)["rank"], low(graph)["width"], graph.nodes["reads"].config.rank)
    assert 256 == read(tmp_path, 'kind = "low"\n' + READER).nodes["reads"].config.rank
    assert 7 == read(tmp_path, LOW + READER, "train.low.rank=7").nodes["reads"].config.rank
    assert 32 == low(override_graph(read(tmp_path, LOW), ["train.low.rank=${env:RANK}"]))["rank"]
    other = (
        '[node.other]\nop = "train"\nkind = "low"\nlow = "${train.low}"\n[node.other.pace]\nsteps = "${reads.rank}"\n'
    )
    graph = read(tmp_path, 'kind = "low"\nlow.rank = "${env:RANK}"\n' + READER + other)
    assert (low(graph), 32) == (low(graph, "other"), graph.nodes["other"].config.pace.steps)


def test_mistakes_in_references_to_tables_name_the_field(tmp_path: Path) -> None:
    assert ['p.toml:7:1: node.reads.rank: node "train" has no value for low.rank'] == mistakes(tmp_path, READER)
    wrong = READER.replace("low.rank", "low.rnk")
    hint = 'node "train" has no field "low.rnk" (did you mean "rank"?)'
    assert [f"p.toml:10:1: node.reads.rank: {hint}"] == mistakes(tmp_path, LOW + wrong)
    cycle = '"${reads.rank}"\n'
    message = "the values refer to each other: train.low.rank -> reads.rank -> train.low.rank"
    assert [f"p.toml:5:5: node.train.low.rank: {message}"] == mistakes(
        tmp_path, f'kind = "low"\nlow.rank = {cycle}{READER}'
    )


def test_a_secret_in_a_table_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_abc")
    graph = read(tmp_path, LOW + 'label = "Bearer ${env:MY_TOKEN}"\nheaders = { a = "${secret:MY_TOKEN}" }\n')
    config = graph.nodes["train"].config
    assert ("Bearer ${env:MY_TOKEN}", ("hf_abc",)) == (config.low.label, secret_values(config))
    assert ("Bearer hf_abc", {"a": "hf_abc"}) == (resolved(config).low.label, resolved(config).low.headers)
    monkeypatch.delenv("MY_TOKEN")
    (unset,) = mistakes(tmp_path, LOW + 'label = "${secret:MY_TOKEN}"\n')
    message = "the environment variable MY_TOKEN is not set (export it before you call dflow)"
    assert f"p.toml:7:1: node.train.low.label: {message}" == unset


def test_tables_are_merged_with_those_of_the_file_that_is_extended(tmp_path: Path) -> None:
    written(tmp_path, LOW + 'form = "round"\nwidth = 1.5\n')
    top = tmp_path / "top.toml"
    top.write_text('extends = "p.toml"\n[node.train.low]\nrank = 8\nwidth = 2\n')
    found = low(read_graph(top))
    assert (8, "round", 2) == (found["rank"], found["form"], found["width"])
    top.write_text('extends = "p.toml"\n[node.train.low]\nrank = 0\n')
    with pytest.raises(PipelineError) as caught:
        read_graph(top)
    assert [
        "top.toml:3:1: node.train.low.rank: must be >= 1, got 0",
        "p.toml:8:1: node.train.low.width: expected int or none, got 1.5 (float)",
    ] == str(caught.value).replace(f"{tmp_path}/", "").split("\n")


def test_a_path_that_a_table_refers_to_in_its_own_file_stays_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.jsonl").touch()
    ingest = '[node.ingest]\nop = "ingest"\nsource = "a.jsonl"\n'
    written(tmp_path / "deep", f'kind = "low"\nlow.label = "${{ingest.source}}"\n{ingest}')
    top = tmp_path / "top.toml"
    top.write_text('extends = "deep/p.toml"\n')
    assert "a.jsonl" == low(read_graph(top))["label"]


def test_variants_and_sweeps_change_single_fields_of_tables(tmp_path: Path) -> None:
    variants = (
        '[for_each.kinds.wide]\ntrain.low.rank = 8\n[for_each.kinds.tall]\ntrain = { kind = "high", high.level = 1 }\n'
    )
    text = 'kind = "low"\nlow.form = "round"\n'
    graph = read(tmp_path, text.replace("low.form", "note") + variants)
    assert ["train-wide", "train-tall"] == list(graph.nodes)
    assert (8, None) == (low(graph, "train-wide")["rank"], graph.nodes["train-tall"].config.low)
    sweep = "[sweep]\ntrain.low.rank = [8, 16]\n"
    graph = read(tmp_path, text + READER + sweep)
    assert ["train-rank_8", "train-rank_16", "reads-rank_8", "reads-rank_16"] == list(graph.nodes)
    assert [8, 16] == [graph.nodes[f"reads-rank_{rank}"].config.rank for rank in (8, 16)]
    assert "round" == low(graph, "train-rank_16")["form"]
    copy = graph.nodes["train-rank_8"].copy
    assert copy is not None and {"train.low.rank": "8"} == copy.values
    assert list(graph.nodes) == list(read(tmp_path, text + READER, sweeps=("train.low.rank=[8,16]",)).nodes)


def test_a_field_that_a_variant_leaves_alone_copies_nothing(tmp_path: Path) -> None:
    other = '[node.other]\nop = "train"\npace.steps = "${train.low.rank}"\n'
    more = '[node.more]\nop = "train"\nnote = "${train.low.form}"\n'
    graph = read(tmp_path, LOW + 'form = "round"\n' + other + more + "[sweep]\ntrain.low.rank = [8, 16]\n")
    assert ["train-rank_8", "train-rank_16", "other-rank_8", "other-rank_16", "more"] == list(graph.nodes)
    assert 16 == graph.nodes["other-rank_16"].config.pace.steps


def test_mistakes_in_variants_are_shown_where_they_stand(tmp_path: Path) -> None:
    variants = "[for_each.ranks.a]\ntrain.low.rank = 0\n[for_each.ranks.b]\ntrain.low = { rnk = 1 }\n"
    assert [
        "p.toml:8:11: for_each.ranks.a.train.low.rank: must be >= 1, got 0",
        'p.toml:10:15: for_each.ranks.b.train.low.rnk: unknown key (did you mean "rank"?)',
    ] == mistakes(tmp_path, LOW + variants)
    assert ['p.toml:8:11: sweep.train.low.rank: expected int, got "x"'] == mistakes(
        tmp_path, LOW + "[sweep]\ntrain.low.rank = [1, 'x']\n"
    )
    assert ["--sweep train.low.rank=[1,0]: must be >= 1, got 0"] == [
        line.replace("node.train.low.rank: ", "") for line in mistakes(tmp_path, LOW, sweeps=("train.low.rank=[1,0]",))
    ]
    assert [
        "-s train.low.rank=2: for_each.ranks.a sets this very value (name one copy: -s train-a.low.rank=...)"
    ] == mistakes(tmp_path, LOW + variants.replace("0", "1").replace("rnk", "rank"), "train.low.rank=2")
    read(
        tmp_path, LOW + variants.replace("0", "1").replace("rnk", "rank"), "train.low.form=round", "train-a.low.rank=3"
    )


def test_a_graph_with_tables_is_read_back_from_its_record(tmp_path: Path) -> None:
    graph = read(tmp_path, LOW + "headers.a = 'b'\n")
    data = json.loads(json.dumps(graph_to_json(graph)))
    config = data["nodes"][0]["config"]
    assert ({"a": "b"}, None, {"steps": 10}) == (config["low"]["headers"], config["high"], config["pace"])
    assert graph == graph_from_json(data)
    config["low"]["gone"] = 1
    with pytest.raises(PipelineError, match=r"train.low.gone: unknown key"):
        graph_from_json(data)


def test_the_schema_describes_tables_and_asks_for_what_they_need(tmp_path: Path) -> None:
    written(tmp_path, "")
    schema = json.loads(json.dumps(pipeline_schema({"train": train(tmp_path)})))
    Draft7Validator.check_schema(schema)
    table = schema["definitions"]["op.train"]["properties"]["low"]
    assert "of low" == table["description"]
    assert False is table["else"]["additionalProperties"]
    rank = table["else"]["properties"]["rank"]
    assert ("of the low matrix", 256, {"type": "integer", "minimum": 1}) == (
        rank["description"],
        rank["default"],
        rank["else"],
    )

    def wrong(text: str) -> list[str]:
        errors = Draft7Validator(schema).iter_errors(tomli.loads(HEAD + text))
        return sorted(".".join(map(str, error.absolute_path)) + f": {error.message}" for error in errors)

    fine = [
        LOW,
        'kind = "${env:KIND}"\nlow.rank = "${env:RANK}"\n',
        "pace.steps = 3\n",
        "[sweep]\ntrain.low.rank = [1]\n",
    ]
    assert [[]] * len(fine) == [wrong(text) for text in fine]
    assert ["node.train.low.rank: 0 is less than the minimum of 1"] == wrong('kind = "low"\nlow.rank = 0\n')
    assert ["node.train.high: 'level' is a required property"] == wrong('kind = "high"\nhigh.depth = 1\n')
    assert ["node.train.low: 'label' is a required property"] == wrong('kind = "low"\nlow.width = 8\n')
    assert ["node.train.kind: 'low' was expected"] == wrong('kind = "plain"\nlow.rank = 8\n')
    (unknown,) = wrong('kind = "low"\nlow.rnk = 8\n')
    assert unknown.startswith("node.train.low: Additional properties are not allowed")


def test_a_table_that_is_only_allowed_by_a_value_stays_out_where_it_is_left_out() -> None:
    @frozen(kw_only=True)
    class Extra:
        rank: int = 1

    @op(version=1, run="a:b")
    @frozen(kw_only=True)
    class Allowing:
        kind: str = "plain"
        extra: Extra | None = field(default=None, validator=Only("kind", "low", "'{name}' is for low"))
        output = Samples

    assert None is Allowing(kind="low").extra
    assert Extra(rank=1) == Allowing(kind="low", extra={}).extra  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'extra' is for low"):
        Allowing(extra=Extra())


def test_what_dflow_cannot_do_with_a_table_is_refused_when_the_op_is_declared() -> None:
    @frozen(kw_only=True)
    class Inner:
        rank: int = 1

    @frozen(kw_only=True)
    class Reads:
        samples: Samples

    @frozen(kw_only=True)
    class Names:
        file: str = field(default="builtin", external=True)

    @frozen(kw_only=True)
    class Outer:
        inner: Inner = Inner()

    def declared(annotation: Any, default: Any = None, validator: Any = None) -> str:
        members = {"__annotations__": {"table": annotation}, "table": field(default=default, validator=validator)}
        with pytest.raises(TypeError) as caught:
            op(version=1, run="a:b")(frozen(kw_only=True)(type("Op", (), {**members, "output": Samples})))
        return str(caught.value)

    for table, name in ((Reads, "samples"), (Names, "file"), (Outer, "inner")):
        expected = f"Op.table.{name}: a table has no inputs, external files or tables of its own"
        assert expected == declared(table | None)
    assert "Op.table: the default of a table is None or Inner()" == declared(Inner, Inner(rank=2))
    rule = "Op.table: ChosenBy names another field, and goes with a table whose default is None"
    assert rule == declared(Inner | None, validator=ChosenBy("nothing", 1, "x"))
    assert rule == declared(int | None, validator=ChosenBy("table", 1, "x"))
