"""How an op is declared: a frozen config class with `@op` on top.

    @op(version=1, run="ops.capture_targets.run:capture_targets", key_libraries=("transformers",), resumable=True)
    @frozen(kw_only=True)
    class CaptureTargets:
        \"\"\"Hidden states of chosen target layers for every token.\"\"\"
        tokens: TokenShards                                     # an artifact type: an input edge
        num_layers: int = field(default=5, help="...")          # config: part of the key
        batch_tokens: int = field(default=8192, neutral=True, help="...")   # config outside the key
        output = TargetFeatures

A field whose annotation is an artifact type, `X | None` or `tuple[X, ...]` of one is an *edge* and holds a `Ref`
until the stage runs. Every other field is config, checked when the object is made. One whose annotation
is another attrs class, or `X | None` of one, is a *table*: its fields are declared as those of the op.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import attrs
from attrs import frozen

from dsl.convert import Checked, ChosenBy, Member, checked, converter, table_class, validators_of
from dsl.errors import ConfigError, StructureError
from dsl.finding import Finding
from dsl.op_class import Question, class_attributes
from dsl.shown import shown_value

T = TypeVar("T")

NOTHING_MORE: Mapping[str, Any] = types.MappingProxyType({})


@frozen
class Artifact:
    """A committed, never changing folder of files; a subclass's docstring says which files lie in it.

    digest is that of the content; path is where this machine's store holds it. required_files: names of files that no
    artifact of the type lacks; an output without one of them is not committed. They do not affect the key.
    """

    path: Path
    digest: str
    required_files: ClassVar[tuple[str, ...]] = ()


@frozen
class Ref:
    """The output of another node, named by the node's id."""

    node: str

    def __str__(self) -> str:
        return f"@{self.node}"


def field(
    *,
    default: Any = attrs.NOTHING,
    help: str = "",
    neutral: bool = False,
    external: bool = False,
    model_id: bool = False,
    pinned_by: str = "",
    validator: Any = None,
    schema: Mapping[str, Any] = NOTHING_MORE,
    keyed_default: bool = True,
) -> Any:
    """A config field of an op.

    neutral: the value changes results by rounding only, so it stays outside the key.
    external: the string, or each of a tuple, names a file or folder (relative to the pipeline file) whose content
    enters the key;
    "builtin" and "builtin:..." name no path. model_id: where no such path exists, "owner/name" is a model id;
    pinned_by names the config field that then has to hold a commit, 40 hex digits: the key sees the id and the commit,
    and would not see what a branch holds tomorrow.
    keyed_default: False for a field that came later, whose default keeps the keys from before it; for an optional edge
    too, whose other arguments have no meaning.
    schema: what the JSON schema asks of the value beside its type, the bounds of attrs' own validators, and what
    dsl/convert.py lets a value ask of other fields.
    """
    metadata = {
        "help": help,
        "neutral": neutral,
        "external": external,
        "model_id": model_id,
        "pinned_by": pinned_by,
        "schema": schema,
        "keyed_default": keyed_default,
    }
    return attrs.field(default=default, validator=validator, metadata=metadata)


def seed_field() -> Any:
    """Declare the `seed` field of an op that draws random numbers; None is replaced by the pipeline's seed."""
    return field(default=None, help="seed of the random numbers; default: the pipeline's seed")


def is_builtin(value: object) -> bool:
    """Whether the value of an external field names something built in: "builtin" or "builtin:..."."""
    return isinstance(value, str) and (value == "builtin" or value.startswith("builtin:"))


@frozen
class Edge:
    """An input of an op: the field, the artifact type it accepts, and how many; optional: may be left out.

    keyed_absence: whether the key says that it was left out; False for an edge that came later.
    """

    name: str
    type: type[Artifact]
    optional: bool
    many: bool
    keyed_absence: bool = True
    table: None = None

    def structure(self, value: object) -> Ref | tuple[Ref, ...] | None:
        """The field's value as one Ref or a tuple, from Refs or texts such as "@node". Raises StructureError."""
        if self.many and isinstance(value, (list, tuple)):
            references = tuple(map(_as_reference, value))
            if all(isinstance(each, Ref) for each in references) and (references or self.optional):
                return references
        reference = _as_reference(value)
        if not self.many and (isinstance(reference, Ref) or (reference is None and self.optional)):
            return reference
        raise StructureError([Finding(f'expected {self._kind} ("@node"), got {shown_value(value)}')])

    @property
    def wanted(self) -> str:
        """A description of the values that the edge takes, for the message about a node that lacks it."""
        example = '["@node", ...]' if self.many else '"@node"'
        return f"{self._kind}: {example}"

    @property
    def _kind(self) -> str:
        return f"{'a list of references' if self.many else 'a reference'} to {self.type.__name__}"


@frozen(kw_only=True)
class ConfigField(Member):
    """A config field of an op, as shown by `dflow ops NAME`. fields: those of a table, by name."""

    default: Any
    help: str
    neutral: bool
    external: bool
    model_id: bool
    pinned_by: str
    validator: Any
    schema: Mapping[str, Any]
    keyed_default: bool
    fields: Mapping[str, ConfigField]

    @property
    def required(self) -> bool:
        return self.default is attrs.NOTHING

    @property
    def made_default(self) -> Any:
        """The field's default value; NOTHING for a required field."""
        return self.default.factory() if isinstance(self.default, attrs.Factory) else self.default  # type: ignore[arg-type]

    @property
    def chosen_by(self) -> ChosenBy | None:
        """The rule that ties a table to a value of another field; None for other fields."""
        return next((rule for rule in validators_of(self.validator) if isinstance(rule, ChosenBy)), None)


@frozen
class OpSpec:
    """A declared op: the arguments of `@op`, and what its config class says (dsl/op_class.py).

    run: the run function, as "module:function".
    - key_libraries: distributions whose versions enter the key.
    - resumable: a killed stage continues from its work_dir.
    - single_process: the run function cannot share its work between ranks; a launch on several is refused.
    - shares_shards: worker processes share the shards; without it, shard_workers > 1 is refused.
    - sequence_parallel: groups of `stage.sp_degree` ranks share a sequence; without it, sp_degree > 1 is refused.
    - pool: it uses workers beside its ranks (`launch.pool`); without it, a pool is refused.
    - gpu: it computes on a GPU if there is one; without launch.gpus, the node gets one for each rank.
    """

    name: str
    version: int
    run: str
    key_libraries: tuple[str, ...]
    resumable: bool
    single_process: bool
    shares_shards: bool
    sequence_parallel: bool
    pool: bool
    gpu: bool
    transient: tuple[str, ...]
    shows_results: bool
    judged_by: str
    main_figures: str
    answers: tuple[Question, ...]
    config_class: type
    output: type[Artifact]
    edges: Mapping[str, Edge]
    fields: Mapping[str, ConfigField]
    help: str

    @property
    def all_fields(self) -> dict[str, ConfigField]:
        """The config fields by name, each table followed by its own fields as "table.field"."""
        return with_tables(self.fields)


def op(
    *,
    version: int,
    run: str,
    key_libraries: tuple[str, ...] = (),
    resumable: bool = False,
    single_process: bool = False,
    shares_shards: bool = False,
    sequence_parallel: bool = False,
    pool: bool = False,
    gpu: bool = False,
) -> Callable[[type[T]], type[T]]:
    """Declare an op; goes above `@frozen(kw_only=True)`. The op's name is the class name in snake case.

    OpSpec describes the arguments. Raises ConfigError for a wrong member of the class, see dsl/op_class.py.
    """

    def declare(cls: type[T]) -> type[T]:
        edges, fields = _edges_and_fields(cls)
        spec = OpSpec(
            name=snake_case(cls.__name__),
            version=version,
            run=run,
            key_libraries=key_libraries,
            resumable=resumable,
            single_process=single_process,
            shares_shards=shares_shards,
            sequence_parallel=sequence_parallel,
            pool=pool,
            gpu=gpu,
            **class_attributes(cls, (*edges, *fields)),
            config_class=cls,
            output=_output(cls),
            edges=edges,
            fields=fields,
            help=(cls.__doc__ or "").strip(),
        )
        cls.__op__ = spec  # type: ignore[attr-defined]
        _check_types_when_made(cls, spec)
        return cls

    return declare


def _edges_and_fields(cls: type) -> tuple[dict[str, Edge], dict[str, ConfigField]]:
    hints = typing.get_type_hints(cls)
    edges: dict[str, Edge] = {}
    fields: dict[str, ConfigField] = {}
    for attribute in attrs.fields(cls):
        edge = _edge(attribute, hints[attribute.name])
        if edge is not None:
            edges[attribute.name] = edge
            continue
        fields[attribute.name] = _config_field(attribute, hints[attribute.name])
        _check_external(cls, fields[attribute.name])
    for field in fields.values():
        _check_table(cls, field, fields)
    return edges, fields


def _output(cls: type) -> type[Artifact]:
    output = getattr(cls, "output", None)
    if not (isinstance(output, type) and issubclass(output, Artifact)):
        raise TypeError(f"{cls.__name__}: an op needs `output = <a subclass of Artifact>`")
    names = output.required_files
    if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"{output.__name__}.required_files: expected a tuple of names of files, got {names!r}")
    return output


def config_fields(cls: type) -> dict[str, ConfigField]:
    """The fields of an attrs class, by name, described like those of an op's config."""
    hints = typing.get_type_hints(cls)
    return {attribute.name: _config_field(attribute, hints[attribute.name]) for attribute in attrs.fields(cls)}


def with_tables(fields: Mapping[str, ConfigField]) -> dict[str, ConfigField]:
    """The fields by name, each table followed by its own fields as "table.field"."""
    found: dict[str, ConfigField] = {}
    for name, field in fields.items():
        found |= {name: field, **{f"{name}.{key}": each for key, each in field.fields.items()}}
    return found


def chosen_tables(fields: Mapping[str, ConfigField], values: Mapping[str, Any]) -> list[str]:
    """The tables that other fields choose but that are not given; they have their defaults."""
    return [
        field.name
        for field in fields.values()
        if field.table is not None
        and (rule := field.chosen_by) is not None
        and values.get(field.name) is None
        and values.get(rule.other, fields[rule.other].default) == rule.value
    ]


def checked_config(op: OpSpec, given: Mapping[str, Any], into: Any = None) -> Checked:
    """Check the values of a node, and make its config. into: an uninitialised config to fill."""
    chosen: dict[str, Any] = {name: {} for name in chosen_tables(op.fields, given)}
    return checked(op.config_class, {**given, **chosen}, {**op.edges, **op.fields}, op.name, into)


def op_of(config: object) -> OpSpec:
    """The declaration of a config object or config class. Raises ConfigError for anything else."""
    spec = getattr(config, "__op__", None)
    if not isinstance(spec, OpSpec):
        raise ConfigError(f"{config!r} is not the config of an op: its class lacks the @op decorator")
    return spec


def snake_case(name: str) -> str:
    """The snake-case form of a class name: `FinetuneVlm` becomes `finetune_vlm`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _config_field(attribute: Any, annotation: Any) -> ConfigField:
    table = table_class(annotation)
    return ConfigField(
        name=attribute.name,
        type=annotation,
        default=attribute.default,
        help=attribute.metadata.get("help", ""),
        neutral=attribute.metadata.get("neutral", False),
        external=attribute.metadata.get("external", False),
        model_id=attribute.metadata.get("model_id", False),
        pinned_by=attribute.metadata.get("pinned_by", ""),
        validator=attribute.validator,
        schema=attribute.metadata.get("schema", NOTHING_MORE),
        keyed_default=attribute.metadata.get("keyed_default", True),
        table=table,
        fields={} if table is None else config_fields(table),
    )


def _check_external(cls: type, field: ConfigField) -> None:
    """Check that an external field's type is a path or a list of paths. Raises TypeError."""
    is_union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
    members = typing.get_args(field.type) if is_union else (field.type,)
    listed = [typing.get_args(member) for member in members if typing.get_origin(member) is tuple]
    others = [member for member in members if typing.get_origin(member) is not tuple]
    is_right = set(others) <= {str, type(None)} and all(arguments == (str, Ellipsis) for arguments in listed)
    if field.external and not is_right:
        raise TypeError(f"{cls.__name__}.{field.name}: an external field is a str or a tuple[str, ...], or None")
    if field.pinned_by and listed:
        raise TypeError(f"{cls.__name__}.{field.name}: pinned_by goes with one path, not with a list")


def _check_table(cls: type, field: ConfigField, fields: Mapping[str, ConfigField]) -> None:
    """Check that dflow supports the declaration of a table. Raises TypeError."""
    place = f"{cls.__name__}.{field.name}"
    rule = field.chosen_by
    if rule is not None and (field.table is None or field.default is not None or rule.other not in fields):
        raise TypeError(f"{place}: ChosenBy names another field, and goes with a table whose default is None")
    for inner in field.fields.values():
        if _edge(inner, inner.type) is not None or inner.table is not None or inner.external:
            raise TypeError(f"{place}.{inner.name}: a table has no inputs, external files or tables of its own")
    if field.table is not None and field.default not in (None, attrs.NOTHING) and field.default != field.table():
        raise TypeError(f"{place}: the default of a table is None or {field.table.__name__}()")


def _edge(attribute: Any, annotation: Any) -> Edge | None:
    name = attribute.name
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if _is_artifact(annotation):
        return Edge(name, annotation, optional=False, many=False)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis and _is_artifact(arguments[0]):
        return Edge(name, arguments[0], optional=attribute.default is not attrs.NOTHING, many=True)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in arguments if member is not type(None)]
        if len(members) == 1 and len(arguments) == 2 and _is_artifact(members[0]):
            is_keyed = attribute.metadata.get("keyed_default", True)
            return Edge(name, members[0], optional=True, many=False, keyed_absence=is_keyed)
    return None


def _is_artifact(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Artifact)


def _check_types_when_made(cls: type, spec: OpSpec) -> None:
    """Make the constructor of a config class convert its values; one error names all values of a wrong type."""
    cls.__attrs_init__ = cls.__init__  # type: ignore[attr-defined, misc]

    def checked_init(self: Any, **values: Any) -> None:
        found = checked_config(spec, values, self)
        if found.mistakes:
            wrong = [each.at(f"{spec.name}.{each.path}" if each.path else spec.name) for each in found.mistakes]
            raise ConfigError("\n".join(map(str, wrong)))

    cls.__init__ = checked_init  # type: ignore[misc]


def _as_reference(value: Any) -> Any:
    return Ref(value[1:]) if isinstance(value, str) and value.startswith("@") else value


converter.register_unstructure_hook(Ref, str)
converter.register_unstructure_hook_func(_is_artifact, str)  # which holds a Ref in a config
