"""The JSON schema of pipeline files, by which editors complete keys, show help and mark mistakes while one types.

It covers types, ranges and what one value requires of others (dsl/convert.py), as dflow checks them. Other checks
between values, and all between nodes, are not in it.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import validators

from dsl.convert import BOUND, Given, Needs, Only, unstructure, validators_of
from dsl.for_each import NAME, SORT
from dsl.launch import CLASSES, RESERVED_TAGS, TABLE_NAMES, Launch
from dsl.op import ConfigField, Edge, OpSpec, config_fields
from dsl.pipeline import NODE_ID
from dsl.tune import TUNE, TuneTable

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"  # what editors of TOML read
REFERENCE: Schema = {"type": "string", "pattern": r"\$\{.+\}"}
NODE: Schema = {"type": "string", "pattern": r"^@|\$\{.+\}"}
LAUNCH: Schema = {"$ref": "#/definitions/launch"}
BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
LENGTHS = {"string": "minLength", "array": "minItems"}
LENGTH: Any = type(validators.min_len(0))  # attrs names the classes of its validators nowhere
LAUNCH_HELP = {
    "kind": '"process": one process of its own; "ranks": nproc ranks here; "ray": on a Ray cluster',
    "nproc": "ranks on each host",
    "hosts": "hosts of a Ray cluster, each with nproc ranks",
    "sp_degree": "ranks that share every sequence; nproc is a multiple of it",
    "shard_workers": "processes that share the op's shards",
    "device": '"auto": cuda where there is one',
    "threads": "CPU threads of each rank; 0: by the target's size, at most the cores divided by the ranks",
    "pool": "workers on this machine that compute for the ranks, outside their number: train_dflash's online capture",
    "gpus": "GPUs that the stage takes of [machine] while it runs",
    "cpus": "CPUs that the stage takes of [machine] while it runs",
    "memory": 'memory that the stage takes of [machine] while it runs: "24 GiB"',
    "retries": "how often an attempt that ends with a transient error is retried",
    "retry_wait": "seconds before the first retry, doubled for each later one",
    "timeout": "seconds after which an attempt is ended; 0: never",
}
# What dsl/shown.py accepts, except that only dsl/shown.py refuses fractions of a byte.
SIZE: Schema = {"pattern": r"^\s*(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)? ?(([KMGTkmgt][iI]?)?[bB])?\s*$|\$\{.+\}"}
NODE_NAMES = f"(?!(?:{'|'.join(TABLE_NAMES)})$){NODE_ID.pattern}"
TAGS: Schema = {"propertyNames": {"pattern": rf"^(?!{'|'.join(map(re.escape, RESERVED_TAGS))})[\s\S]*\S"}}
CLUSTER: Schema = {"pattern": r"^local$|:[0-9]{1,5}$|\$\{.+\}"}
TABLE_LIMITS: Mapping[str, Mapping[str, Schema]] = {
    "machine": {"memory": SIZE, "ray": CLUSTER},
    "mlflow": {"tags": TAGS, "upload": {"description": "the nodes whose whole artifacts are sent to MLflow"}},
}
LAUNCH_LIMITS: Mapping[str, Schema] = {"memory": SIZE, "retry_wait": {"minimum": 0}, "timeout": {"minimum": 0}}
SEVERAL: Schema = {"type": "number", "minimum": 2}
RAY: Schema = {"properties": {"kind": {"if": REFERENCE, "else": {"const": "ray"}}}, "required": ["kind"]}
RANKS: Schema = {"properties": {"kind": {"if": REFERENCE, "else": {"enum": ["ranks", "ray"]}}}, "required": ["kind"]}
ONE: Schema = {"if": REFERENCE, "else": {"maximum": 1}}
# What dsl/launch.py asks of several values of a launch.
TOGETHER = [
    *(
        {"if": {"properties": {name: SEVERAL}, "required": [name]}, "then": kinds}
        for name, kinds in (("nproc", RANKS), ("hosts", RAY), ("sp_degree", RANKS))
    ),
    {
        "if": {"properties": {"shard_workers": SEVERAL}, "required": ["shard_workers"]},
        "then": {"properties": {"nproc": ONE, "hosts": ONE}},
    },
    {
        "if": {"properties": {"device": {"const": "cpu"}}, "required": ["device"]},
        "then": {"properties": {"gpus": {"maximum": 0}}},
    },
]
SWEPT: Schema = {"$ref": "#/definitions/swept"}
SWEPT_FIELDS: Schema = {"type": "object", "minProperties": 1, "additionalProperties": SWEPT}
SOME_CHANGE: Schema = {"not": {"additionalProperties": {"maxProperties": 0}}}
TABLE_HELP = {
    "pipeline": "the pipeline's name, seed and op files",
    "mlflow": "how runs are tracked in MLflow",
    "machine": "what the nodes of a run may use of this machine together; default: all of it",
}
TUNE_HELP = "values of a training that `dflow tune` tries, and the steps at which it stops the worse ones"


def pipeline_schema(ops: Mapping[str, OpSpec]) -> Schema:
    """The JSON schema of a pipeline file, with these ops for its nodes."""
    return {
        "$schema": DRAFT,
        "title": "dflow pipeline",
        "type": "object",
        "properties": {
            "extends": {"type": "string", "pattern": r"\.toml$", "description": "another pipeline file, changed here"},
            **{name: _table(name) for name in TABLE_NAMES},
            "node": _table_of({"$ref": "#/definitions/node"}, NODE_NAMES, "the nodes, by id"),
            "for_each": _table_of(
                {**_table_of(_table_of({"$ref": "#/definitions/change"}), NAME.pattern, "variants"), **SOME_CHANGE},
                help="groups of variants: every node that one changes, and all below it, is copied for each",
            ),
            "sweep": {
                **_table_of(SWEPT_FIELDS, help="node.field = [values]: a copy for every value"),
                "properties": {
                    SORT: {
                        "type": ["string", "object"],
                        "description": 'the metric that sorts its table; with "-" before it: lowest first',
                    }
                },
            },
            TUNE: {**_object(TuneTable, config_fields(TuneTable)), "description": TUNE_HELP},
        },
        "additionalProperties": False,
        "if": {"required": ["extends"]},
        "else": {
            "required": ["pipeline", "node"],
            "if": {"anyOf": [{"required": ["for_each"]}, {"required": ["sweep"]}]},
            "else": {"properties": {"node": {"additionalProperties": {"$ref": "#/definitions/whole_node"}}}},
        },
        "definitions": {
            "swept": {**SWEPT_FIELDS, "type": ["array", "object"], "minItems": 1, "uniqueItems": True},
            "launch": _launch(),
            "node": _node(ops),
            "whole_node": _whole_node(ops),
            "change": {"type": "object", "properties": {"op": _op_names(ops), "launch": LAUNCH}},
            **{f"op.{name}": _op(spec) for name, spec in ops.items()},
        },
    }


def _table(name: str) -> Schema:
    fields = config_fields(CLASSES[name])
    schema = _object(CLASSES[name], fields)
    for limited, limits in TABLE_LIMITS.get(name, {}).items():
        schema["properties"][limited] |= limits
    return {**schema, "description": TABLE_HELP[name]}


def _node(ops: Mapping[str, OpSpec]) -> Schema:
    """The JSON schema of a node; its keys depend on its op. Without an op it changes a node of the extended file."""
    return {
        "type": "object",
        "properties": {"op": _op_names(ops), "launch": LAUNCH},
        "allOf": [
            {
                "if": {"properties": {"op": {"const": name}}, "required": ["op"]},
                "then": {"$ref": f"#/definitions/op.{name}"},
            }
            for name in ops
        ],
    }


def _whole_node(ops: Mapping[str, OpSpec]) -> Schema:
    """The JSON schema of the keys that a node must have in a file that neither extends another nor makes copies."""
    required = {
        name: [
            *(edge.name for edge in spec.edges.values() if not edge.optional),
            *(field.name for field in spec.fields.values() if field.required),
        ]
        for name, spec in ops.items()
    }
    return {
        "required": ["op"],
        "properties": {"launch": {"allOf": TOGETHER}},
        "allOf": [
            {"if": {"properties": {"op": {"const": name}}, "required": ["op"]}, "then": {"required": names}}
            for name, names in required.items()
            if names
        ]
        + [
            {"if": {"properties": {"op": {"const": name}}, "required": ["op"]}, "then": rules}
            for name, spec in ops.items()
            if (rules := _needs(spec.config_class, spec.fields))
        ],
    }


def _needs(cls: type, fields: Mapping[str, ConfigField]) -> Schema:
    """The JSON schema of what values of some fields require of other fields, and of fields inside a table."""
    rules: list[Schema] = [
        {"properties": {field.name: {"if": REFERENCE, "else": inside}}}
        for field in fields.values()
        if (inside := _inside(field))
    ]
    defaults = {attribute.name: attribute.default for attribute in attrs.fields(cls)}
    for attribute in attrs.fields(cls):
        for rule in validators_of(attribute.validator):
            if isinstance(rule, Needs):
                presence = {} if attribute.default == rule.value else {"required": [attribute.name]}
                chosen = {"properties": {attribute.name: {"const": rule.value}}, **presence}
                rules.append({"if": chosen, "then": _required(rule.given, dict.fromkeys(rule.left_out))})
            elif isinstance(rule, Only):
                wanted = {"properties": {rule.other: _value(rule.value)}}
                presence = {} if defaults[rule.other] == rule.value else {"required": [rule.other]}
                rules.append({"if": _changed(attribute.name, attribute.default), "then": {**wanted, **presence}})
            elif isinstance(rule, Given):
                required = _required(rule.given, rule.left_out)
                rules.append({"if": _changed(attribute.name, attribute.default), "then": required})
    return {"allOf": rules} if rules else {}


def _inside(field: ConfigField) -> Schema:
    """The JSON schema of the keys that a table must have where no other file can give them."""
    required = [each.name for each in field.fields.values() if each.required]
    needed: Schema = {"required": required} if required else {}
    return needed if field.table is None else needed | _needs(field.table, field.fields)


def _required(given: Sequence[str], left_out: Mapping[str, Any]) -> Schema:
    """A JSON schema that requires the keys in `given` and fixes the values of those in `left_out`.

    left_out: name -> its only allowed value; None stands for a key that must be missing, as TOML has no null.
    """
    values = {name: _value(default) for name, default in left_out.items()}
    required = {"required": list(given), "properties": values}
    return {name: each for name, each in required.items() if each}


def _value(value: Any) -> Any:
    """The JSON schema of a fixed value, or of a text that may refer to one."""
    return False if value is None else {"if": REFERENCE, "else": {"const": _plain(value)}}


def _changed(name: str, default: Any) -> Schema:
    """A JSON schema condition: the field is given with a value that is visibly not its default."""
    unchanged = [REFERENCE] if default is None else [REFERENCE, {"const": _plain(default)}]
    return {"required": [name], "properties": {name: {"not": {"anyOf": unchanged}}}}


def _plain(value: Any) -> Any:
    return unstructure(value)


def _op_names(ops: Mapping[str, OpSpec]) -> Schema:
    return {"type": "string", "enum": list(ops), "description": "what the node computes: `dflow ops` lists them"}


def _op(spec: OpSpec) -> Schema:
    """The JSON schema of a node with this op. Keys are not required here, as the extended file may give them."""
    schema = _object(spec.config_class, spec.fields)
    edges = {edge.name: _edge(edge) for edge in spec.edges.values()}
    named = {"op": {"const": spec.name, "description": spec.help}, "launch": {"properties": _refused_launches(spec)}}
    return {**schema, "properties": {**named, **edges, **schema["properties"]}, "description": spec.help}


def _refused_launches(spec: OpSpec) -> Schema:
    """The JSON schema that excludes launches which the op does not support."""
    refused: Schema = {}
    if spec.single_process:
        refused |= {"kind": {"not": {"const": "ranks"}}, "nproc": ONE, "hosts": ONE}
    if not spec.shares_shards:
        refused["shard_workers"] = {"maximum": 1}
    if not spec.sequence_parallel:
        refused["sp_degree"] = {"maximum": 1}
    if not spec.pool:
        refused["pool"] = False
    return refused


def _edge(edge: Edge) -> Schema:
    help = f"reads {edge.type.__name__}" + (", optional" if edge.optional else "")
    if edge.many:
        least = {} if edge.optional else {"minItems": 1}
        return {"type": "array", "items": NODE, **least, "description": f"{help}, from every node of the list"}
    return {**NODE, "description": help}


def _launch() -> Schema:
    schema = _object(Launch, config_fields(Launch))
    for name, help in LAUNCH_HELP.items():
        schema["properties"][name] |= {"description": help, **LAUNCH_LIMITS.get(name, {})}
    return {**schema, "description": "how the stage runs; outside the key"}


def _object(cls: type, fields: Mapping[str, ConfigField]) -> Schema:
    properties = {name: _field(field) for name, field in fields.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _field(field: ConfigField) -> Schema:
    """The JSON schema of one field: its type, or a text that refers to another value."""
    schema = {**_ranged(_type(field.type), field.validator), **field.schema}
    if field.external and schema == {"type": "string"}:
        schema = {**schema, "minLength": 1, "pattern": r"^[^\u0000]*$"}
    schema = _or_reference(schema)
    if field.help:
        schema["description"] = field.help
    default = field.default
    if isinstance(default, (bool, int, float, str, dict)) or (isinstance(default, tuple) and default):
        schema["default"] = list(default) if isinstance(default, tuple) else default
    return schema


def _type(expected: Any) -> Schema:
    """The JSON schema of a type known to dsl/convert.py; None is expressed by leaving the key out."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        choices = [_type(member) for member in arguments if member is not type(None)]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _or_reference(_type(arguments[0]))}
    if origin is dict:
        return {"type": "object", "additionalProperties": _or_reference(_type(arguments[1]))}
    if attrs.has(expected):
        return _object(expected, config_fields(expected))
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[expected]} if expected in names else {}


def _or_reference(schema: Schema) -> Schema:
    """The JSON schema extended to accept a reference as well.

    It avoids `anyOf`: an editor would then not name the rule that the value breaks.
    """
    return schema if schema in ({}, {"type": "string"}) else {"if": REFERENCE, "else": schema}


def _ranged(schema: Schema, validator: Any) -> Schema:
    """The JSON schema extended by the bounds of an attrs validator."""
    bounds: Schema = {}
    for each in validators_of(validator):
        if isinstance(each, BOUND):
            bounds[BOUNDS[each.compare_op]] = each.bound
        elif isinstance(each, LENGTH) and schema.get("type") in LENGTHS:
            bounds[LENGTHS[schema["type"]]] = each.min_length
    return {**schema, **bounds} if "enum" not in schema else schema


def _table_of(members: Schema, names: str = "", help: str = "") -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": members}
    if names:
        schema["propertyNames"] = {"pattern": f"^(?:{names})$"}
    if help:
        schema["description"] = help
    return schema
