"""The JSON schema of pipeline files: real ones fit, and what is wrong by itself does not."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomli
from corpus import CASES, OPS, Case
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from dsl.check import LAUNCH_FIELDS
from dsl.convert import Needs
from dsl.errors import ConfigError, PipelineError
from dsl.op import Ref
from dsl.op_table import all_ops
from dsl.read_toml import op_files_of, read_graph
from dsl.schema import LAUNCH_HELP, SIZE, pipeline_schema, validators_of
from dsl.shown import parsed_bytes

ROOT = Path(__file__).resolve().parents[2]
PIPELINES = sorted((ROOT / "pipelines").glob("*.toml"))
# What of the corpus no schema can see, since it sees one file, as JSON, and no values beside each other in two nodes.
UNSEEN = {
    "another node": [
        "cycle",
        "cycles_in_two_knots",
        "node_that_reads_itself",
        "unknown_node",
        "values",
        "wrong_artifact",
    ],
    "another file": ["extends_broken_toml", "extends_in_a_circle", "extends_missing"],
    "what lies on the disk": ["missing_file", "neither_path_nor_model_id", "path_that_is_too_long"],
    "whether a text is a model id or a folder": ["model_id_with_a_branch", "model_id_without_commit"],
    "the environment": ["secrets"],
    "arguments": ["argument_of_several_lines", "arguments", "sweep_argument", "to_an_unknown_node"],
    "8.0 and 8 are one number of JSON, which has no nan and no bits": [
        *("whole_float_for_int", "nan", "int_of_more_than_64_bits"),
    ],
    "arithmetic": ["more_than_the_machine", "sp_degree_that_does_not_divide"],
    "plugins of MLflow, which bring schemes of their own": ["tracking_server_of_no_known_kind"],
}


def wrong(schema: dict[str, Any], data: bytes) -> list[str]:
    """Paths of all that the schema refuses in a file."""
    errors = Draft7Validator(schema).iter_errors(tomli.loads(data.decode("utf-8-sig")))
    return sorted(".".join(map(str, error.absolute_path)) for error in errors)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(pipeline_schema(all_ops())))
    Draft7Validator.check_schema(made)
    return made


@pytest.fixture(scope="module")
def corpus_schema() -> dict[str, Any]:
    return pipeline_schema(all_ops((OPS,)))


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.name)
def test_every_shipped_pipeline_fits_the_schema(schema: dict[str, Any], file: Path) -> None:
    assert wrong(schema, file.read_bytes()) == []


def test_the_schema_refuses_every_mistake_of_the_corpus_but_those_that_no_schema_sees(
    corpus_schema: dict[str, Any],
) -> None:
    judged = {case.name: wrong(corpus_schema, case.files["pipeline.toml"]) for case in CASES if is_toml(case)}
    unseen = {case for cases in UNSEEN.values() for case in cases}
    assert unseen == {case for case, paths in judged.items() if not paths}
    assert len(judged) - len(unseen) >= 60


def is_toml(case: Case) -> bool:
    """The editor itself reports a file that is none."""
    try:
        tomli.loads(case.files["pipeline.toml"].decode("utf-8-sig"))
    except (KeyError, ValueError, RecursionError):
        return False
    return True


def test_the_schema_in_the_repository_is_that_of_the_ops(schema: dict[str, Any]) -> None:
    kept = json.loads((ROOT / "pipelines" / "dflow.schema.json").read_text("utf-8"))
    assert schema == kept, "run `make generated`"


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.name)
def test_every_shipped_pipeline_names_the_schema_in_its_first_line(file: Path) -> None:
    first = file.read_text("utf-8").splitlines()[0]
    assert first.startswith("#:schema ./")
    assert (ROOT / "pipelines" / "dflow.schema.json") == (file.parent / first.removeprefix("#:schema ")).resolve()


def test_what_a_base_gives_is_not_asked_of_a_file_that_extends_it(schema: dict[str, Any]) -> None:
    node = {"train": {"op": "train_dflash", "launch": {"nproc": 2}}}
    assert [] == messages(schema, {"extends": "base.toml", "node": node})
    told = messages(schema, {"pipeline": {"name": "x"}, "node": node})
    assert [f"'{name}' is a required property" for name in ("batches", "features", "kind", "target")] == told


def messages(schema: dict[str, Any], values: dict[str, Any]) -> list[str]:
    return sorted(error.message for error in Draft7Validator(schema).iter_errors(values))


WRONG = {
    "machine.memory": ["machine = { memory = 'abc' }", "machine = { memory = '0' }", "machine = { memory = '24 G' }"],
    "node.a.launch.memory": ["node.a.launch.memory = '0'", "node.a.launch.memory = '0.0 GiB'"],
    "node.c.target_layer_ids": [f"node.c.target_layer_ids = {ids}" for ids in ("[]", "[0, 0]", "[-1]")],
    "node": [f'node.{name} = {{ op = "ingest", source = "builtin:digits" }}' for name in ("pipeline", "machine")],
    "mlflow.tags": [f"mlflow.tags = {{ '{tag}' = 'x' }}" for tag in ("dflow.a", "mlflow.runName", " ", "")],
    "sweep.c": ["sweep.c = {}", "sweep.c = 1"],
    "sweep.c.dtype": ["sweep.c.dtype = {}", "sweep.c.dtype = 1", "sweep.c.dtype = []"],
    "sweep.c.launch.threads": ["sweep.c.launch.threads = {}"],
    "node.c": [
        "node.c.server_args = { mm_attention_backend = 'sdpa' }",
        "node.c.num_layers = 3, target_layer_ids = [1, 2]",
        "node.c.tp_degree = 1, server_args = { mm_attention_backend = 'sdpa' }",
    ],
    "node.c.recipe": ["node.c.num_layers = 3, recipe = 'eagle3'"],
    "node.c.num_layers": ["node.c.num_layers = 0"],
    "node.s": ["node.s.epochs = 1", 'node.s.features = "@c", tokens = "@b"'],
    "node.b.processor": ["node.b.processor = 'builtin:tiny-qwen3-vl'"],
    "node.d": [
        *(f"node.d.features = '@c', {field}" for field in ("capture_layers = 4", "target_layer_ids = [1]")),
        *(f"node.d.features = '@c', {field}" for field in ("capture_dtype = 'bfloat16'", "capture_batch_tokens = 9")),
        *("node.d.features = '@c', sliding_window = 8", "node.d.features = '@c', sliding_layers = [0]"),
        "node.d.features = '@c', eval_every = 1, eval_prompts = 4",
        "node.d.features = '@c', tokens = '@b', eval_new_tokens = 4",
    ],
    "node.d.capture": ["node.d.features = '@c', capture = 'stored', capture_batch_tokens = 4"],
    "node.d.capture_layers": ["node.d.tokens = '@b', capture = 'online', target_layer_ids = [1], capture_layers = 4"],
    "node.f": ["node.f.pattern = '(a)'", "node.f.batch_size = 4, batch_tokens = 8"],
    "node.r": [
        *(f"node.r.{field} = 'x', target = '@t'" for field in ("endpoint", "model", "api_key_env", "revision")),
        *("node.r.dialect = 'vllm', target = '@t'", "node.r.extra_body = { top_k = 3 }, target = '@t'"),
    ],
    "node.r.backend": [
        "node.r.backend = 'endpoint', endpoint = 'http://h/v1', model = 'm', target = '@t', dtype = 'float16'"
    ],
    "for_each.d": ["for_each.d.small = {}", "for_each.d = {}"],
}
CHAIN = """
pipeline.name = "x"
node.a = { op = "ingest", source = "builtin:digits" }
node.t = { op = "load_target", checkpoint = "builtin:tiny-qwen3-vl" }
node.b = { op = "tokenize_chat", samples = "@i", target = "@t" }
node.i = { op = "inject_images", samples = "@a" }
node.c = { op = "capture_targets", tokens = "@b", target = "@t" }
"""
# Nodes that stand in the chain only where a line is about them.
OTHERS = {
    "s": 'node.s = { op = "shard_sequence" }',
    "d": 'node.s = { op = "shard_sequence", tokens = "@b" }\n'
    'node.d = { op = "train_dflash", batches = "@s", target = "@t" }',
    "f": 'node.f = { op = "finetune_vlm", tokens = "@b" }',
    "r": 'node.r = { op = "regenerate_answers", samples = "@i" }',
}


@pytest.mark.parametrize(("path", "line"), [(path, line) for path, lines in WRONG.items() for line in lines])
def test_what_a_check_of_its_own_refuses_the_schema_refuses_too(
    schema: dict[str, Any], tmp_path: Path, path: str, line: str
) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(with_line(line))
    with pytest.raises(PipelineError) as caught:
        read_graph(file, [], [])
    assert 1 == len(caught.value.mistakes), caught.value
    assert [path] == [each.removesuffix(".0") for each in wrong(schema, file.read_bytes())]


@pytest.mark.parametrize(
    "line",
    [
        "mlflow.tags = { 'my.mlflow.tag' = 'x', 'two words' = 'y' }",
        'node.machines = { op = "ingest", source = "builtin:digits" }',
        "sweep = {}",
        "node.c.backend = 'sglang', server_args = { mm_attention_backend = 'sdpa' }, num_layers = 2",
        "node.c.target_layer_ids = [1, 2], recipe = 'eagle3', tp_degree = 1",
        *('node.s.features = "@c"', 'node.s.tokens = "@b"'),
        "node.d.features = '@c', capture_layers = 5, capture_dtype = 'float32'",
        "node.d.features = '@c', sliding_window = 8, sliding_layers = [0]",
        "node.d.tokens = '@b', capture = 'online', target_layer_ids = [1], capture_layers = 5",
        "node.d.features = '@c', tokens = '@b', eval_every = 5, eval_prompts = 2",
        "node.d.tokens = '@b', capture = '${env:DFLOW_HOW}', capture_layers = 3",
        "node.d.features = '@c', capture_layers = '${d.block_size}', block_size = 5",
        "node.b.processor = 'builtin'",
        *("node.f.batch_tokens = 8", "node.f.pattern = '(a)', metric = 'pattern'"),
        "node.r.backend = 'endpoint', endpoint = 'http://h/v1', model = 'm', target = '@t', dialect = 'vllm'",
        "node.r.target = '@t', dialect = 'auto', dtype = 'bfloat16'",
        "sweep.c.launch.threads = [1, 2]",
        "sweep.c.launch = [{ threads = 1 }, { threads = 2 }]",
        "sweep.a.source = ['builtin:digits']",
        "for_each.g.x.a.source = 'builtin:digits'",
    ],
)
def test_what_dflow_takes_the_schema_takes(
    schema: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Also where a node has what it needs from the variants alone."""
    monkeypatch.setenv("DFLOW_HOW", "online")
    text = with_line(line)
    file = tmp_path / "pipeline.toml"
    file.write_text(text.replace(', source = "builtin:digits" }', " }", 1) if "a.source" in line else text)
    read_graph(file, [], [])
    assert [] == wrong(schema, file.read_bytes())


def with_line(line: str) -> str:
    """The chain with a line more, which changes a node where it names one."""
    key, _, value = line.partition(" = ")
    if not key.startswith("node.") or key.count(".") == 1:
        return CHAIN + line
    _, node, field = key.split(".", 2)
    return re.sub(rf"(node\.{node} = .*) }}", rf"\1, {field} = {value} }}", CHAIN + OTHERS.get(node, ""))


@given(
    st.sampled_from(["", "0", "00", "0.0", "1", "1.5", "1.", ".5", "024", "x", "-1"]),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from(["", "b", "B", "k", "G", "kb", "GB", "gIb", "TiB", "PB", "GiBs"]),
    st.sampled_from(["", " "]),
)
def test_a_size_is_judged_as_dflow_judges_it(number: str, between: str, unit: str, end: str) -> None:
    text = number + between + unit + end
    try:
        parsed_bytes(text)
        expected = True
    except ConfigError:
        expected = False
    assert expected == (re.search(SIZE["pattern"], text) is not None)


def test_an_editor_is_told_the_rule_that_a_value_breaks(schema: dict[str, Any]) -> None:
    def told(**values: object) -> list[str]:
        node = {"op": "train_dflash", "batches": "@b", "target": "@t", "features": "@f", **values}
        return messages(schema, {"pipeline": {"name": "x"}, "node": {"train": node}})

    assert [] == told() == told(num_anchors="${ANCHORS}")
    assert ["0 is less than the minimum of 1"] == told(num_anchors=0)
    assert ["'many' is not of type 'integer'"] == told(num_anchors="many")
    assert ["'both' is not one of ['stored', 'online']"] == told(capture="both")


NEEDS = [
    (name, field.name, rule)
    for name, spec in all_ops().items()
    for field in spec.fields.values()
    for rule in validators_of(field.validator)
    if isinstance(rule, Needs)
]


@pytest.mark.parametrize(("op", "field", "rule"), NEEDS)
def test_what_a_value_needs_is_asked_by_the_schema_as_by_the_op(
    schema: dict[str, Any], op: str, field: str, rule: Needs
) -> None:
    spec = all_ops()[op]
    edges = {edge.name: f"@{edge.name}" for edge in spec.edges.values() if not edge.optional}
    for others in ((), rule.given, (*rule.given, *rule.left_out)):
        named = {name: f"@{name}" if name in spec.edges else "([0-9])" for name in others}
        values = {**edges, field: rule.value, **named}
        try:
            spec.config_class(
                **{name: Ref(value[1:]) if name in spec.edges else value for name, value in values.items()}
            )
            told = ""
        except ConfigError as error:
            told = str(error)
        refused = messages(schema, {"pipeline": {"name": "x"}, "node": {"n": {"op": op, **values}}})
        asked = [f"'{name}' is a required property" for name in rule.given if name not in named]
        asked += [f"False schema does not allow '@{name}'" for name in rule.left_out if name in named]
        assert bool(asked) == (rule.message in told)
        assert set(asked) <= set(refused)


# What the ops check in code of their own, and of which the schema says nothing, or the bounds alone that stand in it.
BETWEEN_VALUES = {
    "capture_targets": ["server_args: sglang_args", "target_layer_ids: ascending_layers"],
    "check_export": ["server_args: sglang_args"],
    "evaluate": ["temperature: _temperature"],
    "export_draft": ["formats: _formats"],
    "finetune_vlm": ["freeze: _frozen", "pattern: _pattern"],
    "ingest": ["__attrs_post_init__"],
    "load_target": ["template_date: _is_day"],
    "regenerate_answers": ["__attrs_post_init__", "max_pixels: ordered_pixels"],
    "tokenize_chat": [
        *("history_reasoning: _of_served_contexts", "max_pixels: ordered_pixels", "min_loss_tokens: _fits_a_sample"),
    ],
    "train_dflash": [
        *("algorithm: _known_algorithm", "decay_ratio: _phases", "num_kv_heads: _kv_heads", "own: _own_table"),
        *("select: _select", "sliding_layers: _sliding_layers"),
        *("sp_exchange: known_exchange", "target_layer_ids: ascending_layers", "warmup_ratio: _phases"),
    ],
}


def test_the_rules_that_no_schema_sees_are_those_that_ops_check_in_code_of_their_own() -> None:
    found: dict[str, list[str]] = {}
    for name, spec in all_ops().items():
        rules = ["__attrs_post_init__"] if "__attrs_post_init__" in vars(spec.config_class) else []
        for attribute in attrs.fields(spec.config_class):
            functions = [each for each in validators_of(attribute.validator) if isinstance(each, types.FunctionType)]
            rules += [f"{attribute.name}: {function.__name__}" for function in functions]
        found |= {name: sorted(rules)} if rules else {}
    assert BETWEEN_VALUES == found


def test_a_wrong_value_is_refused_at_its_own_key(corpus_schema: dict[str, Any]) -> None:
    (data,) = (case.files["pipeline.toml"] for case in CASES if case.name == "inline_tables_and_dotted_keys")
    (maker, joiner) = tomli.loads(data.decode())["node"]
    expected = {f"node.{joiner}.launch.nproc", f"node.{joiner}.share", f"node.{maker}.seed"}
    assert sorted(expected) == wrong(corpus_schema, data)


def test_a_field_tells_type_range_default_and_help(schema: dict[str, Any]) -> None:
    definitions = schema["definitions"]
    rate = definitions["op.train_dflash"]["properties"]["lr"]
    reference = {"type": "string", "pattern": r"\$\{.+\}"}
    expected = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    assert (rate["if"], rate["else"]) == (reference, expected)
    assert (rate["default"], rate["description"]) == (0.0006, "peak learning rate")
    assert definitions["op.export_draft"]["properties"]["draft"]["pattern"] == r"^@|\$\{.+\}"
    assert definitions["launch"]["properties"]["kind"]["else"] == {"enum": ["process", "ranks", "ray"]}
    assert set(LAUNCH_HELP) == set(LAUNCH_FIELDS)


def test_the_ops_of_a_file_are_found_whatever_else_is_wrong_with_it(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "eight_at_once")
    assert op_files_of(case.write(tmp_path) / "pipeline.toml") == (tmp_path / "corpus_ops.py",)
